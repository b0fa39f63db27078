//! Real models: speculated answers are the target's own, token by token.
//!
//! Runs on the bundled models, or on the folders that `FORETELL_TEST_MODEL` and
//! `FORETELL_TEST_DRAFTER` name. A batch of another shape may round differently, so a first
//! difference is allowed where the target's own logprobs show a tie: two logits less than 1e-3
//! apart, or a token within 1e-5 of the edge of top-p.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use foretell::app::local::{self, LocalTarget};
use foretell_onnx::noise;
use foretell_onnx::open::DeviceChoice;
use foretell_onnx::open::Options;
use foretell_onnx::target::open::open;
use foretell_wire::openai::Route;
use futures_util::stream::{self, StreamExt};
use rstest::rstest;
use serde_json::{Value, json};

use super::house::{Answer, Ask, House, send, watch_panics};

/// Source of the prompts; without it they are cut out of this repository's own files.
const WORKLOADS: &str = "tests/workloads";
const PROMPTS: usize = 40;
const MAX_TOKENS: usize = 24;
/// Bytes of a prompt: long enough to look things up in, short enough to be read forty times.
const PROMPT_BYTES: usize = 900;
const TOP_P: f64 = 0.9;
const TEMPERATURE: f64 = 0.8;
/// Requests in flight at once.
const WIDE: usize = 3;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn folder(variable: &str, name: &str) -> PathBuf {
    std::env::var_os(variable).map_or_else(|| root().join("onnx/models").join(name), PathBuf::from)
}

/// Prompts of every file of a folder in turn.
fn prompts() -> Vec<(Route, Value)> {
    let mut files: Vec<Vec<(Route, Value)>> = Vec::new();
    let listed = std::fs::read_dir(root().join(WORKLOADS)).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = listed.map(|entry| entry.path()).collect();
    paths.sort();
    for path in paths.iter().filter(|path| path.extension().is_some_and(|extension| extension == "jsonl")) {
        let text = std::fs::read_to_string(path).unwrap();
        files.push(text.lines().filter_map(workload).collect());
    }
    if files.iter().map(Vec::len).sum::<usize>() < PROMPTS {
        files = vec![own_text()];
    }
    let longest = files.iter().map(Vec::len).max().unwrap_or(0);
    let turns = (0..longest).flat_map(|turn| files.iter().filter_map(move |file| file.get(turn).cloned()));
    turns.take(PROMPTS).collect()
}

fn workload(line: &str) -> Option<(Route, Value)> {
    let line: Value = serde_json::from_str(line).unwrap();
    let (route, subject) = match line["route"].as_str().unwrap() {
        "chat" => (Route::Chat, &line["body"]["messages"]),
        _ => (Route::Completions, &line["body"]["prompt"]),
    };
    (subject.to_string().len() <= PROMPT_BYTES).then(|| (route, subject.clone()))
}

fn own_text() -> Vec<(Route, Value)> {
    let mut text = std::fs::read_to_string(root().join("README.md")).unwrap_or_default();
    for name in [
        "src/core/session.rs",
        "src/engines/lib.rs",
        "src/proxy/gateway.rs",
        "src/onnx/target/server.rs",
        "src/config/process.rs",
    ] {
        text.push_str(&std::fs::read_to_string(root().join(name)).unwrap());
    }
    let letters: Vec<char> = text.chars().collect();
    let pieces = letters.chunks(PROMPT_BYTES / 2).map(|piece| piece.iter().collect::<String>());
    pieces
        .enumerate()
        .map(|(at, piece)| match at % 4 {
            3 => (Route::Chat, json!([{"role": "user", "content": piece}])),
            _ => (Route::Completions, json!(piece)),
        })
        .collect()
}

/// A prompt with its sampling; every other one is streamed.
fn asks() -> Vec<(Route, Value)> {
    let settings =
        [json!({"temperature": 0}), json!({"temperature": TEMPERATURE, "top_p": TOP_P, "seed": 20_261_120})];
    let mut asks = Vec::new();
    for (at, (route, subject)) in prompts().into_iter().enumerate() {
        for setting in &settings {
            let mut body = json!({"model": "toy", "max_tokens": MAX_TOKENS, "return_token_ids": true});
            let fields = body.as_object_mut().unwrap();
            fields.extend(setting.as_object().unwrap().clone());
            let name = if route == Route::Chat { "messages" } else { "prompt" };
            fields.insert(name.to_owned(), subject.clone());
            fields.insert("stream".to_owned(), json!(at % 2 == 1));
            if at % 2 == 1 {
                fields.insert("stream_options".to_owned(), json!({"include_usage": true}));
            }
            asks.push((route, body));
        }
    }
    asks
}

async fn ask(to: std::net::SocketAddr, route: Route, body: &Value) -> Answer {
    let kind = Ask::new(route, body["stream"] == true, json!({}));
    Answer::read(&kind, send(to, route.path(), "", body).await)
}

/// The tie that explains the first difference, from the target's own logprobs at that position.
/// `None` if it was no tie.
async fn tie(target: &LocalTarget, body: &Value, plain: &Answer, other: &Answer) -> Option<String> {
    let at = plain.ids.iter().zip(&other.ids).position(|(one, two)| one != two)?;
    let (one, two) = (plain.ids[at], other.ids[at]);
    let context = [plain.prompt_ids.as_slice(), &plain.ids[..at]].concat();
    let temperature = body["temperature"].as_f64().unwrap();
    let position = context.len() as u64;
    let call = json!({"model": "toy", "context": context, "generated": at, "tokens": [], "parents": [],
        "temperature": temperature, "seed": body["seed"], "top_logprobs": 20});
    let rows = send(target.address, "/v1/verify", "", &call).await.json();
    let top: BTreeMap<u32, f64> = rows["rows"][0]["top"]
        .as_array()?
        .iter()
        .map(|pair| (pair[0].as_u64().unwrap() as u32, pair[1].as_f64().unwrap()))
        .collect();
    let (scale, seed) = if temperature > 0.0 { (temperature, body["seed"].as_u64()) } else { (1.0, None) };
    let score = |token: u32| {
        let noise = seed.map_or(0.0, |seed| noise::gumbel(seed, 0, position, token));
        Some((top.get(&token)? + noise) * scale)
    };
    let gap = score(one).zip(score(two)).map(|(one, two)| (one - two).abs());
    if let Some(gap) = gap.filter(|gap| *gap < 1e-3) {
        return Some(format!("position {at}: {one} and {two} are {gap:.2e} apart"));
    }
    seed?;
    let mut mass = 0.0;
    let mut sorted: Vec<(u32, f64)> = top.into_iter().collect();
    sorted.sort_by(|a, b| b.1.total_cmp(&a.1));
    for (token, logprob) in sorted {
        let before = mass;
        mass += logprob.exp();
        let edge = (before - TOP_P).abs().min((mass - TOP_P).abs());
        if (token == one || token == two) && edge < 1e-5 {
            return Some(format!("position {at}: {token} is {edge:.2e} from the edge of top-p"));
        }
    }
    None
}

fn process(target: &LocalTarget, methods: &str) -> String {
    let drafter = folder("FORETELL_TEST_DRAFTER", "draft-same");
    format!(
        "version: 1\ntimeouts: {{ verify: 20s, draft: 2s }}\nbackends:\n  - name: toy\n    replicas: [\"http://{}\"]\n    \
         verify: {{ allow: {methods} }}\n    probe: {{ when: never }}\ndrafters: {{ draft-same: {{ path: \"{}\", device: cpu, slots: 8 }} }}\n",
        target.address,
        drafter.display()
    )
}

#[rstest]
#[case::lookup_tree("{ kind: prompt_lookup, ngram: { min: 1, max: 8 } }", "[tree]")]
#[case::lookup_fan_out("{ kind: prompt_lookup, ngram: { min: 1, max: 8 } }", "[fan_out]")]
#[case::model_tree("{ kind: model, model: draft-same }", "[tree]")]
#[case::model_fan_out("{ kind: model, model: draft-same }", "[fan_out]")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forty_prompts_read_as_the_target_alone(#[case] drafter: &str, #[case] methods: &str) {
    watch_panics();
    let options = Options { device: DeviceChoice::Cpu, lanes: 16, threads: 1, ..Options::default() };
    let model = folder("FORETELL_TEST_MODEL", "target");
    let opened = open(&model, Some("toy".into()), &options, None)
        .expect("the model opens (make fetches ONNX Runtime)");
    let target = LocalTarget::start(opened.app).await.unwrap();
    let policy = format!("version: 1\nname: forced\ndrafters: [{drafter}]\ngamma: {{ max: 8, fixed: 4 }}\n");
    let proxy = local::proxy(&process(&target, methods), &[&policy]).await.unwrap();
    let front = proxy.gateway.addresses[0];

    let asks = asks();
    assert!(asks.len() >= 2 * PROMPTS, "{} requests", asks.len());
    let answers = stream::iter(asks.iter().map(|(route, body)| {
        let target = target.address;
        async move { (ask(target, *route, body).await, ask(front, *route, body).await) }
    }));
    let answers: Vec<(Answer, Answer)> = answers.buffered(WIDE).collect().await;

    let (mut ties, mut wrong) = (Vec::new(), Vec::new());
    let (mut speculated, mut rounds, mut drafted, mut accepted) = (0, 0, 0, 0);
    for ((_, body), (plain, through)) in asks.iter().zip(&answers) {
        let foretell = through.foretell();
        let count = |name: &str| foretell[name].as_u64().unwrap_or(0);
        speculated += usize::from(foretell["path"] == "speculated");
        rounds += count("rounds");
        drafted += count("drafted");
        accepted += count("accepted");
        if plain.plain != through.plain {
            match tie(&target, body, plain, through).await {
                Some(why) => ties.push(why),
                None => {
                    wrong.push(format!("{body}\n  {foretell}\n  {:?}\n  {:?}", plain.plain, through.plain));
                }
            }
        }
    }
    eprintln!("{drafter} {methods}: {rounds} rounds, {accepted} of {drafted} accepted, ties: {ties:?}");
    assert!(wrong.is_empty(), "{} differ without a tie, the first: {}", wrong.len(), wrong[0]);
    assert!(ties.len() * 50 <= asks.len(), "{} of {} end in a tie: {ties:?}", ties.len(), asks.len());
    assert!(speculated * 10 >= asks.len() * 9, "{speculated} of {} were speculated on", asks.len());
    assert!(accepted > 0 && rounds > asks.len() as u64, "{rounds} rounds, {accepted} accepted");
    House::assert_calm();
}
