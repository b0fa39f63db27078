//! Hosted services get the requests of clients and no others.

use foretell_wire::openai::Route;
use serde_json::{Value, json};

use super::house::{before, front, way};
use crate::client::{Answer, Ask};
use crate::fakes::hosted::Hosted;
use crate::fakes::{Fake, Setup};

const CHAT: &str = "/v1/chat/completions";
const KEY: &str = "authorization: Bearer sk-good\r\n";
const CODE: &str =
    "def add(first, second):\n    total = first + second\n    return total\n\n\nprint(add(1, 2))\n";

fn edit(more: &Value) -> Ask {
    let text = format!("Rename `total`.\n```python\n{CODE}```");
    let mut fields = json!({"prompt": text, "max_tokens": 20});
    fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    Ask::new(Route::Chat, false, fields)
}

async fn hosted() -> Fake<Hosted> {
    Fake::start(Hosted::new(Setup::default())).await
}

fn tried(answer: &Answer) -> u64 {
    let count = |name: &str| answer.usage["completion_tokens_details"][name].as_u64().unwrap();
    count("accepted_prediction_tokens") + count("rejected_prediction_tokens")
}

fn calls(fake: &Fake<Hosted>) -> Vec<(String, usize)> {
    fake.house.tally().calls.into_iter().collect()
}

#[tokio::test]
async fn a_billed_service_gets_the_client_s_calls_and_no_others() {
    let fake = hosted().await;
    let proxy = before(fake.address, "    engine: openai\n    billed: true\n").await;
    let ask = edit(&json!({"temperature": 0}));
    let direct = ask.send(fake.address, KEY).await;
    for _ in 0..3 {
        let through = ask.send(front(&proxy), KEY).await;
        assert_eq!(through.plain, direct.plain);
        assert_eq!(way(&through), (Some("passthrough"), Some("billed")));
        assert_eq!(tried(&through), 0);
    }
    assert_eq!(calls(&fake), [(CHAT.to_owned(), 4), ("/v1/models".to_owned(), 1)]);
    assert_eq!(fake.engine.billed(), 4);
}

#[tokio::test]
async fn a_service_that_is_not_billed_is_asked_for_its_models_and_nothing_else() {
    let fake = hosted().await;
    let proxy = before(fake.address, "    engine: openai\n").await;
    let through = edit(&json!({})).send(front(&proxy), KEY).await;
    assert_eq!((through.plain.status, way(&through).1, tried(&through)), (200, Some("no_verify_method"), 0));
    assert!(calls(&fake).iter().all(|(path, _)| path == CHAT || path == "/v1/models"), "{:?}", calls(&fake));
}

#[tokio::test]
async fn the_client_s_own_prediction_goes_through() {
    let fake = hosted().await;
    let proxy = before(fake.address, "    engine: openai\n    billed: true\n").await;
    let ask = edit(&json!({"temperature": 0, "prediction": {"type": "content", "content": "print(1)"}}));
    let (direct, through) = (ask.send(fake.address, KEY).await, ask.send(front(&proxy), KEY).await);
    assert_eq!(through.plain, direct.plain);
    assert!(tried(&through) > 0);
}
