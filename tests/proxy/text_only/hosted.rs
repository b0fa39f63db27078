//! Hosted services and servers that get passthrough requests only: they get the requests of clients
//! and no others.

use rstest::rstest;
use serde_json::{Value, json};

use super::house::{Answer, ask, before, front};
use crate::fakes::hosted::Hosted;
use crate::fakes::passthrough::{Kind, Passthrough};
use crate::fakes::{Engine, Fake, Setup};

const CHAT: &str = "/v1/chat/completions";
const KEY: &str = "authorization: Bearer sk-good\r\n";
const CODE: &str =
    "def add(first, second):\n    total = first + second\n    return total\n\n\nprint(add(1, 2))\n";

fn edit(more: &Value) -> Value {
    let text = format!("Rename `total`.\n```python\n{CODE}```");
    let mut body = json!({"model": "toy", "messages": [{"role": "user", "content": text}], "max_tokens": 20});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

async fn hosted() -> Fake<Hosted> {
    Fake::start(Hosted::new(Setup::default())).await
}

fn tried(answer: &Answer) -> u64 {
    let count = |name: &str| answer.usage["completion_tokens_details"][name].as_u64().unwrap();
    count("accepted_prediction_tokens") + count("rejected_prediction_tokens")
}

fn calls<E: Engine>(fake: &Fake<E>) -> Vec<(String, usize)> {
    fake.house.tally().calls.into_iter().collect()
}

#[tokio::test]
async fn a_billed_service_gets_the_client_s_calls_and_no_others() {
    let fake = hosted().await;
    let proxy = before(fake.address, "    engine: openai\n    billed: true\n").await;
    let body = edit(&json!({"temperature": 0}));
    let direct = ask(fake.address, CHAT, KEY, &body).await;
    for _ in 0..3 {
        let through = ask(front(&proxy), CHAT, KEY, &body).await;
        assert_eq!(through.plain, direct.plain);
        assert_eq!(
            (through.field("x-foretell-path"), through.field("x-foretell-reason")),
            ("passthrough", "billed")
        );
        assert_eq!(tried(&through), 0);
    }
    assert_eq!(calls(&fake), [(CHAT.to_owned(), 4), ("/v1/models".to_owned(), 1)]);
    assert_eq!(fake.engine.billed(), 4);
}

#[tokio::test]
async fn a_service_that_is_not_billed_is_asked_for_its_models_and_nothing_else() {
    let fake = hosted().await;
    let proxy = before(fake.address, "    engine: openai\n").await;
    let through = ask(front(&proxy), CHAT, KEY, &edit(&json!({}))).await;
    assert_eq!(
        (through.plain.status, through.field("x-foretell-reason"), tried(&through)),
        (200, "no_verify_method", 0)
    );
    assert!(calls(&fake).iter().all(|(path, _)| path == CHAT || path == "/v1/models"), "{:?}", calls(&fake));
}

#[tokio::test]
async fn the_client_s_own_prediction_goes_through() {
    let fake = hosted().await;
    let proxy = before(fake.address, "    engine: openai\n    billed: true\n").await;
    let own = json!({"temperature": 0, "prediction": {"type": "content", "content": "print(1)"}});
    let direct = ask(fake.address, CHAT, KEY, &edit(&own)).await;
    let through = ask(front(&proxy), CHAT, KEY, &edit(&own)).await;
    assert_eq!(through.plain, direct.plain);
    assert!(tried(&through) > 0);
}

async fn passthrough<E: Engine>(fake: &Fake<E>, more: &str, allowed: &[&str]) {
    let proxy = before(fake.address, more).await;
    let body = json!({"model": "toy", "prompt": "The cat sat on", "max_tokens": 8, "temperature": 0});
    let direct = ask(fake.address, "/v1/completions", "", &body).await;
    let through = ask(front(&proxy), "/v1/completions", "", &body).await;
    assert_eq!((direct.plain.status, &through.plain), (200, &direct.plain), "{}", direct.message.text());
    assert_eq!(
        (through.field("x-foretell-path"), through.field("x-foretell-reason")),
        ("passthrough", "no_verify_method")
    );
    let strange = |path: &str| path != "/v1/completions" && !allowed.contains(&path);
    assert!(calls(fake).iter().all(|(path, _)| !strange(path)), "{:?}", calls(fake));
    assert_eq!(fake.house.tally().calls_of("/v1/completions"), 2);
}

const QUESTIONS: [&str; 7] =
    ["/v1/models", "/version", "/props", "/server_info", "/info", "/api/version", "/v2"];

#[rstest]
#[case::tgi(Kind::Tgi, "tgi", &["/v1/models", "/info"])]
#[case::ollama(Kind::Ollama, "ollama", &["/v1/models", "/api/version"])]
#[case::mlx(Kind::Mlx, "mlx", &["/v1/models"])]
#[tokio::test]
async fn servers_without_a_verification_method_are_passed_through_detected_or_configured(
    #[case] kind: Kind,
    #[case] name: &str,
    #[case] allowed: &[&str],
) {
    passthrough(&Fake::start(Passthrough::new(kind, Setup::default())).await, "", &QUESTIONS).await;
    let fake = Fake::start(Passthrough::new(kind, Setup::default())).await;
    passthrough(&fake, &format!("    engine: {name}\n"), allowed).await;
}
