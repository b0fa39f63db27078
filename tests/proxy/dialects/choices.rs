//! Requests for several choices before vLLM: each choice is a request of its own, and the answer is
//! the one that vLLM gives to the client's.

use foretell_engines::openai::Route;
use serde_json::{Value, json};

use super::house::{House, on_each, setup};
use super::table::TABLE;
use crate::client::{Ask, FORCED, events, send};
use crate::fakes::fault::{Fault, When};
use crate::wire::Message;

/// Requests at a high temperature are only decoded plainly.
const STILL: &str = "version: 1\nname: a-still\nmatch: { temperature: { min: 1.4 } }\nmode: plain\n";

/// A bias that leaves one likely token, so that the text is known though it is drawn.
fn known(house: &House, more: &Value) -> Value {
    let token = house.engine.house().toy.encode("a")[0].to_string();
    let mut fields = json!({"prompt": "a a a a a a a a", "max_tokens": 12, "temperature": 0.9, "n": 3,
        "logit_bias": {token: 100}});
    fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    fields
}

/// The parts of an answer that are the same in each: no names, times or caches; a stream's events
/// by choice.
fn parts(ask: &Ask, message: &Message) -> Vec<Vec<Value>> {
    let all = if ask.stream { events(message) } else { vec![message.json()] };
    let mut by_choice = vec![Vec::new(); 4];
    for mut event in all {
        for name in ["id", "created"] {
            assert!(!event[name].is_null(), "{event}");
            event.as_object_mut().unwrap().shift_remove(name);
        }
        // Versions differ in the members that they leave out.
        without_nulls(&mut event);
        if let Some(usage) = event["usage"].as_object_mut() {
            usage.shift_remove("foretell");
            usage.shift_remove("prompt_tokens_details");
        }
        let place = if ask.stream { event["choices"][0]["index"].as_u64().unwrap_or(3) } else { 3 };
        by_choice[place as usize].push(event);
    }
    by_choice
}

fn without_nulls(value: &mut Value) {
    match value {
        Value::Object(members) => {
            members.retain(|_, member| !member.is_null());
            members.values_mut().for_each(without_nulls);
        }
        Value::Array(items) => items.iter_mut().for_each(without_nulls),
        _ => {}
    }
}

/// All text of a choice's events, and the last of them: how the text is cut into events differs.
fn joined(events: &[Value]) -> (String, Value) {
    let text = |event: &Value| {
        let choice = &event["choices"][0];
        choice["text"].as_str().or(choice["delta"]["content"].as_str()).unwrap_or_default().to_owned()
    };
    let mut last = events.last().cloned().unwrap_or_default();
    for path in ["/choices/0/text", "/choices/0/delta/content", "/choices/0/token_ids"] {
        last.pointer_mut(path).map(Value::take);
    }
    (events.iter().map(text).collect(), last)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_answer_is_that_of_one_request() {
    let rows = TABLE.iter().filter(|row| row.dialect == "vllm");
    on_each(rows, async |row| {
        let house = House::build(row, setup(None)).await;
        for ask in Ask::all(&known(&house, &json!({}))) {
            let (direct, through) = (house.direct(&ask).await, house.through(&ask).await);
            let (wanted, got) = (parts(&ask, &direct.message), parts(&ask, &through.message));
            if ask.stream {
                for (wanted, got) in wanted.iter().zip(&got) {
                    assert_eq!(joined(got), joined(wanted), "{} {ask:?}", row.name);
                }
            } else {
                assert_eq!(got, wanted, "{} {ask:?}", row.name);
            }
            assert_eq!(through.plain.prompt_tokens, direct.plain.prompt_tokens, "{ask:?}");
            let told = through.foretell()["choices"].as_array().unwrap_or_else(|| panic!("{through:?}"));
            assert!(told.len() == 3 && told.iter().all(|one| one["path"] == "speculated"), "{told:?}");
            assert!(told.iter().all(|one| one["accepted"].as_u64().unwrap() > 0), "{told:?}");
        }
        house.leave().await;
    })
    .await;
}

/// vLLM does not do the same with a request for each choice, or those may not be speculated on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn others_are_passed_on_as_they_are() {
    let row = TABLE.iter().find(|row| row.name == "vllm").unwrap();
    let house = House::under(row, setup(None), &[STILL, FORCED]).await;
    for (more, status) in [
        (json!({"temperature": 0}), 400),
        (json!({"seed": 7}), 200),
        (json!({"echo": true}), 200),
        (json!({"n": 17}), 200),
        (json!({"prompt": ["a b", "b c"]}), 200),
        (json!({"temperature": 1.5}), 200),
    ] {
        let ask = Ask::new(Route::Completions, false, known(&house, &more));
        let before = house.engine.house().tally().calls_of("/v1/completions");
        let (direct, through) = (house.direct(&ask).await, house.through(&ask).await);
        let calls = house.engine.house().tally().calls_of("/v1/completions") - before;
        assert_eq!((through.plain.status, calls), (status, 2), "{more} {}", through.message.text());
        assert_eq!(direct.plain.status, status, "{more}");
        assert_eq!(through.message.head.get("x-foretell-path"), Some("relayed"), "{more}");
    }
    house.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_explanation_is_that_of_one_choice() {
    let row = TABLE.iter().find(|row| row.name == "vllm").unwrap();
    let house = House::under(row, setup(None), &[STILL, FORCED]).await;
    let explain = async |more: Value| {
        let ask = Ask::new(Route::Completions, false, known(&house, &more));
        let admin = house.proxy.gateway.admin.unwrap();
        send(admin, "/api/explain?route=completions", "", &ask.body()).await.json()
    };
    let told = explain(json!({})).await;
    assert_eq!((&told["path"], &told["reason"]), (&json!("eligible"), &Value::Null), "{told}");
    assert!(told["notes"].to_string().contains("Each of the 3 choices"), "{told}");
    for more in [json!({"seed": 7}), json!({"temperature": 0}), json!({"temperature": 1.5})] {
        let told = explain(more.clone()).await;
        assert_eq!((&told["path"], &told["reason"]), (&json!("relayed"), &json!("choices")), "{more} {told}");
    }
    house.leave().await;
}

/// An engine behind a limit of requests answers one of them with an error: then it gets the
/// client's own request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_a_choice_is_refused_the_clients_own_request_is_sent() {
    let row = TABLE.iter().find(|row| row.name == "vllm").unwrap();
    let house = House::build(row, setup(None)).await;
    for ask in Ask::all(&known(&house, &json!({}))) {
        let direct = house.direct(&ask).await;
        let faults = &house.engine.house().faults;
        faults.clear();
        // Rounds do not stream.
        faults.at(When::path(ask.route.path()).streamed(true), 1, Fault::Status(429));
        let through = house.through(&ask).await;
        assert_eq!(parts(&ask, &through.message), parts(&ask, &direct.message), "{ask:?}");
        assert_eq!(through.message.head.get("x-foretell-path"), Some("relayed"), "{ask:?}");
        assert_eq!(through.message.head.get("x-foretell-reason"), Some("choices"), "{ask:?}");
    }
    house.leave().await;
}
