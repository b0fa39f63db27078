//! The pure folders stay pure: no runtime, no sockets, no model runtime, no clock, no hidden randomness.

use std::fs;
use std::path::{Path, PathBuf};

const PURE: [&str; 6] = ["openai", "session", "draft", "control", "dialect", "words"];

/// What a pure file may not name. The list is of words, matched at their boundaries, comments left out.
const FORBIDDEN: [&str; 14] = [
    "tokio",
    "hyper",
    "hyper_util",
    "ort",
    "reqwest",
    "Instant",
    "SystemTime",
    "UNIX_EPOCH",
    "std::net",
    "std::fs",
    "std::env",
    "thread_rng",
    "RandomState",
    "std::thread",
];

fn rust_files(path: &Path, found: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(path) else { return };
    for entry in entries.flatten().map(|entry| entry.path()) {
        if entry.is_dir() {
            rust_files(&entry, found);
        } else if entry.extension().is_some_and(|kind| kind == "rs") && !entry.ends_with("tests.rs") {
            found.push(entry);
        }
    }
}

fn names(line: &str, word: &str) -> bool {
    let code = line.split("//").next().unwrap_or_default();
    let part = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    code.match_indices(word)
        .any(|(at, _)| !part(code[..at].chars().next_back()) && !part(code[at + word.len()..].chars().next()))
}

/// What a file names that it may not; its unit tests may read files.
fn impurities(text: &str) -> Vec<String> {
    let code = text.split("#[cfg(test)]").next().unwrap_or_default();
    code.lines()
        .enumerate()
        .flat_map(|(number, line)| {
            FORBIDDEN
                .iter()
                .filter(move |word| names(line, word))
                .map(move |word| format!("line {}: {word}", number + 1))
        })
        .collect()
}

#[test]
fn pure_folders_touch_no_world_and_read_no_clock() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for folder in PURE {
        let mut files = vec![source.join(format!("{folder}.rs"))];
        rust_files(&source.join(folder), &mut files);
        for file in files {
            let text = fs::read_to_string(&file).expect("readable");
            let found = impurities(&text);
            assert!(found.is_empty(), "{}: {found:?}", file.display());
        }
    }
}

#[test]
fn the_check_sees_what_it_forbids() {
    assert_eq!(impurities("use tokio::time;\nlet a = Instant::now();").len(), 2);
    assert!(impurities("// tokio would do this\nlet sort = import(report);").is_empty());
}
