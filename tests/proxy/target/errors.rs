//! Every refusal has OpenAI's shape and names its cause.

use http::{Method, StatusCode};
use http_body_util::BodyExt;
use rstest::rstest;
use serde_json::{Value, json};

use super::client::serve;
use super::fake::Fake;

#[rstest]
#[case("/v1/completions", json!({"prompt": "a", "temprature": 1}), 400, "temprature")]
#[case("/v1/completions", json!({"prompt": "a", "model": "other"}), 404, "model")]
#[case("/v1/completions", json!({}), 400, "prompt")]
#[case("/v1/completions", json!({"prompt": ""}), 400, "prompt")]
#[case("/v1/completions", json!({"prompt": []}), 400, "prompt")]
#[case("/v1/completions", json!({"prompt": [1, "a"]}), 400, "prompt")]
#[case("/v1/completions", json!({"prompt": [[1], []]}), 400, "prompt")]
#[case("/v1/completions", json!({"prompt": [260]}), 400, "prompt")]
#[case("/v1/completions", json!({"prompt": {"text": "a"}}), 400, "prompt")]
#[case("/v1/completions", json!({"prompt": "a", "max_tokens": "3"}), 400, "max_tokens")]
#[case("/v1/completions", json!({"prompt": "a", "max_tokens": -1}), 400, "max_tokens")]
#[case("/v1/completions", json!({"prompt": "a", "max_tokens": 0}), 400, "max_tokens")]
#[case("/v1/completions", json!({"prompt": "a", "max_tokens": 64}), 400, "prompt")]
#[case("/v1/completions", json!({"prompt": "x".repeat(80)}), 400, "prompt")]
#[case("/v1/completions", json!({"prompt": "a", "temperature": 2.5}), 400, "temperature")]
#[case("/v1/completions", json!({"prompt": "a", "temperature": true}), 400, "temperature")]
#[case("/v1/completions", json!({"prompt": "a", "top_p": -0.1}), 400, "top_p")]
#[case("/v1/completions", json!({"prompt": "a", "logit_bias": {"x": 1}}), 400, "logit_bias")]
#[case("/v1/completions", json!({"prompt": "a", "logit_bias": {"1": 101}}), 400, "logit_bias")]
#[case("/v1/completions", json!({"prompt": "a", "logprobs": 21}), 400, "logprobs")]
#[case("/v1/completions", json!({"prompt": "a", "stop": ["a", ""]}), 400, "stop")]
#[case("/v1/completions", json!({"prompt": "a", "stop": 3}), 400, "stop")]
#[case("/v1/completions", json!({"prompt": "a", "n": 0}), 400, "n")]
#[case("/v1/completions", json!({"prompt": vec!["a"; 1024], "n": 2}), 400, "n")]
#[case("/v1/completions", json!({"prompt": "a\u{0}"}), 400, "prompt")]
#[case("/v1/completions", json!({"prompt": "a", "stop": vec!["a"; 257]}), 400, "stop")]
#[case("/v1/completions", json!({"prompt": "a", "stop": vec!["a".repeat(200); 100]}), 400, "stop")]
#[case("/v1/completions", json!({"prompt": "a", "seed": 1.5}), 400, "seed")]
#[case("/v1/completions", json!({"prompt": "a", "suffix": "b"}), 400, "suffix")]
#[case("/v1/completions", json!({"prompt": "a", "best_of": 3}), 400, "best_of")]
#[case("/v1/completions", json!({"prompt": "a", "generated": 1}), 400, "generated")]
#[case("/v1/completions", json!({"prompt": [1, 2], "generated": 3}), 400, "generated")]
#[case("/v1/completions", json!({"prompt": [1, 2], "generated": [1, 1]}), 400, "generated")]
#[case("/v1/completions", json!({"prompt": "a", "response_format": {"type": "json_object"}}), 400, "response_format")]
#[case("/v1/completions", json!({"prompt": "a", "stream_options": {"include_usage": true}}), 400, "stream_options")]
#[case("/v1/completions", json!({"prompt": "a", "stream": true, "stream_options": {"x": true}}), 400, "stream_options.x")]
#[case("/v1/completions", json!({"prompt": "a", "stream": true, "prompt_logprobs": 1}), 400, "prompt_logprobs")]
#[case("/v1/chat/completions", json!({"messages": []}), 400, "messages")]
#[case("/v1/chat/completions", json!({"messages": [{"content": "a"}]}), 400, "messages")]
#[case("/v1/chat/completions", json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), 400, "messages")]
#[case("/v1/chat/completions", json!({"messages": [{"role": "wizard", "content": "a"}]}), 400, "messages")]
#[case("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "a"}], "tools": [{}]}), 400, "tools")]
#[case("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "a"}], "prompt": "a"}), 400, "prompt")]
#[case("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}), 400, "top_logprobs")]
#[case("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "\u{0}"}]}), 400, "messages")]
#[case("/v1/chat/completions", json!({"messages": [{"role": "user", "content": null}]}), 400, "messages")]
#[case("/v1/verify", json!({"context": [1], "tokens": vec![1; 257]}), 400, "tokens")]
#[case("/v1/verify", json!({"tokens": []}), 400, "context")]
#[case("/v1/verify", json!({"context": [], "tokens": []}), 400, "context")]
#[case("/v1/verify", json!({"context": [1], "tokens": [1], "parents": [0]}), 400, "parents")]
#[case("/v1/verify", json!({"context": [1], "tokens": [1], "parents": [-2]}), 400, "parents")]
#[case("/v1/verify", json!({"context": [1], "tokens": [1], "parents": []}), 400, "parents")]
#[case("/v1/verify", json!({"context": [1], "tokens": [999]}), 400, "tokens")]
#[case("/v1/verify", json!({"context": [1], "tokens": [1], "generated": 2}), 400, "generated")]
#[case("/v1/verify", json!({"context": vec![1; 60], "tokens": vec![1; 5]}), 400, "context")]
#[case("/tokenize", json!({"prompt": "a", "messages": []}), 400, "prompt")]
#[case("/tokenize", json!({"prompt": "x".repeat(65)}), 400, "prompt")]
#[case("/detokenize", json!({"tokens": [-1]}), 400, "tokens")]
#[case("/detokenize", json!({"tokens": vec![1; 65]}), 400, "tokens")]
#[tokio::test]
async fn a_wrong_request_is_refused_by_name(
    #[case] path: &str,
    #[case] body: Value,
    #[case] status: u16,
    #[case] param: &str,
) {
    let server = serve(Fake::new(1, 64)).await;
    let (got, answer) = server.post(path, &body).await;
    let error = &answer["error"];
    assert_eq!(
        (got.as_u16(), &error["param"], &error["code"]),
        (status, &json!(param), &json!(status)),
        "{answer}"
    );
    assert!(
        error["message"].as_str().unwrap().contains(param)
            || status == 404
            || error["message"].as_str().unwrap().contains("context length")
    );
    assert_eq!(error["type"], if status == 404 { "NotFoundError" } else { "BadRequestError" });
}

#[tokio::test]
async fn a_text_that_no_context_can_hold_is_not_tokenized() {
    let server = serve(Fake::new(1, 64)).await;
    let (_, answer) =
        server.post("/v1/completions", &json!({"prompt": "x".repeat(65), "max_tokens": 1})).await;
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(message.contains("65 bytes") && message.contains("maximum context length of 64"), "{message}");
    // One that could fit by its bytes is counted in tokens.
    let (_, answer) =
        server.post("/v1/completions", &json!({"prompt": "x".repeat(64), "max_tokens": 1})).await;
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(message.contains("65 tokens (64 in the prompt"), "{message}");
}

#[tokio::test]
async fn null_counts_as_absent() {
    let server = serve(Fake::new(1, 64)).await;
    let body = json!({"prompt": "a", "temperature": null, "stop": null, "stream": null, "tools": null, "seed": null, "suffix": null});
    let (status, answer) = server.post("/v1/completions", &body).await;
    assert_eq!(
        (status.as_u16(), &answer["error"]["param"]),
        (400, &json!("tools")),
        "a chat's field is unknown here"
    );
    let body = json!({"prompt": "a", "temperature": null, "stop": null, "stream": null, "seed": null, "suffix": null, "n": null});
    server.ask("/v1/completions", &body).await;
}

#[tokio::test]
async fn bodies_that_are_no_json_and_unknown_routes_have_different_errors() {
    let server = serve(Fake::new(1, 64)).await;
    for (method, path, body, want) in [
        (Method::POST, "/v1/completions", "{\"prompt\": ", StatusCode::BAD_REQUEST),
        (Method::POST, "/v1/completions", "[1]", StatusCode::BAD_REQUEST),
        (Method::POST, "/v1/completions", "", StatusCode::BAD_REQUEST),
        (Method::GET, "/v1/completions", "", StatusCode::METHOD_NOT_ALLOWED),
        (Method::POST, "/v1/embeddings", "{}", StatusCode::NOT_FOUND),
        (Method::GET, "/v1/models/other", "", StatusCode::NOT_FOUND),
    ] {
        let (status, answer) = server.send(method, path, body).await;
        let answer: Value = serde_json::from_slice(&answer.collect().await.unwrap().to_bytes()).unwrap();
        assert_eq!(status, want, "{path} {body:?}: {answer}");
        assert_eq!(answer["error"]["code"], want.as_u16());
    }
}

#[tokio::test]
async fn a_fault_of_the_model_fails_the_request_and_not_the_server() {
    let mut model = Fake::new(2, 64);
    model.poison = Some(7);
    let server = serve(model).await;
    let (status, answer) = server.post("/v1/completions", &json!({"prompt": [1, 2, 7]})).await;
    assert_eq!((status.as_u16(), &answer["error"]["type"]), (500, &json!("InternalServerError")), "{answer}");
    let (status, _) = server.post("/v1/verify", &json!({"context": [1], "tokens": [7]})).await;
    assert_eq!(status, 500);
    let (_, body) = server
        .send(Method::POST, "/v1/completions", json!({"prompt": [7], "stream": true}).to_string())
        .await;
    let text = String::from_utf8(body.collect().await.unwrap().to_bytes().to_vec()).unwrap();
    assert!(text.starts_with("data: {\"error\":") && text.ends_with("data: [DONE]\n\n"), "{text}");
    let good = server.ask("/v1/completions", &json!({"prompt": [1, 2, 3], "temperature": 0})).await;
    let fresh = serve(Fake::new(2, 64))
        .await
        .ask("/v1/completions", &json!({"prompt": [1, 2, 3], "temperature": 0}))
        .await;
    assert_eq!(good["choices"][0]["text"], fresh["choices"][0]["text"], "no lane kept a wrong row");
}
