//! A model that the proxy runs itself, without a socket in between; clients see no difference.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use foretell::app::Running;
use foretell::app::local::{self, LocalTarget};
use foretell::app::served;
use foretell::config::process::ServedModel;
use foretell_engines::openai::Route;
use foretell_onnx::open::DeviceChoice;
use serde_json::{Value, json};

use crate::client::{Ask, FORCED, get, metric, watch_panics};
use crate::wire::{PATIENCE, Wire, post};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("onnx/models/target")
}

async fn proxy(replicas: &str) -> Running {
    let process = format!(
        "version: 1\ntimeouts: {{ verify: 20s, draft: 2s }}\nbackends:\n  - name: toy\n    replicas: {replicas}\n    \
         probe: {{ when: never }}\n"
    );
    local::proxy(&process, &[FORCED]).await.unwrap()
}

async fn proxy_with_the_model() -> Running {
    let folder = folder();
    proxy(&format!("{{ model: {}, name: toy, device: cpu, lanes: 8, threads: 2 }}", folder.display())).await
}

fn asks() -> Vec<Ask> {
    let fields = |setting: Value| {
        let mut fields = json!({"prompt": "for i in range(3):\n    print(i)\nfor i in range(4):\n    print(i)\nfor i in ",
            "max_tokens": 32});
        fields.as_object_mut().unwrap().extend(setting.as_object().unwrap().clone());
        fields
    };
    let settings = [json!({"temperature": 0}), json!({"temperature": 0.8, "top_p": 0.9, "seed": 7})];
    settings.into_iter().flat_map(|setting| Ask::all(&fields(setting))).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_in_the_proxy_answers_as_on_its_own_server() {
    watch_panics();
    let model = ServedModel {
        name: Some("toy".into()),
        device: DeviceChoice::Cpu,
        lanes: 8,
        threads: 2,
        ..ServedModel::of(folder())
    };
    let opened = served::load(&model, None).expect("the model opens (make fetches ONNX Runtime)");
    let target = LocalTarget::start(opened.app).await.unwrap();
    let proxy = proxy_with_the_model().await;
    let front = proxy.gateway.addresses[0];
    for ask in asks() {
        let (alone, through) = (ask.send(target.address, "").await, ask.send(front, "").await);
        assert_eq!(through.plain, alone.plain, "{ask:?}");
        let foretell = through.foretell();
        assert_eq!(foretell["path"], "speculated", "{ask:?} {foretell}");
        assert!(foretell["rounds"].as_u64().unwrap() > 0, "{foretell}");
    }
    let replicas = get(proxy.gateway.admin.unwrap(), "/api/replicas").await.json();
    let replica = &replicas["replicas"][0];
    assert_eq!(replica["dialect"], "onnx", "{replicas}");
    assert_eq!(replica["url"], format!("onnx:{}", folder().display()), "{replicas}");
}

/// Above temperature 0 the model drafter's drafts are sampled and verified as a block, unless the
/// client's seed makes the text a function of the target's noise.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_draft_for_a_model_in_the_proxy_is_sampled_unless_the_client_has_a_seed() {
    watch_panics();
    let drafter = Path::new(env!("CARGO_MANIFEST_DIR")).join("onnx/models/draft-same");
    let process = format!(
        "version: 1\ntimeouts: {{ verify: 20s }}\nbackends:\n  - name: toy\n    replicas: {{ model: {}, name: toy, device: cpu, lanes: 8 }}\n    \
         probe: {{ when: never }}\ndrafters: {{ small: {{ path: {}, device: cpu }} }}\n",
        folder().display(),
        drafter.display()
    );
    let policy = "version: 1\nname: model\nmatch: {}\ndrafters: [{ kind: model, model: small }]\ngamma: { fixed: 4 }\n";
    let proxy = local::proxy(&process, &[policy]).await.unwrap();
    let (front, admin) = (proxy.gateway.addresses[0], proxy.gateway.admin.unwrap());
    let asked =
        |kind: &'static str| metric(admin, format!("foretell_drafts_total{{kind=\"{kind}\"}} ").leak());
    let fields =
        json!({"prompt": "def add(a, b):\n", "max_tokens": 40, "temperature": 0.8, "ignore_eos": true});
    let (mut accepted, mut rounds) = (0, 0);
    for _ in 0..4 {
        let ask = Ask::new(Route::Completions, false, fields.clone());
        let sent = ask.send(front, "").await;
        let foretell = sent.foretell();
        assert_eq!(foretell["path"], "speculated", "{foretell}");
        accepted += foretell["accepted"].as_u64().unwrap();
        rounds += foretell["rounds"].as_u64().unwrap();
    }
    assert!(accepted > 0 && asked("sampled").await >= rounds as f64 - 4.0, "{accepted} {rounds}");
    assert!(asked("draft").await.total_cmp(&0.0).is_eq());
    let mut seeded = fields;
    seeded["seed"] = json!(5);
    let before = asked("sampled").await;
    let ask = Ask::new(Route::Completions, false, seeded);
    let (plain, speculated) = (ask.send(front, "x-foretell: off\r\n").await, ask.send(front, "").await);
    assert_eq!(speculated.plain, plain.plain);
    assert!(asked("sampled").await.total_cmp(&before).is_eq() && asked("draft").await > 0.0);
}

/// The other routes of the model's own server are answered too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn its_other_pages_and_its_errors_come_through() {
    let proxy = proxy_with_the_model().await;
    let front = proxy.gateway.addresses[0];
    let models = get(front, "/v1/models").await.json();
    assert_eq!(models["data"][0]["id"], "toy", "{models}");
    let missing = get(front, "/v1/models/other").await;
    assert_eq!(missing.head.status(), 404);
    let other = Ask::new(Route::Completions, false, json!({"model": "other", "prompt": "a"}));
    let refused = other.send(front, "").await;
    assert_eq!(refused.plain.status, 404, "{}", refused.message.text());
    let long = Ask::new(Route::Completions, false, json!({"prompt": "a", "max_tokens": 1_000_000}));
    let refused = long.send(front, "").await;
    assert_eq!(refused.plain.status, 400, "{}", refused.message.text());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_stops_the_model() {
    let proxy = proxy_with_the_model().await;
    let front = proxy.gateway.addresses[0];
    let fields =
        json!({"prompt": "Once upon a time", "max_tokens": 2000, "temperature": 0, "ignore_eos": true});
    for head in ["", "x-foretell: plain\r\n", "x-foretell: off\r\n"] {
        let ask = Ask::new(Route::Completions, true, fields.clone());
        let before = computed(front).await;
        let mut wire = Wire::connect(front).await;
        wire.send(post(ask.route.path(), head, ask.body().to_string().as_bytes())).await;
        wire.head().await.expect("an answer");
        wire.chunk().await.expect("a token");
        drop(wire);
        // The count stops long before `max_tokens`.
        let mut last = computed(front).await;
        let still = async {
            loop {
                tokio::time::sleep(Duration::from_millis(50)).await;
                let now = computed(front).await;
                if now.total_cmp(&last).is_eq() {
                    return now;
                }
                last = now;
            }
        };
        let end = tokio::time::timeout(PATIENCE, still).await.unwrap_or_else(|_| panic!("{head:?}: goes on"));
        assert!(end > before && end - before < 1500.0, "{head:?}: {} tokens computed", end - before);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_head_has_no_body() {
    let proxy = proxy_with_the_model().await;
    let mut wire = Wire::connect(proxy.gateway.addresses[0]).await;
    wire.send("HEAD /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
    let head = wire.head().await.expect("an answer");
    assert_eq!(head.status(), 405);
    // The connection is in step: the next bytes are the next answer.
    let models = wire.ask("GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
    assert_eq!(models.json()["data"][0]["id"], "toy");
}

/// Tokens that went through the model, from its server's `/metrics`.
async fn computed(front: SocketAddr) -> f64 {
    metric(front, "foretell_target_computed_tokens_total ").await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_folder_without_a_model_fails_the_start_by_its_name() {
    let process = "version: 1\nbackends: [{ name: toy, replicas: { model: tests/workloads } }]\n";
    let error = local::proxy(process, &[FORCED]).await.map(|_| ()).unwrap_err().to_string();
    assert!(error.starts_with("model `tests/workloads`: "), "{error}");
}
