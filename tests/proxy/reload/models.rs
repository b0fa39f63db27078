//! Models are loaded with the first policy that names them and dropped with the last.

use std::path::Path;

use foretell::app::{self, Running};
use foretell_config::{load_policies, process};
use serde_json::{Value, json};

use super::write;
use crate::wire::{Message, Server, Wire, ok};

/// A whole proxy with two drafters: one whose tokenizer is named by its folder, and one that cannot
/// be loaded.
async fn start(server: &Server, folder: &Path) -> Running {
    let bundled = Path::new(env!("CARGO_MANIFEST_DIR")).join("onnx/models/draft-same");
    let model = folder.join("good");
    std::fs::create_dir(&model).unwrap();
    for file in ["config.json", "tokenizer.json", "model.onnx"] {
        std::fs::copy(bundled.join(file), model.join(file)).unwrap();
    }
    write(&model, "trained.json", &origin(7, "null"));
    let broken = folder.join("broken");
    std::fs::create_dir(&broken).unwrap();
    for file in ["config.json", "tokenizer.json"] {
        std::fs::copy(model.join(file), broken.join(file)).unwrap();
    }
    write(&broken, "model.onnx", "no graph");
    let text = format!(
        "version: 1\nlisten: [{{ address: '127.0.0.1:0' }}]\nadmin: {{ address: '127.0.0.1:0' }}\n\
         backends: [{{ name: b, replicas: ['http://{}'] }}]\npolicies: {{ dir: {} }}\n\
         drafters: {{ good: {{ path: {model}, tokenizer: {model}, device: cpu, slots: 2 }}, broken: {{ path: {} }} }}\n",
        server.address,
        folder.join("policies").display(),
        broken.display(),
        model = model.display(),
    );
    let process = process::parse("f", &text).unwrap();
    let policies = load_policies(&process).unwrap();
    app::start(process, policies).await.unwrap()
}

fn origin(at: u64, tenants: &str) -> String {
    format!(r#"{{ "at": {at}, "vocabulary": "v", "tenants": [{tenants}], "requests": 60 }}"#)
}

/// True if the weights of `good` that are loaded were trained at this time.
async fn is_trained_at(running: &Running, at: u64) -> bool {
    let scrape = "GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n".to_owned();
    let page = Wire::connect(running.gateway.admin.unwrap()).await.ask(scrape).await.text();
    page.contains(&format!("foretell_drafter_trained_timestamp_seconds{{drafter=\"good\"}} {at}\n"))
}

async fn reload(running: &Running) -> Message {
    let request = "POST /api/reload HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n".to_owned();
    Wire::connect(running.gateway.admin.unwrap()).await.ask(request).await
}

fn policy(drafter: &str) -> String {
    format!("version: 1\nname: p\ndrafters: [{{ {drafter} }}]\n")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_is_loaded_before_the_swap_and_dropped_when_no_policy_names_it() {
    let server = Server::answering(|_| ok("", b"{}")).await;
    let folder = tempfile::tempdir().unwrap();
    let policies = folder.path().join("policies");
    std::fs::create_dir(&policies).unwrap();
    write(&policies, "p.yaml", &policy("kind: prompt_lookup"));
    let running = start(&server, folder.path()).await;
    assert_eq!(running.drafters.names(), Vec::<String>::new(), "named by no policy");

    write(&policies, "p.yaml", &policy("kind: model, model: good"));
    assert_eq!(reload(&running).await.head.status(), 200);
    assert_eq!(running.drafters.names(), ["good"]);
    assert!(is_trained_at(&running, 7).await);

    let revision = |body: &Value| body["policies"][0]["revision"].clone();
    write(&policies, "q.yaml", "version: 1\nname: q\ndrafters: [{ kind: model, model: broken }]\n");
    let refused = reload(&running).await;
    assert_eq!(refused.head.status(), 422, "{}", refused.text());
    assert_eq!(refused.json()["errors"][0]["path"], "drafters.broken");
    assert_eq!(running.drafters.names(), ["good"], "that of the policies in force");
    std::fs::remove_file(policies.join("q.yaml")).unwrap();

    write(&policies, "p.yaml", &policy("kind: prompt_lookup"));
    let done = reload(&running).await.json();
    assert_ne!(revision(&done), json!(null));
    assert_eq!(running.drafters.names(), Vec::<String>::new(), "named by no policy any more");
}

/// The policies are judged by the tenants of the drafter on disk, so no other weights may draft.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_that_was_trained_again_takes_the_place_of_the_loaded_one() {
    let server = Server::answering(|_| ok("", b"{}")).await;
    let folder = tempfile::tempdir().unwrap();
    let (policies, model) = (folder.path().join("policies"), folder.path().join("good"));
    std::fs::create_dir(&policies).unwrap();
    write(&policies, "p.yaml", &policy("kind: model, model: good"));
    let running = start(&server, folder.path()).await;
    write(&model, "trained.json", &origin(8, r#""a", "b""#));
    write(&policies, "p.yaml", &policy("kind: model, model: good, i_accept_sharing: true"));
    assert_eq!(reload(&running).await.head.status(), 200);
    assert!(is_trained_at(&running, 8).await);

    let for_a = format!("{}match: {{ tenants: [a] }}\n", policy("kind: model, model: good"));
    write(&policies, "p.yaml", &for_a);
    let refused = reload(&running).await;
    assert!(refused.text().contains("trained on texts of other tenants"), "{}", refused.text());
    write(&model, "trained.json", &origin(9, r#""a""#));
    assert_eq!(reload(&running).await.head.status(), 200);
    assert!(is_trained_at(&running, 9).await, "the weights of a and b draft no more");

    write(&model, "trained.json", &origin(10, r#""a""#));
    write(&policies, "q.yaml", "version: 1\nname: q\ndrafters: [{ kind: model, model: broken }]\n");
    assert_eq!(reload(&running).await.head.status(), 422);
    assert!(is_trained_at(&running, 9).await, "the policies in force keep the weights they were judged with");
}
