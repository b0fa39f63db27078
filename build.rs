//! The commit of a build, for `foretell --version`: `0.1.0 (abcdef12, 2026-11-23)`.
//!
//! A package that is built outside of its repository takes it from the variable `FORETELL_COMMIT`
//! ("abcdef12, 2026-11-23"), or shows the bare version. Debug builds show `debug`: with a commit,
//! everything would be compiled again for each one.

use std::env;
use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=FORETELL_COMMIT");
    let given = env::var("FORETELL_COMMIT").ok().filter(|given| !given.is_empty());
    let debug = env::var("PROFILE").is_ok_and(|profile| profile == "debug");
    let told = given.or_else(|| if debug { Some("debug".to_owned()) } else { commit() });
    let version = env::var("CARGO_PKG_VERSION").unwrap_or_default();
    let version = told.map_or_else(|| version.clone(), |told| format!("{version} ({told})"));
    println!("cargo:rustc-env=FORETELL_VERSION={version}");
}

/// Hash and date of the commit; `None` outside of this package's own repository, and without git.
fn commit() -> Option<String> {
    let here = env::var("CARGO_MANIFEST_DIR").ok()?;
    let top = git(&["rev-parse", "--show-toplevel"])?;
    if Path::new(&top).canonicalize().ok()? != Path::new(&here).canonicalize().ok()? {
        return None;
    }
    // Every commit and checkout adds a line to it. Where it is missing, nothing is watched.
    let log = git(&["rev-parse", "--git-path", "logs/HEAD"]).filter(|log| Path::new(log).exists());
    if let Some(log) = log {
        println!("cargo:rerun-if-changed={log}");
    }
    let shown = git(&["log", "-1", "--abbrev=8", "--date=short", "--format=%h, %cd"])?;
    Some(shown).filter(|shown| !shown.is_empty())
}

/// Output of git, without the line end.
fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim_end().to_owned())
}
