//! A server is asked once for all requests that share everything but their messages if a grammar
//! binds them.

use super::*;

const RENDER: &str = "/v1/chat/completions/render";
/// An answer that is long enough for the server's answer to arrive meanwhile.
const TEXT: &str =
    "There is no tool for this, so here is a text. There is no tool for this, so here is a text.";

impl Server {
    pub fn fake(&self) -> &Fake<Vllm> {
        match self {
            Self::Vllm(fake) => fake,
            Self::Own(..) => panic!("not a fake"),
        }
    }
}

/// Number of requests that a fake has rendered since the last call, those of clients only.
fn rendered(fake: &Fake<Vllm>) -> usize {
    let of_client = |body: &[u8]| String::from_utf8_lossy(body).contains("max_tokens\":400");
    let requests = fake.house.take_requests();
    requests.iter().filter(|request| request.path == RENDER && of_client(&request.body)).count()
}

impl Scene {
    /// A proxy in front of a vLLM whose requests are recorded.
    async fn recorded() -> Self {
        let scene = Self::of(Server::vllm(TEXT, Hermes::AsRead, LATEST).await).await;
        scene.server.fake().house.keep_requests();
        scene
    }

    /// True if this request makes the proxy ask.
    async fn asks(&self, more: &Value) -> bool {
        rendered(self.server.fake());
        self.through(more).await;
        rendered(self.server.fake()) > 0
    }

    /// Sends the request until the answer for its like is known.
    async fn learns(&self, more: &Value) {
        until(PATIENCE, || async { !self.asks(more).await }).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_differ_in_their_messages_ask_once() {
    let scene = Scene::recorded().await;
    let turn = |text: &str| {
        let call =
            json!({"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}});
        json!({"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": text}, {"role": "user", "content": "Go on."}]})
    };
    assert!(scene.asks(&json!({})).await);
    scene.learns(&json!({})).await;
    for text in ["One.", "Two.", "Three.", "Four."] {
        assert!(!scene.asks(&turn(text)).await, "{text}");
    }
    for same in [json!({"user": "somebody"}), json!({"metadata": {"turn": 2}})] {
        assert!(!scene.asks(&same).await, "{same}");
    }
}

#[rstest]
#[case::another_tool(json!({"tools": [weather(), {"type": "function", "function": {"name": "f", "parameters": {}}}]}))]
#[case::another_schema(json!({"tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "required": ["city"]}}}]}))]
#[case::barred(json!({"tool_choice": "none"}))]
#[case::chosen(json!({"tool_choice": "auto"}))]
#[case::parallel(json!({"parallel_tool_calls": true}))]
#[case::format(json!({"response_format": {"type": "text"}}))]
#[case::effort(json!({"reasoning_effort": "low"}))]
#[case::template(json!({"chat_template_kwargs": {"enable_thinking": false}}))]
#[case::temperature(json!({"temperature": 0.0}))]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_member_asks_again(#[case] more: Value) {
    let scene = Scene::recorded().await;
    scene.learns(&json!({})).await;
    assert!(scene.asks(&more).await);
    scene.learns(&more).await;
    assert!(!scene.asks(&json!({})).await, "the first answer is still known");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bound_request_stays_plain_without_being_asked_for() {
    let scene = Scene::proven(CALL).await;
    scene.server.fake().house.keep_requests();
    let single = json!({"parallel_tool_calls": false});
    scene.learns(&single).await;
    let (want, got) = (scene.direct(&single).await, scene.through(&single).await);
    assert_eq!((got.parts, got.told), (want.parts, ("plain".to_owned(), "grammar".to_owned())));
    scene.learns(&json!({})).await;
    assert_eq!(scene.through(&json!({})).await.told.0, "speculated");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_server_is_asked_again() {
    let scene = Scene::recorded().await;
    let none = json!({});
    scene.learns(&none).await;
    scene.server.fake().restart();
    until(PATIENCE, || scene.asks(&none)).await;
    scene.learns(&none).await;
}

/// Its restart would not be seen.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_server_that_renders_is_asked_every_time() {
    let closed = Fake::start(Server::vllm_of(TEXT, Hermes::AsRead, LATEST, false)).await;
    let renders = Fake::start(Server::vllm_of(TEXT, Hermes::AsRead, LATEST, true)).await;
    let line = format!("    render: \"{}\"\n", renders.url());
    let scene = Scene::rendered(Server::Vllm(closed), &line).await;
    renders.house.keep_requests();
    for _ in 0..3 {
        scene.through(&json!({})).await;
        assert_eq!(rendered(&renders), 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_does_not_say_what_binds_is_not_speculated_on() {
    let scene = Scene::proven(CALL).await;
    scene.server.fake().house.faults.always(When::path(RENDER), Fault::Status(500));
    let more = json!({"tools": [weather()], "parallel_tool_calls": false});
    for _ in 0..3 {
        let (want, got) = (scene.direct(&more).await, scene.through(&more).await);
        assert_eq!((got.parts, got.told), (want.parts, ("plain".to_owned(), "grammar".to_owned())));
    }
}
