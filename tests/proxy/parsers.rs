//! Chats whose server parses tool calls: speculated on, they have the parts that the server's own
//! parser gives.

mod grammars;
mod messages;
mod responses;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use foretell::app::local::LocalTarget;
use foretell::app::{Running, local};
use foretell_onnx::target::hugging::FolderWords;
use foretell_onnx::target::metrics::Metrics;
use foretell_onnx::target::scheduler;
use foretell_onnx::target::server::App;
use foretell_parsers::parse::{Parsers, ToolFormat};
use foretell_parsers::text::Tokenizer;
use foretell_wire::openai::Route;
use rstest::rstest;
use serde_json::{Map, Value, json};

use crate::client::{CONTROL_GROUP, FORCED, panics, watch_panics};
use crate::end_to_end::model::{self, Babble};
use crate::fakes::fault::{Fault, When};
use crate::fakes::house::{Hermes, Script};
use crate::fakes::toy::{Temper, Toy};
use crate::fakes::vllm::{Options, Vllm};
use crate::fakes::{Fake, Setup, toy};
use crate::probe::house::until;
use crate::wire::{Message, PATIENCE, Wire, post};

/// Tokens that the model may write.
const MOST: usize = 400;
/// The page that parses a complete output.
const DERENDER: &str = "/v1/chat/completions/derender";
/// The version of vLLM where a test does not name one.
const LATEST: &str = "0.33.0";
const STEP: Duration = Duration::from_millis(1);

/// A server whose chats are parsed.
enum Server {
    Vllm(Fake<Vllm>),
    Own(LocalTarget, Arc<Tokenizer>),
}

impl Server {
    /// A vLLM with the tool parser `hermes` whose model writes this text after "Go on.".
    async fn vllm(text: &str, hermes: Hermes, version: &'static str) -> Self {
        Self::Vllm(Fake::start(Self::vllm_of(text, hermes, version, true)).await)
    }

    /// `scale_out`: it renders requests.
    fn vllm_of(text: &str, hermes: Hermes, version: &'static str, scale_out: bool) -> Vllm {
        let script = |after: &str, text: &str| Script {
            after: format!("{after}<|end|>\n<|assistant|>\n"),
            text: text.to_owned(),
        };
        let scripts = vec![script("Go on.", text), script("Call.", CALL), script("Say.", "Well.")];
        let mut setup = Setup { hermes: Some(hermes), scripts, ..Setup::default() };
        // Leaves time for the call that renders the request.
        setup.pace.step = STEP;
        Vllm::new(Options { scale_out, prompt_tokens_details: true, setup, ..Options::of(version) })
    }

    /// `foretell target` with the same parser, whose model always writes this text.
    async fn own(text: &str) -> Self {
        let words = tempfile::tempdir().unwrap();
        let tokenizer = model::words(words.path());
        let script = tokenizer.encode(text, false).unwrap();
        let after = tokenizer.id("<|assistant|>").unwrap();
        let babble = Babble::new(&tokenizer, 4096, 24).with_step(STEP).with_script(after, script);
        let metrics = Arc::new(Metrics::new().unwrap());
        let engine = scheduler::Engine::start(Box::new(babble), Arc::clone(&metrics)).unwrap();
        let read = Arc::new(FolderWords::read(words.path()).unwrap());
        let parsers = Parsers { tools: Some(ToolFormat::Hermes), reasoning: None };
        let app = App::new("toy".into(), engine, read, metrics).with_parsers(parsers).unwrap();
        Self::Own(LocalTarget::start(app).await.unwrap(), tokenizer)
    }

    fn address(&self) -> SocketAddr {
        match self {
            Self::Vllm(fake) => fake.address,
            Self::Own(target, ..) => target.address,
        }
    }

    /// Number of tokens of a text.
    fn length(&self, text: &str) -> usize {
        match self {
            Self::Vllm(fake) => fake.house.toy.encode(text).len(),
            Self::Own(_, tokenizer) => tokenizer.encode(text, false).unwrap().len(),
        }
    }

    /// Requests that no server should get.
    fn fatal(&self) -> Vec<String> {
        match self {
            Self::Vllm(fake) => fake.house.fatal(),
            Self::Own(..) => Vec::new(),
        }
    }
}

struct Scene {
    server: Server,
    proxy: Running,
}

impl Scene {
    /// A proxy in front of this server that speculates at every token.
    async fn of(server: Server) -> Self {
        Self::rendered(server, "").await
    }

    /// As [`Scene::of`]; `render` is a line of the backend.
    async fn rendered(server: Server, render: &str) -> Self {
        Self::under(server, render, &format!("{FORCED}holdback: {{ start: 0, floor: 0 }}\n")).await
    }

    /// As [`Scene::rendered`], under this policy.
    async fn under(server: Server, render: &str, policy: &str) -> Self {
        watch_panics();
        let model = match &server {
            Server::Vllm(fake) => {
                let Setup { words, hermes, .. } = &fake.house.setup;
                let parsers = hermes.map_or("", |_| ", parsers: { tools: hermes }");
                format!("{{ id: toy, tokenizer: {}{parsers} }}", words.join("tokenizer.json").display())
            }
            Server::Own(..) => "{ id: toy }".to_owned(),
        };
        let process = format!(
            "version: 1\nbackends:\n  - name: toy\n    replicas: [\"http://{}\"]\n    models: [{model}]\n{render}    \
             probe: {{ when: never }}\n",
            server.address(),
        );
        let proxy = local::proxy(&process, &[policy]).await.unwrap();
        Self { server, proxy }
    }

    /// A vLLM whose parser has proved itself on answers that stayed plain.
    async fn proven(text: &str) -> Self {
        Self::proven_of(text, LATEST).await
    }

    async fn proven_of(text: &str, version: &'static str) -> Self {
        let scene = Self::of(Server::vllm(text, Hermes::AsRead, version).await).await;
        scene.prove().await;
        scene
    }

    /// The first answer ends by a special token, which the server does not show though it decodes
    /// such tokens.
    async fn prove(&self) {
        let first = json!({"messages": [{"role": "user", "content": "Say."}]});
        let call = json!({"messages": [{"role": "user", "content": "Call."}]});
        for more in [&first, &call, &call] {
            let (want, got) = (self.direct(more).await, self.through(more).await);
            assert_eq!((got.parts, got.told), (want.parts, ("plain".to_owned(), "parser".to_owned())));
        }
    }

    async fn direct(&self, more: &Value) -> Answer {
        ask(self.server.address(), more).await
    }

    async fn through(&self, more: &Value) -> Answer {
        ask(self.proxy.gateway.addresses[0], more).await
    }

    /// Compares streams with those of the server: whole, and cut in every third place, also within
    /// markers and calls.
    async fn streams_alike(&self, text: &str) {
        let limits = (2..self.server.length(text)).step_by(3).chain([MOST]);
        let mut told = BTreeSet::new();
        for most in limits {
            let more = json!({"max_tokens": most});
            let (want, got) = (self.direct(&more).await, self.through(&more).await);
            assert_eq!(got.parts, want.parts, "{most} tokens of {text:?}");
            assert!(got.ids.iter().all(|id| id.starts_with("chatcmpl-tool-")), "{:?}", got.ids);
            told.insert(got.told);
        }
        self.has_speculated(&told);
    }

    /// Compares answers that are not streamed.
    async fn wholes_alike(&self, text: &str) {
        let mut told = BTreeSet::new();
        for most in (2..self.server.length(text)).step_by(5).chain([MOST; 4]) {
            let more = json!({"max_tokens": most});
            let (want, _) = ask_whole(self.server.address(), &more).await;
            let (got, path) = ask_whole(self.proxy.gateway.addresses[0], &more).await;
            assert_eq!(got, want, "{most} tokens of {text:?}");
            told.insert(path);
        }
        self.has_speculated(&told);
    }

    fn has_speculated(&self, told: &BTreeSet<(String, String)>) {
        assert!(told.iter().any(|(path, _)| path == "speculated"), "{told:?}");
        assert_eq!((self.server.fatal(), panics()), (Vec::<String>::new(), Vec::<String>::new()));
    }
}

/// The parts of a streamed answer, joined.
#[derive(Debug, PartialEq)]
struct Parts {
    content: String,
    calls: Vec<(String, String)>,
    finish: Value,
    /// The stop that ended it, if one is named.
    stop: Value,
    usage: Value,
    /// Kinds of deltas, repetitions left out.
    kinds: Vec<String>,
}

struct Answer {
    parts: Parts,
    /// Its path, and its reason.
    told: (String, String),
    /// Ids of its calls.
    ids: Vec<String>,
}

fn weather() -> Value {
    json!({"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}})
}

async fn ask(to: SocketAddr, more: &Value) -> Answer {
    let mut body = json!({"model": "toy", "messages": [{"role": "user", "content": "Go on."}], "temperature": 0,
        "max_tokens": MOST, "stream": true, "stream_options": {"include_usage": true}, "tools": [weather()]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let fields = "content-type: application/json\r\nte: trailers\r\nconnection: te\r\n";
    let message =
        Wire::connect(to).await.ask(post(Route::Chat.path(), fields, body.to_string().as_bytes())).await;
    assert_eq!(message.head.status(), 200, "{}", message.text());
    read(&message)
}

fn read(message: &Message) -> Answer {
    let mut parts = Parts {
        content: String::new(),
        calls: Vec::new(),
        finish: Value::Null,
        stop: Value::Null,
        usage: Value::Null,
        kinds: Vec::new(),
    };
    let mut ids = Vec::new();
    for line in message.text().lines().filter_map(|line| line.strip_prefix("data: {")) {
        let event: Value = serde_json::from_str(&format!("{{{line}")).unwrap();
        let choice = &event["choices"][0];
        parts.content += choice["delta"]["content"].as_str().unwrap_or_default();
        for call in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
            let at = call["index"].as_u64().unwrap() as usize;
            if let Some(id) = call["id"].as_str() {
                assert_eq!((at, call["type"].as_str()), (parts.calls.len(), Some("function")));
                ids.push(id.to_owned());
                parts.calls.push((call["function"]["name"].as_str().unwrap().to_owned(), String::new()));
            }
            parts.calls[at].1 += call["function"]["arguments"].as_str().unwrap_or_default();
        }
        if choice["finish_reason"].is_string() {
            parts.finish = choice["finish_reason"].clone();
            parts.stop = choice["stop_reason"].clone();
        }
        if event["usage"].is_object() {
            parts.usage = without_own(&event["usage"]);
        }
        parts.kinds.extend(kind(choice).map(str::to_owned));
    }
    parts.kinds.dedup();
    let trailer = |name: &str| {
        let line = message.trailers.iter().find_map(|line| line.strip_prefix(&format!("{name}: ")));
        line.unwrap_or_default().to_owned()
    };
    Answer { parts, told: (trailer("x-foretell-path"), trailer("x-foretell-reason")), ids }
}

/// As [`ask`], for an answer that is not streamed: the answer without what differs by nature, and
/// its path and reason.
async fn ask_whole(to: SocketAddr, more: &Value) -> (Value, (String, String)) {
    try_whole(to, more).await.unwrap()
}

/// As [`ask_whole`]; the status and the path of an answer that failed.
async fn try_whole(to: SocketAddr, more: &Value) -> Result<(Value, (String, String)), (u16, String)> {
    let mut body = json!({"model": "toy", "messages": [{"role": "user", "content": "Go on."}], "temperature": 0,
        "max_tokens": MOST, "tools": [weather()]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let fields = "content-type: application/json\r\n";
    let message =
        Wire::connect(to).await.ask(post(Route::Chat.path(), fields, body.to_string().as_bytes())).await;
    if message.head.status() != 200 {
        let path = message.head.get("x-foretell-path").unwrap_or_default();
        return Err((message.head.status(), path.to_owned()));
    }
    let mut answer: Value = serde_json::from_str(&message.text()).unwrap();
    let calls = answer.pointer_mut("/choices/0/message/tool_calls").and_then(Value::as_array_mut);
    for call in calls.into_iter().flatten() {
        assert!(call["id"].as_str().unwrap().starts_with("chatcmpl-tool-"), "{call}");
        call["id"] = Value::Null;
    }
    answer["usage"] = without_own(&answer["usage"]);
    for name in ["id", "created"] {
        answer[name] = Value::Null;
    }
    answer["choices"][0]["seed"] = Value::Null;
    let told = ["x-foretell-path", "x-foretell-reason"]
        .map(|name| message.head.get(name).unwrap_or_default().to_owned());
    let [path, reason] = told;
    Ok((answer, (path, reason)))
}

/// Usage without Foretell's own report and what depends on the state of the cache.
fn without_own(usage: &Value) -> Value {
    let members = usage.as_object().unwrap().iter();
    let kept = members.filter(|(name, _)| !["foretell", "prompt_tokens_details"].contains(&name.as_str()));
    Value::Object(kept.map(|(name, value)| (name.clone(), value.clone())).collect::<Map<_, _>>())
}

fn kind(choice: &Value) -> Option<&'static str> {
    let delta = &choice["delta"];
    match () {
        () if delta["tool_calls"].is_array() => Some("call"),
        () if choice["finish_reason"].is_string() => None,
        () if delta["role"].is_string() => Some("role"),
        () if delta["content"].as_str().is_some_and(|text| !text.is_empty()) => Some("content"),
        () if choice.is_object() => Some("empty"),
        () => None,
    }
}

const CALL: &str =
    "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Bern\", \"days\": 3}}\n</tool_call>";

#[rstest]
#[case::text("There is no tool for this, so here is a text. There is no tool for this, so here is a text.")]
#[case::call(CALL)]
#[case::text_and_call(&format!("Let me look that up. Let me look that up.\n{CALL}"))]
#[case::two_calls(&format!("{CALL}\n{CALL}"))]
#[case::nested(
    "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"at\": {\"where\": [1, {\"a\": \"}\"}]}, \"note\": \"<tool_call> é 😀 \\\"x\\\"\"}}\n</tool_call>"
)]
#[case::no_arguments("<tool_call>\n{\"name\": \"weather\", \"arguments\": {}}\n</tool_call>")]
#[case::text_after(&format!("{CALL}\nThat is all. That is all. That is all."))]
#[case::half_a_marker("A tag begins here: <tool_")]
#[case::broken("<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \n</tool_call> and on")]
#[case::unknown_function(
    "<tool_call>\n{\"name\": \"nothing\", \"arguments\": {\"city\": \"Bern\"}}\n</tool_call>"
)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_has_the_servers_own_parts(#[case] text: &str) {
    Scene::proven(text).await.streams_alike(text).await;
}

/// The server parses it by other code than a stream: arguments are written again, and one call that
/// cannot be read hides all. Its own page is the judge, so nothing has to be proved before.
#[rstest]
#[case::text("There is no tool for this, so here is a text. There is no tool for this, so here is a text.")]
#[case::call(CALL)]
#[case::text_and_call(&format!("Let me look that up. Let me look that up.\n{CALL}"))]
#[case::two_calls(&format!("{CALL}\n{CALL}"))]
#[case::tight(
    "<tool_call>{\"name\":\"weather\",\"arguments\":{\"city\":\"Bern\",\"days\":[1,2,3]}}</tool_call>"
)]
#[case::text_after(&format!("{CALL}\nThat is all. That is all. That is all."))]
#[case::broken("<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \n</tool_call> and on")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_whole_answer_has_the_servers_own_parts(
    #[case] text: &str,
    #[values(Hermes::AsRead, Hermes::LeavesBrace)] hermes: Hermes,
) {
    Scene::of(Server::vllm(text, hermes, LATEST).await).await.wholes_alike(text).await;
}

/// The page that parses whole answers fails: a parser that has proved nothing gives none, so a
/// speculated answer fails, and one that stayed plain has the parts of the server's stream.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_parser_that_has_not_proved_itself_never_stands_in_for_the_server(
    #[values(Hermes::AsRead, Hermes::LeavesBrace)] hermes: Hermes,
) {
    let scene = Scene::of(Server::vllm(CALL, hermes, LATEST).await).await;
    let Server::Vllm(fake) = &scene.server else { unreachable!() };
    fake.house.faults.always(When::path(DERENDER), Fault::Status(500));
    let (want, _) = ask_whole(fake.address, &json!({})).await;
    let mut failed = BTreeSet::new();
    for _ in 0..4 {
        match try_whole(scene.proxy.gateway.addresses[0], &json!({})).await {
            Ok((got, told)) => assert_eq!((got, told.0.as_str()), (want.clone(), "plain")),
            Err(other) => drop(failed.insert(other)),
        }
    }
    assert_eq!(failed, BTreeSet::from([(502, "speculated".to_owned())]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_proven_parser_stands_in_for_a_page_that_fails() {
    let scene = Scene::of(Server::vllm(CALL, Hermes::AsRead, LATEST).await).await;
    let Server::Vllm(fake) = &scene.server else { unreachable!() };
    let (want, _) = ask_whole(fake.address, &json!({})).await;
    for _ in 0..3 {
        assert_eq!(ask_whole(scene.proxy.gateway.addresses[0], &json!({})).await.0, want);
    }
    fake.house.faults.always(When::path(DERENDER), Fault::Status(500));
    for _ in 0..3 {
        assert_eq!(ask_whole(scene.proxy.gateway.addresses[0], &json!({})).await.0, want);
    }
}

/// The page fails, and the answer stays plain: several calls, each in several pieces.
#[rstest]
#[case::one(CALL.to_owned())]
#[case::two(format!("Let me look that up.\n{CALL}\n{CALL}"))]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_pieces_of_a_stream_make_a_whole_answer(#[case] text: String) {
    let server = Server::vllm(&text, Hermes::AsRead, LATEST).await;
    let scene = Scene::under(server, "", CONTROL_GROUP).await;
    let Server::Vllm(fake) = &scene.server else { unreachable!() };
    fake.house.faults.always(When::path(DERENDER), Fault::Status(500));
    for most in [MOST, scene.server.length(&text)] {
        let more = json!({"max_tokens": most});
        let (want, _) = ask_whole(fake.address, &more).await;
        assert_eq!(want["choices"][0]["finish_reason"], "tool_calls", "{want}");
        let (got, told) = ask_whole(scene.proxy.gateway.addresses[0], &more).await;
        assert_eq!((got, told.0.as_str()), (want, "plain"), "{most}");
    }
}

/// The first version whose page parses whole answers, one before the call that aborts, and one
/// with it. Older ones leave out some members that are null.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn versions_of_vllm_are_alike(#[values("0.24.0", "0.29.0", "0.32.0")] version: &'static str) {
    let text = format!("Let me look that up.\n{CALL}\n{CALL}");
    let scene = Scene::proven_of(&text, version).await;
    scene.streams_alike(&text).await;
    let mut told = BTreeSet::new();
    for most in [3, 40, MOST] {
        let more = json!({"max_tokens": most});
        let (mut want, _) = ask_whole(scene.server.address(), &more).await;
        let (mut got, path) = ask_whole(scene.proxy.gateway.addresses[0], &more).await;
        leave_out_nulls(&mut want);
        leave_out_nulls(&mut got);
        assert_eq!(got, want, "{most} tokens");
        told.insert(path);
    }
    scene.has_speculated(&told);
}

/// A server whose own pages are closed, and another that renders for it. Nothing fails while that
/// is away.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_server_renders() {
    let text = format!("Let me look that up.\n{CALL}");
    let closed = Fake::start(Server::vllm_of(&text, Hermes::AsRead, LATEST, false)).await;
    let renders = Fake::start(Server::vllm_of(&text, Hermes::AsRead, LATEST, true)).await;
    renders.kill();
    let line = format!("    render: \"{}\"\n", renders.url());
    let scene = Scene::rendered(Server::Vllm(closed), &line).await;
    let none = json!({});
    let path = || async { ask_whole(scene.proxy.gateway.addresses[0], &none).await.1.0 };
    assert_eq!(path().await, "passthrough");
    renders.revive();
    until(PATIENCE, || async { path().await != "passthrough" }).await;
    for _ in 0..3 {
        assert_eq!(scene.through(&none).await.parts, scene.direct(&none).await.parts);
    }
    scene.wholes_alike(&text).await;
    scene.streams_alike(&text).await;
    assert_eq!(renders.house.tally().computed, 0, "it computes nothing");
    renders.kill();
    let (want, _) = ask_whole(scene.server.address(), &none).await;
    let (got, _) = ask_whole(scene.proxy.gateway.addresses[0], &none).await;
    assert_eq!(got, want);
}

fn leave_out_nulls(value: &mut Value) {
    match value {
        Value::Object(members) => {
            members.retain(|_, value| !value.is_null());
            members.values_mut().for_each(leave_out_nulls);
        }
        Value::Array(items) => items.iter_mut().for_each(leave_out_nulls),
        _ => {}
    }
}

#[rstest]
#[case::call(CALL)]
#[case::text_and_call(&format!("Let me look that up. Let me look that up.\n{CALL}"))]
#[case::two_calls(&format!("{CALL}\n{CALL}"))]
#[case::broken("<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \n</tool_call> and on")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn our_own_target_has_the_same_parts_direct_and_through(#[case] text: &str) {
    let scene = Scene::of(Server::own(text).await).await;
    for _ in 0..3 {
        let none = json!({});
        assert_eq!(scene.through(&none).await.parts, scene.direct(&none).await.parts);
    }
    scene.wholes_alike(text).await;
    if text.contains("\"days\"") {
        scene.streams_alike(text).await;
    }
}

/// The functions `weather` and `climate`; the city is one of two.
fn strict_tools() -> Value {
    let schema = json!({"type": "object", "additionalProperties": false, "required": ["city", "days"],
        "$defs": {"City": {"enum": ["Bern", "Basel"]}},
        "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}}});
    let function = |name: &str| json!({"type": "function", "function": {"name": name, "strict": true, "parameters": schema}});
    json!([function("weather"), function("climate")])
}

/// The model asks for a city that is not offered.
#[rstest]
#[case::call(&format!("Let me look.\n{}", CALL.replace("Bern", "Paris")), 1)]
#[case::two(&format!("{CALL}\n{}", CALL.replace("Bern", "Paris")), 2)]
#[case::text("There is no tool for this <tool_, so here is a text.", 0)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn our_own_target_binds_the_arguments_of_strict_functions(#[case] text: &str, #[case] calls: usize) {
    let scene = Scene::of(Server::own(text).await).await;
    let more = json!({"tools": strict_tools()});
    let mut told = BTreeSet::new();
    for _ in 0..5 {
        let (want, got) = (scene.direct(&more).await, scene.through(&more).await);
        assert_eq!(got.parts, want.parts);
        assert!(want.parts.calls.len() >= calls, "{:?}", want.parts);
        for (_, arguments) in &want.parts.calls {
            assert!(["Ba", "Be"].contains(&&arguments[10..12]), "{arguments}");
        }
        if calls == 0 {
            assert_eq!(want.parts.content, text);
        }
        told.insert(got.told);
    }
    // The parser proves itself on calls.
    if calls > 0 {
        scene.has_speculated(&told);
    }
}

/// The parser leaves out the others, streamed and whole.
async fn has_one_call(scene: &Scene, more: Value) {
    let mut told = BTreeSet::new();
    for _ in 0..5 {
        let (want, got) = (scene.direct(&more).await, scene.through(&more).await);
        assert_eq!(got.parts, want.parts, "{more}");
        assert_eq!(want.parts.calls.len(), 1, "{more}");
        let calls = async |to| ask_whole(to, &more).await.0["choices"][0]["message"]["tool_calls"].take();
        let want = calls(scene.server.address()).await;
        assert_eq!(calls(scene.proxy.gateway.addresses[0]).await, want, "{more}");
        assert_eq!(want.as_array().map(Vec::len), Some(1), "{more}");
        told.insert(got.told);
    }
    scene.has_speculated(&told);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_for_a_single_call_is_speculated_on() {
    let two = format!("{CALL}\n{}", CALL.replace("Bern", "Paris"));
    let single = json!({"parallel_tool_calls": false});
    has_one_call(&Scene::proven_of(&two, "0.31.0").await, single).await;
    let own = Scene::of(Server::own(&two).await).await;
    for more in [json!({}), json!({"tools": strict_tools()}), json!({"tool_choice": "required"})] {
        let mut more = more;
        more["parallel_tool_calls"] = json!(false);
        has_one_call(&own, more).await;
    }
}

/// The model would rather write a text.
#[rstest]
#[case::any(json!("required"))]
#[case::named(json!({"type": "function", "function": {"name": "weather"}}))]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn our_own_target_makes_the_calls_that_are_forced(#[case] choice: Value) {
    let scene = Scene::of(Server::own("There is no tool for this, so here is a text.").await).await;
    let tools = strict_tools();
    let mut told = BTreeSet::new();
    for temperature in [0.0, 0.0, 0.0, 0.0, 0.8, 1.2] {
        let more = json!({"tools": tools, "tool_choice": choice, "temperature": temperature, "seed": 5});
        let (want, got) = (scene.direct(&more).await, scene.through(&more).await);
        assert_eq!(got.parts, want.parts, "{temperature}");
        assert!(!want.parts.calls.is_empty() && want.parts.content.is_empty(), "{:?}", want.parts);
        // Where several calls are allowed, the model makes them until the limit.
        let cut = usize::from(want.parts.finish == "length");
        for (name, arguments) in want.parts.calls.iter().rev().skip(cut) {
            assert!(
                ["weather", "climate"].contains(&name.as_str())
                    && (name == "weather" || choice == "required")
            );
            let arguments: Value = serde_json::from_str(arguments).unwrap();
            assert!(arguments["city"].is_string() && arguments["days"].is_u64(), "{arguments}");
        }
        let (want, _) = ask_whole(scene.server.address(), &more).await;
        assert_eq!(ask_whole(scene.proxy.gateway.addresses[0], &more).await.0, want, "{temperature}");
        told.insert(got.told);
    }
    scene.has_speculated(&told);
}

#[rstest]
#[case::not_offered(json!({"tool_choice": {"type": "function", "function": {"name": "g"}}}), "tool_choice")]
#[case::none_to_force(json!({"tools": [], "tool_choice": "required"}), "tool_choice")]
#[case::a_format(json!({"response_format": {"type": "json_object"}}), "response_format")]
#[case::a_format_and_forced(json!({"response_format": {"type": "json_object"}, "tool_choice": "required"}), "response_format")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn our_own_target_refuses_what_it_cannot_bind(#[case] more: Value, #[case] parameter: &str) {
    let server = Server::own(CALL).await;
    let mut body =
        json!({"model": "toy", "messages": [{"role": "user", "content": "Go on."}], "tools": [weather()]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let post = post(Route::Chat.path(), "content-type: application/json\r\n", body.to_string().as_bytes());
    let message = Wire::connect(server.address()).await.ask(post).await;
    let answer: Value = serde_json::from_str(&message.text()).unwrap();
    assert_eq!((message.head.status(), answer["error"]["param"].as_str()), (400, Some(parameter)));
}

/// The server names every end-of-text token but the tokenizer's own, and a stop token of the
/// client's only if it is not that.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_token_that_ends_a_text_is_named_as_by_the_server(#[values(false, true)] scale_out: bool) {
    let text = "Say it again and again. Say it again and again. Say it again and again.<|end|> Again.";
    let end = Toy::new(Temper::default()).encode("<|end|>")[0];
    let fake = Server::vllm_of(text, Hermes::AsRead, LATEST, scale_out);
    let other_ends = vec![end];
    let fake = Vllm::new(Options { other_ends, ..fake.options });
    let scene = Scene::of(Server::Vllm(Fake::start(fake).await)).await;
    let Server::Vllm(fake) = &scene.server else { unreachable!() };
    let own = fake.house.toy.eos();
    let told: BTreeSet<_> = BTreeSet::from([("speculated".to_owned(), String::new())]);
    let say = json!([{"role": "user", "content": "Say."}]);
    for (more, stop) in [
        (json!({}), json!(end)),
        (json!({"stop_token_ids": [own, end]}), json!(end)),
        (json!({"ignore_eos": true, "stop_token_ids": [own]}), json!(own)),
        (json!({"messages": say}), Value::Null),
        (json!({"messages": say, "stop_token_ids": [own]}), Value::Null),
    ] {
        // A server that does not render tells no defaults, and one that always writes the same text
        // confirms none.
        let mut asked = json!({"tools": [], "temperature": 0, "presence_penalty": 0, "frequency_penalty": 0,
            "repetition_penalty": 1});
        asked.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let more = asked;
        let (mut want, mut got) = (scene.direct(&more).await, scene.through(&more).await);
        // Events without text may be joined with others.
        want.parts.kinds.clear();
        got.parts.kinds.clear();
        assert_eq!((got.parts, want.parts.stop.clone()), (want.parts, stop.clone()), "{more}");
        let (want, _) = ask_whole(fake.address, &more).await;
        let (got, _) = ask_whole(scene.proxy.gateway.addresses[0], &more).await;
        assert_eq!(got, want, "{more}");
        if stop == json!(end) {
            assert_eq!(BTreeSet::from([scene.through(&more).await.told]), told);
        }
    }
}

/// A folder of words whose mark `<|rewrite|>` is text, as `<think>` is for many models.
fn with_a_mark_in_texts() -> tempfile::TempDir {
    let words = tempfile::tempdir().unwrap();
    let read = |name: &str| std::fs::read_to_string(toy::folder().join(name)).unwrap();
    let mut tokenizer: Value = serde_json::from_str(&read("tokenizer.json")).unwrap();
    let added = tokenizer["added_tokens"].as_array_mut().unwrap();
    let mark = added.iter_mut().find(|token| token["content"] == "<|rewrite|>").unwrap();
    mark["special"] = json!(false);
    std::fs::write(words.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    std::fs::write(words.path().join("chat_template.jinja"), read("chat_template.jinja")).unwrap();
    words
}

/// Where no parser is known, a mark might be taken out by one; where it was text three times, none
/// does. One that does not show stays suspect.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mark_that_a_server_shows_as_text_does_not_end_speculation(#[values(true, false)] is_text: bool) {
    let text =
        "<|rewrite|>Say it again and again. Say it again and again.<|rewrite|> Say it again and again.";
    let folder = with_a_mark_in_texts();
    let mut fake = Server::vllm_of(text, Hermes::AsRead, LATEST, true);
    let setup = Setup { hermes: None, ..fake.options.setup.clone() };
    let words = if is_text { folder.path().to_owned() } else { setup.words.clone() };
    fake = Vllm::new(Options { setup: Setup { words, ..setup }, ..fake.options });
    let scene = Scene::of(Server::Vllm(Fake::start(fake).await)).await;
    let more = json!({"tools": []});
    let plain = ("plain".to_owned(), "untrusted_ids".to_owned());
    for round in 0..5 {
        let (want, got) = (scene.direct(&more).await, scene.through(&more).await);
        assert_eq!((&got.parts.content, &got.parts.finish), (&want.parts.content, &want.parts.finish));
        assert_eq!(want.parts.content.contains("<|rewrite|>"), is_text);
        // Each answer shows it twice.
        let told =
            if is_text && round > 1 { ("speculated".to_owned(), String::new()) } else { plain.clone() };
        assert_eq!(got.told, told, "{round}");
    }
}

/// Its tools do not bind the sampling, and none may be called: the text is not parsed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_bars_its_tools_is_speculated_on() {
    let scene = Scene::proven(CALL).await;
    let more = json!({"tool_choice": "none"});
    let (want, got) = (scene.direct(&more).await, scene.through(&more).await);
    assert_eq!((got.parts, got.told.0.as_str()), (want.parts, "speculated"));
}

/// A single call: the server binds it by a grammar, and no later request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_a_grammar_binds_stays_plain() {
    let scene = Scene::proven(CALL).await;
    let more = json!({"parallel_tool_calls": false});
    for _ in 0..3 {
        let (want, got) = (scene.direct(&more).await, scene.through(&more).await);
        assert_eq!((got.parts, got.told), (want.parts, ("plain".to_owned(), "grammar".to_owned())));
        let (want, _) = ask_whole(scene.server.address(), &more).await;
        let (got, told) = ask_whole(scene.proxy.gateway.addresses[0], &more).await;
        assert_eq!((got, told), (want, ("plain".to_owned(), "grammar".to_owned())));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_parses_differently_is_left_alone() {
    let server = Server::vllm(&format!("{CALL}\n{CALL}"), Hermes::LeavesBrace, LATEST).await;
    let scene = Scene::of(server).await;
    let none = json!({});
    let want = scene.direct(&none).await.parts;
    for _ in 0..3 {
        let got = scene.through(&none).await;
        assert_eq!((got.parts.calls == want.calls, got.told.1.as_str()), (true, "parser"));
        assert_eq!(got.parts, want);
    }
}

#[rstest]
#[case::stop_text(LATEST, json!({"stop": ["never there"]}), ["tools", "stop"])]
#[case::required(LATEST, json!({"tool_choice": "required"}), ["structured", "tool_choice"])]
#[case::required_of_an_older("0.31.0", json!({"tool_choice": "required"}), ["structured", "tool_choice"])]
#[case::required_single(LATEST, json!({"tool_choice": "required", "parallel_tool_calls": false}), ["structured", "tool_choice"])]
#[case::named(LATEST, json!({"tool_choice": {"type": "function", "function": {"name": "weather"}}}), ["structured", "tool_choice"])]
#[case::strict(LATEST, json!({"tools": strict_tools()}), ["structured", "tools"])]
#[case::strict_of_an_older("0.31.0", json!({"tools": strict_tools()}), ["structured", "tools"])]
#[case::a_format_besides_tools(LATEST, json!({"response_format": {"type": "json_object"}}), ["structured", "response_format"])]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn others_are_passed_through_by_name(
    #[case] version: &'static str,
    #[case] more: Value,
    #[case] told: [&str; 2],
    #[values(false, true)] stream: bool,
) {
    let scene = Scene::of(Server::vllm(CALL, Hermes::AsRead, version).await).await;
    let mut body =
        json!({"model": "toy", "messages": [{"role": "user", "content": "Go on."}], "tools": [weather()]});
    body["stream"] = json!(stream);
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let post = post(Route::Chat.path(), "content-type: application/json\r\n", body.to_string().as_bytes());
    let message = Wire::connect(scene.proxy.gateway.addresses[0]).await.ask(post).await;
    let names = ["x-foretell-path", "x-foretell-reason", "x-foretell-parameter"];
    let said = names.map(|name| message.head.get(name).unwrap_or_default());
    assert_eq!(said, ["passthrough", told[0], told[1]], "{}", message.text());
    assert_eq!(scene.server.fatal(), Vec::<String>::new());
}
