//! Servers whose grammars are not followed here: their answers stay plain.

use rstest::rstest;

use super::same::structures;
use super::*;
use crate::fakes::house::Script;

/// A schema with a member that xgrammar ignores.
fn foreign() -> Value {
    schema(&json!({"type": "array", "items": {"type": "integer", "multipleOf": 2}, "maxItems": 4}))
}

/// The answers stay plain, whatever the grammar is, and the server is asked once what it uses.
async fn stays_plain(scene: &Scene) {
    for structure in [0, 9, 13, 17].map(|at| structures()[at].clone()) {
        for (route, stream) in [(Route::Completions, false), (Route::Chat, true)] {
            scene.stays_plain(&asked(route, stream, &structure, &json!({}))).await;
        }
    }
    let requests = scene.engine.house.take_requests();
    let questions = requests
        .iter()
        .filter_map(crate::fakes::http::Request::json)
        .filter(|body| body.get("structured_outputs").is_some() && body.get("allowed_token_ids").is_some());
    assert!((1..5).contains(&questions.count()), "they are not asked again");
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_with_another_library_is_left_alone(#[values("0.32.0", "0.33.0")] version: &'static str) {
    let scene = Scene::of(Options { library: Library::Unknown, ..options(version) }).await;
    stays_plain(&scene).await;
    scene.leave().await;
}

/// An answer shows the likeliest tokens only, and the version of the library is not known.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grammars_of_llguidance_stay_plain_above_temperature_0() {
    let scene = Scene::of(Options { library: Library::Guidance, ..options("0.33.0") }).await;
    let structure = &structures()[0];
    let sampled = json!({"temperature": 0.8});
    scene.stays_plain(&asked(Route::Completions, false, structure, &sampled)).await;
    scene.proves(&asked(Route::Completions, false, structure, &json!({}))).await;
    scene.leave().await;
}

/// The first grammar of a process decides which library it uses.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_server_is_asked_anew() {
    let scene = Scene::of(options("0.33.0")).await;
    let ask = asked(Route::Chat, true, &structures()[0], &json!({}));
    scene.proves(&ask).await;
    let admin = scene.proxy.gateway.admin.unwrap();
    let epoch =
        async || crate::client::get(admin, "/api/replicas").await.json()["replicas"][0]["epoch"].clone();
    let before = epoch().await;
    scene.engine.restart();
    let begun = Instant::now();
    while epoch().await == before || epoch().await.is_null() {
        assert!(begun.elapsed() < PATIENCE, "the old epoch still stands");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    scene.direct(&asked(Route::Chat, false, &foreign(), &json!({}))).await;
    let forced = json!({"structured_outputs": {"json": {"type": "object", "additionalProperties": false,
        "required": ["language"], "properties": {"language": {"type": "string"}}}}});
    for structure in [&structures()[0], &forced] {
        scene.proves(&asked(Route::Completions, true, structure, &json!({}))).await;
    }
    scene.leave().await;
}

/// A library of the same name with other rules shows itself by an answer in which they matter.
#[rstest]
#[case::more(Library::MoreMembers, "{\"name\": \"Bob\", \"age\": 42, \"size\": 7}")]
#[case::fewer(Library::FewerMembers, "{\"name\": \"Bob\", \"age\": 42, \"tags\": [\"a\"]}")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grammar_whose_answer_differs_is_refused(
    #[case] library: Library,
    #[case] text: &str,
    #[values("0.32.0", "0.33.0")] version: &'static str,
) {
    let mut options = Options { library, ..options(version) };
    let after = "<|end|>\n<|assistant|>\n".to_owned();
    options.setup.scripts = vec![Script { after, text: text.to_owned() }];
    let scene = Scene::of(options).await;
    let person = json!({"type": "object", "required": ["name", "age"], "properties": {"name": {"type": "string"},
        "age": {"type": "integer"}, "tags": {"type": "array", "items": {"type": "string"}}}});
    for stream in [true, false] {
        scene.stays_plain(&asked(Route::Chat, stream, &schema(&person), &json!({}))).await;
    }
    // Others are not concerned.
    let choice = json!({"structured_outputs": {"choice": ["{\"name\": 1}", "{\"name\": 2}", "no"]}});
    scene.proves(&asked(Route::Chat, true, &choice, &json!({}))).await;
    scene.leave().await;
}
