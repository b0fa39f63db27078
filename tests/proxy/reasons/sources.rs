//! What the sources say: the lists of reasons are whole, and every reason is given.

use std::fmt::Debug;
use std::path::{Path, PathBuf};

use foretell::words::BypassReason;
use foretell::words::RideReason;

const BYPASSES: &str = "src/words/bypass.rs";
const RIDES: &str = "src/words/ride.rs";

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
fn the_lists_of_reasons_are_whole() {
    assert_eq!(debugged(&BypassReason::ALL), variants(BYPASSES, "BypassReason"));
    assert_eq!(debugged(&RideReason::ALL), variants(RIDES, "RideReason"));
}

#[test]
fn reasons_have_names_of_their_own_and_shapes_of_labels() {
    for names in
        [BypassReason::ALL.map(BypassReason::name).to_vec(), RideReason::ALL.map(RideReason::name).to_vec()]
    {
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

/// The code lines that may give a reason: all that name it but an arm of a list of patterns.
fn given(name: &str) -> Vec<String> {
    let mut files = Vec::new();
    sources(&root().join("src"), &mut files);
    let named = format!("RideReason::{name}");
    let mut given = Vec::new();
    for file in files.iter().filter(|file| **file != root().join(RIDES)) {
        for line in read(file).lines().map(str::trim).filter(|line| !line.starts_with("//")) {
            // By another name it could not be found.
            assert!(!line.contains("RideReason as ") && !line.contains("RideReason::{"), "{line}");
            assert!(!line.contains("RideReason::*"), "{line}");
            let whole = |rest: &str| !rest.starts_with(|next: char| next.is_alphanumeric() || next == '_');
            let names = line.match_indices(&named).any(|(at, _)| whole(&line[at + named.len()..]));
            if names && !line.starts_with("| RideReason::") {
                given.push(format!("{}: {line}", file.display()));
            }
        }
    }
    given
}

#[test]
fn every_reason_is_given_somewhere() {
    for reason in RideReason::ALL {
        assert!(!given(&format!("{reason:?}")).is_empty(), "{reason:?}");
    }
}
