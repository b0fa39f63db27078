//! Recordings: a request is on disk only if process, policy and client allow it, and then as the
//! tokens that the client got; encrypted if there is a key.

use std::path::Path;
use std::time::{Duration, Instant};

use foretell_proxy::learning::cipher::Cipher;
use foretell_proxy::learning::recording::Record;
use foretell_proxy::learning::recording::segment;
use foretell_wire::openai::Route;
use serde_json::json;

use super::house::{Ask, House, Setup, get};
use crate::wire::PATIENCE;

const CANARY: &str = "take the canary, ";
const TENANTS: &str = "tenant: { header: x-tenant, trusted_peers: [127.0.0.1/32] }\n";

async fn house(more: &str) -> House {
    let policies = [true, false].map(|record| {
        format!(
            "version: 1\nname: record-{record}\nmatch: {{ headers: {{ x-record: [\"{record}\"] }} }}\n\
             gamma: {{ fixed: 4 }}\ncorpus: {{ record: {record} }}\n"
        )
    });
    let policies = policies.each_ref().map(String::as_str);
    House::build(Setup { policies: &policies, more: format!("{TENANTS}{more}"), ..Setup::default() }).await
}

fn ask(stream: bool) -> Ask {
    Ask::new(
        Route::Completions,
        stream,
        json!({"prompt": CANARY, "max_tokens": 30, "temperature": 0.0, "ignore_eos": true}),
    )
}

/// Waits until so many requests have been written.
async fn written(house: &House, count: usize) {
    let wanted = format!("foretell_recorded_requests_total{{result=\"written\"}} {count}\n");
    let begun = Instant::now();
    while !get(house.admin(), "/metrics").await.text().contains(&wanted) {
        assert!(begun.elapsed() < PATIENCE, "not written: {wanted}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn recorded(folder: &Path, key: Option<&Path>) -> Vec<Record> {
    let cipher = key.map(|path| Cipher::from_file(path).unwrap());
    let segments = segment::list(folder).unwrap();
    let read = segments.iter().flat_map(|path| segment::read(path, cipher.as_ref()).unwrap().records);
    read.collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_is_recorded_where_process_policy_and_client_allow_it() {
    let folder = tempfile::tempdir().unwrap();
    let (dir, key) = (folder.path().join("r"), folder.path().join("key"));
    std::fs::write(&key, "5a".repeat(32)).unwrap();
    let house =
        house(&format!("corpus: {{ record: {{ dir: {}, key_file: {} }} }}\n", dir.display(), key.display()))
            .await;
    let plain = house.direct(&ask(false)).await;
    let refused = [
        "x-record: false\r\n",
        "x-record: true\r\nx-foretell-corpus: off\r\n",
        "x-record: true\r\nx-foretell: plain\r\n",
    ];
    for fields in refused {
        ask(false).send(house.front(), fields).await;
    }
    let allowed = ["", "x-tenant: a\r\n"];
    for fields in allowed {
        let answer = ask(true).send(house.front(), &format!("x-record: true\r\n{fields}")).await;
        assert_eq!(answer.plain.text, plain.plain.text);
    }
    written(&house, allowed.len()).await;
    let records = recorded(&dir, Some(&key));
    assert_eq!(records.len(), allowed.len());
    let tenants: Vec<Option<&str>> = records.iter().map(|record| record.tenant.as_deref()).collect();
    assert_eq!(tenants, [None, Some("a")]);
    for record in &records {
        assert_eq!((record.policy.as_str(), record.output.len()), ("record-true", 30));
        assert_eq!((&record.prompt, &record.output), (&records[0].prompt, &records[0].output));
        assert!(!record.prompt.is_empty() && !record.vocabulary.is_empty());
    }
    let ids = serde_json::to_vec(&records[0].output).unwrap();
    for path in segment::list(&dir).unwrap() {
        let bytes = std::fs::read(path).unwrap();
        let holds = |part: &[u8]| bytes.windows(part.len()).any(|found| found == part);
        assert!(!holds(b"canary") && !holds(&ids) && !holds(b"record-true"));
    }
    for page in ["/metrics", "/api/sessions", "/api/corpus", "/api/status", "/api/policies"] {
        assert!(!get(house.admin(), page).await.text().contains("canary"), "{page}");
    }
    House::assert_calm();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_recorded_without_a_folder() {
    let house = house("").await;
    ask(false).send(house.front(), "x-record: true\r\n").await;
    let page = get(house.admin(), "/metrics").await.text().clone();
    for result in ["written", "dropped", "failed"] {
        assert!(
            page.contains(&format!("foretell_recorded_requests_total{{result=\"{result}\"}} 0\n")),
            "{result}"
        );
    }
}
