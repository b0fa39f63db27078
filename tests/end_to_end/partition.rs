//! However the target's bytes are cut on their way, the client gets the same bytes.

use serde_json::{Value, json};

use crate::house::{Ask, House, Plan, events};
use crate::middlebox::{Fate, Fault};

/// Cuts per way of asking.
const CUTS: u64 = 18;

/// The body, less what is new with every request.
fn normal(ask: &Ask, message: &crate::wire::Message) -> String {
    let blank = |mut value: Value| {
        value["id"] = json!("id");
        value["created"] = json!(0);
        value.to_string()
    };
    match ask.stream {
        false => blank(message.json()),
        true => events(message).into_iter().map(blank).collect::<Vec<_>>().join("\n"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_cut_of_the_upstream_bytes_gives_the_client_the_same_bytes() {
    let house = House::build(Plan::default()).await;
    let fields = json!({"prompt": "take the dog — über naïve façades: ", "max_tokens": 30, "temperature": 0.7, "seed": 5});
    let mut cut = 0;
    for ask in Ask::all(&fields) {
        for header in ["", "x-foretell: ride\r\n", "x-foretell: off\r\n"] {
            let whole = ask.send(house.front(), header).await;
            let plain = house.direct(&ask).await;
            assert_eq!(whole.plain, plain.plain, "{header}");
            let expected = normal(&ask, &whole.message);
            for seed in 0..CUTS {
                let id = format!("cut.{}.{}.{seed}.{}", ask.route.name(), ask.stream, header.len());
                house.middlebox.fate(&id, Fate::always(Fault::Cuts(seed)));
                let answer = ask.send(house.front(), &format!("x-request-id: {id}\r\n{header}")).await;
                assert_eq!(normal(&ask, &answer.message), expected, "{id}");
                assert_eq!(answer.usage, whole.usage, "{id}");
                cut += house.middlebox.struck(&id);
            }
        }
    }
    assert!(cut >= 200, "{cut} calls were cut");
    House::assert_calm();
}
