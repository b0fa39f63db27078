//! The contract with clients and operators: headers, trailers, usage, modes, the admin API, errors,
//! disconnects.

use std::time::{Duration, Instant};

use foretell_wire::openai::Route;
use serde_json::{Value, json};

use super::house::{Answer, Ask, House, Setup, events, get, metric, send};
use super::middlebox::{Fate, Fault, Kind};
use crate::wire::{PATIENCE, Wire, post};

const PROMPT: &str = "take the fox, take the dog: let mut taken = String::new(); ";

fn ask(route: Route, stream: bool) -> Ask {
    Ask::new(route, stream, json!({"prompt": PROMPT, "max_tokens": 32, "temperature": 0.5, "seed": 4}))
}

fn header<'a>(answer: &'a Answer, name: &str) -> Option<&'a str> {
    answer.message.head.get(name)
}

/// `name@revision`, from the admin API.
async fn policy(house: &House) -> String {
    let policies = get(house.admin(), "/api/policies").await.json();
    let policy = &policies["policies"][0];
    format!("{}@{}", policy["name"].as_str().unwrap(), policy["revision"].as_str().unwrap())
}

async fn set_mode(house: &House, mode: &str) {
    let set = send(house.admin(), "/api/mode", "", &json!({"mode": mode})).await;
    assert_eq!((set.head.status(), &set.json()["mode"]), (200, &json!(mode)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_whole_answer_reports_its_final_path_policy_and_reason() {
    let house = House::build(Setup::default()).await;
    let policy = policy(&house).await;
    for route in [Route::Completions, Route::Chat] {
        let ask = ask(route, false);
        let plain = house.direct(&ask).await;
        for (wish, path, reason) in [
            ("", "speculated", None),
            ("x-foretell: gamma=2\r\n", "speculated", None),
            ("x-foretell: plain\r\n", "plain", Some("client")),
            ("x-foretell: off\r\n", "passthrough", Some("client")),
            ("x-foretell: faster\r\n", "passthrough", Some("client")),
        ] {
            let answer = ask.send(house.front(), wish).await;
            assert_eq!(answer.plain, plain.plain, "{wish}");
            assert_eq!(header(&answer, "x-foretell-path"), Some(path), "{wish}");
            assert_eq!(header(&answer, "x-foretell-reason"), reason, "{wish}");
            if path == "passthrough" {
                assert_eq!(answer.foretell(), &Value::Null, "a passthrough answer is the backend's own");
                continue;
            }
            assert_eq!(header(&answer, "x-foretell-policy"), Some(policy.as_str()), "{wish}");
            let foretell = answer.foretell();
            assert_eq!((&foretell["path"], &foretell["policy"]), (&json!(path), &json!(policy)));
            assert_eq!(foretell["reason"], json!(reason), "{wish}");
            assert_eq!(foretell["drift"], json!({"charged": 0.0, "rate": 0.0, "substitutions": 0}));
            let max = if wish.contains("gamma") { 2 } else { 4 };
            let (rounds, drafted) =
                (foretell["rounds"].as_u64().unwrap(), foretell["drafted"].as_u64().unwrap());
            assert!(drafted <= max * rounds && (drafted > 0) == (path == "speculated"), "{wish} {foretell}");
            assert!(foretell["accepted"].as_u64() <= foretell["drafted"].as_u64());
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_reports_its_policy_in_the_head_and_the_rest_in_usage_and_trailers() {
    let house = House::build(Setup::default()).await;
    let policy = policy(&house).await;
    for route in [Route::Completions, Route::Chat] {
        let ask = ask(route, true);
        let plain = house.direct(&ask).await;
        for (wish, path, reason) in
            [("", "speculated", None), ("x-foretell: plain\r\n", "plain", Some("client"))]
        {
            let answer = ask.send(house.front(), &format!("te: trailers\r\n{wish}")).await;
            assert_eq!(answer.plain, plain.plain);
            assert_eq!(header(&answer, "x-foretell-path"), Some("eligible"));
            assert_eq!(header(&answer, "x-foretell-reason"), None);
            assert_eq!(header(&answer, "x-foretell-policy"), Some(policy.as_str()));
            let declared = header(&answer, "trailer").unwrap();
            assert_eq!(declared, "x-foretell-path, x-foretell-reason, x-foretell-accepted, x-foretell-drift");
            let trailers = &answer.message.trailers;
            let trailer =
                |name: &str| trailers.iter().find_map(|line| line.strip_prefix(&format!("{name}: ")));
            assert_eq!(trailer("x-foretell-path"), Some(path), "{trailers:?}");
            assert_eq!(trailer("x-foretell-reason"), reason);
            assert_eq!(trailer("x-foretell-drift"), Some("0"));
            let foretell = answer.foretell();
            assert_eq!((&foretell["path"], &foretell["reason"]), (&json!(path), &json!(reason)));
            let accepted = foretell["accepted"].to_string();
            assert_eq!(trailer("x-foretell-accepted"), Some(accepted.as_str()));
        }
        let answer = ask.send(house.front(), "").await;
        assert_eq!((header(&answer, "trailer"), answer.message.trailers.len()), (None, 0));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prediction_is_accepted_and_its_tokens_are_counted() {
    let house = House::build(Setup::default()).await;
    let plain = ask(Route::Chat, false);
    let mut predicted = plain.clone();
    predicted.fields["prediction"] = json!({"type": "content", "content": "let mut taken = String::new();"});
    let direct = house.direct(&plain).await;
    let answer = house.through(&predicted, "predicted").await;
    assert_eq!(answer.plain, direct.plain);
    let (details, foretell) = (&answer.usage["completion_tokens_details"], answer.foretell());
    assert_eq!(details["accepted_prediction_tokens"], foretell["accepted"]);
    let rejected = foretell["drafted"].as_u64().unwrap() - foretell["accepted"].as_u64().unwrap();
    assert_eq!(details["rejected_prediction_tokens"], json!(rejected));
    let answer = house.through(&plain, "plain").await;
    assert_eq!(answer.usage.get("completion_tokens_details"), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_first_call_that_is_refused_is_the_clients_own_refusal() {
    let house = House::build(Setup::default()).await;
    for (at, ask) in Ask::all(&ask(Route::Chat, false).fields).iter().enumerate() {
        for status in [400, 429, 500, 503] {
            let id = format!("refused-{at}-{status}");
            // Not for the fields that are added to it: the client's own request is refused too.
            let fault = Fault::Later(status, 3);
            house.middlebox.fate(&id, Fate::at(Kind::First, 0, fault).and(Kind::First, 1, fault));
            let request = ask.bytes(&format!("x-request-id: {id}\r\n"));
            let answer = Wire::connect(house.front()).await.ask(request).await;
            assert_eq!((answer.head.status(), answer.head.get("retry-after")), (status, Some("3")));
            assert_eq!(answer.json()["error"]["message"], "not now");
            assert!(house.middlebox.seen(&id).len() <= 2, "no further call after a refusal");
        }
        let id = format!("reset-{at}");
        house.middlebox.fate(&id, Fate::at(Kind::First, 0, Fault::Reset));
        let request = ask.bytes(&format!("x-request-id: {id}\r\n"));
        let answer = Wire::connect(house.front()).await.ask(request).await;
        assert_eq!((answer.head.status(), house.middlebox.seen(&id).len()), (502, 1), "{}", answer.text());
        assert!(answer.json()["error"]["code"].is_string(), "{}", answer.text());
    }
    House::assert_calm();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_mode_changes_under_a_running_stream_and_the_text_stays() {
    let step = Duration::from_millis(3);
    let house = House::build(Setup { step, ..Setup::default() }).await;
    for route in [Route::Completions, Route::Chat] {
        for last in ["off", "auto"] {
            set_mode(&house, "auto").await;
            let mut ask = ask(route, true);
            ask.fields["max_tokens"] = json!(120);
            ask.fields["ignore_eos"] = json!(true);
            let plain = house.direct(&ask).await;
            let id = format!("{}-{last}", route.name());
            let mut client = Wire::connect(house.front()).await;
            client.send(ask.bytes(&format!("x-request-id: {id}\r\n"))).await;
            let head = client.head().await.unwrap();
            let mut body = Vec::new();
            let mut chunks = 0;
            loop {
                let chunk = client.chunk().await.unwrap();
                if chunk.is_empty() {
                    break;
                }
                body.extend(chunk);
                chunks += 1;
                match chunks {
                    8 => set_mode(&house, "off").await,
                    16 => set_mode(&house, last).await,
                    _ => {}
                }
            }
            let message = crate::wire::Message { head, body, trailers: Vec::new() };
            let events = events(&message);
            let text: String = events
                .iter()
                .filter_map(|event| {
                    let choice = &event["choices"][0];
                    choice["text"].as_str().or(choice["delta"]["content"].as_str())
                })
                .collect();
            assert_eq!(text, plain.plain.text, "{id}");
            let usage = &events[events.len() - 1]["usage"];
            assert_eq!(usage["completion_tokens"], json!(120));
            let foretell = &usage["foretell"];
            assert_eq!(foretell["path"], "speculated", "it was speculated on before: {foretell}");
            let calls = house.middlebox.seen(&id);
            let plain_calls = calls.iter().filter(|seen| seen.kind == Kind::Plain).count();
            assert!(plain_calls > 0, "{id}: it was plain once the mode went off: {calls:?}");
            let reason = if last == "off" { json!("observe") } else { Value::Null };
            assert_eq!(foretell["reason"], reason, "{id} {foretell}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_admin_api_shows_sessions_replicas_and_policies() {
    let house = House::build(Setup::default()).await;
    let policy = policy(&house).await;
    let answer = house.through(&ask(Route::Chat, false), "mine").await;
    let foretell = answer.foretell();
    let sessions = get(house.admin(), "/api/sessions").await.json();
    let session = &sessions["sessions"][0];
    assert_eq!((&session["id"], &session["path"]), (&json!("mine"), &json!("speculated")));
    assert_eq!((&session["reason"], &session["policy"]), (&Value::Null, &json!(policy)));
    let rounds = session["rounds"].as_array().unwrap();
    assert_eq!(json!(rounds.len()), foretell["rounds"]);
    let sum = |name: &str| rounds.iter().map(|round| round[name].as_u64().unwrap()).sum::<u64>();
    assert_eq!(
        (json!(sum("drafted")), json!(sum("accepted"))),
        (foretell["drafted"].clone(), foretell["accepted"].clone())
    );
    for round in rounds {
        assert!(round["verify_ms"].as_f64().unwrap() > 0.0);
        let drafter = if round["drafted"] == 0 { "none" } else { "prompt_lookup" };
        assert_eq!(round["drafter"], drafter);
    }
    assert!(!sessions.to_string().contains("fox"), "no text of a prompt");

    let replica = &get(house.admin(), "/api/replicas").await.json()["replicas"][0];
    assert_eq!((&replica["name"], &replica["engine"]), (&json!("toy/0"), &json!("onnx")));
    assert_eq!((&replica["up"], &replica["verify"]), (&json!(true), &json!(["tree", "fan_out"])));
    assert!(replica["engine_start"].as_str().unwrap().starts_with("toy/toy/"));

    let policies = get(house.admin(), "/api/policies").await.json();
    let entry = &policies["policies"][0];
    assert_eq!((&entry["mode"], &entry["synchronized"]), (&json!("auto"), &json!(true)));
    for line in [
        "foretell_spec_decode_num_drafts_total ",
        "foretell_spec_decode_num_draft_tokens_total ",
        "foretell_spec_decode_num_accepted_tokens_total ",
    ] {
        assert!(house.metric(line).await > 0.5, "{line}");
    }
}

/// The parts of the backend's stream are gathered: the client gets one, at the end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_whole_answer_is_not_measured_as_a_stream() {
    let house = House::build(Setup::default()).await;
    for stream in [false, true] {
        house.through(&ask(Route::Completions, stream), "one").await;
        let gaps = house.metric("foretell_inter_token_latency_seconds_count ").await;
        assert_eq!(gaps > 0.5, stream, "{gaps}");
        let sessions = get(house.admin(), "/api/sessions").await.json();
        let session = &sessions["sessions"][0];
        let ms = |of: &Value, name: &str| of[name].as_f64().unwrap();
        let verifying: f64 =
            session["rounds"].as_array().unwrap().iter().map(|round| ms(round, "verify_ms")).sum();
        assert!(verifying > 0.0, "{session}");
        assert!(stream || ms(session, "first_byte_ms") >= verifying, "{session}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusals_of_the_target_reach_the_client_unchanged() {
    let house = House::build(Setup::default()).await;
    let long = "fox ".repeat(5000);
    for route in [Route::Completions, Route::Chat] {
        for stream in [false, true] {
            let prompt = |text: &str, more: Value| {
                let mut fields = json!({"prompt": text, "max_tokens": 8});
                fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
                Ask::new(route, stream, fields).body().to_string()
            };
            let bodies = [
                ("too long", prompt(&long, json!({}))),
                ("too hot", prompt("a", json!({"temperature": 7}))),
                ("no model", prompt("a", json!({"model": "other"}))),
                ("unknown", prompt("a", json!({"temprature": 1}))),
                ("no tokens", prompt("a", json!({"max_tokens": 0}))),
                ("no JSON", "{\"model\": \"toy\", ".to_owned()),
                ("no object", "[1]".to_owned()),
                ("empty", String::new()),
            ];
            for (name, body) in bodies {
                let request = post(route.path(), "", body.as_bytes());
                let direct = Wire::connect(house.target.address).await.ask(&request).await;
                let through = Wire::connect(house.front()).await.ask(&request).await;
                assert!((400..500).contains(&direct.head.status()), "{name}: {}", direct.head.line);
                assert_eq!(through.head.status(), direct.head.status(), "{name}");
                assert_eq!(through.text(), direct.text(), "{name}");
                assert_eq!(through.head.get("content-type"), direct.head.get("content-type"), "{name}");
                assert!(through.head.get("x-foretell-path").is_some(), "{name}");
            }
        }
    }
    House::assert_calm();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_disconnects_frees_the_target_at_once() {
    let step = Duration::from_millis(4);
    let house = House::build(Setup { step, ..Setup::default() }).await;
    for (at, (stream, wish)) in
        [(true, ""), (true, "x-foretell: plain\r\n"), (false, ""), (false, "x-foretell: plain\r\n")]
            .into_iter()
            .enumerate()
    {
        let mut ask = ask(Route::Completions, stream);
        ask.fields["max_tokens"] = json!(3000);
        ask.fields["ignore_eos"] = json!(true);
        let id = format!("leaver-{at}");
        let mut client = Wire::connect(house.front()).await;
        client.send(ask.bytes(&format!("x-request-id: {id}\r\n{wish}"))).await;
        // Well under way: calls were sent and tokens were computed.
        let computed = async || metric(house.target.address, "foretell_target_computed_tokens_total ").await;
        let (before, begun) = (computed().await, Instant::now());
        while computed().await < before + 60.0 {
            assert!(begun.elapsed() < PATIENCE, "{id} is not under way");
        }
        assert!(house.middlebox.seen(&id).len() > usize::from(wish.is_empty()), "{id}");
        drop(client);
        let left = computed().await;
        loop {
            let running = metric(house.target.address, "foretell_target_requests_running ").await;
            let open = house.metric("foretell_requests_in_flight ").await;
            if running + open < 0.5 {
                break;
            }
            // A tenth of all the tokens of the request; the time depends on the machine.
            let more = computed().await - left;
            assert!(more < 300.0, "{id}: {running} running, {open} open, {more} tokens since it left");
        }
        assert!(
            (house.metric("foretell_client_disconnects_total ").await - (at + 1) as f64).abs() < 0.5,
            "{id}"
        );
        let plain = Ask { stream: false, ..self::ask(Route::Completions, false) };
        assert_eq!(house.through(&plain, "next").await.plain, house.direct(&plain).await.plain);
        // A call that was in flight when the client disconnected has arrived by now.
        let calls = house.middlebox.seen(&id).len();
        assert_eq!(house.through(&plain, "later").await.plain, house.direct(&plain).await.plain);
        assert_eq!(house.middlebox.seen(&id).len(), calls, "{id}: no calls after it left");
    }
    House::assert_calm();
}
