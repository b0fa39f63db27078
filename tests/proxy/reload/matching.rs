//! Which policy a request gets, by each field of `match`.

use serde_json::{Value, json};

use super::write;
use crate::client::send;
use crate::fakes::Pace;
use crate::groups::house::{before, engine, policy};
use crate::reasons::proxy::Proxy;

/// The name of the policy that a completion with these fields gets; none if no policy matches.
async fn policy_of(proxy: &Proxy, fields: &str, more: Value) -> String {
    let mut body = json!({"model": "toy", "prompt": [100, 101, 102], "max_tokens": 2, "temperature": 0});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let chat = body["messages"].is_array();
    if chat {
        body.as_object_mut().unwrap().shift_remove("prompt");
    }
    let path = if chat { "/v1/chat/completions" } else { "/v1/completions" };
    let answer = send(proxy.front, path, &format!("content-type: application/json\r\n{fields}"), &body).await;
    assert_eq!(answer.head.status(), 200, "{}", answer.text());
    let label = answer.head.get("x-foretell-policy").unwrap_or_default();
    label.split('@').next().unwrap_or_default().to_owned()
}

#[tokio::test]
async fn each_field_chooses_and_the_first_file_that_matches_wins() {
    let engine = engine(Pace::default()).await;
    let tenants = "tenant: { header: x-tenant, trusted_peers: [127.0.0.1], fallback: authorization_hash }\n";
    let proxy = before(&engine, tenants, "", &policy("last", "")).await;
    let dir = proxy.folder().join("policies");
    for (file, name, matcher) in [
        ("10.yaml", "by-header", "headers: { x-team: [ide, web] }"),
        ("20.yaml", "by-tenant", "tenants: [red]"),
        ("21.yaml", "by-key", "tenants: [c3e9a1c985d603e4]"),
        ("30.yaml", "by-route", "routes: [chat]"),
        ("40.yaml", "by-temperature", "temperature: { min: 0.5, max: 0.9 }"),
        ("50.yaml", "by-length", "prompt_tokens: { min: 20 }"),
        ("60.yaml", "by-backend", "backends: [other*]"),
        ("70.yaml", "by-model", "models: [to*], headers: { x-by: [model] }"),
        ("80.yaml", "by-both", "backends: [to?], headers: { x-by: [backend] }"),
    ] {
        write(&dir, file, &policy(name, &format!("mode: plain\nmatch: {{ {matcher} }}")));
    }
    let done = proxy.post("/api/reload").await;
    assert_eq!(done.head.status(), 200, "{}", done.text());
    let long: Vec<u32> = (0..20).map(|at| 100 + at).collect();
    for (fields, body, wanted) in [
        ("", json!({}), "last"),
        ("x-team: web\r\n", json!({}), "by-header"),
        ("x-team: web\r\nx-tenant: red\r\n", json!({}), "by-header"),
        ("x-team: ops\r\n", json!({}), "last"),
        ("x-tenant: red\r\n", json!({}), "by-tenant"),
        ("x-tenant: blue\r\n", json!({}), "last"),
        ("authorization: Bearer sk-1\r\n", json!({}), "by-key"),
        ("authorization: Bearer sk-2\r\n", json!({}), "last"),
        ("", json!({"messages": [{"role": "user", "content": "a"}]}), "by-route"),
        ("", json!({"temperature": 0.5}), "by-temperature"),
        ("", json!({"temperature": 0.9}), "by-temperature"),
        ("", json!({"temperature": 0.91}), "last"),
        ("", json!({"prompt": long}), "by-length"),
        ("x-by: model\r\n", json!({}), "by-model"),
        ("x-by: backend\r\n", json!({}), "by-both"),
    ] {
        assert_eq!(policy_of(&proxy, fields, body.clone()).await, wanted, "{fields} {body}");
    }
}

#[tokio::test]
async fn a_translated_request_matches_by_the_api_that_the_client_asks_by() {
    let engine = engine(Pace::default()).await;
    let translates = "    routes: { messages: translate, responses: translate }\n";
    let proxy = before(&engine, "", translates, &policy("last", "")).await;
    for api in ["messages", "responses", "chat"] {
        let text = policy(&format!("by-{api}"), &format!("mode: plain\nmatch: {{ routes: [{api}] }}"));
        write(&proxy.folder().join("policies"), &format!("0-{api}.yaml"), &text);
    }
    assert_eq!(proxy.post("/api/reload").await.head.status(), 200);
    let said = json!([{"role": "user", "content": "a"}]);
    for (path, body, wanted) in [
        ("/v1/messages", json!({"model": "toy", "max_tokens": 2, "messages": said}), "by-messages"),
        (
            "/v1/responses",
            json!({"model": "toy", "max_output_tokens": 2, "input": "a", "store": false}),
            "by-responses",
        ),
        ("/v1/chat/completions", json!({"model": "toy", "max_tokens": 2, "messages": said}), "by-chat"),
    ] {
        let answer = send(proxy.front, path, "content-type: application/json\r\n", &body).await;
        let label = answer.head.get("x-foretell-policy").unwrap_or_default();
        assert!(label.starts_with(wanted), "{path}: {label:?} {}", answer.text());
    }
}

/// Two tenants, each with a policy: neither ever gets the other's, however their requests are
/// mixed, and an untrusted client that names a tenant gets neither.
#[tokio::test]
async fn two_tenants_never_see_each_other_s_policies() {
    let engine = engine(Pace::default()).await;
    for (peers, trusted) in [("127.0.0.0/8", true), ("10.0.0.0/8", false)] {
        let tenants = format!("tenant: {{ header: x-tenant, trusted_peers: [{peers}] }}\n");
        let red = policy("red", "match: { tenants: [red] }\nmode: plain");
        let proxy = before(&engine, &tenants, "", &red).await;
        write(
            &proxy.folder().join("policies"),
            "z.yaml",
            &policy("blue", "match: { tenants: [blue] }\nmode: plain"),
        );
        assert_eq!(proxy.post("/api/reload").await.head.status(), 200);
        let asked = (0..40).map(|number| {
            let (proxy, tenant) = (&proxy, if number % 3 == 0 { "red" } else { "blue" });
            async move { (tenant, policy_of(proxy, &format!("x-tenant: {tenant}\r\n"), json!({})).await) }
        });
        for (tenant, got) in futures_util::future::join_all(asked).await {
            assert_eq!(got, if trusted { tenant } else { "" });
        }
        let both = "content-type: application/json\r\nx-tenant: red\r\nx-tenant: blue\r\n";
        let body = json!({"model": "toy", "prompt": [100], "max_tokens": 2});
        let answer = send(proxy.front, "/v1/completions", both, &body).await;
        assert_eq!(answer.head.status(), 400, "which of the two is not known: {}", answer.text());
    }
}
