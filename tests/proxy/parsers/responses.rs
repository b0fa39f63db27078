//! The Responses API by translation: a response has what a chat of the same words has, and is
//! speculated on as that is.

use super::messages::posted;
use super::*;

const ROUTES: &str = "    routes: { responses: translate }\n";
const PATH: &str = "/v1/responses";

fn body(more: &Value) -> Value {
    let tool = json!({"type": "function", "name": "weather", "parameters": {"type": "object"}});
    let mut body = json!({"model": "toy", "max_output_tokens": MOST, "temperature": 0, "tools": [tool],
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "Go on."}]}]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// A streamed response, as its last event has it, and its path.
async fn streamed(to: SocketAddr, more: &Value) -> (Value, String) {
    let mut body = body(more);
    body["stream"] = json!(true);
    let answer = posted(to, PATH, &body).await;
    assert_eq!(answer.head.status(), 200, "{}", answer.text());
    let path = answer.trailers.iter().find_map(|line| line.strip_prefix("x-foretell-path: "));
    (joined(&answer.text()), path.unwrap_or_default().to_owned())
}

/// The response of the last event, whose output must be what the events before made.
fn joined(text: &str) -> Value {
    let mut output: Vec<Value> = Vec::new();
    let mut pieces = String::new();
    let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
    let events: Vec<Value> = data.map(|data| serde_json::from_str(data).unwrap()).collect();
    for (number, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], number, "{event}");
        let at = event["output_index"].as_u64().unwrap_or_default() as usize;
        match event["type"].as_str().unwrap() {
            "response.output_item.added" => {
                assert_eq!(output.len(), at);
                pieces.clear();
            }
            "response.output_text.delta" | "response.function_call_arguments.delta" => {
                pieces += event["delta"].as_str().unwrap();
            }
            "response.output_text.done" => assert_eq!(event["text"], pieces),
            "response.function_call_arguments.done" => assert_eq!(event["arguments"], pieces),
            "response.output_item.done" => output.push(event["item"].clone()),
            "response.created" | "response.in_progress" => assert!(number < 2),
            "response.content_part.added" | "response.content_part.done" => {}
            "response.completed" | "response.incomplete" => assert_eq!(number, events.len() - 1),
            other => panic!("{other}: {event}"),
        }
    }
    let response = events.last().unwrap()["response"].clone();
    assert_eq!(response["output"], json!(output));
    response
}

/// A response that is not streamed, its path, and what its reason is about.
async fn whole(to: SocketAddr, more: &Value) -> (Value, String, String) {
    let answer = posted(to, PATH, &body(more)).await;
    assert_eq!(answer.head.status(), 200, "{}", answer.text());
    let told = |name: &str| answer.head.get(name).unwrap_or_default().to_owned();
    let why = format!("{} {}", told("x-foretell-reason"), told("x-foretell-parameter"));
    (serde_json::from_str(&answer.text()).unwrap(), told("x-foretell-path"), why)
}

/// Items without ids, status, and tokens.
fn said(response: &Value) -> Value {
    let mut output = response["output"].clone();
    for item in output.as_array_mut().unwrap() {
        item["id"] = Value::Null;
        if let Some(id) = item.get_mut("call_id") {
            assert!(id.as_str().unwrap().starts_with("chatcmpl-tool-"), "{id}");
            *id = Value::Null;
        }
    }
    let count = |name: &str| response["usage"][name].as_u64().unwrap();
    let tokens = [count("input_tokens"), count("output_tokens")];
    assert_eq!(response["object"], "response");
    json!([output, response["status"], tokens])
}

#[rstest]
#[case::text("There is no tool for this, so here is a text. There is no tool for this, so here is a text.")]
#[case::call(CALL)]
#[case::text_and_call(&format!("Let me look that up. Let me look that up.\n{CALL}"))]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn responses_are_those_of_the_server_and_speculated_on(#[case] text: &str) {
    let scene = Scene::rendered(Server::own(text).await, ROUTES).await;
    let (target, proxy) = (scene.server.address(), scene.proxy.gateway.addresses[0]);
    let mut paths = BTreeSet::new();
    for limit in [MOST, MOST, 9, MOST] {
        let more = json!({"max_output_tokens": limit});
        let (direct, through) = (streamed(target, &more).await, streamed(proxy, &more).await);
        assert_eq!(said(&through.0), said(&direct.0));
        let (direct_whole, through_whole) = (whole(target, &more).await, whole(proxy, &more).await);
        assert_eq!(said(&through_whole.0), said(&direct_whole.0));
        if limit == MOST {
            assert_eq!(said(&direct_whole.0), said(&direct.0));
        } else {
            assert_eq!(direct.0["incomplete_details"], json!({"reason": "max_output_tokens"}));
        }
        paths.extend([through.1, through_whole.1]);
    }
    assert!(paths.contains("speculated"), "{paths:?}");
    assert_eq!(panics(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn before_a_server_without_responses_they_are_its_chats() {
    let text = format!("Let me look that up. Let me look that up.\n{CALL}");
    let scene = Scene::rendered(Server::vllm(&text, Hermes::AsRead, LATEST).await, ROUTES).await;
    scene.prove().await;
    let proxy = scene.proxy.gateway.addresses[0];
    let chat = scene.direct(&json!({})).await.parts;
    let (response, path) = streamed(proxy, &json!({"store": false})).await;
    let (name, arguments) = &chat.calls[0];
    let text = json!({"annotations": [], "text": chat.content, "type": "output_text"});
    let output = json!([
        {"id": null, "content": [text], "role": "assistant", "status": "completed", "type": "message"},
        {"arguments": arguments, "call_id": null, "name": name, "type": "function_call", "id": null,
         "status": "completed"},
    ]);
    let tokens = ["prompt_tokens", "completion_tokens"].map(|name| chat.usage[name].as_u64().unwrap());
    assert_eq!((said(&response), path.as_str()), (json!([output, "completed", tokens]), "speculated"));
    assert_eq!(response["usage"]["foretell"]["path"], "speculated");
    let admin = scene.proxy.gateway.admin.unwrap();
    let speculated = "foretell_requests_total{route=\"responses\",path=\"speculated\"}";
    assert!((crate::client::metric(admin, speculated).await - 1.0).abs() < 1e-9);
    assert_eq!(scene.server.fatal(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_free_form_tool_has_its_input_as_text() {
    let call = "<tool_call>\n{\"name\": \"patch\", \"arguments\": {\"input\": \"a\\nb\"}}\n</tool_call>";
    let scene = Scene::rendered(Server::own(call).await, ROUTES).await;
    let tools = json!({"tools": [{"type": "custom", "name": "patch"}], "stream": true});
    for to in [scene.server.address(), scene.proxy.gateway.addresses[0]] {
        let answer = posted(to, PATH, &body(&tools)).await;
        let data = answer.text();
        let events = data.lines().filter_map(|line| line.strip_prefix("data: "));
        let events: Vec<Value> = events.map(|data| serde_json::from_str(data).unwrap()).collect();
        let of = |kind: &str| events.iter().filter(|event| event["type"] == kind).collect::<Vec<_>>();
        let pieces = of("response.custom_tool_call_input.delta");
        let pieces: String = pieces.iter().map(|event| event["delta"].as_str().unwrap()).collect();
        assert_eq!(pieces, "a\nb");
        assert_eq!(of("response.custom_tool_call_input.done")[0]["input"], "a\nb");
        let item = &of("response.completed")[0]["response"]["output"][0];
        assert_eq!((&item["type"], &item["input"]), (&json!("custom_tool_call"), &json!("a\nb")));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_name_the_member() {
    let scene = Scene::rendered(Server::own("Well.").await, ROUTES).await;
    let wrong = [
        (json!({"input": [{"role": "tool", "content": "x"}]}), 400, json!("input[0].role")),
        (json!({"input": [{"type": "item_reference", "id": "x"}]}), 400, json!("input[0]")),
        // The proxy passes these on, and no server behind takes them.
        (json!({"previous_response_id": "resp_1"}), 400, json!("previous_response_id")),
        (json!({"tools": [{"type": "web_search"}]}), 400, json!("tools[0].type")),
        (json!({"model": "other"}), 404, json!("model")),
    ];
    for to in [scene.server.address(), scene.proxy.gateway.addresses[0]] {
        for (more, status, member) in &wrong {
            let answer = posted(to, PATH, &body(more)).await;
            let error: Value = serde_json::from_str(&answer.text()).unwrap();
            assert_eq!((answer.head.status(), &error["error"]["param"]), (*status, member), "{error}");
        }
    }
}

/// A server may keep answers, so that it gets these requests as they are.
#[rstest]
#[case(json!({"previous_response_id": "resp_1"}), "parameter previous_response_id")]
#[case(json!({"store": true}), "parameter store")]
#[case(json!({"background": true}), "parameter background")]
#[case(json!({"tools": [{"type": "web_search"}]}), "tools tools[0].type")]
#[case(json!({"input": [{"type": "computer_call"}]}), "parameter input[0].type")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_only_a_server_does_is_passed_through_for_a_reason(#[case] more: Value, #[case] wanted: &str) {
    let server = Server::vllm("Well.", Hermes::AsRead, LATEST).await;
    let scene = Scene::rendered(server, ROUTES).await;
    let asked = body(&more);
    let answer = posted(scene.proxy.gateway.addresses[0], PATH, &asked).await;
    let told = |name: &str| answer.head.get(name).unwrap_or_default().to_owned();
    let why = format!("{} {}", told("x-foretell-reason"), told("x-foretell-parameter"));
    assert_eq!((told("x-foretell-path").as_str(), why.as_str()), ("passthrough", wanted));
    let direct = posted(scene.server.address(), PATH, &asked).await;
    assert_eq!((answer.head.status(), answer.text()), (direct.head.status(), direct.text()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_setting_and_when_asked_for_what_is_stored_they_are_passed_through() {
    let scene = Scene::of(Server::own("Well. Well. Well. Well.").await).await;
    let proxy = scene.proxy.gateway.addresses[0];
    let (response, path, why) = whole(proxy, &json!({})).await;
    let text = &response["output"][0]["content"][0]["text"];
    assert_eq!(
        (text.as_str(), path.as_str(), why.as_str()),
        (Some("Well. Well. Well. Well."), "passthrough", "route ")
    );
    let scene = Scene::rendered(Server::own("Well.").await, ROUTES).await;
    let proxy = scene.proxy.gateway.addresses[0];
    let answer = crate::client::get(proxy, &format!("{PATH}/resp_1")).await;
    assert_eq!(answer.head.get("x-foretell-path"), Some("passthrough"));
}
