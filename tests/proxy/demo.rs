//! `foretell demo` against deterministic servers: its output and its exit code.

use std::path::Path;

use foretell::bench::canvas::Canvas;
use foretell::bench::demo::{About, Stack};
use foretell::cli::Exit;
use foretell::cli::demo::{DemoArgs, run_on};
use tempfile::TempDir;

use super::bench::fake::{self, Behaviour, Fake, Fault};

const SPECULATING: Behaviour =
    Behaviour { speculates: true, lies: false, loops: false, fails_every: None, bare: false };

fn workloads() -> TempDir {
    let folder = TempDir::new().unwrap();
    let completion = |i: usize| {
        format!(
            r#"{{"route":"completions","body":{{"model":"m","prompt":"def f{i}():\n    return","max_tokens":8}}}}"#
        )
    };
    let chat = r#"{"route":"chat","body":{"model":"m","messages":[{"role":"user","content":"Hello?"}],"max_tokens":6}}"#;
    let lines: Vec<_> = (0..5).map(completion).collect();
    std::fs::write(folder.path().join("code.jsonl"), lines.join("\n")).unwrap();
    std::fs::write(folder.path().join("talk.jsonl"), chat).unwrap();
    folder
}

async fn demo(direct: &Fake, through: &Fake, folder: &Path, canvas: Canvas) -> (Exit, String) {
    let stack = Stack {
        direct: direct.url.clone(),
        through: through.url.clone(),
        admin: through.url.clone(),
        about: About {
            model: "m".into(),
            parameters: 6_500_000,
            device: "cpu".into(),
            inflate: 1,
            drafters: vec!["prompt_lookup".into()],
        },
    };
    let args = DemoArgs { once: true, workloads: Some(folder.to_owned()), prompts: 2, ..DemoArgs::default() };
    let mut out = Vec::new();
    let exit = run_on(&args, Path::new("nowhere"), &stack, canvas, &mut out).await;
    (exit, String::from_utf8(out).unwrap())
}

#[tokio::test]
async fn equal_texts_are_shown_once_with_their_figures() {
    let (direct, through) = (Fake::start(Behaviour::default()).await, Fake::start(SPECULATING).await);
    let folder = workloads();
    let (exit, out) = demo(&direct, &through, folder.path(), Canvas::plain()).await;
    assert_eq!(exit, Exit::Done, "{out}");
    assert!(out.starts_with("m: 6.5 M parameters on cpu; drafters: prompt_lookup\n"), "{out}");
    assert!(out.contains("── code 1 (completions, T=0) … return"), "{out}");
    assert!(out.contains("── code 2 (completions, T=0.8, seeded)"), "{out}");
    assert!(out.contains("── talk 1 (chat, T=0) … Hello?"), "{out}");
    assert!(out.contains("4 rounds, 4 of 12 drafted tokens accepted; same text"), "{out}");
    assert!(out.contains("3 of 3 texts are the same both ways"), "{out}");
    assert!(!out.contains('\u{1b}'), "no colours into a pipe: {out:?}");
    let shown = fake::words(&through.seen.lock().unwrap()[6], &SPECULATING).concat();
    assert_eq!(out.matches(shown.trim_end()).count(), 1, "{out}");
}

#[tokio::test]
async fn a_terminal_shows_both_texts_side_by_side() {
    let (direct, through) = (Fake::start(Behaviour::default()).await, Fake::start(SPECULATING).await);
    let folder = workloads();
    let (_, out) = demo(&direct, &through, folder.path(), Canvas::terminal(120, true)).await;
    let words = fake::words(&through.seen.lock().unwrap()[6], &SPECULATING);
    let line = out.lines().find(|line| line.matches(&words[0]).count() == 2).expect(&out);
    let (plain, speculated) = line.split_once('│').unwrap();
    // Left without colour, right with every run of two tokens coloured.
    assert!(
        !plain.contains("\u{1b}[32m") && speculated.contains(&format!("\u{1b}[32m{}", words[0])),
        "{line:?}"
    );
}

#[tokio::test]
async fn different_texts_are_both_shown_and_fall_short() {
    let liar = Behaviour { lies: true, ..SPECULATING };
    let (direct, through) = (Fake::start(Behaviour::default()).await, Fake::start(liar).await);
    let folder = workloads();
    let (exit, out) = demo(&direct, &through, folder.path(), Canvas::plain()).await;
    assert_eq!(exit, Exit::RequirementNotMet);
    assert!(out.contains("THE TEXTS DIFFER") && out.contains("0 of 3 texts are the same both ways"), "{out}");
    assert!(out.contains("  [plain]\n  w") && out.contains("  [foretell]\n  w"), "{out}");
}

#[tokio::test]
async fn a_server_that_fails_ends_the_demonstration() {
    let failing = Behaviour { fails_every: Some((3, Fault::Status)), ..SPECULATING };
    let (direct, through) = (Fake::start(Behaviour::default()).await, Fake::start(failing).await);
    let folder = workloads();
    assert_eq!(demo(&direct, &through, folder.path(), Canvas::plain()).await.0, Exit::Unreachable);
}

#[tokio::test]
async fn without_workloads_there_is_nothing_to_show() {
    let (direct, through) = (Fake::start(Behaviour::default()).await, Fake::start(SPECULATING).await);
    let empty = TempDir::new().unwrap();
    assert_eq!(demo(&direct, &through, empty.path(), Canvas::plain()).await.0, Exit::Usage);
    assert_eq!(demo(&direct, &through, Path::new("/nowhere"), Canvas::plain()).await.0, Exit::Usage);
}

#[tokio::test]
async fn prompts_whose_plain_answers_loop_are_passed_over_and_counted() {
    let looping = Behaviour { loops: true, ..Behaviour::default() };
    let (direct, through) = (Fake::start(looping).await, Fake::start(SPECULATING).await);
    let folder = TempDir::new().unwrap();
    let line = |i: usize| {
        format!(
            r#"{{"route":"completions","says":"S","body":{{"model":"m","prompt":"p{i}","max_tokens":64}}}}"#
        )
    };
    let lines: Vec<_> = (0..5).map(line).collect();
    std::fs::write(folder.path().join("code.jsonl"), lines.join("\n")).unwrap();
    let (exit, out) = demo(&direct, &through, folder.path(), Canvas::plain()).await;
    assert_eq!(exit, Exit::Done, "{out}");
    assert!(out.contains("0 of 0 texts are the same"), "{out}");
    assert!(out.contains("5 more prompts were skipped: their plain answers loop."), "{out}");
}

#[tokio::test]
async fn a_prompt_that_says_what_to_look_for_is_shown_whole() {
    let (direct, through) = (Fake::start(Behaviour::default()).await, Fake::start(SPECULATING).await);
    let folder = TempDir::new().unwrap();
    let line = r#"{"route":"completions","says":"Mind the gap","body":{"model":"m","prompt":"one\ntwo\n","max_tokens":8}}"#;
    std::fs::write(folder.path().join("edit.jsonl"), line).unwrap();
    let (_, out) = demo(&direct, &through, folder.path(), Canvas::plain()).await;
    assert!(out.contains("── edit 1 (completions, T=0) Mind the gap\n  > one\n  > two\n"), "{out}");
}
