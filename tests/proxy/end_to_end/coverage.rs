//! The coverage report: every output token is counted once, whatever API and path it came by, and
//! no byte of a passthrough answer changes for it.

use std::collections::BTreeMap;

use foretell::cli::explain::{self, ExplainArgs};
use foretell_config::Flags;
use foretell_wire::openai::Route;
use serde_json::{Value, json};

use super::house::{Ask, House, Setup, get, metric};
use crate::wire::{EVENTS, Message, PATIENCE, Server, Wire, chunk, ok, post};

const CHAT: &str = r#"{"choices":[{"message":{"role":"assistant","content":null,"tool_calls":[]}}],"usage":{"prompt_tokens":9,"completion_tokens":7}}"#;
const RESPONSE: &str = r#"{"object":"response","output":[{"type":"message","content":[{"type":"output_text","text":"Hi"}]}],"usage":{"input_tokens":9,"output_tokens":11}}"#;
const MESSAGE: &str = r#"{"type":"message","content":[{"type":"text","text":"Hi"}],"usage":{"input_tokens":9,"output_tokens":13}}"#;
/// Streams, each piece a chunk of its own; they are cut anywhere.
const CHAT_EVENTS: [&str; 3] = [
    "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\ndata: {\"choices\":[{\"delta\":{\"con",
    "tent\":\"b\"}}]}\n\ndata: {\"choices\":[{\"delta\":{\"content\":\"c\"}}]}\n\n",
    "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n",
];
const RESPONSE_EVENTS: [&str; 2] = [
    "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"Hi\"}\n\n",
    "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"usage\":{\"output_tokens\":17}}}\n\n",
];
const MESSAGE_EVENTS: [&str; 2] = [
    "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"usage\":{\"output_tokens\":1}}}\n\n",
    "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{},\"usage\":{\"output_tokens\":19}}\n\n",
];

/// A request that is passed through: path, the whole answer or its pieces, stream, route and
/// reason, and the tokens that are counted.
struct Passthrough {
    path: &'static str,
    answer: &'static [&'static str],
    stream: bool,
    row: [&'static str; 2],
    tokens: u64,
}

fn passthrough() -> Vec<Passthrough> {
    let one = |path, answer: &'static [&'static str], row, tokens| Passthrough {
        path,
        answer,
        stream: answer.len() > 1,
        row,
        tokens,
    };
    let chats = ["chat", "no_verify_method"];
    let responses = ["responses", "route"];
    let messages = ["messages", "route"];
    vec![
        one("/v1/chat/completions", &[CHAT], chats, 7),
        one("/v1/chat/completions", &CHAT_EVENTS, chats, 3),
        one("/v1/responses", &[RESPONSE], responses, 11),
        one("/v1/responses", &RESPONSE_EVENTS, responses, 17),
        one("/v1/messages", &[MESSAGE], messages, 13),
        one("/v1/messages", &MESSAGE_EVENTS, messages, 19),
    ]
}

impl Passthrough {
    fn body(&self) -> String {
        let tool = json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}});
        let messages = json!([{"role": "user", "content": "Hello"}]);
        json!({"model": "other", "messages": messages, "tools": [tool], "stream": self.stream}).to_string()
    }

    fn bytes(&self) -> Vec<u8> {
        if !self.stream {
            return ok("content-type: application/json\r\n", self.answer.concat().as_bytes());
        }
        let chunks = self.answer.iter().flat_map(|piece| chunk(piece.as_bytes()));
        EVENTS.bytes().chain(chunks).chain(*b"0\r\n\r\n").collect()
    }

    async fn ask(&self, house: &House) {
        let answer =
            Wire::connect(house.front()).await.ask(post(self.path, "", self.body().as_bytes())).await;
        assert_eq!(answer.head.get("x-foretell-path"), Some("passthrough"), "{}", self.path);
        assert_eq!(answer.text(), self.answer.concat(), "{}: not a byte differs", self.path);
    }
}

/// A server of the other APIs, and of chats with tools.
async fn texts() -> Server {
    Server::answering(|request: Message| {
        let (_, path) = request.head.target();
        let stream = serde_json::from_slice::<Value>(&request.body).is_ok_and(|body| body["stream"] == true);
        let found = passthrough().into_iter().find(|one| one.path == path && one.stream == stream);
        found.map_or_else(
            || b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n".to_vec(),
            |one| one.bytes(),
        )
    })
    .await
}

/// The report, once `requests` are in it: records end after their answers.
async fn report(house: &House, requests: u64) -> Value {
    let complete = async {
        loop {
            let report = get(house.admin(), "/api/coverage").await.json();
            if report["requests"] == requests {
                return report;
            }
        }
    };
    tokio::time::timeout(PATIENCE, complete).await.expect("every request is counted")
}

/// Sends eligible requests; returns the output tokens that their usage reports for
/// those that were, and for those that were decoded plainly, such as those whose client wants that.
async fn eligible(house: &House) -> [u64; 2] {
    let [mut speculated, mut plain] = [0, 0];
    let fields = json!({"prompt": "take the fox, take the dog: take ", "max_tokens": 24, "temperature": 0});
    for stream in [false, true] {
        for route in [Route::Completions, Route::Chat] {
            for wish in ["", "x-foretell: plain\r\n"] {
                let answer = Ask::new(route, stream, fields.clone()).send(house.front(), wish).await;
                let sum =
                    if answer.foretell()["path"] == "speculated" { &mut speculated } else { &mut plain };
                *sum += answer.plain.completion_tokens;
            }
        }
    }
    [speculated, plain]
}

fn of<'a>(rows: &'a [Value], wanted: [&str; 3]) -> Vec<&'a Value> {
    let names = ["route", "reason", "path"];
    rows.iter().filter(|row| names.iter().zip(wanted).all(|(name, wanted)| row[*name] == wanted)).collect()
}

fn tokens<'a>(rows: impl IntoIterator<Item = &'a Value>) -> u64 {
    rows.into_iter().map(|row| row["tokens"].as_u64().unwrap()).sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_token_is_counted_once_by_every_path_and_api() {
    let server = texts().await;
    let more = format!(
        "    models: [{{ id: toy }}]\n  - name: texts\n    replicas: [\"http://{}\"]\n    models: [{{ id: other }}]\n",
        server.address
    );
    let house = House::build(Setup { more, ..Setup::default() }).await;
    let empty = report(&house, 0).await;
    assert_eq!(
        (&empty["sentence"], &empty["rows"]),
        (&json!("No request for text has ended yet"), &json!([]))
    );
    let [speculated, plain] = eligible(&house).await;
    for one in passthrough() {
        one.ask(&house).await;
    }
    let report = report(&house, 14).await;
    let rows = report["rows"].as_array().unwrap();
    let all = speculated + plain + 70;
    let by_wish = tokens(rows.iter().filter(|row| row["reason"] == "client"));
    assert!(speculated > 0 && by_wish > 0);
    assert_eq!((tokens(rows), &report["tokens"]), (all, &json!(all)), "{report:#}");
    assert_eq!(report["estimated_tokens"], 3);
    let shares: f64 = rows.iter().map(|row| row["share"].as_f64().unwrap()).sum();
    assert!((shares - 1.0).abs() < 1e-9, "{shares}");
    let share = |name: &str, tokens: u64| {
        assert!((report[name].as_f64().unwrap() - tokens as f64 / all as f64).abs() < 1e-9, "{report:#}");
    };
    share("may_speculate", speculated + plain - by_wish);
    share("speculated", speculated);
    let by_path = |path: &str| tokens(rows.iter().filter(|row| row["path"] == path));
    assert_eq!(["speculated", "plain", "passthrough"].map(by_path), [speculated, plain, 70], "{report:#}");
    for [route, reason] in [["chat", "no_verify_method"], ["responses", "route"], ["messages", "route"]] {
        let sent = passthrough().into_iter().filter(|one| one.row == [route, reason]);
        let found = of(rows, [route, reason, "passthrough"]);
        assert_eq!(tokens(found.iter().copied()), sent.map(|one| one.tokens).sum::<u64>(), "{report:#}");
        assert_eq!((found.len(), &found[0]["backend"]), (1, &json!("texts")));
    }
    let rest = report["rest"].as_array().unwrap();
    let of_reason = |reason: &str| tokens(rest.iter().filter(|rest| rest["reason"] == reason));
    assert_eq!(["route", "client"].map(of_reason), [60, by_wish], "{report:#}");
    assert_eq!(rest.len(), 3);
    agrees(&house, rows).await;
    printed(&house, &report).await;
    House::assert_calm();
}

/// The metric has the same tokens by the labels that both have.
async fn agrees(house: &House, rows: &[Value]) {
    let mut sums: BTreeMap<String, u64> = BTreeMap::new();
    for row in rows {
        let label = |name: &str| format!("{name}=\"{}\"", row[name].as_str().unwrap());
        let labels = ["path", "reason", "route"].map(label).join(",");
        *sums.entry(labels).or_default() += row["tokens"].as_u64().unwrap();
    }
    for (labels, tokens) in &sums {
        let counted = house.metric(&format!("foretell_output_tokens_total{{{labels}}}")).await;
        assert!((counted - *tokens as f64).abs() < 0.5, "{labels}: {counted} and {tokens}");
    }
    let all = metric(house.admin(), "foretell_output_tokens_total").await;
    assert!((all - sums.values().sum::<u64>() as f64).abs() < 0.5, "{all}");
}

/// `foretell explain --traffic` prints the report; its exit code tells whether a proxy answers.
async fn printed(house: &House, report: &Value) {
    let text = explained(house.admin().to_string(), false).await;
    let sentence = report["sentence"].as_str().unwrap();
    assert_eq!((text.0, text.1.lines().next()), (0, Some(sentence)), "{}", text.1);
    for wanted in ["passthrough", "route", "messages", "texts", "estimated"] {
        assert!(text.1.contains(wanted), "{wanted} in {}", text.1);
    }
    let (code, json) = explained(house.admin().to_string(), true).await;
    assert_eq!((code, &serde_json::from_str::<Value>(&json).unwrap()), (0, report));
    // Nobody can listen on port 0.
    assert_eq!(explained("127.0.0.1:0".to_owned(), false).await, (1, String::new()));
    assert_eq!(explained("nowhere".to_owned(), false).await.0, 64);
}

async fn explained(admin: String, json: bool) -> (u8, String) {
    let run = move || {
        let flags = Flags { admin: Some(admin), ..Flags::default() };
        let args = ExplainArgs { flags, json, traffic: true, ..ExplainArgs::default() };
        let mut out = Vec::new();
        let code = explain::run(&args, &BTreeMap::new(), &mut out).unwrap();
        (code, String::from_utf8(out).unwrap())
    };
    tokio::task::spawn_blocking(run).await.unwrap()
}
