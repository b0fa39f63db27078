//! A lossy rule over HTTP: its charges are reported everywhere, and it charges nothing where it may
//! not be relaxed.

use foretell_wire::openai::Route;
use serde_json::{Value, json};

use super::house::{House, Setup};
use crate::client::Ask;

const LOSSY: &str = "version: 1\nname: lossy\ndrafters: [{ kind: prompt_lookup, ngram: { min: 1, max: 8 } }]\n\
    gamma: { max: 8, fixed: 4 }\naccept: { rule: ears, tolerance: { max: 0.8 }, max_drift: 1.0, drift_per_100_tokens: 20 }\n";

fn ask(stream: bool, more: &Value) -> Ask {
    let mut fields = json!({"prompt": "one two three one two three one two three one two", "max_tokens": 48, "temperature": 0.9});
    fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    Ask::new(Route::Completions, stream, fields)
}

async fn house(methods: &str) -> House {
    House::build(Setup { policies: &[LOSSY], methods, ..Setup::default() }).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn charges_are_reported_in_usage_trailers_metrics_and_log() {
    let house = house("[tree]").await;
    let (mut tv, mut substitutions) = (0.0, 0);
    for number in 0..12 {
        let stream = number % 3 == 0;
        let answer = ask(stream, &json!({})).send(house.front(), "te: trailers\r\n").await;
        let drift = &answer.foretell()["drift"];
        let tokens = answer.plain.completion_tokens as f64;
        let spent = drift["charged"].as_f64().unwrap();
        assert!((drift["rate"].as_f64().unwrap() - spent / tokens).abs() < 1e-9, "{drift}");
        assert!(spent <= (0.2 * tokens).min(1.0) + 1e-9, "beyond max_drift or drift_per_100_tokens: {drift}");
        tv += spent;
        substitutions += drift["substitutions"].as_u64().unwrap();
        if stream {
            let trailers = &answer.message.trailers;
            let trailer = trailers.iter().find_map(|line| line.strip_prefix("x-foretell-drift: "));
            let trailer: f64 = trailer.unwrap_or_else(|| panic!("{trailers:?}")).parse().unwrap();
            assert!((trailer - spent).abs() < 1e-9, "{trailer} {spent}");
        }
    }
    assert!(tv > 0.5 && substitutions > 0, "{tv} {substitutions}");
    let counted = house.metric("foretell_drift_tv_total{policy=\"lossy\"} ").await;
    assert!((counted - tv).abs() < 1e-6, "{counted} {tv}");
    assert!(
        (house.metric("foretell_drift_substitutions_total{policy=\"lossy\"} ").await - substitutions as f64)
            .abs()
            < 0.5
    );
    assert!(house.metric("foretell_drift_positions_total{outcome=\"relaxed\"} ").await > 0.5);
    House::assert_calm();
}

/// With a seed and at temperature 0 the text is that of the target alone. With a verification
/// method that reports no probabilities the rule is exact, and the answer says so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rule_that_may_not_be_relaxed_is_exact() {
    let house = house("[tree]").await;
    for more in [json!({"seed": 5}), json!({"temperature": 0})] {
        for stream in [false, true] {
            let ask = ask(stream, &more);
            let (through, direct) = (house.through(&ask, "r").await, house.direct(&ask).await);
            assert_eq!(through.plain, direct.plain, "{more}");
            assert_eq!(through.foretell()["path"], "speculated");
            assert_eq!(through.foretell()["drift"], json!({"charged": 0.0, "rate": 0.0, "substitutions": 0}));
        }
    }
    assert!(house.metric("foretell_drift_positions_total{outcome=\"relaxed\"} ").await < 0.5);
    let blind = self::house("[fan_out]").await;
    let answer = ask(false, &json!({})).send(blind.front(), "").await;
    assert_eq!(
        (&answer.foretell()["path"], &answer.foretell()["drift"]["charged"]),
        (&json!("speculated"), &json!(0.0))
    );
    assert!(blind.metric("foretell_drift_positions_total{outcome=\"unknown\"} ").await > 0.5);
    House::assert_calm();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn explain_says_how_far_a_rule_is_relaxed_and_why_not() {
    let house = house("[tree, fan_out]").await;
    let admin = house.admin();
    let asked = move |more: Value| {
        let body = ask(false, &more).body();
        async move {
            let explained = crate::client::send(admin, "/api/explain?route=completions", "", &body).await;
            explained.json()["accept"].clone()
        }
    };
    let free = asked(json!({})).await;
    assert_eq!(
        (&free["rule"], &free["tolerance"], &free["exact"]),
        (&json!("ears"), &json!(0.8), &Value::Null),
        "{free}"
    );
    for (more, why) in [
        (json!({"seed": 5}), "the request has a seed: it asks for a reproducible text"),
        (json!({"temperature": 0}), "at temperature 0 there is nothing to relax"),
    ] {
        let exact = asked(more).await;
        assert_eq!((&exact["tolerance"], &exact["exact"]), (&json!(0.0), &json!(why)), "{exact}");
    }
}
