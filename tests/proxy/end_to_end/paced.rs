//! In front of a target with 60 ms steps the session waits for drafts: only its own deadline
//! applies.
//!
//! The target is the bundled model; its steps are made longer by sleeping, which takes no processor
//! time from the drafter. The tests assert counts and not times: drafts that come too late
//! (`patience`) depend on the machine, so their number is not asserted.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use foretell::app::Running;
use foretell::app::local::{self, LocalTarget};
use foretell_onnx::open::DeviceChoice;
use foretell_onnx::open::Options;
use foretell_onnx::pace::Paced;
use foretell_onnx::runtime::model::Model;
use foretell_onnx::target::hugging::FolderWords;
use foretell_onnx::target::metrics::Metrics;
use foretell_onnx::target::scheduler::Engine;
use foretell_onnx::target::server::App;
use foretell_wire::openai::Route;
use futures_util::future::join_all;
use serde_json::json;

use super::house::House;
use crate::client::{Answer, Ask, metric, watch_panics};

const PACE: &str = "step=60ms";
const REQUESTS: usize = 20;
const MAX_TOKENS: usize = 64;

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("onnx/models").join(name)
}

async fn target() -> LocalTarget {
    let options =
        Options { device: DeviceChoice::Cpu, lanes: REQUESTS + 4, threads: 2, ..Options::default() };
    let folder = folder("target");
    let model = Model::open(&folder, &options).expect("the model opens (make fetches ONNX Runtime)");
    let metrics = Arc::new(Metrics::new().unwrap());
    let engine =
        Engine::start(Box::new(Paced::new(Box::new(model), PACE.parse().unwrap())), Arc::clone(&metrics))
            .unwrap();
    let words = Arc::new(FolderWords::read(&folder).unwrap());
    LocalTarget::start(App::new("toy".into(), engine, words, metrics)).await.unwrap()
}

/// A proxy with `draft-same` and no limit on drafts. A verify request waits for up to twenty
/// others, so that it may take long.
async fn proxy(target: &LocalTarget, gamma: &str) -> Running {
    let process = format!(
        "version: 1\ntimeouts: {{ verify: 5m }}\nbackends:\n  - name: toy\n    replicas: [\"http://{}\"]\n    \
         verify: {{ allow: [tree] }}\n    probe: {{ when: never }}\n\
         drafters: {{ draft-same: {{ path: \"{}\", device: cpu, slots: {REQUESTS} }} }}\n",
        target.address,
        folder("draft-same").display()
    );
    let policy = format!(
        "version: 1\nname: paced\ndrafters: [{{ kind: model, model: draft-same }}]\ngamma: {gamma}\n\
         holdback: {{ start: 0, floor: 0 }}\n"
    );
    local::proxy(&process, &[&policy]).await.unwrap()
}

/// Many requests at once, each with a prompt of its own.
async fn answers(proxy: &Running) -> Vec<Answer> {
    let front = proxy.gateway.addresses[0];
    let kind = Ask::new(Route::Completions, false, json!({}));
    let asked = (0..REQUESTS).map(|number| {
        let prompt =
            format!("fn number_{number}(text: &str) -> usize {{\n    text.len() + {number}\n}}\n").repeat(8);
        let fields = json!({"model": "toy", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0,
            "ignore_eos": true});
        let kind = &kind;
        async move {
            let sent = crate::client::send(front, Route::Completions.path(), "", &fields).await;
            Answer::read(kind, sent)
        }
    });
    join_all(asked).await
}

async fn count(proxy: &Running, line: &str) -> u64 {
    metric(proxy.gateway.admin.unwrap(), line).await as u64
}

async fn lost(proxy: &Running, cause: &str) -> u64 {
    let mut lost = 0;
    for kind in ["draft", "shadow"] {
        lost +=
            count(proxy, &format!("foretell_drafts_lost_total{{cause=\"{cause}\",kind=\"{kind}\"}}")).await;
    }
    lost
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_forced_gamma_drafts_in_every_request_without_a_longer_timeout() {
    watch_panics();
    let target = target().await;
    let proxy = proxy(&target, "{ fixed: 4 }").await;
    for answer in answers(&proxy).await {
        let foretell = answer.foretell();
        assert_eq!(foretell["path"], "speculated", "{foretell}");
        assert!(foretell["drafted"].as_u64().unwrap() >= foretell["rounds"].as_u64().unwrap(), "{foretell}");
    }
    assert!(count(&proxy, "foretell_drafts_total{kind=\"draft\"}").await >= REQUESTS as u64);
    for cause in ["timeout", "patience", "fault", "no_slot"] {
        assert_eq!(lost(&proxy, cause).await, 0, "{cause}");
    }
    House::assert_calm();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_draft_and_no_shadow_pass_is_lost_to_a_deadline_that_was_set() {
    watch_panics();
    let target = target().await;
    let proxy = proxy(&target, "{ max: 8 }").await;
    let answers = answers(&proxy).await;
    let speculated = answers.iter().filter(|answer| answer.foretell()["path"] == "speculated").count();
    eprintln!(
        "{speculated} of {REQUESTS} were speculated on, {} drafts came too late",
        lost(&proxy, "patience").await
    );
    let passes = count(&proxy, "foretell_drafts_total{kind=\"shadow\"}").await;
    assert!(passes > 0, "no request had the drafter read its prompt");
    for cause in ["timeout", "fault", "no_slot"] {
        assert_eq!(lost(&proxy, cause).await, 0, "{cause}");
    }
    House::assert_calm();
}
