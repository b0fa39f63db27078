//! Drafts of the target's own head: right, wrong or none, the answers are those of the target.

use foretell_wire::openai::Route;
use serde_json::{Value, json};

use super::house::{Ask, House, Setup, send};
use super::model::Head;

const PROMPT: &str = "take the fox, take the dog: let mut taken = String::new(); ";

/// A policy with the head alone.
fn policy(gamma: &str) -> String {
    format!(
        "version: 1\nname: heads\ndrafters: [{{ kind: head }}]\ngamma: {gamma}\nholdback: {{ start: 0, floor: 0 }}\n"
    )
}

async fn house(head: Head, gamma: &str) -> House {
    House::build(Setup { head: Some(head), policies: &[&policy(gamma)], ..Setup::default() }).await
}

fn asks() -> Vec<Ask> {
    let mut asks = Vec::new();
    for route in [Route::Completions, Route::Chat] {
        for stream in [false, true] {
            for temperature in [0.0, 0.8] {
                let fields = json!({
                    "prompt": PROMPT, "max_tokens": 48, "temperature": temperature, "seed": 4, "ignore_eos": true,
                });
                asks.push(Ask::new(route, stream, fields));
            }
        }
    }
    asks
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_are_the_same_with_any_head() {
    for head in [Head::Trained, Head::Drawing, Head::Wrong, Head::Broken] {
        let house = house(head, "{ fixed: 4 }").await;
        let (mut drafted, mut accepted) = (0, 0);
        for (number, ask) in asks().iter().enumerate() {
            let plain = house.direct(ask).await;
            let through = house.through(ask, &format!("r{number}")).await;
            assert_eq!(through.plain, plain.plain, "{head:?}, request {number}");
            let foretell = through.foretell();
            drafted += foretell["drafted"].as_u64().unwrap();
            accepted += foretell["accepted"].as_u64().unwrap();
        }
        assert_eq!(drafted > 0, head != Head::Broken, "{head:?}: {drafted} drafted");
        assert_eq!(
            accepted > 40,
            matches!(head, Head::Trained | Head::Drawing),
            "{head:?}: {accepted} of {drafted} accepted"
        );
    }
    House::assert_calm();
}

/// Drafted tokens that are accepted of hot answers.
async fn accepted(head: Head) -> u64 {
    let house = house(head, "{ fixed: 4 }").await;
    let mut accepted = 0;
    for seed in 0..6 {
        let fields =
            json!({"prompt": PROMPT, "max_tokens": 48, "temperature": 2.0, "seed": seed, "ignore_eos": true});
        let ask = Ask::new(Route::Completions, true, fields);
        let (plain, through) = (house.direct(&ask).await, house.through(&ask, "r").await);
        assert_eq!(through.plain, plain.plain, "{head:?}, seed {seed}");
        accepted += through.foretell()["accepted"].as_u64().unwrap();
    }
    accepted
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_head_knows_the_noise_of_every_position() {
    let (drawn, likeliest) = (accepted(Head::Drawing).await, accepted(Head::Trained).await);
    assert!(drawn > 60 && drawn > 2 * likeliest, "{drawn} drawn, {likeliest} likeliest");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_sees_nothing_of_the_proposals() {
    let house = house(Head::Trained, "{ fixed: 4 }").await;
    for mode in ["auto", "observe"] {
        let set = send(house.admin(), "/api/mode", "", &json!({"mode": mode})).await;
        assert_eq!(set.head.status(), 200);
        for ask in asks() {
            let answer = ask.send(house.front(), "x-foretell: plain\r\n").await;
            assert!(!String::from_utf8_lossy(&answer.message.body).contains("proposal"), "{mode}");
        }
    }
}

/// The target is asked only where a drafter reads the answer, and says what it can.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_head_drafts_where_it_is_asked_to() {
    let house = house(Head::Trained, "{ fixed: 4 }").await;
    let card = crate::client::get(house.target.address, "/v1/models").await.json();
    assert_eq!(card["data"][0]["proposes"], json!(4));
    let verify = |more: Value| {
        let house = &house;
        async move {
            let mut body = json!({"context": [5, 6, 7], "tokens": [8], "temperature": 0});
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            send(house.target.address, "/v1/verify", "", &body).await.json()
        }
    };
    assert_eq!(verify(json!({})).await.get("proposal"), None);
    let proposal = verify(json!({"propose": 9})).await["proposal"].clone();
    assert_eq!(proposal["tokens"].as_array().map(Vec::len), Some(4));
    assert_eq!(proposal["shares"][0], json!([0.6, 0.2]));
    let drafts = "foretell_target_step_seconds_count{kind=\"draft\"}";
    assert!((crate::client::metric(house.target.address, drafts).await - 1.0).abs() < 0.5);
    let lookups = House::build(Setup { head: Some(Head::Trained), ..Setup::default() }).await;
    for ask in asks() {
        lookups.through(&ask, "r").await;
    }
    assert!(crate::client::metric(lookups.target.address, drafts).await.abs() < 0.5, "FORCED has no head");
}
