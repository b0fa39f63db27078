//! Checks of the sources: the lists of reasons are complete, and every reason is used.

use std::fmt::Debug;
use std::path::{Path, PathBuf};

use foretell_core::words::PassthroughReason;
use foretell_core::words::PlainReason;

const PASSTHROUGH: &str = "src/core/words/passthrough_reason.rs";
const PLAIN: &str = "src/core/words/plain_reason.rs";

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The variants of an enum, as its file has them.
fn variants(file: &str, name: &str) -> Vec<String> {
    let source = read(&root().join(file));
    let start = source.find(&format!("pub enum {name} {{")).expect("the enum");
    let body = source[start..].split_once("\n}").expect("its end").0;
    let names = body.lines().skip(1).map(str::trim).filter(|line| !line.starts_with("//"));
    names.map(|line| line.strip_suffix(',').expect("a bare variant").to_owned()).collect()
}

fn debugged<T: Debug>(all: &[T]) -> Vec<String> {
    all.iter().map(|one| format!("{one:?}")).collect()
}

#[test]
fn the_lists_of_reasons_are_complete() {
    assert_eq!(debugged(&PassthroughReason::ALL), variants(PASSTHROUGH, "PassthroughReason"));
    assert_eq!(debugged(&PlainReason::ALL), variants(PLAIN, "PlainReason"));
}

#[test]
fn reasons_have_unique_names_in_the_form_of_labels() {
    for names in [
        PassthroughReason::ALL.map(PassthroughReason::name).to_vec(),
        PlainReason::ALL.map(PlainReason::name).to_vec(),
    ] {
        let mut once = names.clone();
        once.sort_unstable();
        once.dedup();
        assert_eq!(once.len(), names.len());
        let plain = |name: &&str| name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
        assert!(names.iter().all(plain), "{names:?}");
    }
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The code lines that may set a reason: all that name it, except arms of a list of patterns.
fn given(name: &str) -> Vec<String> {
    let mut files = Vec::new();
    sources(&root().join("src"), &mut files);
    let named = format!("PlainReason::{name}");
    let mut given = Vec::new();
    for file in files.iter().filter(|file| **file != root().join(PLAIN)) {
        for line in read(file).lines().map(str::trim).filter(|line| !line.starts_with("//")) {
            // Under another name it could not be found.
            assert!(!line.contains("PlainReason as ") && !line.contains("PlainReason::{"), "{line}");
            assert!(!line.contains("PlainReason::*"), "{line}");
            let whole = |rest: &str| !rest.starts_with(|next: char| next.is_alphanumeric() || next == '_');
            let names = line.match_indices(&named).any(|(at, _)| whole(&line[at + named.len()..]));
            if names && !line.starts_with("| PlainReason::") {
                given.push(format!("{}: {line}", file.display()));
            }
        }
    }
    given
}

#[test]
fn every_reason_is_used_somewhere() {
    for reason in PlainReason::ALL {
        assert!(!given(&format!("{reason:?}")).is_empty(), "{reason:?}");
    }
}
