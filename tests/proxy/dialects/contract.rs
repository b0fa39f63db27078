//! The client gets the text of the engine alone, whether or not the request is speculated on.

use std::collections::BTreeSet;
use std::fmt::Write;

use foretell_wire::openai::Route;
use rstest::rstest;
use serde_json::{Value, json};

use super::house::{House, setup};
use super::table::{Row, Seeds, TABLE};
use crate::client::{Answer, Ask, events};
use crate::fakes::{Defaults, Setup};
use crate::wire::Wire;

pub const PROMPTS: [&str; 3] = [
    "def area(width, height):\n    return width * height\n\n\ndef perimeter(width, height):\n    return ",
    "The quick brown fox. The quick brown dog. The quick ",
    "naïve façades — 1, 2, 3, 1, 2, 3, 1, 2, ",
];

/// A greedy request that sets every field whose default of the server could change the output.
pub fn greedy(prompt: &str, more: &Value) -> Value {
    let mut fields = json!({"prompt": prompt, "max_tokens": 40, "temperature": 0, "repetition_penalty": 1});
    fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    fields
}

pub fn both(route: Route, fields: &Value) -> [Ask; 2] {
    [Ask::new(route, false, fields.clone()), Ask::new(route, true, fields.clone())]
}

/// A prompt followed by the engine's own output for it: the next output repeats parts of that text,
/// so that some drafts from it are accepted.
pub async fn talkative(house: &House, route: Route, prompt: &str) -> String {
    let ask = Ask::new(route, false, greedy(prompt, &json!({"max_tokens": 160, "ignore_eos": true})));
    format!("{prompt}{}", house.direct(&ask).await.plain.text)
}

/// Sends a request with and without the proxy and notes the differences. Returns the number of
/// accepted tokens and the engine's own answer.
async fn compare(house: &House, ask: &Ask, wrong: &mut String) -> (u64, Answer) {
    let plain = house.direct(ask).await;
    let answer = house.through(ask).await;
    assert_eq!(plain.plain.status, 200, "{}: {ask:?} {}", house.row.name, plain.message.text());
    if answer.plain != plain.plain {
        let foretell = answer.foretell();
        writeln!(
            wrong,
            "{} {ask:?}\n  {foretell}\n  got  {:?}\n  want {:?}",
            house.row.name, answer.plain, plain.plain
        )
        .unwrap();
    }
    (answer.foretell()["accepted"].as_u64().unwrap_or(0), plain)
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn auto_recognises_every_engine(#[values(0, 1, 2, 3, 4, 5)] row: usize) {
    let house = House::build(&TABLE[row], setup(None)).await;
    let replicas = house.admin("/api/replicas").await;
    assert!(replicas.to_string().contains(house.row.dialect), "{replicas}");
    house.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_greedy_text_is_the_same_on_every_route_and_is_speculated_on() {
    let mut wrong = String::new();
    for row in TABLE {
        let house = House::build(row, setup(Some(30))).await;
        for route in [Route::Completions, Route::Chat] {
            let (mut accepted, before) = (0, house.rounds());
            for prompt in PROMPTS {
                let prompt = talkative(&house, route, prompt).await;
                for ask in both(route, &greedy(&prompt, &json!({}))) {
                    accepted += compare(&house, &ask, &mut wrong).await.0;
                }
            }
            assert!(accepted > 0, "{} {}: {accepted} accepted", row.name, route.name());
            assert!(house.rounds() > before, "{} {}: verified", row.name, route.name());
        }
        house.leave().await;
    }
    assert!(wrong.is_empty(), "{wrong}");
}

/// Ends of outputs: limits, stop texts that end in the middle of a token, stop tokens.
/// Texts that would end at every third token end where the engine's own do: in plain requests, and
/// by every verification method.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_call_ends_a_text_before_min_tokens() {
    let mut wrong = String::new();
    for row in TABLE.iter().filter(|row| row.dialect == "vllm") {
        let house = House::build(row, setup(Some(3))).await;
        let (mut accepted, mut lengths) = (0, BTreeSet::new());
        for route in [Route::Completions, Route::Chat] {
            for prompt in PROMPTS {
                let prompt = talkative(&house, route, prompt).await;
                for least in [1, 7, 16, 23, 40] {
                    for ask in both(route, &greedy(&prompt, &json!({"min_tokens": least}))) {
                        let (taken, plain) = compare(&house, &ask, &mut wrong).await;
                        accepted += taken;
                        lengths.insert(plain.plain.text.len());
                    }
                }
            }
        }
        assert!(lengths.len() > 12 && accepted > 0, "{}: {accepted} {lengths:?}", row.name);
        house.leave().await;
    }
    assert!(wrong.is_empty(), "{wrong}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_end_of_a_text_is_the_engines_own() {
    let mut wrong = String::new();
    for row in TABLE {
        let house = House::build(row, setup(None)).await;
        for route in [Route::Completions, Route::Chat] {
            let prompt = talkative(&house, route, PROMPTS[0]).await;
            let [ask, _] = both(route, &greedy(&prompt, &json!({})));
            let text = house.direct(&ask).await.plain.text;
            let part = |from: usize, len: usize| text.chars().skip(from).take(len).collect::<String>();
            let half = text.chars().count() / 2;
            let toy = &house.engine.house().toy;
            let token = *toy.encode(&part(half, 12)).last().unwrap();
            for more in [
                json!({"max_tokens": 1}),
                json!({"max_tokens": 2}),
                json!({"max_tokens": 7}),
                json!({"stop": part(half, 3)}),
                json!({"stop": ["never there", part(half + 1, 5), part(half + 9, 2)]}),
                json!({"stop": part(2, 1)}),
                json!({"stop_token_ids": [token]}),
            ] {
                for ask in both(route, &greedy(&prompt, &more)) {
                    compare(&house, &ask, &mut wrong).await;
                }
            }
        }
        house.leave().await;
    }
    assert!(wrong.is_empty(), "{wrong}");
}

/// SGLang names the token that ended a text: a stop token of the client or the end of sequence.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_speculated_answer_names_its_stop_as_the_engine_does() {
    for row in TABLE.iter().filter(|row| row.dialect == "sglang") {
        let house = House::build(row, setup(Some(30))).await;
        for route in [Route::Completions, Route::Chat] {
            let prompt = talkative(&house, route, PROMPTS[0]).await;
            let plain = async |more: Value| {
                let [ask, _] = both(route, &greedy(&prompt, &more));
                house.direct(&ask).await.plain
            };
            let text = plain(json!({"max_tokens": 2000})).await.text;
            let part: String = text.chars().skip(text.chars().count() / 2).take(4).collect();
            let (eos, mut ids) = (house.engine.house().toy.eos(), house.engine.house().toy.encode(&text));
            // The engine may have generated the text as other tokens.
            let token = loop {
                let token = ids.pop().expect("a token of the text");
                if plain(json!({"max_tokens": 2000, "stop_token_ids": [token]})).await.stop
                    == token.to_string()
                {
                    break token;
                }
            };
            for (more, stop) in [
                (json!({"max_tokens": 2000}), json!(eos)),
                (json!({"max_tokens": 2000, "stop": part}), json!(part)),
                (json!({"max_tokens": 2000, "stop_token_ids": [token]}), json!(token)),
            ] {
                for ask in both(route, &greedy(&prompt, &more)) {
                    let (plain, answer) = (house.direct(&ask).await, house.through(&ask).await);
                    assert_eq!(
                        (&plain.plain.stop, &answer.plain),
                        (&stop.to_string(), &plain.plain),
                        "{ask:?}"
                    );
                    assert_eq!(answer.foretell()["path"], "speculated", "{ask:?}");
                }
            }
        }
        house.leave().await;
    }
}

/// `timings` of llama-server: they reach the client if one call made the whole output. A speculated
/// output has none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn timings_of_the_engine_reach_the_clients_of_plain_requests() {
    let house =
        House::build(TABLE.iter().find(|row| row.dialect == "llamacpp").unwrap(), setup(Some(30))).await;
    let (mut ends, mut speculated_answers) = (BTreeSet::new(), 0);
    for route in [Route::Completions, Route::Chat] {
        let prompt = talkative(&house, route, PROMPTS[0]).await;
        let [ask, _] = both(route, &greedy(&prompt, &json!({})));
        let part: String = house.direct(&ask).await.plain.text.chars().skip(20).take(3).collect();
        for more in [json!({"max_tokens": 8}), json!({"max_tokens": 2000}), json!({"stop": part})] {
            for ask in both(route, &greedy(&prompt, &more)) {
                for usage in [true, false] {
                    let fields = if ask.stream { json!({ "include_usage": usage }) } else { json!(null) };
                    let mut ask = ask.clone();
                    ask.fields["stream_options"] = fields;
                    let direct = ask.send(house.engine.address(), "").await;
                    let plain_answer = ask.send(house.front(), "x-foretell: plain\r\n").await;
                    assert_eq!(
                        reported(&plain_answer),
                        reported(&direct),
                        "{ask:?} {}",
                        plain_answer.message.text()
                    );
                    assert!(reported(&direct).is_some_and(|count| count > 1), "{ask:?}");
                    let speculated = ask.send(house.front(), "").await;
                    // On a busy machine a short text may be complete before the first round: then
                    // it is plain.
                    let own = reported(&speculated);
                    assert!(
                        own.is_none() || own == reported(&direct),
                        "{ask:?} {}",
                        speculated.message.text()
                    );
                    speculated_answers += usize::from(own.is_none());
                    ends.insert((route.name(), direct.plain.finish));
                }
            }
        }
    }
    assert!(speculated_answers >= 12, "{speculated_answers} of about 24 were speculated on");
    assert_eq!(ends.len(), 4, "texts end by themselves and by the limit: {ends:?}");
    house.leave().await;
}

/// Output tokens according to the engine's `timings`, which the last event has.
fn reported(answer: &Answer) -> Option<u64> {
    let message = &answer.message;
    let streamed = message.text().starts_with("data: ");
    let last = if streamed { events(message).pop()? } else { message.json() };
    last["timings"]["predicted_n"].as_u64()
}

/// The server's defaults for omitted fields hold on every route that the proxy uses for the
/// request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_servers_own_defaults_hold_in_speculated_answers() {
    let defaults = Defaults { temperature: Some(0.7), repetition_penalty: Some(1.3), ..Defaults::default() };
    let mut wrong = String::new();
    for row in TABLE {
        let house = House::build(row, Setup { defaults: defaults.clone(), ..setup(None) }).await;
        for prompt in PROMPTS {
            let fields = json!({"prompt": prompt, "max_tokens": 40, "temperature": 0});
            for ask in Ask::all(&fields) {
                compare(&house, &ask, &mut wrong).await;
            }
        }
        house.leave().await;
    }
    assert!(wrong.is_empty(), "{wrong}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn text_that_a_reasoning_parser_takes_out_stays_out() {
    let mut wrong = String::new();
    for row in TABLE {
        let plain = House::build(row, setup(None)).await;
        let asks = both(Route::Chat, &greedy(PROMPTS[0], &json!({})));
        let text = plain.direct(&asks[0]).await.plain.text;
        let marker: String = text.chars().skip(text.chars().count() / 3).take(3).collect();
        plain.leave().await;
        let house = House::build(row, Setup { reasoning_end: Some(marker), ..setup(None) }).await;
        for ask in asks {
            let (_, direct) = compare(&house, &ask, &mut wrong).await;
            let taken = direct.plain.text.len() < text.len() && !direct.plain.thought.is_empty();
            assert!(taken, "{}: nothing was taken out", row.name);
        }
        house.leave().await;
    }
    assert!(wrong.is_empty(), "{wrong}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_seed_gives_the_text_that_it_gives_without_the_proxy() {
    let mut wrong = String::new();
    for row in TABLE.iter().filter(|row| row.seeds == Seeds::Kept) {
        let house = House::build(row, setup(Some(40))).await;
        for seed in 1..4 {
            let fields = json!({"prompt": PROMPTS[0], "max_tokens": 30, "temperature": 0.8, "seed": seed,
                "repetition_penalty": 1, "top_p": 1, "top_k": -1, "min_p": 0, "presence_penalty": 0,
                "frequency_penalty": 0});
            for ask in Ask::all(&fields) {
                compare(&house, &ask, &mut wrong).await;
            }
        }
        house.leave().await;
    }
    assert!(wrong.is_empty(), "{wrong}");
}

/// A client that disconnects ends every call that was made for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_disconnects_leaves_nothing_running() {
    for row in TABLE {
        let mut busy = setup(None);
        busy.pace.step = std::time::Duration::from_millis(2);
        let house = House::build(row, busy).await;
        for route in [Route::Completions, Route::Chat] {
            for bytes in [1, 900, 4000] {
                let ask = Ask::new(route, true, greedy(PROMPTS[1], &json!({"max_tokens": 400})));
                let mut wire = Wire::connect(house.front()).await;
                wire.send(ask.bytes("")).await;
                assert_eq!(wire.exactly(bytes).await.len(), bytes);
            }
        }
        house.leave().await;
    }
}

#[test]
fn rows_have_names_of_their_own() {
    let mut names: Vec<&str> = TABLE.iter().map(|row: &Row| row.name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), TABLE.len());
}
