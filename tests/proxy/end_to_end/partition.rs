//! However the target's bytes are split on their way, the client gets the same bytes.

use serde_json::{Value, json};

use super::house::{Ask, House, Setup, events};
use super::middlebox::{Fate, Fault};

/// Splits per route and mode of streaming; FORETELL_CUTS sets more (`make reliability`).
fn cuts() -> u64 {
    std::env::var("FORETELL_CUTS").ok().and_then(|cuts| cuts.parse().ok()).unwrap_or(10)
}

/// Usage without the cached prompt tokens, which depend on the lane of the target.
fn less_cached(mut usage: Value) -> Value {
    if let Some(usage) = usage.as_object_mut() {
        usage.shift_remove("prompt_tokens_details");
    }
    usage
}

/// The body without the fields that are new with every request.
fn normal(ask: &Ask, message: &crate::wire::Message) -> String {
    let blank = |mut value: Value| {
        value["id"] = json!("id");
        value["created"] = json!(0);
        let usage = value["usage"].take();
        value["usage"] = less_cached(usage);
        value.to_string()
    };
    if !ask.stream {
        return blank(message.json());
    }
    events(message).into_iter().map(blank).collect::<Vec<_>>().join("\n")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_cut_of_the_upstream_bytes_gives_the_client_the_same_bytes() {
    let house = House::build(Setup::default()).await;
    let fields = json!({"prompt": "take the dog — über naïve façades: ", "max_tokens": 60, "temperature": 0.2, "seed": 5});
    let (mut cut, mut accepted) = (0, 0);
    for ask in Ask::all(&fields) {
        for header in ["", "x-foretell: plain\r\n", "x-foretell: off\r\n"] {
            let plain = house.direct(&ask).await;
            let whole = ask.send(house.front(), header).await;
            accepted += whole.foretell()["accepted"].as_u64().unwrap_or(0);
            assert_eq!(whole.plain, plain.plain, "{header}");
            let expected = normal(&ask, &whole.message);
            for seed in 0..cuts() {
                let id = format!("cut.{}.{}.{seed}.{}", ask.route.name(), ask.stream, header.len());
                house.middlebox.fate(&id, Fate::always(Fault::Cuts(seed)));
                let answer = ask.send(house.front(), &format!("x-request-id: {id}\r\n{header}")).await;
                assert_eq!(normal(&ask, &answer.message), expected, "{id}");
                assert_eq!(less_cached(answer.usage), less_cached(whole.usage.clone()), "{id}");
                cut += house.middlebox.struck(&id);
            }
        }
    }
    assert!(cut >= 200 && accepted > 0, "{cut} calls were cut, {accepted} tokens accepted");
    House::assert_calm();
}
