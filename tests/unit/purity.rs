//! Architecture rules: a layer uses only the layers below it, pure layers have no side effects, and
//! no function has too many parameters.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The layers from top to bottom. A layer may use those after it.
const ROOMS: [&str; 22] = [
    "cli",
    "lab",
    "app",
    "admin",
    "gateway",
    "serving",
    "observe",
    "onnx_server",
    "runtime",
    "fleet",
    "config",
    "policy",
    "dialect",
    "openai",
    "text",
    "session",
    "control",
    "draft",
    "words",
    "http",
    "clock",
    "units",
];

/// Layers without sockets, clocks and random numbers of their own.
const PURE: [&str; 8] = ["policy", "dialect", "openai", "text", "session", "control", "draft", "words"];

/// The exception in which a pure layer may read a file: tokenizers can be opened by their path.
const READS: (&str, &str) = ("src/text.rs", "std::fs");

/// Words that a pure file may not contain, matched at word boundaries outside of comments.
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

/// Maximum number of parameters of a function, including `self`.
const PARAMETERS: usize = 7;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn rust_files(path: &Path, found: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(path) else { return };
    for entry in entries.flatten().map(|entry| entry.path()) {
        if entry.is_dir() {
            rust_files(&entry, found);
        } else if entry.extension().is_some_and(|kind| kind == "rs") {
            found.push(entry);
        }
    }
}

/// Every source file below `folder`, by its path from the root, with its text.
fn sources(folder: &str) -> Vec<(String, String)> {
    let mut files = Vec::new();
    rust_files(&root().join(folder), &mut files);
    files.sort();
    let named = |file: PathBuf| {
        let text = fs::read_to_string(&file).expect("readable");
        (file.strip_prefix(root()).expect("below the root").display().to_string(), text)
    };
    files.into_iter().map(named).collect()
}

/// The layer of a source file; none for `lib.rs` and `main.rs`.
fn room(file: &str) -> Option<&str> {
    let path = file.strip_prefix("src/")?;
    let room = path.split('/').next()?;
    let room = room.strip_suffix(".rs").unwrap_or(room);
    (!matches!(room, "lib" | "main")).then_some(room)
}

/// The code of a file: without comments and without its unit tests.
fn code(text: &str) -> String {
    let code = text.split("#[cfg(test)]\nmod").next().unwrap_or_default();
    code.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

// ------------------------------------------------------------------------ Layers

/// The paths from the crate root that a file names: after `crate::`, or after enough `super::` to
/// reach it.
fn paths(file: &str, code: &str) -> Vec<String> {
    let depth = file.matches('/').count();
    let way_up = "super::".repeat(depth);
    let starts = ["crate::", way_up.as_str()];
    let found =
        starts.iter().flat_map(|start| code.match_indices(start).map(|(at, _)| (at, at + start.len())));
    let whole =
        found.filter(|(at, _)| !code[..*at].ends_with(|c: char| c.is_alphanumeric() || "_:".contains(c)));
    whole.flat_map(|(_, end)| members(&code[end..])).collect()
}

/// `a::b` of `a::b::{…}`; all of them in `{a::b, c}`.
fn members(rest: &str) -> Vec<String> {
    let Some(group) = rest.strip_prefix('{') else {
        let end = rest.find(|c: char| !(c.is_alphanumeric() || "_:".contains(c))).unwrap_or(rest.len());
        return vec![rest[..end].trim_end_matches(':').to_owned()];
    };
    let (mut level, mut pieces) = (0_usize, vec![String::new()]);
    for letter in group.chars() {
        match letter {
            '{' => level += 1,
            '}' if level == 0 => break,
            '}' => level -= 1,
            ',' if level == 0 => pieces.push(String::new()),
            _ if level == 0 => pieces.last_mut().expect("one is there").push(letter),
            _ => {}
        }
    }
    pieces.iter().map(|piece| piece.trim().trim_end_matches("::").to_owned()).collect()
}

/// Reason for which a file may not name this path, if any.
fn upward(file: &str, path: &str) -> Option<String> {
    let position = |room: &str| ROOMS.iter().position(|known| *known == room);
    let (own, other) = (room(file)?, path.split("::").next()?);
    let (from, to) = (position(own)?, position(other)?);
    (to < from).then(|| format!("{file}: {own} uses {path}, which is above it"))
}

#[test]
fn a_layer_uses_only_layers_below_it() {
    let mut found = Vec::new();
    for (file, text) in sources("src") {
        found.extend(paths(&file, &code(&text)).iter().filter_map(|path| upward(&file, path)));
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn every_layer_is_declared_and_on_the_map() {
    let map = fs::read_to_string(root().join("src/lib.rs")).expect("readable");
    let declared = map.lines().filter_map(|line| line.strip_prefix("pub mod ")?.strip_suffix(';'));
    let declared: BTreeSet<&str> = declared.collect();
    assert_eq!(declared, ROOMS.into_iter().collect());
    for room in ROOMS {
        assert!(map.contains(&format!("[`{room}`]")), "lib.rs has no link to {room}");
    }
    for (file, _) in sources("src") {
        assert!(room(&file).is_none_or(|room| ROOMS.contains(&room)), "{file} is in no layer");
    }
}

#[test]
fn every_way_to_name_another_layer_is_found() {
    let file = "src/draft/tree.rs";
    let code = "use crate::{units, session::{Start, Rules},\n  gateway::proxy};\nuse crate::serving;\nlet a = crate::app::start();\n\
                use super::super::control::Run;\nuse super::merge;\nuse mycrate::cli;";
    assert_eq!(
        paths(file, code),
        ["units", "session", "gateway::proxy", "serving", "app::start", "control::Run"]
    );
    assert!(upward(file, "gateway::proxy").is_some() && upward(file, "units").is_none());
    assert!(upward("src/lib.rs", "cli").is_none());
}

// ------------------------------------------------------------------------ Purity

fn names(line: &str, word: &str) -> bool {
    let part = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    line.match_indices(word)
        .any(|(at, _)| !part(line[..at].chars().next_back()) && !part(line[at + word.len()..].chars().next()))
}

/// The forbidden words in a file; its unit tests are exempt.
fn impurities(file: &str, text: &str) -> Vec<String> {
    let code = code(text);
    let lines = code.lines().enumerate();
    let in_line = |(number, line): (usize, &str)| {
        let named = FORBIDDEN.iter().filter(|word| names(line, word) && (file, **word) != READS);
        named.map(|word| format!("{file}:{}: {word}", number + 1)).collect::<Vec<_>>()
    };
    lines.flat_map(in_line).collect()
}

#[test]
fn pure_layers_have_no_side_effects_and_read_no_clock() {
    let files = sources("src");
    for pure in PURE {
        let own = files.iter().filter(|(file, _)| room(file) == Some(pure) && !file.ends_with("tests.rs"));
        let found: Vec<String> = own.flat_map(|(file, text)| impurities(file, text)).collect();
        assert!(found.is_empty(), "{found:?}");
    }
}

#[test]
fn the_check_sees_what_it_forbids() {
    assert_eq!(impurities("f", "use tokio::time;\nlet a = Instant::now();").len(), 2);
    assert!(impurities("f", "// tokio would do this\nlet sort = import(report);").is_empty());
}

// -------------------------------------------------------------------- Parameters

/// The functions of a text with more parameters than are allowed.
fn too_many(code: &str) -> Vec<String> {
    let functions = code.match_indices("fn ").filter_map(|(at, _)| {
        let rest = &code[at + 3..];
        let end = rest.find(|c: char| !(c.is_alphanumeric() || c == '_'))?;
        let before = code[..at].chars().next_back();
        (end > 0 && before.is_none_or(char::is_whitespace)).then(|| (&rest[..end], parameters(&rest[end..])))
    });
    functions.filter(|(_, count)| *count > PARAMETERS).map(|(name, _)| name.to_owned()).collect()
}

/// Number of parameters of a signature that begins at the end of the function's name.
fn parameters(signature: &str) -> usize {
    let (mut level, mut open, mut commas, mut last) = (0_i32, false, 0, ' ');
    let mut filled = false;
    for letter in signature.chars() {
        match letter {
            '(' if level == 0 => {
                (level, open) = (1, true);
            }
            '(' | '[' | '{' | '<' => level += 1,
            '>' if last == '-' || last == '=' => {}
            ')' | ']' | '}' | '>' => level -= 1,
            ',' if open && level == 1 => {
                commas += usize::from(filled);
                filled = false;
            }
            letter if open && !letter.is_whitespace() => filled = true,
            _ => {}
        }
        if open && level == 0 {
            break;
        }
        last = letter;
    }
    commas + usize::from(filled)
}

#[test]
fn no_function_has_too_many_parameters() {
    // Unit tests are left to the lint: a property that draws many values is not called by other
    // code.
    let files = sources("src").into_iter().filter(|(file, _)| !file.ends_with("tests.rs"));
    let of = |(file, text): (String, String)| {
        too_many(&code(&text)).into_iter().map(move |name| (file.clone(), name)).collect::<Vec<_>>()
    };
    let found: Vec<(String, String)> = files.flat_map(of).collect();
    assert!(found.is_empty(), "{found:?}");
}

#[test]
fn the_lint_for_it_is_switched_off_nowhere() {
    let lint = ["too_many", "arguments"].join("_");
    for folder in ["src", "tests", "examples"] {
        for (file, text) in sources(folder) {
            assert!(!text.contains(&lint), "{file}");
        }
    }
}

#[test]
fn parameters_are_counted_through_types_and_line_breaks() {
    let code = "fn none() {}\nfn seven(&self, a: (u8, u8), b: HashMap<K, V>, c: impl Fn(A, B) -> C, d: D, e: [u8; 2],\n  f: F,\n) {}\n\
                pub fn eight<T: Into<(A, B)>>(a: A, b: B, c: C, d: D, e: E, f: F, g: G, h: H) -> (A, B) {}";
    assert_eq!(too_many(code), ["eight"]);
    assert_eq!(parameters("(&self, a: (u8, u8), b: HashMap<K, V>)"), 3);
    assert_eq!(parameters("() -> (A, B)"), 0);
}
