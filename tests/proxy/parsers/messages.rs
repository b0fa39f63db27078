//! The Messages API by translation: a message has what a chat of the same words has, and is
//! speculated on as that is.

use super::*;

const ROUTES: &str = "    routes: { messages: translate }\n";
const PATH: &str = "/v1/messages";

fn body(more: &Value) -> Value {
    let tool = json!({"name": "weather", "input_schema": {"type": "object"}});
    let mut body = json!({"model": "toy", "max_tokens": MOST, "temperature": 0, "tools": [tool],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Go on."}]}]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

pub(super) async fn posted(to: SocketAddr, path: &str, body: &Value) -> Message {
    let fields = "content-type: application/json\r\nx-api-key: k\r\nte: trailers\r\nconnection: te\r\n";
    Wire::connect(to).await.ask(post(path, fields, body.to_string().as_bytes())).await
}

/// A streamed message, joined, and its path.
async fn streamed(to: SocketAddr, more: &Value) -> (Value, String) {
    let mut body = body(more);
    body["stream"] = json!(true);
    let answer = posted(to, PATH, &body).await;
    assert_eq!(answer.head.status(), 200, "{}", answer.text());
    let path = answer.trailers.iter().find_map(|line| line.strip_prefix("x-foretell-path: "));
    (joined(&answer.text()), path.unwrap_or_default().to_owned())
}

fn joined(text: &str) -> Value {
    let mut message = Value::Null;
    for line in text.lines().filter_map(|line| line.strip_prefix("data: ")) {
        let event: Value = serde_json::from_str(line).unwrap();
        let block = event["index"].as_u64().map(|index| index as usize);
        match event["type"].as_str().unwrap() {
            "message_start" => message = event["message"].clone(),
            "content_block_start" => {
                assert_eq!(message["content"].as_array().unwrap().len(), block.unwrap());
                message["content"].as_array_mut().unwrap().push(event["content_block"].clone());
            }
            "content_block_delta" => grow(&mut message["content"][block.unwrap()], &event["delta"]),
            "content_block_stop" => {
                let block = &mut message["content"][block.unwrap()];
                if let Some(arguments) = block["input"].as_str() {
                    block["input"] = serde_json::from_str(arguments).unwrap_or_else(|_| json!(arguments));
                }
            }
            "message_delta" => {
                message["stop_reason"] = event["delta"]["stop_reason"].clone();
                message["usage"] = event["usage"].clone();
            }
            "message_stop" => message["over"] = json!(true),
            other => panic!("{other}: {event}"),
        }
    }
    assert_eq!(message["over"], true, "{text}");
    message
}

fn grow(block: &mut Value, delta: &Value) {
    let (member, piece) = match delta["type"].as_str().unwrap() {
        "text_delta" => ("text", &delta["text"]),
        "input_json_delta" => ("input", &delta["partial_json"]),
        other => panic!("{other}"),
    };
    let before = block[member].as_str().unwrap_or_default().to_owned();
    block[member] = json!(before + piece.as_str().unwrap());
}

/// A message that is not streamed, and its path.
async fn whole(to: SocketAddr, more: &Value) -> (Value, String) {
    let answer = posted(to, PATH, &body(more)).await;
    assert_eq!(answer.head.status(), 200, "{}", answer.text());
    let path = answer.head.get("x-foretell-path").unwrap_or_default().to_owned();
    (serde_json::from_str(&answer.text()).unwrap(), path)
}

/// Content without ids, reason of the end, and tokens.
fn said(message: &Value) -> Value {
    let mut content = message["content"].clone();
    for block in content.as_array_mut().unwrap() {
        if let Some(id) = block.get_mut("id") {
            assert!(id.as_str().unwrap().starts_with("chatcmpl-tool-"), "{id}");
            *id = Value::Null;
        }
    }
    let count = |name: &str| message["usage"][name].as_u64().unwrap_or_default();
    // How many of them were cached depends on the requests before.
    let tokens = [count("input_tokens") + count("cache_read_input_tokens"), count("output_tokens")];
    assert_eq!((&message["type"], &message["role"]), (&json!("message"), &json!("assistant")));
    json!([content, message["stop_reason"], tokens])
}

#[rstest]
#[case::text("There is no tool for this, so here is a text. There is no tool for this, so here is a text.")]
#[case::call(CALL)]
#[case::text_and_call(&format!("Let me look that up. Let me look that up.\n{CALL}"))]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_are_those_of_the_server_and_speculated_on(#[case] text: &str) {
    let scene = Scene::rendered(Server::own(text).await, ROUTES).await;
    let (target, proxy) = (scene.server.address(), scene.proxy.gateway.addresses[0]);
    let mut paths = BTreeSet::new();
    for _ in 0..4 {
        let more = json!({});
        let (direct, through) = (streamed(target, &more).await, streamed(proxy, &more).await);
        assert_eq!(said(&through.0), said(&direct.0));
        let (direct_whole, through_whole) = (whole(target, &more).await, whole(proxy, &more).await);
        assert_eq!(said(&through_whole.0), said(&direct_whole.0));
        assert_eq!(said(&direct_whole.0)[0], said(&direct.0)[0]);
        paths.extend([through.1, through_whole.1]);
    }
    assert!(paths.contains("speculated"), "{paths:?}");
    assert_eq!(panics(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn before_a_server_without_messages_they_are_its_chats() {
    let text = format!("Let me look that up. Let me look that up.\n{CALL}");
    let scene = Scene::rendered(Server::vllm(&text, Hermes::AsRead, LATEST).await, ROUTES).await;
    scene.prove().await;
    let proxy = scene.proxy.gateway.addresses[0];
    let chat = scene.direct(&json!({})).await.parts;
    let (message, path) = streamed(proxy, &json!({})).await;
    let (name, arguments) = &chat.calls[0];
    let arguments: Value = serde_json::from_str(arguments).unwrap();
    let content = json!([
        {"type": "text", "text": chat.content},
        {"type": "tool_use", "id": null, "name": name, "input": arguments},
    ]);
    let tokens = ["prompt_tokens", "completion_tokens"].map(|name| chat.usage[name].as_u64().unwrap());
    assert_eq!((said(&message), path.as_str()), (json!([content, "tool_use", tokens]), "speculated"));
    let admin = scene.proxy.gateway.admin.unwrap();
    let speculated = "foretell_requests_total{route=\"messages\",path=\"speculated\"}";
    assert!((crate::client::metric(admin, speculated).await - 1.0).abs() < 1e-9);
    assert_eq!(scene.server.fatal(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_are_in_the_shape_of_the_api() {
    let scene = Scene::rendered(Server::own("Well.").await, ROUTES).await;
    for to in [scene.server.address(), scene.proxy.gateway.addresses[0]] {
        let wrong = json!({"max_tokens": 9, "messages": [{"role": "tool", "content": "x"}]});
        let unknown = body(&json!({"messages": [{"role": "user", "content": [{"type": "document"}]}]}));
        for (body, words) in [(wrong, "messages[0]: role"), (unknown, "messages[0].content[0]: type")] {
            let answer = posted(to, PATH, &body).await;
            let error: Value = serde_json::from_str(&answer.text()).unwrap();
            assert_eq!((answer.head.status(), &error["type"]), (400, &json!("error")), "{error}");
            assert_eq!(error["error"]["type"], "invalid_request_error");
            assert!(error["error"]["message"].as_str().unwrap().starts_with(words), "{error}");
        }
        let answer = posted(to, PATH, &body(&json!({"model": "other"}))).await;
        let error: Value = serde_json::from_str(&answer.text()).unwrap();
        assert_eq!((answer.head.status(), &error["type"]), (404, &json!("error")), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_setting_messages_are_passed_through() {
    let scene = Scene::of(Server::own("Well. Well. Well. Well.").await).await;
    let (message, path) = whole(scene.proxy.gateway.addresses[0], &json!({})).await;
    assert_eq!(
        (message["content"][0]["text"].as_str(), path.as_str()),
        (Some("Well. Well. Well. Well."), "passthrough")
    );
}
