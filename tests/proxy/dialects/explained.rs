//! `POST /api/explain` says what then happens to a request: random requests, in front of every
//! engine.

use foretell::app::Running;
use foretell::app::local;
use foretell_core::units::SplitMix64;
use foretell_wire::openai::Route;
use serde_json::{Value, json};

use super::house::{House, on_each, setup};
use super::table::{Row, Started, TABLE, start};
use crate::client::{Ask, send};
use crate::fakes::Setup;
use crate::fakes::hosted::Hosted;
use crate::fakes::passthrough::{Kind, Passthrough};
use crate::fakes::toy;
use crate::wire::Wire;

/// Requests in all.
const REQUESTS: usize = 504;

/// Policies for each path that a request can take.
const POLICIES: [&str; 5] = [
    "version: 1\nname: hot\nmatch: { temperature: { min: 0.9 } }\nmode: \"off\"\n",
    "version: 1\nname: watch\nmatch: { headers: { x-team: [web] } }\nmode: shadow\n",
    "version: 1\nname: still\nmatch: { routes: [chat], temperature: { min: 0.4 } }\nmode: plain\n",
    "version: 1\nname: lossy\nmatch: { headers: { x-team: [ide] } }\naccept: { rule: ears, tolerance: { max: 0.3 } }\n\
     gamma: { max: 8, fixed: 3 }\ndrafters: [{ kind: prompt_lookup, ngram: { min: 1, max: 8 } }]\n",
    "version: 1\nname: forced\nmatch: { prompt_tokens: { max: 200 } }\ngamma: { max: 8, fixed: 4 }\n\
     drafters: [{ kind: prompt_lookup, ngram: { min: 1, max: 8 } }]\n",
];

fn one_of<T: Clone>(rng: &mut SplitMix64, all: &[T]) -> T {
    all[rng.below(all.len() as u64) as usize].clone()
}

/// Fields that a client may send, each one sometimes.
fn fields(rng: &mut SplitMix64) -> Value {
    let word = one_of(rng, &["the same, the same, the", "one two one two one", "a"]);
    let prompt = if rng.chance(12) { word.repeat(60) } else { word.to_owned() };
    let mut fields = json!({ "prompt": prompt, "max_tokens": 6 });
    let temperatures = [json!(0), json!(0), json!(0.3), json!(0.5), json!(1.0), json!("hot"), Value::Null];
    fields["temperature"] = one_of(rng, &temperatures);
    let more = [
        ("n", json!(2)),
        ("stop", json!(["zz"])),
        ("seed", json!(7)),
        ("presence_penalty", json!(0.5)),
        ("top_p", json!(0.9)),
        ("logit_bias", json!({ "5": 1 })),
        ("response_format", json!({ "type": "json_object" })),
        ("tools", json!([{ "type": "function", "function": { "name": "f", "parameters": {} } }])),
        ("bogus", json!(1)),
        ("echo", json!(true)),
        ("user", json!("u")),
        ("logprobs", json!(true)),
    ];
    for (name, value) in more {
        if rng.chance(16) {
            fields[name] = value;
        }
    }
    fields
}

/// Header fields, for the request and for `explain`.
fn headers(rng: &mut SplitMix64) -> String {
    let team = one_of(rng, &["", "", "x-team: web\r\n", "x-team: ide\r\n"]);
    let wish = one_of(
        rng,
        &[
            "",
            "",
            "",
            "",
            "x-foretell: off\r\n",
            "x-foretell: plain\r\n",
            "x-foretell: gamma=2\r\n",
            "x-foretell: gama=2\r\n",
        ],
    );
    let encoded = if rng.chance(20) { "content-encoding: gzip\r\n" } else { "" };
    format!("{team}{wish}{encoded}")
}

/// Engines before which few or no requests are speculated on: name, start function, lines of the
/// backend's configuration.
type Other = (&'static str, fn() -> Started, &'static str);

const OTHERS: [Other; 5] = [
    ("trtllm", || start(|| Passthrough::new(Kind::Trtllm, Setup::default())), ""),
    ("tgi", || start(|| Passthrough::new(Kind::Tgi, Setup::default())), ""),
    ("ollama", || start(|| Passthrough::new(Kind::Ollama, Setup::default())), "    engine: ollama\n"),
    ("mlx", || start(|| Passthrough::new(Kind::Mlx, Setup::default())), "    engine: mlx\n"),
    ("hosted", || start(|| Hosted::new(Setup::default())), "    engine: openai\n    billed: true\n"),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn explain_predicts_what_happens_to_random_requests() {
    let each = REQUESTS.div_ceil(TABLE.len());
    let known = on_each(TABLE.iter().enumerate(), move |(number, row)| known(row, number as u64, each));
    let others =
        on_each(OTHERS.iter().enumerate(), move |(number, one)| other(one, 100 + number as u64, each / 3));
    let (known, others) = tokio::join!(known, others);
    let sum = |at: usize| known.iter().chain(&others).map(|count| count[at]).sum::<usize>();
    let all = [sum(0), sum(1), sum(2)];
    assert!(
        all.iter().sum::<usize>() >= 500 && all.iter().all(|&count| count > 40),
        "{all:?} passed through, plain, eligible"
    );
}

async fn known(row: &'static Row, number: u64, requests: usize) -> [usize; 3] {
    let house = House::under(row, setup(None), &POLICIES).await;
    let counts = agrees(row.name, &house.proxy, number, requests).await;
    house.leave().await;
    counts
}

async fn other(&(name, start, backend): &'static Other, number: u64, requests: usize) -> [usize; 3] {
    let engine = start().await;
    let process = format!(
        "version: 1\nbackends:\n  - name: toy\n    replicas: [\"http://{}\"]\n    models: [{{ id: toy, tokenizer: {} }}]\n    \
         probe: {{ when: never }}\n{backend}",
        engine.address(),
        toy::folder().join("tokenizer.json").display(),
    );
    let proxy = local::proxy(&process, &POLICIES).await.unwrap();
    agrees(name, &proxy, number, requests).await
}

/// Requests that were passed through, that were plain only, and that could be speculated on.
async fn agrees(name: &str, proxy: &Running, number: u64, requests: usize) -> [usize; 3] {
    let (front, admin) = (proxy.gateway.addresses[0], proxy.gateway.admin.unwrap());
    let mut rng = SplitMix64::new(1_000 + number);
    let mut counts = [0; 3];
    for _ in 0..requests {
        let route = one_of(&mut rng, &[Route::Completions, Route::Chat]);
        let ask = Ask::new(route, rng.chance(4), fields(&mut rng));
        let headers = headers(&mut rng);
        let path = format!("/api/explain?route={}", route.name());
        let explained = send(admin, &path, &headers, &ask.body()).await.json();
        let answer = Wire::connect(front).await.ask(ask.bytes(&headers)).await;
        let header = |name: &str| answer.head.get(name).unwrap_or_default().to_owned();
        let (went, why) = (header("x-foretell-path"), header("x-foretell-reason"));
        let reason = explained["reason"].as_str().unwrap_or_default();
        let context = format!("{name} {headers} {}: {explained}\n{:?}", ask.body(), answer.head);
        match explained["path"].as_str().unwrap() {
            "passthrough" => {
                counts[0] += 1;
                assert_eq!((went.as_str(), why.as_str()), ("passthrough", reason), "{context}");
            }
            "eligible" => {
                counts[if reason.is_empty() { 2 } else { 1 }] += 1;
                assert_eq!(explained["policy"], header("x-foretell-policy").as_str(), "{context}");
                let streams = went == "eligible" && why.is_empty();
                // Ids asked for by a call of their own may come behind the end of a short answer.
                let late_ids = reason.is_empty() && why == "untrusted_ids" && name == "llamacpp";
                let is_plain = went == "plain" && (why == reason || late_ids);
                // Under a grammar drafts may decide nothing.
                let decided_nothing = ["no_draft", "no_gain", "undecided"];
                let speculates =
                    reason.is_empty() && (went == "speculated" || decided_nothing.contains(&why.as_str()));
                assert!(streams || is_plain || speculates, "{context}");
            }
            other => panic!("{other}: {context}"),
        }
    }
    counts
}
