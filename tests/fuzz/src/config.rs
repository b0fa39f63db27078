//! The config file and policy files.
//!
//! Input: config file, separator, policy files with separators between them. `check` of files on
//! disk and a reload of their texts must report the same; each problem of a file must have a line
//! in it.

use foretell_config::load::{attempt, load_policies, parse_policies};
use foretell_config::process::{Process, parse_all};
use foretell_config::{Flags, Problem, Strings, difference, policy};

use crate::bytes::Bytes;
use crate::snapshot::scratch;

/// Maximum size of an input, bytes.
const MAX_LEN: usize = 32 << 10;
/// Maximum number of policy files of an input.
const FILES: usize = 4;

/// An environment without variables.
struct Nothing;

impl Strings for Nothing {
    fn get(&self, _: &str) -> Option<String> {
        None
    }
}

/// Runs one input.
pub fn run(input: &[u8]) {
    if input.len() > MAX_LEN {
        return;
    }
    let parts = Bytes(input).bodies();
    let texts: Option<Vec<&str>> = parts.iter().map(|part| std::str::from_utf8(part).ok()).collect();
    let Some((process, policies)) = texts.as_deref().and_then(<[&str]>::split_first) else { return };
    let parsed = parse_all("p", process, &Nothing);
    for problem in &parsed.problems {
        placed(problem, process);
    }
    for policy in policies {
        if let Err(problems) = policy::parse("f", policy) {
            assert!(!problems.is_empty());
            for problem in &problems {
                placed(problem, policy);
            }
        }
    }
    let _ = difference::refused("p", process, process).map(|refused| assert_eq!(refused, []));
    on_disk(process, policies.get(..FILES.min(policies.len())).unwrap_or_default());
}

/// A problem of a file has a line of that file, and says what is allowed.
fn placed(problem: &Problem, text: &str) {
    // YAML accepts both as line breaks.
    let lines = text.split(['\n', '\r']).count() as u64;
    assert!(problem.line.is_some_and(|line| (1..=lines).contains(&line)), "of {lines} lines: {problem:?}");
    assert!(!problem.message.is_empty() && !problem.path.is_empty(), "{problem:?}");
    assert!(!problem.to_string().contains('\n'), "one line: {problem}");
}

/// The same files as `check` and `serve` read them and as a reload does.
fn on_disk(process: &str, policies: &[&str]) {
    let folder = scratch().with_extension("d");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(folder.join("policies")).expect("a folder");
    let file = folder.join("foretell.yaml");
    std::fs::write(&file, process).expect("a file");
    for (at, text) in policies.iter().enumerate() {
        std::fs::write(folder.join(format!("policies/{at}.yaml")), text).expect("a file");
    }
    let flags = Flags { config: Some(file.display().to_string()), ..Flags::default() };
    let checked = attempt(&flags, &Nothing);
    let settled: &Process = &checked.process;
    let process_is_good = parse_all("p", process, &Nothing).problems.is_empty();
    if process_is_good && settled.policies == folder.join("policies") {
        let reloaded = load_policies(settled);
        let named: Vec<(String, String)> = policies
            .iter()
            .enumerate()
            .map(|(at, text)| {
                (folder.join(format!("policies/{at}.yaml")).display().to_string(), (*text).to_owned())
            })
            .collect();
        let told = |result: Result<_, Vec<Problem>>| result.map(|set| format!("{set:?}"));
        let reloaded = told(reloaded);
        assert_eq!(reloaded, told(parse_policies(&named, settled)));
        assert_eq!(reloaded.is_ok(), checked.problems.is_empty(), "{:?} {reloaded:?}", checked.problems);
    }
}
