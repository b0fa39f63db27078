//! What sidecars learn from each other.

use super::house::{Server, fleet, lines, sidecar, until_sidecars, until_up};
use crate::fakes::vllm::Vllm;
use crate::fakes::{Fake, Pace};
use crate::groups::house::{before, compared, engine, forced, policy, send};
use crate::reasons::proxy::Proxy;

/// The basis of the projected speedup at a sidecar that sends no verify request.
async fn basis(engine: &Fake<Vllm>, proxy: &Proxy) -> String {
    let mut sent = 0;
    while compared(proxy).await["projected_speedup"].is_null() {
        assert!(sent < 400, "{}", proxy.log());
        send(engine, proxy, sent..sent + 16).await;
        sent += 16;
    }
    compared(proxy).await["projected_speedup"]["basis"].as_str().unwrap().to_owned()
}

fn shadow() -> String {
    policy("kept", "mode: shadow")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sidecar_knows_the_costs_that_others_have_measured() {
    let Some(server) = Server::start(&[]).await else { return };
    let engine = engine(Pace::default()).await;
    let url = server.url();
    let alone = before(&engine, "", "", &shadow()).await;
    assert_eq!(basis(&engine, &alone).await, "guess", "without a store");
    assert!(!alone.get("/metrics").await.text().contains("foretell_store_"), "no task runs");

    let first = sidecar(&engine, &url, "", &forced("kept")).await;
    send(&engine, &first, 0..16).await;
    let second = sidecar(&engine, &url, "", &shadow()).await;
    until_sidecars(&second, 1).await;
    assert_eq!(basis(&engine, &second).await, "measured");
    let third = sidecar(&engine, &url, "", &forced("kept")).await;
    send(&engine, &third, 0..4).await;
    until_sidecars(&first, 1).await;
    until_sidecars(&second, 2).await;
    assert_eq!(lines(&second, "measurements are shared"), 1, "{}", second.log());

    // What they know is kept when they go.
    first.end().await;
    third.end().await;
    let fourth = sidecar(&engine, &url, "", &shadow()).await;
    until_sidecars(&fourth, 2).await;
    assert_eq!(basis(&engine, &fourth).await, "measured");
    engine.restart();
    let fifth = sidecar(&engine, &url, "", &shadow()).await;
    until_sidecars(&fifth, 2).await;
    assert_eq!(basis(&engine, &fifth).await, "probe", "of another process, as a probe of this one");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fleets_with_names_of_their_own_share_nothing() {
    let Some(server) = Server::start(&[]).await else { return };
    let engine = engine(Pace::default()).await;
    let first = sidecar(&engine, &server.url(), ", key: one", &forced("kept")).await;
    send(&engine, &first, 0..16).await;
    server.until_keys("one:2:sidecar:*", 1).await;
    let second = sidecar(&engine, &server.url(), ", key: two", &shadow()).await;
    until_up(&second, true).await;
    assert_eq!(basis(&engine, &second).await, "guess");
    until_sidecars(&second, 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn measurements_of_a_snapshot_are_not_counted_a_second_time() {
    let Some(server) = Server::start(&[]).await else { return };
    let (engine, folder) = (engine(Pace::default()).await, tempfile::tempdir().unwrap());
    let file = folder.path().join("learnt.json").display().to_string();
    let process = format!("{}corpus: {{ snapshot: {file:?} }}\n", fleet(&server.url(), ""));
    let first = before(&engine, &process, "", &forced("kept")).await;
    send(&engine, &first, 0..16).await;
    first.end().await;
    let former = server.keys("foretell:2:sidecar:*").pop().expect("an entry");
    let again = before(&engine, &process, "", &forced("kept")).await;
    until_up(&again, true).await;
    server.until_keys(&former, 0).await;
    server.until_keys("foretell:2:sidecar:*", 1).await;
    until_sidecars(&again, 0).await;
}

/// Two fleets under one name: the costs of an engine are not taken for those of another.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_fleets_under_one_name_tell_their_engines_apart() {
    let Some(server) = Server::start(&[]).await else { return };
    let (here, there) = (engine(Pace::default()).await, engine(Pace::default()).await);
    there.restart();
    let first = sidecar(&here, &server.url(), "", &forced("kept")).await;
    send(&here, &first, 0..16).await;
    let second = sidecar(&there, &server.url(), "", &shadow()).await;
    until_sidecars(&second, 1).await;
    assert_eq!(basis(&there, &second).await, "probe");
}
