//! Answers to clients when the engine fails: every row of the table in docs/fleet.md, with a fake
//! engine behind the real proxy. No hang, no panic and no wrong token: the text is that of the
//! engine alone, or the answer says that it broke off.

use crate::client::{CONTROL_GROUP, FORCED};
use std::time::Duration;

use foretell::app::Running;
use foretell::app::local;
use foretell_proxy::serving::drafters::Drafters;
use futures_util::stream::{self, StreamExt};
use serde_json::{Value, json};

use crate::fakes::vllm::{Options, Vllm};
use crate::fakes::{Fake, Fault, When};
use crate::wire::{Message, PATIENCE, Wire, post};

const COMPLETIONS: &str = "/v1/completions";
const SCORE: &str = "/inference/v1/generate";
const TABLE: &str = include_str!("../../docs/fleet.md");
const TOKENS: u64 = 40;
/// A text of the fake's own model, which makes it repeat itself.
const PROMPT: &str = "def area(width, height):\n    return width * height\n\n\ndef area(width, height):\n";

struct House {
    engine: Fake<Vllm>,
    proxy: Running,
}

impl House {
    async fn build() -> Self {
        Self::under(FORCED).await
    }

    async fn under(policy: &str) -> Self {
        let options = Options { scale_out: true, ..Options::of("0.29.0") };
        let engine = Fake::start(Vllm::new(options)).await;
        let root = env!("CARGO_MANIFEST_DIR");
        let process = format!(
            "version: 1\ntimeouts: {{ verify: 3s, connect: 10s, idle: 4s }}\nbackends:\n  - name: vllm\n    replicas: [\"{}\"]\n    \
             models: [{{ id: toy, tokenizer: {root}/onnx/models/target }}]\n    probe: {{ when: never }}\n",
            engine.url()
        );
        let proxy = local::proxy_with(&process, &[policy], Drafters::default()).await.unwrap();
        Self { engine, proxy }
    }

    fn body(stream: bool) -> Value {
        // Every field is set, so that no default of the server is in doubt and tails are scored.
        let sampling = json!({"temperature": 0, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
            "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0});
        let mut body = json!({"model": "toy", "prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": true, "stream": stream});
        if stream {
            body["stream_options"] = json!({"include_usage": true});
        }
        body.as_object_mut().unwrap().extend(sampling.as_object().unwrap().clone());
        body
    }

    async fn ask(&self, through: bool, stream: bool) -> Message {
        self.ask_with(through, stream, "").await
    }

    async fn ask_with(&self, through: bool, stream: bool, fields: &str) -> Message {
        let to = if through { self.proxy.gateway.addresses[0] } else { self.engine.address };
        let fields = format!("content-type: application/json\r\nte: trailers\r\n{fields}");
        let request = post(COMPLETIONS, &fields, Self::body(stream).to_string().as_bytes());
        let answer = async { Wire::connect(to).await.ask(request).await };
        tokio::time::timeout(PATIENCE, answer).await.expect("no hang")
    }

    /// Calls that went silent.
    async fn silences(&self) -> String {
        let page = "GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n";
        let metrics = Wire::connect(self.proxy.gateway.admin.unwrap()).await.ask(page).await.text();
        let line = "foretell_replica_errors_total{kind=\"backend_timeout\",replica=\"vllm/0\"} ";
        metrics.lines().find_map(|found| found.strip_prefix(line)).expect("it is counted").to_owned()
    }
}

/// The parts of an answer that the tests compare.
#[derive(Debug, Default, PartialEq)]
struct Got {
    status: u16,
    text: String,
    finish: String,
    reason: String,
    path: String,
    error: String,
}

fn read(message: &Message) -> Got {
    let mut got = Got { status: message.head.status(), ..Got::default() };
    let streamed = message.head.get("content-type").is_some_and(|kind| kind.starts_with("text/event-stream"));
    let events: Vec<Value> = if streamed {
        let text = message.text();
        let fails = text.contains("data: {\"error\":");
        assert!(text.ends_with("data: [DONE]\n\n") != fails, "only a complete text ends in [DONE]: {text}");
        let data =
            text.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]");
        data.map(|data| serde_json::from_str(data).expect("every event is whole")).collect()
    } else {
        vec![serde_json::from_slice(&message.body).unwrap_or(Value::Null)]
    };
    for event in events {
        let choice = &event["choices"][0];
        got.text += choice["text"].as_str().unwrap_or_default();
        if let Some(finish) = choice["finish_reason"].as_str() {
            finish.clone_into(&mut got.finish);
        }
        let foretell = &event["usage"]["foretell"];
        if let Some(path) = foretell["path"].as_str() {
            path.clone_into(&mut got.path);
            foretell["reason"].as_str().unwrap_or_default().clone_into(&mut got.reason);
        }
        if let Some(code) = event["error"]["code"].as_str() {
            code.clone_into(&mut got.error);
        }
    }
    // The usage of a plain answer does not name its path.
    let trailer = |name: &str| {
        let mut lines = message.trailers.iter().filter_map(|line| line.split_once(": "));
        lines.find_map(|(found, value)| (found == name).then_some(value)).or(message.head.get(name))
    };
    if got.path.is_empty() && got.error.is_empty() {
        trailer("x-foretell-path").unwrap_or_default().clone_into(&mut got.path);
        trailer("x-foretell-reason").unwrap_or_default().clone_into(&mut got.reason);
    }
    got
}

/// The outcome that the table promises.
#[derive(Clone, Copy, Debug)]
enum Outcome {
    /// 200, the text of the engine alone; with this reason, unless the request was speculated on
    /// again before its end.
    Text(&'static str),
    /// The engine's own answer, with this status.
    Own(u16),
    /// The engine's text, plain: the client's own request was sent.
    Resent,
    /// An error of Foretell: this status and code.
    Error(u16, &'static str),
    /// The text so far is sent; then a stream ends with an error event, a whole answer is a 502.
    BrokenOff,
}

struct Row {
    name: &'static str,
    when: fn() -> When,
    fault: Fault,
    outcome: Outcome,
}

fn first() -> When {
    When::path(COMPLETIONS).holding("\"prompt\":\"")
}

fn verify() -> When {
    When::path(SCORE).holding("token_ids")
}

fn later() -> When {
    When::path(COMPLETIONS).holding("\"prompt\":[[").streamed(true)
}

fn rows() -> Vec<Row> {
    let row = |name, when: fn() -> When, fault, outcome| Row { name, when, fault, outcome };
    vec![
        row("first call: 400", first, Fault::Status(400), Outcome::Resent),
        row("first call: 500", first, Fault::Status(500), Outcome::Resent),
        row("first call: 429 with Retry-After", first, Fault::Later(429, 7), Outcome::Own(429)),
        // The connection has answered before, so the request is sent once more over a new one.
        row("first call: reset before the answer", first, Fault::Reset, Outcome::Text("")),
        row("first call: cut before its first event", first, Fault::CutAfter(0), Outcome::Text("fault")),
        row(
            "first call: garbage in place of its first event",
            first,
            Fault::GarbageAfter(0),
            Outcome::Text("unreadable_answers"),
        ),
        row("first call: cut in the stream", first, Fault::CutAfter(5), Outcome::Text("upstream_error")),
        row("first call: reset in the stream", first, Fault::ResetAfter(5), Outcome::Text("upstream_error")),
        row("first call: half an event", first, Fault::HalfEventAfter(5), Outcome::Text("upstream_error")),
        row(
            "first call: garbage in the stream",
            first,
            Fault::GarbageAfter(5),
            Outcome::Text("upstream_error"),
        ),
        row(
            "first call: an error in the stream",
            first,
            Fault::ErrorAfter(5),
            Outcome::Text("upstream_error"),
        ),
        row("first call: silence in the stream", first, Fault::HangAfter(5), Outcome::Text("upstream_error")),
        row("verify: 400", verify, Fault::Status(400), Outcome::Text("verify_fault")),
        row("verify: 500", verify, Fault::Status(500), Outcome::Text("verify_fault")),
        row("verify: 429 with Retry-After", verify, Fault::Later(429, 30), Outcome::Text("retry_after")),
        row("verify: 503 with Retry-After", verify, Fault::Later(503, 30), Outcome::Text("retry_after")),
        row("verify: garbage", verify, Fault::Garbage, Outcome::Text("verify_fault")),
        row("verify: empty", verify, Fault::Empty, Outcome::Text("verify_fault")),
        row("verify: half an answer", verify, Fault::Half, Outcome::Text("verify_fault")),
        row("verify: reset", verify, Fault::Reset, Outcome::Text("verify_fault")),
        row("verify: no answer", verify, Fault::Hang, Outcome::Text("verify_fault")),
        row("verify: an answer that stalls", verify, Fault::Stall, Outcome::Text("verify_fault")),
        row("killed in the first call", first, Fault::Kill, Outcome::Error(502, "backend_unreachable")),
        row("killed in a verify request", verify, Fault::Kill, Outcome::BrokenOff),
    ]
}

fn judge(row: &Row, got: &Got, plain: &Got, stream: bool, message: &Message) -> Result<(), String> {
    let wrong = |what: &str| Err(format!("{} (stream {stream}): {what}: {got:?}", row.name));
    match row.outcome {
        Outcome::Text(_) if (&got.text, &got.finish, got.status) != (&plain.text, &plain.finish, 200) => {
            wrong("not the engine's own text")
        }
        // The reason is kept until the request is speculated on again.
        Outcome::Text(reason) if got.reason != reason && !got.reason.is_empty() => wrong("another reason"),
        Outcome::Text("verify_fault" | "upstream_error") if got.path != "speculated" => {
            wrong("it was not speculated on")
        }
        Outcome::Text("retry_after") if got.reason.is_empty() => {
            wrong("it was speculated on before Retry-After was over")
        }
        Outcome::Own(status) if got.status != status || got.error.starts_with("backend") => {
            wrong("not its own answer")
        }
        Outcome::Resent if (&got.text, got.status) != (&plain.text, 200) => {
            wrong("not the engine's own text")
        }
        Outcome::Resent if (got.path.as_str(), got.reason.as_str()) != ("plain", "upstream_error") => {
            wrong("another path")
        }
        Outcome::Own(429) if message.head.get("retry-after").is_none() => wrong("no Retry-After"),
        Outcome::Error(status, code) if (got.status, got.error.as_str()) != (status, code) => {
            wrong("another error")
        }
        Outcome::BrokenOff if !plain.text.starts_with(&got.text) => wrong("a wrong text"),
        Outcome::BrokenOff if got.error != "backend_broke_off" => wrong("no error"),
        Outcome::BrokenOff if !stream && got.status != 502 => wrong("a broken answer without a 502"),
        _ => Ok(()),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_fault_of_an_engine_ends_as_the_table_says() {
    let cases = rows().into_iter().flat_map(|row| {
        let other = Row { fault: row.fault.clone(), ..row };
        [(other, false), (row, true)]
    });
    let wrong: Vec<String> = stream::iter(cases)
        .map(|(row, stream)| async move {
            let house = House::build().await;
            let plain = read(&house.ask(false, stream).await);
            assert_eq!((plain.status, plain.finish.as_str()), (200, "length"));
            let undisturbed = read(&house.ask(true, stream).await);
            assert_eq!((&undisturbed.text, undisturbed.path.as_str()), (&plain.text, "speculated"));
            house.engine.house.faults.at((row.when)(), 0, row.fault.clone());
            let message = house.ask(true, stream).await;
            assert_eq!(house.engine.house.faults.struck(), 1, "{}: the fault did not occur", row.name);
            let result = judge(&row, &read(&message), &plain, stream, &message).err();
            let said = format!("| {} |", row.name);
            let reason = if let Outcome::Text(reason) = row.outcome { reason } else { "" };
            let line = TABLE.lines().find(|line| line.starts_with(&said) && line.contains(reason));
            let documented = line.is_none().then(|| format!("docs/fleet.md has no row: {said} … {reason}"));
            assert_eq!(house.engine.house.fatal(), Vec::<String>::new());
            result.into_iter().chain(documented).collect::<Vec<_>>()
        })
        .buffer_unordered(4)
        .flat_map(stream::iter)
        .collect()
        .await;
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_breaks_off_repeatedly_is_given_up_with_an_error() {
    let house = House::build().await;
    let plain = read(&house.ask(false, true).await);
    house.engine.house.faults.always(first(), Fault::CutAfter(5));
    house.engine.house.faults.always(later(), Fault::CutAfter(0));
    house.engine.house.faults.always(verify(), Fault::Status(500));
    let got = read(&house.ask(true, true).await);
    assert!(plain.text.starts_with(&got.text) && !got.text.is_empty(), "{got:?}");
    assert_eq!(got.error, "backend_broke_off");
    assert!(TABLE.contains("| every plain call is cut |"));
}

/// The first call is cut before its first event, and the call that repeats it somewhere later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repeated_first_call_that_ends_early_too_leaves_no_half_event_and_no_clean_end() {
    for again in [
        Fault::CutAfter(0),
        Fault::HalfEventAfter(0),
        Fault::HalfEventAfter(3),
        Fault::HalfAsWhole(0),
        Fault::HalfAsWhole(3),
    ] {
        let house = House::build().await;
        let plain = read(&house.ask(false, true).await);
        house.engine.house.faults.at(first(), 0, Fault::CutAfter(0));
        house.engine.house.faults.at(first(), 1, again.clone());
        let got = read(&house.ask(true, true).await);
        assert_eq!((got.status, got.error.as_str()), (200, "backend_broke_off"), "{again:?}: {got:?}");
        assert!(plain.text.starts_with(&got.text), "{again:?}: {got:?}");
        assert_eq!(house.engine.house.faults.struck(), 2);
    }
    for again in [Fault::Half, Fault::HalfAsWhole(0), Fault::Garbage, Fault::Empty] {
        let house = House::build().await;
        house.engine.house.faults.at(first(), 0, Fault::CutAfter(0));
        house.engine.house.faults.at(first(), 1, again.clone());
        let got = read(&house.ask(true, false).await);
        assert_eq!((got.status, got.error.as_str()), (502, "backend_broke_off"), "{again:?}: {got:?}");
        assert_eq!(house.engine.house.faults.struck(), 2);
    }
}

/// With and without a head of the second plain call.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_goes_silent_repeatedly_is_given_up_with_an_error() {
    for (again, stream) in [(Fault::HangAfter(0), true), (Fault::Hang, true), (Fault::HangAfter(0), false)] {
        let house = House::build().await;
        let plain = read(&house.ask(false, true).await);
        house.engine.house.faults.always(first(), Fault::HangAfter(5));
        house.engine.house.faults.always(later(), again.clone());
        house.engine.house.faults.always(verify(), Fault::Status(500));
        let message = house.ask(true, stream).await;
        let got = read(&message);
        assert_eq!(got.error, "backend_timeout", "{again:?}: {got:?}");
        assert!(message.text().contains("the backend went silent"), "{}", message.text());
        assert_eq!(got.status, if stream { 200 } else { 504 });
        assert!(plain.text.starts_with(&got.text) && got.text.is_empty() != stream, "{got:?}");
        assert_eq!(house.silences().await, "2", "the first call and the plain call after it");
    }
    assert!(TABLE.contains("| every plain call goes silent |"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_first_call_is_dropped_and_the_text_is_continued() {
    let house = House::under(CONTROL_GROUP).await;
    for (stream, count) in [(true, "1"), (false, "2")] {
        let plain = read(&house.ask(false, stream).await);
        house.engine.house.faults.clear();
        house.engine.house.faults.at(first(), 0, Fault::HangAfter(5));
        let got = read(&house.ask(true, stream).await);
        assert_eq!((got.text, got.finish, got.path.as_str()), (plain.text, plain.finish, "plain"));
        assert_eq!(house.silences().await, count);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_engine_is_a_new_engine_start_and_is_identified_anew() {
    let house = House::build().await;
    let admin = house.proxy.gateway.admin.unwrap();
    let engine_start = async || {
        let request = "GET /api/replicas HTTP/1.1\r\nhost: localhost\r\n\r\n";
        let answer = Wire::connect(admin).await.ask(request).await.json();
        answer["replicas"][0]["engine_start"].as_str().unwrap_or_default().to_owned()
    };
    let before = engine_start().await;
    assert!(before.contains("toy"), "{before}");
    house.engine.restart();
    let asked = tokio::time::Instant::now();
    while engine_start().await == before {
        assert!(asked.elapsed() < PATIENCE, "the old engine start still stands");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let (plain, got) = (read(&house.ask(false, false).await), read(&house.ask(true, false).await));
    assert_eq!((got.text, got.path.as_str()), (plain.text, "speculated"));
    assert!(TABLE.contains("| started again |"));
}
