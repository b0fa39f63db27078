//! Groups and learnt state over an edit of the policies and over a restart.

use super::house::{before, compared, engine, forced, policy, requests, send, series};
use crate::fakes::Fake;
use crate::fakes::Pace;
use crate::fakes::vllm::Vllm;
use crate::reasons::proxy::Proxy;

const GAIN: &str = "foretell_projected_speedup";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_edited_policy_keeps_its_groups_and_one_of_another_name_has_its_own() {
    let engine = engine(Pace::default()).await;
    let lot = policy("first", "holdback: { start: 0.5, floor: 0.5 }");
    let proxy = before(&engine, "", "", &lot).await;
    while compared(&proxy).await["projected_speedup"].is_null() {
        send(&engine, &proxy, 0..16).await;
    }
    let (before, gained) = (requests(&proxy).await, compared(&proxy).await["projected_speedup"].clone());
    proxy.adopt(&policy("first", "mode: plain")).await;
    send(&engine, &proxy, 0..8).await;
    assert_eq!((requests(&proxy).await, &compared(&proxy).await["projected_speedup"]), (before, &gained));
    assert_eq!(series(&proxy, GAIN).await.len(), 3);

    proxy.adopt(&policy("second", "holdback: { start: 1, floor: 1 }")).await;
    assert!(compared(&proxy).await.is_null());
    assert_eq!(series(&proxy, GAIN).await, Vec::<String>::new(), "its policy is not in force");
    send(&engine, &proxy, 0..8).await;
    assert_eq!(requests(&proxy).await, (0, 8));

    proxy.adopt(&lot).await;
    assert_eq!((requests(&proxy).await, &compared(&proxy).await["projected_speedup"]), (before, &gained));
}

/// The basis of the projected speedup in a process that has sent no verify request, from state
/// learnt before it began.
async fn basis(engine: &Fake<Vllm>, process: &str) -> String {
    let proxy: Proxy = before(engine, process, "", &policy("kept", "mode: shadow")).await;
    assert!(compared(&proxy).await.is_null(), "groups are not kept over a restart");
    let mut sent = 0;
    while compared(&proxy).await["projected_speedup"].is_null() {
        assert!(sent < 400);
        send(engine, &proxy, sent..sent + 16).await;
        sent += 16;
    }
    let basis = compared(&proxy).await["projected_speedup"]["basis"].as_str().unwrap().to_owned();
    proxy.end().await;
    basis
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn learnt_state_of_an_engine_outlives_the_process_and_not_the_engine() {
    let folder = tempfile::tempdir().unwrap();
    let keeps =
        format!("corpus: {{ snapshot: {:?} }}\n", folder.path().join("learnt.json").display().to_string());
    let engine = engine(Pace::default()).await;
    let proxy = before(&engine, &keeps, "", &forced("kept")).await;
    send(&engine, &proxy, 0..16).await;
    proxy.end().await;
    assert_eq!(basis(&engine, "").await, "guess", "without the file");
    assert_eq!(basis(&engine, &keeps).await, "measured");
    engine.restart();
    assert_eq!(basis(&engine, &keeps).await, "guess", "another process of the engine");
}
