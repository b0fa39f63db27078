//! Log-probabilities in answers that are written here: those of the server itself.

use std::time::Duration;

use foretell::learning::recording::segment;
use foretell_engines::openai::Route;
use rstest::rstest;
use serde_json::{Value, json};

use crate::client::{Answer, Ask, FORCED};
use crate::end_to_end::house::{House, Setup};
use crate::fakes::Temper;
use crate::fakes::house::Script;
use crate::fakes::vllm::Options;
use crate::structured::{EVERY, Scene};

/// Characters that are several tokens each, words, and punctuation behind spaces.
const TEXT: &str = "Zürich, 東京 and Ørsted: 🦊🦊 , naïve café . 東京 and Ørsted: 🦊🦊 , naïve café . ";

/// The end of a prompt behind which the text is written.
const AFTER: &str = "<|end|>\n<|assistant|>\n";

/// A server whose model likes to write the text once more, and a proxy that verifies by this
/// method.
async fn scene(version: &'static str, method: &str, change: impl FnOnce(&mut Options)) -> Scene {
    let mut options = Options { scale_out: true, prompt_tokens_details: true, ..Options::of(version) };
    options.setup.block = 16;
    options.setup.temper = Temper { eos_every: Some(70), ..Temper::default() };
    options.setup.scripts = vec![Script { after: AFTER.to_owned(), text: TEXT.to_owned() }];
    change(&mut options);
    let backend = format!("    verify: {{ allow: [{method}] }}\n");
    Scene::with(options, &[&format!("{FORCED}{EVERY}")], "", &backend).await
}

/// The answer through the proxy, which is the server's own.
async fn alike(scene: &Scene, ask: &Ask) -> Answer {
    let (want, got) = (scene.direct(ask).await, scene.through(ask).await);
    assert_eq!(got.plain, want.plain, "{ask:?} {:?}", got.foretell());
    assert_eq!(got.ids, want.ids, "{ask:?} {:?}", got.foretell());
    assert_eq!(got.logprobs, want.logprobs, "{ask:?} {:?}", got.foretell());
    got
}

/// Sends the request until it is speculated on.
async fn speculates(scene: &Scene, ask: &Ask) {
    for _ in 0..100 {
        let answer = alike(scene, ask).await;
        let reason = &answer.foretell()["reason"];
        match answer.foretell()["path"].as_str() {
            Some("speculated") => return,
            _ => assert_eq!(reason, "untrusted_ids", "{ask:?}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("never speculated on: {ask:?}");
}

/// A request for log-probabilities of so many tokens in each of the four ways.
fn asked(most: u32, more: &Value) -> Vec<Ask> {
    let mut fields = json!({"prompt": format!("{TEXT}{AFTER}"), "max_tokens": 60, "temperature": 0, "return_token_ids": true});
    fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let mut all = Ask::all(&fields);
    for ask in &mut all {
        let wanted = match ask.route {
            Route::Completions => json!({"logprobs": most}),
            Route::Chat if most == 0 => json!({"logprobs": true}),
            Route::Chat => json!({"logprobs": true, "top_logprobs": most}),
        };
        ask.fields.as_object_mut().unwrap().extend(wanted.as_object().unwrap().clone());
    }
    all
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn they_are_the_servers_own(
    #[values("0.32.0", "0.33.0")] version: &'static str,
    #[values("score", "fan_out")] method: &str,
) {
    let scene = scene(version, method, |_| {}).await;
    // Of a prompt the V1 runner lists every token, so that long lists are asked for by fan-out.
    let longest = if method == "score" { 2 } else { 20 };
    for most in [0, 1, 2, longest] {
        for ask in asked(most, &json!({})) {
            speculates(&scene, &ask).await;
            let answer = alike(&scene, &ask).await;
            assert_eq!(answer.foretell()["path"], "speculated", "{ask:?}");
            assert!(answer.foretell()["accepted"].as_u64().unwrap() > 8, "{ask:?} {:?}", answer.foretell());
        }
    }
    for (more, speculates) in [
        (json!({"stop": ["never there"]}), true),
        (json!({"stop": ["café"]}), true),
        // To the end of the text, which is a token.
        (json!({"max_tokens": 400}), true),
        (json!({"max_tokens": 3}), false),
        (json!({"min_tokens": 50}), method == "fan_out"),
        (json!({"return_token_ids": false}), true),
    ] {
        for ask in asked(2, &more) {
            let answer = alike(&scene, &ask).await;
            assert!(
                !speculates || answer.foretell()["path"] == "speculated",
                "{ask:?} {:?}",
                answer.foretell()
            );
        }
    }
    scene.leave().await;
}

/// Above temperature 0 each token has the numbers that the server gives it behind the same text.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn above_temperature_0_they_belong_to_the_text_that_was_drawn() {
    let scene = scene("0.33.0", "fan_out, score", |_| {}).await;
    for ask in asked(2, &json!({})) {
        speculates(&scene, &ask).await;
    }
    let more = json!({"temperature": 0.9, "top_p": 0.95});
    let mut speculated = 0;
    for ask in asked(2, &more).iter().cycle().take(12) {
        let got = scene.through(ask).await;
        speculated += usize::from(got.foretell()["path"] == "speculated");
        let ids = [got.prompt_ids.as_slice(), &got.ids].concat();
        let fields = json!({"prompt": ids, "max_tokens": 1, "prompt_logprobs": 2});
        let scored = scene.direct(&Ask::new(Route::Completions, false, fields)).await.message.json();
        let rows = scored["choices"][0]["prompt_logprobs"].as_array().unwrap();
        let listed = numbers(ask.route, &got.logprobs);
        assert_eq!(listed.len(), got.ids.len());
        for ((listed, row), id) in listed.iter().zip(&rows[got.prompt_ids.len()..]).zip(&got.ids) {
            let all = row.as_object().unwrap();
            let number = |id: &String| all[id]["logprob"].as_f64().unwrap();
            let mut ids: Vec<&String> = all.keys().collect();
            // The token that was taken, then the likeliest; a chat has two in all.
            ids.sort_by(|a, b| number(b).total_cmp(&number(a)));
            ids.sort_by_key(|listed| **listed != id.to_string());
            let most = if ask.route == Route::Chat { 2 } else { 3 };
            let want: Vec<f64> = ids.into_iter().take(most).map(number).collect();
            assert_eq!(listed, &(want[0], want.clone()), "{ask:?}");
        }
    }
    assert!(speculated > 8, "{speculated}");
    scene.leave().await;
}

/// The number of each token, and those that are listed.
fn numbers(route: Route, logprobs: &Value) -> Vec<(f64, Vec<f64>)> {
    let number = |value: &Value| value.as_f64().unwrap();
    match route {
        Route::Chat => {
            let top = |one: &Value| {
                one["top_logprobs"].as_array().unwrap().iter().map(|top| number(&top["logprob"])).collect()
            };
            let content = logprobs["content"].as_array().unwrap().iter();
            content.map(|one| (number(&one["logprob"]), top(one))).collect()
        }
        Route::Completions => {
            let own = logprobs["token_logprobs"].as_array().unwrap().iter().map(number);
            let tops = logprobs["top_logprobs"].as_array().unwrap().iter();
            own.zip(tops.map(|top| top.as_object().unwrap().values().map(number).collect())).collect()
        }
    }
}

/// Before it is known how a server writes single tokens, an answer's tokens would be those that the
/// tokenizer makes of its text.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_whose_tokens_are_known_by_their_text_alone_is_not_recorded() {
    let folder = tempfile::tempdir().unwrap();
    let policy = format!("{FORCED}{EVERY}corpus: {{ record: true }}\n");
    let record = format!("corpus: {{ record: {{ dir: {} }} }}\n", folder.path().display());
    let mut options = Options { scale_out: true, prompt_tokens_details: true, ..Options::of("0.33.0") };
    options.setup.scripts = vec![Script { after: AFTER.to_owned(), text: TEXT.to_owned() }];
    let scene = Scene::with(options, &[&policy], "", &record).await;
    let ask = asked(2, &json!({})).remove(0);
    let mut plain = 0;
    while scene.through(&ask).await.foretell()["path"] != "speculated" {
        plain += 1;
        assert!(plain < 100, "never speculated on");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(plain > 0);
    let recorded = || {
        let segments = segment::list(folder.path()).unwrap();
        segments.iter().map(|path| segment::read(path, None).unwrap().records.len()).sum::<usize>()
    };
    while recorded() == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(recorded(), 1, "the last one");
    scene.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn before_a_server_that_tidies_single_tokens_they_stay_its_own() {
    let scene = scene("0.33.0", "score", |options| options.tidies = true).await;
    for ask in asked(2, &json!({})).iter().cycle().take(12) {
        let told = alike(&scene, ask).await.foretell().clone();
        assert_eq!((&told["path"], &told["reason"]), (&json!("plain"), &json!("untrusted_ids")), "{ask:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    scene.leave().await;
}

#[rstest]
#[case::older("0.24.0", json!({}))]
#[case::grammar("0.33.0", json!({"response_format": {"type": "json_object"}}))]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_written_here_is_relayed(#[case] version: &'static str, #[case] more: Value) {
    let scene = scene(version, "score, fan_out", |_| {}).await;
    for mut ask in asked(2, &json!({})) {
        let zero = json!({"presence_penalty": 0, "frequency_penalty": 0});
        for part in [&more, &zero] {
            ask.fields.as_object_mut().unwrap().extend(part.as_object().unwrap().clone());
        }
        let got = alike(&scene, &ask).await;
        assert_eq!(got.message.head.get("x-foretell-path"), Some("relayed"), "{ask:?}");
    }
    scene.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn more_than_servers_list_are_relayed() {
    let scene = scene("0.33.0", "score, fan_out", |_| {}).await;
    for ask in asked(21, &json!({})) {
        let got = alike(&scene, &ask).await;
        assert_eq!(
            (got.plain.status, got.message.head.get("x-foretell-path")),
            (400, Some("relayed")),
            "{ask:?}"
        );
    }
    scene.leave().await;
}

/// Our own target goes on with a seed.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn those_of_our_own_target_are_its_own(#[values("[tree]", "[fan_out]")] methods: &str) {
    let house = House::build(Setup { methods, ..Setup::default() }).await;
    let prompt = "take the fox, take the dog: let mut taken = String::new(); ";
    let mut speculated = 0;
    for more in
        [json!({"prompt": prompt}), json!({"prompt": prompt, "temperature": 0.7, "seed": 5, "top_p": 0.9})]
    {
        for most in [0, 2, 20] {
            for ask in asked(most, &more) {
                let (want, got) = (house.direct(&ask).await, house.through(&ask, "a").await);
                assert_eq!(got.plain, want.plain, "{ask:?}");
                assert_eq!(got.logprobs, want.logprobs, "{ask:?} {:?}", got.foretell());
                speculated += usize::from(got.foretell()["path"] == "speculated");
            }
        }
    }
    assert!(speculated > 18, "{speculated}");
    House::assert_calm();
}
