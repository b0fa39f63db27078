//! `foretell bench` against deterministic servers: its requests, its report, its exit code.

use std::path::{Path, PathBuf};

use clap::Parser;
use foretell::cli::Exit;
use foretell::cli::bench::{BenchArgs, run};
use rstest::rstest;
use serde_json::Value;
use tempfile::TempDir;

pub mod fake;

use fake::{Behaviour, Fake, Fault};

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: BenchArgs,
}

const SPECULATING: Behaviour =
    Behaviour { speculates: true, lies: false, loops: false, fails_every: None, bare: false };

/// Writes a workload of `count` prompts, completions and chat in turn.
fn workload(folder: &TempDir, name: &str, count: usize) -> PathBuf {
    let lines: Vec<_> = (0..count)
        .map(|i| {
            let prompt = format!("{name} {}", "x".repeat(i));
            match i % 2 {
                0 => serde_json::json!({"route": "completions", "body": {"model": "m", "prompt": prompt,
                    "max_tokens": 16, "temperature": 0}}),
                _ => serde_json::json!({"route": "chat", "body": {"model": "m",
                    "messages": [{"role": "user", "content": prompt}], "max_tokens": 16}}),
            }
            .to_string()
        })
        .collect();
    let path = folder.path().join(format!("{name}.jsonl"));
    std::fs::write(&path, lines.join("\n")).unwrap();
    path
}

async fn bench(direct: &Fake, through: &Fake, workload: &Path, more: &[&str]) -> (Exit, String) {
    let (direct, through) = (direct.url.to_string(), through.url.to_string());
    let workload = workload.to_str().unwrap();
    let line = ["bench", "--direct", &direct, "--through", &through, "--workload", workload];
    let cli = Cli::try_parse_from(line.iter().chain(more)).unwrap();
    let mut out = Vec::new();
    let exit = run(&cli.args, &mut out).await;
    (exit, String::from_utf8(out).unwrap())
}

async fn pair(direct: Behaviour, through: Behaviour) -> (Fake, Fake) {
    (Fake::start(direct).await, Fake::start(through).await)
}

#[tokio::test]
async fn the_report_holds_the_figures_of_the_servers() {
    let folder = TempDir::new().unwrap();
    let (direct, through) = pair(Behaviour::default(), SPECULATING).await;
    let file = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (json, html) = (file("r.json"), file("r.html"));
    let (target, proxy) = (format!("{}/metrics", direct.url), through.url.to_string());
    let more = ["--alternations", "4", "--json", &json, "--html", &html];
    let pages = ["--metrics-direct", &target, "--metrics-through", &proxy];
    let (exit, out) =
        bench(&direct, &through, &workload(&folder, "code", 12), &[&more[..], &pages].concat()).await;
    assert_eq!(exit, Exit::Done, "{out}");

    let report: Value = serde_json::from_str(&std::fs::read_to_string(json).unwrap()).unwrap();
    let run = &report["runs"][0];
    assert_eq!((&run["workload"], &run["concurrency"]), (&"code".into(), &1.into()));
    for side in ["direct", "through"] {
        assert_eq!((run[side]["requests"].as_u64(), run[side]["failures"].as_u64()), (Some(20), Some(0)));
        assert_eq!(run[side]["looping_share"], 0.0);
        assert!(run[side]["tokens_per_second"].as_f64().unwrap() > 0.0);
    }
    assert_eq!(run["ratio"]["n"], 4);
    // Four alternations allow no interval: their range is shown, and the report says why.
    assert!(run["ratio"]["low"].as_f64() <= run["ratio"]["high"].as_f64(), "{run}");
    assert!(out.contains("(range)") && out.contains("Fewer than 6 alternations"), "{out}");
    assert!(!out.contains("95 %"), "{out}");
    // 16 tokens in 8 rounds of one accepted token each: no plain steps.
    assert_eq!(run["mean_acceptance_length"], 2.0);
    // 320 tokens of 10 ms against 160 verify runs of 12 ms and one draft of 1 ms in each of 4
    // blocks.
    let formula = 320.0 * 0.010 / (160.0 * 0.012 + 4.0 * 0.001);
    assert!((run["formula"].as_f64().unwrap() - formula).abs() < 1e-6, "{run}");
    let over = run["ratio"]["median"].as_f64().unwrap() / formula;
    assert!((run["gain_over_formula"].as_f64().unwrap() - over).abs() < 1e-6, "{run}");
    let html = std::fs::read_to_string(html).unwrap();
    assert!(!html.contains("95 %"));
    let (url, version) = (direct.url.to_string(), foretell::cli::VERSION);
    for part in ["code, T=0, 1 client", &url, version, "<dt>Date</dt>", "<dt>Command</dt>", " core"] {
        assert!(html.contains(part), "{part}");
    }
    assert!(out.contains("100 %") && out.contains("paths: speculated 20"), "{out}");
}

#[tokio::test]
async fn a_server_that_does_not_report_rounds_has_no_formula() {
    let folder = TempDir::new().unwrap();
    let (direct, through) = pair(Behaviour::default(), Behaviour::default()).await;
    let (target, proxy) = (direct.url.to_string(), through.url.to_string());
    let more = ["--alternations", "2", "--metrics-direct", &target, "--metrics-through", &proxy];
    let (exit, out) = bench(&direct, &through, &workload(&folder, "code", 10), &more).await;
    assert_eq!(exit, Exit::Done);
    assert!(out.contains("no formula gain: the answers carry no usage.foretell"), "{out}");
    let bare = Fake::start(Behaviour { bare: true, ..SPECULATING }).await;
    let (_, out) = bench(
        &direct,
        &bare,
        &workload(&folder, "code", 10),
        &[&more[..5], &[&bare.url.to_string()]].concat(),
    )
    .await;
    assert!(out.contains("no formula gain: a metrics page could not be read"), "{out}");
}

#[tokio::test]
async fn both_sides_get_the_same_streamed_and_seeded_requests() {
    let folder = TempDir::new().unwrap();
    let (direct, through) = pair(Behaviour::default(), SPECULATING).await;
    let more = ["--temperature", "0.7", "--seeded", "--max-tokens", "5", "--alternations", "2"];
    let (exit, out) = bench(&direct, &through, &workload(&folder, "code", 7), &more).await;
    assert_eq!(exit, Exit::Done);
    assert!(out.contains("no formula gain: no costs were given"), "{out}");

    let (direct, through) = (direct.seen.lock().unwrap(), through.seen.lock().unwrap());
    assert_eq!(
        direct.len(),
        30,
        "the server reads each alternation's five prompts once before they are timed"
    );
    let direct: Vec<_> = direct.iter().filter(|body| body["max_tokens"] != 1).cloned().collect();
    assert_eq!(direct.len(), 20);
    assert_eq!(direct, *through);
    for body in &direct {
        assert_eq!((body["temperature"].as_f64(), body["max_tokens"].as_u64()), (Some(0.7), Some(5)));
        assert_eq!((&body["stream"], &body["stream_options"]["include_usage"]), (&true.into(), &true.into()));
    }
    // Request 11 is the first prompt, after a warm-up with the last ten prompts in reverse order (7
    // prompts, wrapped around).
    assert_eq!((direct[10]["seed"].as_u64(), direct[0]["seed"].as_u64()), (Some(1000), Some(1006)));
}

#[tokio::test]
async fn many_clients_are_all_counted() {
    let folder = TempDir::new().unwrap();
    let (direct, through) = pair(Behaviour::default(), SPECULATING).await;
    let more = ["--concurrency", "1,8", "--alternations", "2", "--require", "*.failures<=0,*.identical>=1"];
    let (exit, out) = bench(&direct, &through, &workload(&folder, "code", 9), &more).await;
    assert_eq!(exit, Exit::Done, "{out}");
    assert!(out.contains("code, T=0, 8 clients") && out.contains("0/80 → 0/80"), "{out}");
}

#[rstest]
#[case::refused(Fault::Status, "HTTP 500: out of slots")]
#[case::cut(Fault::Cut, "cut off: ")]
#[case::short(Fault::Short, "cut off: after 3 events, no [DONE]")]
#[tokio::test]
async fn failed_requests_are_counted_and_reported(#[case] fault: Fault, #[case] message: &str) {
    let folder = TempDir::new().unwrap();
    let (direct, through) =
        pair(Behaviour::default(), Behaviour { fails_every: Some((5, fault)), ..SPECULATING }).await;
    let more = ["--alternations", "4", "--require", "*.failures<=0"];
    let (exit, out) = bench(&direct, &through, &workload(&folder, "code", 10), &more).await;
    assert_eq!(exit, Exit::RequirementNotMet, "{out}");
    assert!(out.contains(&format!("4 of the through requests failed; first: {message}")), "{out}");
    assert!(out.contains("0/20 → 4/20"), "{out}");
}

#[tokio::test]
async fn an_outcome_below_the_threshold_is_not_met() {
    let folder = TempDir::new().unwrap();
    let (direct, through) = pair(Behaviour::default(), Behaviour { lies: true, ..SPECULATING }).await;
    let more = ["--alternations", "2", "--require", "*.identical>=1,code>=0.0001,code.gain>=0.8"];
    let (exit, out) = bench(&direct, &through, &workload(&folder, "code", 10), &more).await;
    assert_eq!(exit, Exit::RequirementNotMet);
    assert!(out.contains("outputs differ on prompts 1, 2, 3"), "{out}");
    let short: Vec<_> = out.lines().filter(|line| line.starts_with("NOT MET: ")).collect();
    assert_eq!(short.len(), 2, "{out}");
    assert!(short[0].ends_with("identical 0.000, required >= 1") && short[1].contains("gain not measured"));
}

#[rstest]
#[case::by_token_ids(false)]
#[case::by_words(true)]
#[tokio::test]
async fn looping_outputs_are_reported(#[case] bare: bool) {
    let folder = TempDir::new().unwrap();
    let direct = Behaviour { loops: true, bare, ..Behaviour::default() };
    let (direct, through) = pair(direct, SPECULATING).await;
    let json = folder.path().join("r.json");
    let more = ["--alternations", "2", "--max-tokens", "64", "--json", json.to_str().unwrap()];
    let (_, out) = bench(&direct, &through, &workload(&folder, "code", 10), &more).await;
    let report: Value = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
    let share = |side: &str| report["runs"][0][side]["looping_share"].as_f64().unwrap();
    assert_eq!((share("direct"), share("through")), (1.0, 0.0));
    assert_eq!(out.contains("loops were counted in words"), bare, "{out}");
}

#[tokio::test]
async fn a_server_that_does_not_answer_ends_the_run() {
    let folder = TempDir::new().unwrap();
    let (direct, through) = pair(Behaviour::default(), SPECULATING).await;
    let path = workload(&folder, "code", 10);
    let refusing = Fake::start(Behaviour { fails_every: Some((1, Fault::Status)), ..SPECULATING }).await;
    assert_eq!(bench(&direct, &refusing, &path, &["--alternations", "1"]).await.0, Exit::Unreachable);

    // A port without a listener: bound and released.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let nobody = Fake::nobody(port);
    assert_eq!(bench(&nobody, &through, &path, &["--alternations", "1"]).await.0, Exit::Unreachable);
}

#[rstest]
#[case::no_file("nothing.jsonl", &[])]
#[case::a_bad_line("bad.jsonl", &[])]
#[case::no_clients("code.jsonl", &["--concurrency", "0"])]
#[case::no_alternations("code.jsonl", &["--alternations", "0"])]
#[case::too_hot("code.jsonl", &["--temperature", "0,7"])]
#[case::no_folder("code.jsonl", &["--json", "/nowhere/at/all.json"])]
#[tokio::test]
async fn a_run_that_is_not_possible_is_refused_before_the_first_request(
    #[case] file: &str,
    #[case] more: &[&str],
) {
    let folder = TempDir::new().unwrap();
    workload(&folder, "code", 10);
    std::fs::write(folder.path().join("bad.jsonl"), "nonsense\n").unwrap();
    let (direct, through) = pair(Behaviour::default(), SPECULATING).await;
    assert_eq!(bench(&direct, &through, &folder.path().join(file), more).await.0, Exit::Usage);
    assert!(direct.seen.lock().unwrap().is_empty() && through.seen.lock().unwrap().is_empty());
}

#[tokio::test]
async fn without_a_workload_there_are_tasks_for_the_model_that_the_server_lists() {
    let (direct, through) = pair(Behaviour::default(), SPECULATING).await;
    let (one, other) = (direct.url.to_string(), through.url.to_string());
    let asked = ["bench", "--direct", &one, "--through", &other, "--alternations", "6", "--max-tokens", "8"];
    let cli = Cli::try_parse_from(asked).unwrap();
    let mut out = Vec::new();
    assert_eq!(run(&cli.args, &mut out).await, Exit::Done);
    let out = String::from_utf8(out).unwrap();
    assert!(out.contains("builtin, T=0, 1 client") && out.contains("(95 %)"), "{out}");
    let seen = through.seen.lock().unwrap().clone();
    assert!(!seen.is_empty() && seen.iter().all(|body| body["model"] == fake::MODEL), "{seen:?}");

    let none = Cli::try_parse_from(asked.iter().chain(&["--model", "own"])).unwrap();
    assert_eq!(run(&none.args, &mut Vec::new()).await, Exit::Done);
    assert!(through.seen.lock().unwrap().iter().any(|body| body["model"] == "own"));
}

#[rstest]
#[case(&["--direct", "ftp://a", "--through", "http://b", "--workload", "w"])]
#[case(&["--direct", "http://a", "--through", "http://b", "--workload", "w", "--require", "w.speed>=1"])]
#[case(&["--direct", "http://a", "--through", "http://b", "--workload", "w", "--metrics-direct", "http://a"])]
fn a_wrong_command_line_is_refused(#[case] line: &[&str]) {
    assert!(Cli::try_parse_from(["bench"].iter().chain(line)).is_err());
}
