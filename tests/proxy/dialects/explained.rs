//! What `POST /api/explain` says of a request is what then happens to it: random requests, before every engine.

use foretell::openai::Route;
use foretell::units::Dice;
use serde_json::{Value, json};

use super::house::{House, on_each, setup};
use super::table::{Row, TABLE};
use crate::client::{Ask, send};

/// Requests in all.
const REQUESTS: usize = 504;

/// Policies for each way in which a request may go.
const POLICIES: [&str; 5] = [
    "version: 1\nname: hot\nmatch: { temperature: { min: 0.9 } }\nmode: \"off\"\n",
    "version: 1\nname: watch\nmatch: { headers: { x-team: [web] } }\nmode: shadow\n",
    "version: 1\nname: still\nmatch: { routes: [chat], temperature: { min: 0.4 } }\nmode: ride\n",
    "version: 1\nname: lossy\nmatch: { headers: { x-team: [ide] } }\naccept: { rule: ears, tolerance: { max: 0.3 } }\n\
     gamma: { max: 8, fixed: 3 }\ndrafters: [{ kind: prompt_lookup, ngram: { min: 1, max: 8 } }]\n",
    "version: 1\nname: forced\nmatch: { prompt_tokens: { max: 200 } }\ngamma: { max: 8, fixed: 4 }\n\
     drafters: [{ kind: prompt_lookup, ngram: { min: 1, max: 8 } }]\n",
];

fn one_of<T: Clone>(dice: &mut Dice, all: &[T]) -> T {
    all[dice.below(all.len() as u64) as usize].clone()
}

/// Fields that a client may send, each now and then.
fn fields(dice: &mut Dice) -> Value {
    let word = one_of(dice, &["the same, the same, the", "one two one two one", "a"]);
    let prompt = if dice.one_in(12) { word.repeat(60) } else { word.to_owned() };
    let mut fields = json!({ "prompt": prompt, "max_tokens": 6 });
    let temperatures = [json!(0), json!(0), json!(0.3), json!(0.5), json!(1.0), json!("hot"), Value::Null];
    fields["temperature"] = one_of(dice, &temperatures);
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
        if dice.one_in(16) {
            fields[name] = value;
        }
    }
    fields
}

/// Header fields of the request: each as it is sent, and as it is told to `explain`.
fn headers(dice: &mut Dice) -> String {
    let team = one_of(dice, &["", "", "x-team: web\r\n", "x-team: ide\r\n"]);
    let wish = one_of(
        dice,
        &[
            "",
            "",
            "",
            "",
            "x-foretell: off\r\n",
            "x-foretell: ride\r\n",
            "x-foretell: gamma=2\r\n",
            "x-foretell: gama=2\r\n",
        ],
    );
    let encoded = if dice.one_in(20) { "content-encoding: gzip\r\n" } else { "" };
    format!("{team}{wish}{encoded}")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_explained_of_random_requests_is_what_happens() {
    let each = REQUESTS.div_ceil(TABLE.len());
    let counts =
        on_each(TABLE.iter().enumerate(), move |(number, row)| agrees(row, number as u64, each)).await;
    let sum = |at: usize| counts.iter().map(|count| count[at]).sum::<usize>();
    let all = [sum(0), sum(1), sum(2)];
    assert!(
        all.iter().sum::<usize>() >= 500 && all.iter().all(|&count| count > 40),
        "{all:?} bypassed, ridden, free"
    );
}

/// How many were bypassed, were to ride only, and were free to leap.
async fn agrees(row: &'static Row, number: u64, requests: usize) -> [usize; 3] {
    let house = House::under(row, setup(None), &POLICIES).await;
    let admin = house.proxy.gateway.admin.unwrap();
    let mut dice = Dice::new(1_000 + number);
    let mut counts = [0; 3];
    for _ in 0..requests {
        let route = one_of(&mut dice, &[Route::Completions, Route::Chat]);
        let ask = house.said(&Ask::new(route, dice.one_in(4), fields(&mut dice)));
        let headers = headers(&mut dice);
        let path = format!("/api/explain?route={}", route.name());
        let told = send(admin, &path, &headers, &ask.body()).await.json();
        let answer = crate::wire::Wire::connect(house.front()).await.ask(ask.bytes(&headers)).await;
        let said = |name: &str| answer.head.get(name).unwrap_or_default().to_owned();
        let (went, why, policy) =
            (said("x-foretell-path"), said("x-foretell-reason"), said("x-foretell-policy"));
        let reason = told["reason"].as_str().unwrap_or_default();
        let context = format!("{} {headers} {}: {told}\n{:?}", row.name, ask.body(), answer.head);
        match told["path"].as_str().unwrap() {
            "bypassed" => {
                counts[0] += 1;
                assert_eq!((went.as_str(), why.as_str()), ("bypassed", reason), "{context}");
            }
            "eligible" => {
                counts[if reason.is_empty() { 2 } else { 1 }] += 1;
                assert_eq!(told["policy"], policy.as_str(), "{context}");
                let streams = went == "eligible" && why.is_empty();
                let rides = went == "ridden" && why == reason;
                let leaps =
                    reason.is_empty() && (went == "speculated" || why == "no_draft" || why == "no_gain");
                assert!(streams || rides || leaps, "{context}");
            }
            other => panic!("{other}: {context}"),
        }
    }
    house.leave().await;
    counts
}
