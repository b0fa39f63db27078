//! Chats of an engine whose streams tell no ids begin with their first token, which comes as an
//! answer of its own. Where that may not be, or does not help, the client's own request is sent.

use std::net::SocketAddr;

use foretell::app::Running;
use foretell::app::local;
use foretell_wire::openai::Route;
use rstest::rstest;
use serde_json::{Value, json};

use super::contract::PROMPTS;
use super::house::setup;
use crate::client::{Ask, CONTROL_GROUP, FORCED};
use crate::fakes::sglang::{Options, Sglang};
use crate::fakes::{Fake, Setup, toy};

const CHAT: &str = "/v1/chat/completions";
/// The paths by which drafts are verified.
const VERIFIES: [&str; 2] = ["/generate", "/v1/completions"];

async fn sglang(change: impl FnOnce(&mut Options)) -> Fake<Sglang> {
    let house = Options::default().setup;
    let mut options = Options { setup: Setup { temper: setup(None).temper, ..house }, ..Options::default() };
    change(&mut options);
    let fake = Fake::start(Sglang::new(options)).await;
    fake.house.keep_requests();
    fake
}

async fn proxy(address: SocketAddr, policy: &str) -> Running {
    proxy_with(address, policy, "").await
}

/// `model`: further members of its entry.
async fn proxy_with(address: SocketAddr, policy: &str, model: &str) -> Running {
    let process = format!(
        "version: 1\nbackends:\n  - name: toy\n    replicas: [\"http://{address}\"]\n    \
         models: [{{ id: toy, tokenizer: {}{model} }}]\n    probe: {{ when: never }}\n    load: {{ every: 1h }}\n",
        toy::folder().join("tokenizer.json").display(),
    );
    local::proxy(&process, &[policy]).await.unwrap()
}

fn ask(stream: bool, more: &Value) -> Ask {
    let mut fields =
        json!({"prompt": PROMPTS[0], "max_tokens": 40, "temperature": 0, "repetition_penalty": 1});
    fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    Ask::new(Route::Chat, stream, fields)
}

/// The chats that the engine got since the last call, and the number of verify requests.
fn calls(fake: &Fake<Sglang>) -> (Vec<Value>, usize) {
    let all = fake.house.take_requests();
    let body = |request: &crate::fakes::http::Request| serde_json::from_slice(&request.body).unwrap();
    let chats = all.iter().filter(|request| request.path == CHAT).map(body).collect();
    (chats, all.iter().filter(|request| VERIFIES.contains(&request.path.as_str())).count())
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chat_is_asked_for_its_first_token_and_its_rest(#[values(true, false)] stream: bool) {
    let fake = sglang(|_| {}).await;
    let proxy = proxy(fake.address, FORCED).await;
    let front = proxy.gateway.addresses[0];
    calls(&fake);
    for more in [json!({}), json!({"max_tokens": 1}), json!({"max_completion_tokens": 3})] {
        let ask = ask(stream, &more);
        let want = ask.send(fake.address, "").await;
        calls(&fake);
        let got = ask.send(front, "").await;
        let (chats, verifies) = calls(&fake);
        assert_eq!((&got.plain, &got.usage["prompt_tokens"]), (&want.plain, &want.usage["prompt_tokens"]));
        let [first] = chats.as_slice() else { panic!("{chats:?}") };
        assert_eq!((&first["stream"], &first["max_tokens"]), (&json!(false), &json!(1)), "{first}");
        assert_eq!(verifies > 0, more != json!({"max_tokens": 1}), "{more}");
    }
}

/// The engine refuses what its context cannot hold, and would take one token of it; a stop text may
/// be in the first token, and a stop text that special tokens have in them is the engine's.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_and_stop_texts_are_the_engines_own(#[values(true, false)] stream: bool) {
    let fake = sglang(|options| options.setup.max_len = 256).await;
    let proxy = proxy(fake.address, FORCED).await;
    let text = ask(false, &json!({})).send(fake.address, "").await.plain.text;
    let first: String = text.chars().take(2).collect();
    for more in [
        json!({"max_tokens": 200}),
        json!({"max_tokens": 250}),
        json!({"max_tokens": 300}),
        json!({"stop": first}),
        json!({"stop": text.chars().skip(12).take(3).collect::<String>()}),
        json!({"stop": "<|end|>"}),
    ] {
        let ask = ask(stream, &more);
        let want = ask.send(fake.address, "").await;
        let got = ask.send(proxy.gateway.addresses[0], "").await;
        assert_eq!(got.plain, want.plain, "{more}");
    }
    calls(&fake);
    let last = ask(stream, &json!({})).send(proxy.gateway.addresses[0], "").await;
    assert!(calls(&fake).1 > 0, "a stop text in a first token is no reason to stay plain: {:?}", last.plain);
}

/// The route of the rest has other defaults than chats, so all of them are sent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_rest_is_sampled_by_the_defaults_of_the_model() {
    let fake = sglang(|options| options.deterministic = true).await;
    let own = json!({"temperature": 0.6, "top_p": 0.8, "top_k": 20, "eos_token_id": 0});
    {
        let mut defaults = fake.house.defaults.lock();
        (defaults.temperature, defaults.top_p, defaults.top_k) = (Some(0.6), Some(0.8), Some(20));
    }
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("generation_config.json"), own.to_string()).unwrap();
    let named = format!(", generation_config: {}", folder.path().display());
    for (model, passthrough) in [("", true), (named.as_str(), false)] {
        let proxy = proxy_with(fake.address, FORCED, model).await;
        for stream in [true, false] {
            let fields = json!({"prompt": PROMPTS[0], "max_tokens": 40, "seed": 7});
            let ask = Ask::new(Route::Chat, stream, fields);
            let want = ask.send(fake.address, "").await;
            calls(&fake);
            let got = ask.send(proxy.gateway.addresses[0], "").await;
            let (_, verifies) = calls(&fake);
            // With deterministic inference the noise is a function of seed and position.
            assert_eq!(got.plain, want.plain, "{model}");
            assert_eq!(verifies == 0, passthrough, "{model}");
            let reason = got.message.head.get("x-foretell-reason");
            assert_eq!(reason == Some("defaults_unknown"), passthrough, "{reason:?}");
        }
    }
}

/// The client gets the engine's own bytes, and the engine the client's own request alone.
#[rstest]
#[case::a_parser(|options: &mut Options| options.setup.reasoning_end = Some(" the".to_owned()), FORCED, 0)]
#[case::no_ids(|options: &mut Options| options.chat_ids = false, FORCED, 1)]
#[case::control_group(|_: &mut Options| {}, CONTROL_GROUP, 0)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn otherwise_it_passes_unchanged(
    #[case] change: fn(&mut Options),
    #[case] policy: &str,
    #[case] tried: usize,
) {
    let fake = sglang(change).await;
    let proxy = proxy(fake.address, policy).await;
    calls(&fake);
    let mut asked = Vec::new();
    for stream in [true, false, true] {
        let ask = ask(stream, &json!({}));
        let got = ask.send(proxy.gateway.addresses[0], "").await;
        let (chats, verifies) = calls(&fake);
        let want = ask.send(fake.address, "").await;
        calls(&fake);
        assert_eq!((got.plain, verifies), (want.plain, 0));
        assert_eq!(chats.iter().filter(|chat| chat["max_tokens"] == 40).count(), 1, "{chats:?}");
        asked.push(chats.len());
    }
    // Once it is known that first tokens tell no ids, they are not asked for again.
    assert_eq!(asked, [1 + tried, 1 + tried, 1]);
}
