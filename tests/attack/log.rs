//! The log, the record of a request, and the id that both carry.

use std::io::Write;
use std::net::SocketAddr;
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use crate::kit::{Answer, Backend, PATIENCE, Proxy, Start, Wire, ask, chunk, eventually, get, post, respond};

const COMPLETIONS: &str = "/v1/completions";
/// The bundled model's vocabulary, so that ids and text of the toy engine belong together.
const VOCABULARY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/onnx/models/target/tokenizer.json");
/// The endless output of the toy engine.
const LETTERS: [&str; 3] = ["a", "b", "c"];
/// Number of requests that must succeed with a broken log.
const MANY: usize = 5_000;

// ------------------------------------------------------------------ A toy engine

/// Fault in the answers of the toy engine.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    /// Two choices in every event, although one was requested.
    TwoChoices,
    /// Every token's id is repeated three times; the count is right.
    IdsThrice,
    /// Verify requests get an answer of another kind.
    NoResult,
}

/// An engine in the shapes of `foretell target` that writes `abcabc…`.
#[derive(Clone)]
struct Toy {
    ids: [u64; 3],
    fault: Fault,
}

impl Toy {
    fn new(fault: Fault) -> Self {
        let text = std::fs::read_to_string(VOCABULARY).expect("the bundled vocabulary");
        let vocabulary: Value = serde_json::from_str(&text).unwrap();
        let ids = LETTERS.map(|letter| vocabulary["model"]["vocab"][letter].as_u64().expect("a letter"));
        Self { ids, fault }
    }

    fn start(self) -> Backend {
        Backend::start(move |mut wire, seen| {
            wire.stream.set_read_timeout(None).unwrap();
            while let Some(request) = wire.message() {
                // A test that has the answer may look at once for the request.
                seen.lock().unwrap().push(request.clone());
                if !self.answer(&mut wire, &request) {
                    return;
                }
            }
        })
    }

    /// False if the connection must be closed.
    fn answer(&self, wire: &mut Wire, request: &Answer) -> bool {
        let json = |value: Value| respond("200 OK", "content-type: application/json\r\n", value.to_string());
        let bytes = match request.target() {
            "/v1/models" => json(json!({"object": "list", "data": [{"id": "toy", "object": "model",
                "created": 1_700_000_000, "owned_by": "foretell", "max_model_len": 4096}]})),
            "/version" => json(json!({"version": "0.1.0", "engine": "foretell"})),
            "/tokenizer_info" => json(json!({"eos_token_ids": [0]})),
            "/metrics" => respond(
                "200 OK",
                "",
                "foretell_target_requests_running 0\nforetell_target_requests_waiting 0\nforetell_target_kv_usage_ratio 0\n",
            ),
            COMPLETIONS => return self.complete(wire, &request.json()),
            _ => respond("404 Not Found", "", ""),
        };
        wire.try_send(bytes)
    }

    fn complete(&self, wire: &mut Wire, body: &Value) -> bool {
        if body["model"] != "toy" {
            let error = json!({"error": {"message": "no such model", "code": "model_not_found"}});
            return wire.try_send(respond(
                "404 Not Found",
                "content-type: application/json\r\n",
                error.to_string(),
            ));
        }
        let prompts = body["prompt"].as_array().filter(|prompts| prompts.iter().all(Value::is_array));
        if let Some(prompts) = prompts.filter(|_| body["stream"] != true) {
            return self.result(wire, prompts);
        }
        let tokens = body["max_tokens"].as_u64().unwrap_or(16) as usize;
        let from = prompts.and_then(|prompts| prompts[0].as_array()).map_or(0, |ids| self.after(ids));
        if body["stream"] == true {
            return self.stream(wire, from, tokens);
        }
        let text: String = (0..tokens).map(|n| LETTERS[(from + n) % 3]).collect();
        let choice =
            |index: usize| json!({"index": index, "text": text, "logprobs": null, "finish_reason": "length"});
        let choices =
            if self.fault == Fault::TwoChoices { vec![choice(0), choice(1)] } else { vec![choice(0)] };
        let answer = json!({"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "toy",
            "choices": choices, "usage": usage(tokens)});
        wire.try_send(respond("200 OK", "content-type: application/json\r\n", answer.to_string()))
    }

    /// Index of the letter after these ids.
    fn after(&self, ids: &[Value]) -> usize {
        let last = ids.last().and_then(Value::as_u64).unwrap_or(0);
        self.ids.iter().position(|&id| id == last).map_or(0, |at| (at + 1) % 3)
    }

    fn stream(&self, wire: &mut Wire, from: usize, tokens: usize) -> bool {
        let mut events = String::new();
        for n in 0..tokens {
            let id = self.ids[(from + n) % 3];
            let ids = if self.fault == Fault::IdsThrice { vec![id; 3] } else { vec![id] };
            let choice = |index: usize| {
                let finish = if n + 1 == tokens { json!("length") } else { Value::Null };
                let mut choice = json!({"index": index, "text": LETTERS[(from + n) % 3], "logprobs": null,
                    "finish_reason": finish, "token_ids": ids});
                if n == 0 {
                    choice["prompt_token_ids"] = json!(self.ids);
                }
                choice
            };
            let choices =
                if self.fault == Fault::TwoChoices { vec![choice(0), choice(1)] } else { vec![choice(0)] };
            let event = json!({"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "toy",
                "choices": choices, "usage": usage(n + 1)});
            events.extend(["data: ", &event.to_string(), "\n\n"]);
        }
        events.push_str("data: [DONE]\n\n");
        let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
        wire.try_send([head.as_bytes(), &chunk(events), b"0\r\n\r\n"].concat())
    }

    /// One token after each prompt of ids.
    fn result(&self, wire: &mut Wire, prompts: &[Value]) -> bool {
        if self.fault == Fault::NoResult {
            return wire.try_send(respond("200 OK", "content-type: application/json\r\n", "{}"));
        }
        let choice = |(index, prompt): (usize, &Value)| {
            let position = self.after(prompt.as_array().unwrap());
            json!({"index": index, "text": LETTERS[position], "token_ids": [self.ids[position]], "finish_reason": "length"})
        };
        let choices: Vec<Value> = prompts.iter().enumerate().map(choice).collect();
        let answer = json!({"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "toy", "choices": choices});
        wire.try_send(respond("200 OK", "content-type: application/json\r\n", answer.to_string()))
    }
}

fn usage(tokens: usize) -> Value {
    json!({"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": 3 + tokens})
}

/// A proxy in front of a toy engine. `policy`: the policy file without its name.
fn before(address: SocketAddr, policy: &str) -> Start {
    let folder = VOCABULARY.trim_end_matches("/tokenizer.json");
    let mut start = Start::with(&format!(
        "backends:\n  - name: b\n    engine: onnx\n    replicas: [\"http://{address}\"]\n    models: [{{ id: toy, tokenizer: {folder} }}]\n    \
         verify: {{ allow: [fan_out] }}\n    probe: {{ when: never }}\ndrain: {{ delay: 0s, grace: 5s }}\n"
    ));
    start.policies = vec![("p.yaml", format!("version: 1\nname: p\n{policy}\n"))];
    start
}

const PLAIN_POLICY: &str = "mode: plain";
const SPECULATING_POLICY: &str =
    "drafters: [{ kind: prompt_lookup, ngram: { min: 1, max: 8 } }]\ngamma: { max: 4, fixed: 4 }";

fn completion(fields: &str, tokens: usize, stream: bool) -> Vec<u8> {
    let mut body =
        json!({"model": "toy", "prompt": "abc", "max_tokens": tokens, "temperature": 0, "stream": stream});
    if stream {
        body["stream_options"] = json!({"include_usage": true});
    }
    post(COMPLETIONS, &format!("content-type: application/json\r\n{fields}"), body.to_string())
}

/// Text, finish reason and usage of a stream or a whole answer.
fn read(answer: &Answer) -> (String, Value, Value) {
    let text = answer.text();
    let events: Vec<Value> = if answer.field("content-type").is_some_and(|kind| kind.contains("event-stream"))
    {
        let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
        data.filter(|data| *data != "[DONE]").map(|data| serde_json::from_str(data).unwrap()).collect()
    } else {
        vec![answer.json()]
    };
    let (mut said, mut finish, mut usage) = (String::new(), Value::Null, Value::Null);
    for event in events {
        said += event["choices"][0]["text"].as_str().unwrap_or_default();
        if event["choices"][0]["finish_reason"].is_string() {
            finish = event["choices"][0]["finish_reason"].clone();
        }
        if event["usage"].is_object() {
            usage = event["usage"].clone();
        }
    }
    (said, finish, usage)
}

/// The lines of the log so far, each as JSON.
fn lines(proxy: &Proxy) -> Vec<Value> {
    let log = proxy.stderr();
    let whole = log.rsplit_once('\n').map_or("", |(whole, _)| whole);
    whole
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("no JSON: {line}")))
        .collect()
}

/// Waits for the first line that fits. Lines that are not JSON are skipped.
fn line(proxy: &Proxy, what: &str, fits: impl Fn(&Value) -> bool) -> Value {
    eventually(what, || {
        let log = proxy.stderr();
        log.lines().filter_map(|line| serde_json::from_str(line).ok()).find(|line| fits(line))
    })
}

// -------------------------------------------------- A log that cannot be written

/// Sends [`MANY`] requests over four connections; every tenth is eligible, the others are
/// passed through. Returns the number of requests that got no answer or a wrong one; stops after a
/// few.
fn failures(address: SocketAddr) -> usize {
    let failed = Arc::new(Mutex::new(Vec::new()));
    let clients: Vec<_> = (0..4)
        .map(|client| {
            let failed = Arc::clone(&failed);
            thread::spawn(move || {
                let mut wire = None;
                for n in 0..MANY / 4 {
                    if failed.lock().unwrap().len() > 4 {
                        return;
                    }
                    let fields = if n % 10 == 0 { "" } else { "x-foretell: off\r\n" };
                    let request = completion(fields, 8, n % 20 == 0);
                    if let Err(why) = one(&mut wire, address, &request) {
                        failed.lock().unwrap().push(format!("client {client}, request {n}: {why}"));
                        wire = None;
                    }
                }
            })
        })
        .collect();
    for client in clients {
        client.join().unwrap();
    }
    let failed = failed.lock().unwrap();
    failed.iter().for_each(|why| eprintln!("{why}"));
    failed.len()
}

/// One request on a connection that is kept.
fn one(wire: &mut Option<Wire>, address: SocketAddr, request: &[u8]) -> Result<(), String> {
    let wire = match wire {
        Some(wire) => wire,
        None => wire.insert(Wire::new(
            std::net::TcpStream::connect_timeout(&address, PATIENCE).map_err(|error| error.to_string())?,
        )),
    };
    // The toy engine answers at once, so a later answer will not come.
    wire.stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    wire.stream.write_all(request).map_err(|error| error.to_string())?;
    let answer = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| wire.answer()));
    let answer = answer.map_err(|_| "no answer".to_owned())?;
    let (text, finish, _) = read(&answer);
    match (answer.status(), answer.whole, text.as_str(), finish.as_str()) {
        (200, true, "abcabcab", Some("length")) => Ok(()),
        _ => Err(format!("{} {}", answer.line, answer.text())),
    }
}

/// No request may fail, lost lines are counted, and the process still ends normally.
fn survives(stderr: Stdio) {
    let toy = Toy::new(Fault::None).start();
    let mut start = before(toy.address, SPECULATING_POLICY).and("observe: { level: debug }");
    start.stderr = Some(stderr);
    let mut proxy = start.start();
    proxy.knows("onnx");
    assert_eq!(failures(proxy.address), 0, "requests failed of {MANY}");
    let lost = "lines that could not be written are counted";
    eventually(lost, || (proxy.metric("foretell_log_dropped_total") > 100.0).then_some(()));
    assert!(proxy.metric("foretell_requests_total{") >= MANY as f64);
    assert_eq!(proxy.exited(), None, "it still runs");
    proxy.signal("TERM");
    assert_eq!(proxy.wait().code(), Some(0));
}

#[test]
fn a_log_on_a_full_disk_fails_no_request() {
    survives(std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap().into());
}

#[test]
fn a_log_whose_reader_has_died_fails_no_request() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    survives(writer.into());
}

#[test]
fn a_log_that_nobody_reads_fails_no_request() {
    let (reader, writer) = std::io::pipe().unwrap();
    survives(writer.into());
    drop(reader);
}

#[test]
fn standard_output_that_nobody_reads_holds_nothing_up() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let toy = Toy::new(Fault::None).start();
    let mut start = before(toy.address, PLAIN_POLICY);
    start.stderr = Some(writer.try_clone().unwrap().into());
    start.stdout = Some(writer.into());
    let mut proxy = start.start();
    proxy.knows("onnx");
    assert_eq!(ask(proxy.address, completion("", 4, false)).status(), 200);
    proxy.signal("TERM");
    assert_eq!(proxy.wait().code(), Some(0));
}

// --------------------------------------------------------------- Contents of the log

#[test]
fn every_line_is_json_on_one_stream_with_the_listen_addresses() {
    let toy = Toy::new(Fault::None).start();
    let proxy = before(toy.address, PLAIN_POLICY).start();
    proxy.knows("onnx");
    assert_eq!(ask(proxy.address, completion("", 4, false)).status(), 200);
    line(&proxy, "the request's line", |line| line["message"] == "request");
    let lines = lines(&proxy);
    for line in &lines {
        assert!(line["timestamp"].is_string() && line["level"].is_string(), "{line}");
    }
    let told = |message: &str| {
        let found = lines.iter().find(|line| line["message"] == message);
        found.and_then(|line| line["address"].as_str()?.parse::<SocketAddr>().ok())
    };
    assert_eq!((told("listening"), told("admin")), (Some(proxy.address), Some(proxy.admin)));
    assert_eq!(proxy.stdout(), "", "one stream");
}

#[test]
fn level_and_format_are_flags_and_variables_and_a_flag_wins() {
    let toy = Toy::new(Fault::None).start();
    let mut start = before(toy.address, PLAIN_POLICY).and("observe: { level: error, log: json }");
    start.args = ["--log-level", "debug", "--log-format", "text"].map(str::to_owned).into();
    start.env = vec![("FORETELL_LOG_LEVEL", "error".to_owned()), ("FORETELL_LOG_FORMAT", "json".to_owned())];
    let proxy = start.start();
    // A request that is not a completion is logged at level `debug`.
    assert_eq!(ask(proxy.address, get("/v1/models", "")).status(), 200);
    eventually("a line for reading", || proxy.stderr().contains("path=\"passthrough\"").then_some(()));
    let log = proxy.stderr();
    assert!(!log.contains('\u{1b}'), "no colours into a file: {log}");
    assert!(log.lines().all(|line| !line.starts_with('{')), "{log}");

    let mut start = before(toy.address, PLAIN_POLICY).and("observe: { level: error, log: text }");
    start.env = vec![("FORETELL_LOG_LEVEL", "debug".to_owned()), ("FORETELL_LOG_FORMAT", "json".to_owned())];
    let proxy = start.start();
    assert_eq!(ask(proxy.address, get("/v1/models", "")).status(), 200);
    line(&proxy, "a line as JSON", |line| line["path"] == "passthrough");
}

#[test]
fn a_level_that_is_none_is_a_bad_configuration() {
    let mut start = Start::before(SocketAddr::from(([127, 0, 0, 1], 9)));
    start.args = vec!["--log-level".to_owned(), "loud".to_owned()];
    let (status, said) = start.fails();
    assert_eq!(status.code(), Some(64), "{said}");
    assert!(said.contains("error|warn|info|debug|trace") && said.contains("loud"), "{said}");
}

#[test]
fn times_are_rounded_to_microseconds() {
    let toy = Toy::new(Fault::None).start();
    let proxy = before(toy.address, SPECULATING_POLICY).start();
    proxy.knows("onnx");
    let mut wire = Wire::connect(proxy.address);
    for _ in 0..200 {
        assert_eq!(wire.ask(completion("", 8, false)).status(), 200);
    }
    eventually("all lines", || {
        let log = proxy.stderr();
        (log.lines().filter(|line| line.contains("\"message\":\"request\"")).count() == 200).then_some(())
    });
    let long = |text: &str| {
        let digits = |rest: &str| rest.bytes().take_while(u8::is_ascii_digit).count();
        text.match_indices("_ms\":").any(|(at, name)| {
            let number = &text[at + name.len()..];
            number
                .split_once('.')
                .is_some_and(|(before, after)| digits(before) == before.len() && digits(after) > 3)
        })
    };
    let log = proxy.stderr();
    let requests: Vec<&str> = log.lines().filter(|line| line.contains("\"message\":\"request\"")).collect();
    assert!(requests.iter().all(|line| line.contains("duration_ms\":")));
    assert_eq!(
        requests.iter().filter(|line| long(line)).count(),
        0,
        "{:?}",
        requests.iter().find(|line| long(line))
    );
    let sessions = proxy.admin_get("/api/sessions").text();
    assert!(sessions.contains("verify_ms") && !long(&sessions), "{sessions}");
}

#[test]
fn a_session_has_the_time_of_its_log_line() {
    let toy = Toy::new(Fault::None).start();
    let proxy = before(toy.address, PLAIN_POLICY).start();
    proxy.knows("onnx");
    assert_eq!(ask(proxy.address, completion("", 4, false)).status(), 200);
    let session = eventually("the session", || {
        let sessions = proxy.admin_get("/api/sessions").json();
        sessions["sessions"].get(0).cloned()
    });
    let time = session["time"].as_str().unwrap_or_else(|| panic!("no time: {session}"));
    // In the format of the log, so that the two can be compared.
    let stamp = line(&proxy, "its line", |line| line["message"] == "request")["timestamp"].clone();
    let shape = |time: &str| {
        time.bytes().map(|byte| if byte.is_ascii_digit() { b'0' } else { byte }).take(20).collect::<Vec<_>>()
    };
    assert_eq!(shape(time)[..19], shape(stamp.as_str().unwrap())[..19], "{time} {stamp}");
    assert!(time.ends_with('Z') && time[..16] <= stamp.as_str().unwrap()[..16], "{time} {stamp}");
}

// -------------------------------------------------------------- The request's id

/// The id that a backend was sent.
fn sent(backend: &Backend, target: &str) -> Vec<String> {
    let requests = backend.requests(target);
    requests.iter().map(|request| request.field("x-request-id").unwrap_or("none").to_owned()).collect()
}

#[test]
fn the_id_goes_to_the_backend_back_to_the_client_and_into_the_log_on_every_path() {
    let toy = Toy::new(Fault::None).start();
    let proxy = before(toy.address, PLAIN_POLICY).and("observe: { level: debug }").start();
    proxy.knows("onnx");
    let ways: [(&str, Vec<u8>, &str); 5] = [
        ("passthrough", get("/nowhere", "x-request-id: ID\r\n"), "/nowhere"),
        ("passthrough", post("/v1/embeddings", "x-request-id: ID\r\n", "{}"), "/v1/embeddings"),
        ("passthrough", completion("x-request-id: ID\r\nx-foretell: off\r\n", 4, false), COMPLETIONS),
        ("plain", completion("x-request-id: ID\r\n", 4, false), COMPLETIONS),
        ("plain", completion("x-request-id: ID\r\n", 4, true), COMPLETIONS),
    ];
    for (n, (path, request, target)) in ways.iter().enumerate() {
        let request = String::from_utf8(request.clone()).unwrap();
        // The client's own id, and a generated one.
        let own = format!("own-{n}");
        let answer = ask(proxy.address, request.replace("ID", &own));
        assert_eq!(answer.field("x-request-id"), Some(own.as_str()), "{path} {target}");
        let answer = ask(proxy.address, request.replace("x-request-id: ID\r\n", ""));
        let made = answer.field("x-request-id").unwrap_or_else(|| panic!("none: {path} {target}")).to_owned();
        for id in [&own, &made] {
            assert!(sent(&toy, target).contains(id), "{path} {target}: {id} in {:?}", sent(&toy, target));
            let found = line(&proxy, "its line", |line| line["message"] == "request" && line["id"] == **id);
            assert_eq!(found["path"], *path, "{found}");
        }
    }
}

#[test]
fn an_error_of_the_proxy_carries_the_id() {
    // The engine is dropped: there is no listener at this address.
    let address = Toy::new(Fault::None).start().address;
    let proxy = Start::before(address).and("observe: { level: debug }").start();
    for request in [completion("x-request-id: mine\r\n", 4, false), get("/x", "x-request-id: mine\r\n")] {
        let answer = ask(proxy.address, request);
        assert!(answer.status() >= 500, "{}", answer.line);
        assert_eq!(answer.field("x-request-id"), Some("mine"));
    }
    let answer = ask(proxy.address, b"CONNECT a:1 HTTP/1.1\r\nhost: a:1\r\nx-request-id: mine\r\n\r\n");
    assert_eq!((answer.status(), answer.field("x-request-id")), (405, Some("mine")));
}

#[test]
fn the_id_that_a_backend_gives_itself_is_not_taken_from_the_client() {
    let backend = Backend::answering(|_| respond("200 OK", "x-request-id: theirs\r\n", "done"));
    let proxy = Start::before(backend.address).and("observe: { level: debug }").start();
    let answer = ask(proxy.address, get("/x", "x-request-id: mine\r\n"));
    assert_eq!(answer.field("x-request-id"), Some("theirs"));
    let found = line(&proxy, "its line", |line| line["message"] == "request" && line["id"] == "mine");
    assert_eq!(found["backend_request_id"], "theirs", "{found}");
}

#[test]
fn a_verify_request_has_the_id_with_the_number_of_its_round() {
    let toy = Toy::new(Fault::None).start();
    let proxy = before(toy.address, SPECULATING_POLICY).start();
    proxy.knows("onnx");
    let answer = ask(proxy.address, completion("", 40, false));
    assert_eq!(answer.field("x-foretell-path"), Some("speculated"), "{}", answer.text());
    let id = answer.field("x-request-id").expect("an id").to_owned();
    let sent = sent(&toy, COMPLETIONS);
    assert!(sent.contains(&id) && sent.contains(&format!("{id}-1")), "{id} {sent:?}");
}

#[test]
fn the_session_runner_logs_the_request_id() {
    let toy = Toy::new(Fault::NoResult).start();
    let proxy = before(toy.address, SPECULATING_POLICY).and("observe: { level: debug }").start();
    proxy.knows("onnx");
    for stream in [false, true] {
        let id = format!("driven-{stream}");
        let answer = ask(proxy.address, completion(&format!("x-request-id: {id}\r\n"), 20, stream));
        assert_eq!(read(&answer).0, "abcabcabcabcabcabcab");
        line(&proxy, "the line of the refused verification result", |line| {
            line["id"] == id.as_str()
                && line["message"].as_str().is_some_and(|said| said.contains("verification result"))
        });
    }
}

// ------------------------------------------------------- The record of a request

#[test]
fn invented_model_names_do_not_displace_a_real_one() {
    let toy = Toy::new(Fault::None).start();
    // Nothing in the configuration names a model, only the body does.
    let folder = VOCABULARY.trim_end_matches("/tokenizer.json");
    let mut start = before(toy.address, PLAIN_POLICY);
    start.process = start.process.replace(
        &format!("[{{ id: toy, tokenizer: {folder} }}]"),
        &format!("[{{ id: \"*\", tokenizer: {folder} }}]"),
    );
    let proxy = start.start();
    proxy.knows("onnx");
    let mut wire = Wire::connect(proxy.address);
    for n in 0..150 {
        let body = json!({"model": format!("invented-{n}"), "prompt": "a", "temperature": 0}).to_string();
        assert_eq!(wire.ask(post(COMPLETIONS, "", body)).status(), 404);
    }
    assert_eq!(wire.ask(completion("", 4, false)).status(), 200);
    let named = |name: &str| {
        let page = proxy.admin_get("/metrics").text();
        page.lines().any(|line| line.starts_with("foretell_requests_total{") && line.contains(name))
    };
    eventually("every request is counted", || {
        (proxy.metric("foretell_requests_total{") >= 151.0).then_some(())
    });
    assert!(named("model=\"toy\""), "the real model is counted by its name");
    assert!(!named("model=\"invented-"), "others are not");
}

#[test]
fn unrequested_choices_are_passed_through_or_refused() {
    let toy = Toy::new(Fault::TwoChoices).start();
    let proxy = before(toy.address, SPECULATING_POLICY).start();
    proxy.knows("onnx");
    for stream in [true, false] {
        let answer = ask(proxy.address, completion("", 8, stream));
        let text = answer.text();
        let passthrough =
            answer.status() == 200 && read(&answer).0 == "abcabcab" && text.contains("\"index\":1");
        let refused = text.contains("\"error\"") && text.contains("\"code\"");
        assert!(passthrough || refused, "stream {stream}: {} {text}", answer.line);
        assert!(answer.whole);
    }
}

#[test]
fn repeated_ids_do_not_triple_the_count() {
    let toy = Toy::new(Fault::IdsThrice).start();
    let proxy = before(toy.address, SPECULATING_POLICY).start();
    proxy.knows("onnx");
    for stream in [true, false] {
        let (text, finish, usage) = read(&ask(proxy.address, completion("", 8, stream)));
        assert_eq!((text.as_str(), finish.as_str()), ("abcabcab", Some("length")));
        assert_eq!((&usage["completion_tokens"], &usage["total_tokens"]), (&json!(8), &json!(11)), "{usage}");
    }
}
