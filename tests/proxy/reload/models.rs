//! Models are loaded with the first policy that names them and dropped with the last.

use std::path::Path;

use foretell::app::{self, Running};
use foretell::config::{load_policies, process};
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
    let origin = r#"{ "at": 7, "vocabulary": "v", "tenants": [null], "requests": 60 }"#;
    write(&model, "trained.json", origin);
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
    let scrape = "GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n".to_owned();
    let page = Wire::connect(running.gateway.admin.unwrap()).await.ask(scrape).await.text();
    assert!(page.contains("foretell_drafter_trained_timestamp_seconds{drafter=\"good\"} 7\n"));

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
