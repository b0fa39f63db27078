//! Calls that a request forces, wants strict or wants one of at most: vLLM binds them by a
//! structural tag, which is followed here once it has proved itself.

use super::*;
use crate::fakes::vllm::Library;

/// As long as a proof may take.
const PROOF: Duration = Duration::from_mins(1);
const PROMPTS: [&str; 2] = ["Call.", "Look."];
const LIMITS: [usize; 4] = [1, 7, 40, 120];

fn tools(strict: bool) -> Value {
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"], "additionalProperties": false});
    let tool = |name: &str| json!({"type": "function", "function": {"name": name, "strict": strict, "parameters": schema}});
    json!([tool("weather"), tool("climate")])
}

fn named() -> Value {
    json!({"type": "function", "function": {"name": "climate"}})
}

/// A vLLM whose model writes calls after one prompt, text and a call after another, and anything
/// after a third.
fn server(version: &'static str) -> Options {
    let Vllm { mut options, .. } = Server::vllm_of("", Hermes::AsRead, version, true);
    options.setup.scripts.retain(|script| !script.after.starts_with("Go on."));
    options.setup.scripts.push(Script {
        after: "Look.<|end|>\n<|assistant|>\n".to_owned(),
        text: format!("Let me look that up. Let me look that up.\n{CALL}"),
    });
    options.setup.temper = Temper { punctuates: true, eos_every: Some(60), ..Temper::default() };
    options
}

impl Scene {
    async fn tagged(options: Options) -> Self {
        Self::of(Server::Vllm(Fake::start(Vllm::new(options)).await)).await
    }

    /// Compares answers until the grammar has proved itself.
    async fn proves_tag(&self, more: &Value) {
        let begun = std::time::Instant::now();
        loop {
            let (want, got) = (self.direct(more).await, self.through(more).await);
            assert_eq!(got.parts, want.parts, "{more}");
            if got.told.0 == "speculated" {
                return;
            }
            let waits = ["grammar", "parser"].contains(&got.told.1.as_str());
            assert!(waits && begun.elapsed() < PROOF, "{:?} {more}", got.told);
        }
    }

    async fn alike(&self, more: &Value) -> BTreeSet<(String, String)> {
        let mut told = BTreeSet::new();
        for prompt in PROMPTS.into_iter().chain(["Any.", "Go on and on."]) {
            for most in LIMITS {
                let mut more = more.clone();
                more["messages"] = json!([{"role": "user", "content": prompt}]);
                more["max_tokens"] = json!(most);
                let (want, got) = (self.direct(&more).await, self.through(&more).await);
                assert_eq!(got.parts, want.parts, "{more} {:?}", got.told);
                told.insert(got.told);
                let (want, _) = ask_whole(self.server.address(), &more).await;
                let (got, path) = ask_whole(self.proxy.gateway.addresses[0], &more).await;
                assert_eq!(got, want, "{more} {path:?}");
                told.insert(path);
            }
        }
        told
    }
}

#[rstest]
#[case::strict("0.32.0", json!({"tools": tools(true)}))]
#[case::strict_v2(LATEST, json!({"tools": tools(true)}))]
#[case::single("0.32.0", json!({"tools": tools(false), "parallel_tool_calls": false}))]
#[case::single_strict(LATEST, json!({"tools": tools(true), "parallel_tool_calls": false}))]
#[case::required(LATEST, json!({"tools": tools(false), "tool_choice": "required"}))]
#[case::required_strict("0.32.0", json!({"tools": tools(true), "tool_choice": "required"}))]
#[case::required_single(LATEST, json!({"tools": tools(true), "tool_choice": "required", "parallel_tool_calls": false}))]
#[case::named(LATEST, json!({"tools": tools(false), "tool_choice": named()}))]
#[case::named_strict("0.32.0", json!({"tools": tools(true), "tool_choice": named()}))]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_under_a_tag_are_speculated_on(#[case] version: &'static str, #[case] more: Value) {
    let scene = Scene::tagged(server(version)).await;
    for prompt in PROMPTS {
        let mut more = more.clone();
        more["messages"] = json!([{"role": "user", "content": prompt}]);
        scene.proves_tag(&more).await;
    }
    let told = scene.alike(&more).await;
    scene.has_speculated(&told);
    assert!(!told.iter().any(|(_, reason)| reason == "parser"), "{told:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fixed_whitespace_changes_no_tag() {
    let scene = Scene::tagged(Options { library: Library::FixedWhitespace, ..server(LATEST) }).await;
    let mut more = json!({"tools": tools(true), "tool_choice": "required"});
    for prompt in PROMPTS {
        more["messages"] = json!([{"role": "user", "content": prompt}]);
        scene.proves_tag(&more).await;
    }
    scene.has_speculated(&scene.alike(&more).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_that_nothing_binds_are_speculated_on() {
    let scene = Scene::tagged(server("0.33.0")).await;
    let more = json!({"tools": tools(false)});
    for _ in 0..4 {
        let mut more = more.clone();
        more["messages"] = json!([{"role": "user", "content": "Call."}]);
        scene.proves_tag(&more).await;
    }
    let told = scene.alike(&more).await;
    scene.has_speculated(&told);
}

/// Every answer is the server's own, and none is speculated on.
async fn stays_plain(scene: &Scene, more: &Value) {
    for _ in 0..6 {
        let (want, got) = (scene.direct(more).await, scene.through(more).await);
        assert_eq!((got.parts, got.told.0.as_str()), (want.parts, "plain"), "{more}");
        let (want, _) = ask_whole(scene.server.address(), more).await;
        let (got, path) = ask_whole(scene.proxy.gateway.addresses[0], more).await;
        assert_eq!((got, path.0.as_str()), (want, "plain"), "{more}");
    }
}

/// Where no tag binds a forced call, its output is the arguments alone, which no parser here reads;
/// that says nothing against the parser of other calls.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_forced_call_without_a_tag_stays_plain() {
    let scene = Scene::tagged(Options { strict_calling: false, ..server(LATEST) }).await;
    stays_plain(&scene, &json!({"tools": tools(true), "tool_choice": named()})).await;
    for _ in 0..3 {
        scene.proves_tag(&json!({"messages": [{"role": "user", "content": "Call."}]})).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_does_not_say_what_binds_is_not_followed() {
    let scene = Scene::tagged(server(LATEST)).await;
    scene.server.fake().house.faults.always(When::path(grammars::RENDER), Fault::Status(500));
    for more in [json!({"tools": tools(true), "tool_choice": named()}), json!({"tools": tools(true)})] {
        stays_plain(&scene, &more).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tag_before_another_library_is_not_followed() {
    let scene = Scene::tagged(Options { library: Library::Unknown, ..server(LATEST) }).await;
    stays_plain(&scene, &json!({"tools": tools(true), "tool_choice": named()})).await;
}

/// Sampling under which no grammar is followed.
#[rstest]
#[case::min_tokens(json!({"tools": tools(true), "min_tokens": 1}))]
#[case::penalty(json!({"tools": tools(true), "tool_choice": "required", "presence_penalty": 0.1}))]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_not_followed_is_not_speculated_on(#[case] more: Value) {
    let scene = Scene::tagged(server(LATEST)).await;
    for _ in 0..4 {
        let (want, got) = (scene.direct(&more).await, scene.through(&more).await);
        assert_eq!(got.parts, want.parts, "{more}");
        assert_ne!(got.told.0, "speculated", "{more}");
    }
}
