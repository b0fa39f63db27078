//! Inputs that once failed, replayed without a fuzzing engine: `regressions/TARGET/*`.
#![allow(clippy::panic, clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::fs;
use std::path::{Path, PathBuf};

use foretell_fuzz::{TARGETS, wire};

fn regressions() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("regressions")
}

fn replay(target: &str) -> usize {
    let (_, run) = TARGETS.iter().find(|(name, _)| *name == target).expect("a target");
    let entries = fs::read_dir(regressions().join(target)).into_iter().flatten();
    let mut inputs: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    inputs.sort();
    for input in &inputs {
        eprintln!("{}", input.display());
        run(&fs::read(input).unwrap());
    }
    // Every target accepts any input.
    run(&[]);
    run(&[0xff; 64]);
    inputs.len()
}

macro_rules! replayed {
    ($($target:ident)*) => { $(
        #[test]
        fn $target() {
            replay(stringify!($target));
        }
    )* };
}

replayed! { verify stream request tokenizer wire session snapshot shared exposition config admin parse drafts }

#[test]
fn unambiguous_requests_arrive() {
    let lines =
        |bytes: &[u8]| wire::arrive(bytes, None).into_iter().map(|asked| asked.line).collect::<Vec<_>>();
    let two = b"POST /a HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\nhiGET /b HTTP/1.1\r\nhost: a\r\n\r\n";
    assert_eq!(lines(two), ["POST /a", "GET /b", "GET /last"]);
}

#[test]
fn every_folder_is_that_of_a_target() {
    for entry in fs::read_dir(regressions()).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(TARGETS.iter().any(|(target, _)| *target == name), "{name}");
    }
}
