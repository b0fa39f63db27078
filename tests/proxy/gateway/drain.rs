//! Draining: requests in flight are answered to their end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use foretell::app::Ended;
use foretell::app::local;
use foretell::app::signals::SAME_WISH;
use foretell::app::signals::Signals;
use foretell_net::http::drain::DrainTimes;
use foretell_proxy::gateway::Settings;
use tokio::sync::watch;

use super::house;
use crate::wire::{EVENTS, PATIENCE, Server, Wire, chunk, ok, post};

/// Streams three events, and three more on a signal.
async fn streaming() -> (Server, watch::Sender<bool>) {
    let (sender, receiver) = watch::channel(false);
    let server = Server::start(move |mut wire| {
        let mut receiver = receiver.clone();
        async move {
            while let Some(request) = wire.message().await {
                if request.head.target().0 == "GET" {
                    wire.send(ok("", b"hello")).await;
                    continue;
                }
                wire.send(EVENTS).await;
                for n in 0..6 {
                    if n == 3 {
                        receiver.wait_for(|go_on| *go_on).await.unwrap();
                    }
                    if !wire.try_send(chunk(format!("data: {n}\n\n").as_bytes())).await {
                        return;
                    }
                }
                wire.try_send("0\r\n\r\n").await;
            }
        }
    })
    .await;
    (server, sender)
}

fn times(settings: Settings, delay: u64, grace: u64) -> Settings {
    let drain =
        DrainTimes { delay: Duration::from_millis(delay), early: false, grace: Duration::from_millis(grace) };
    Settings { drain, ..settings }
}

fn signal(name: &str) {
    let (name, me) = (format!("-{name}"), std::process::id().to_string());
    assert!(std::process::Command::new("kill").args([name, me]).status().unwrap().success());
}

fn terminate() {
    signal("TERM");
}

async fn begun(address: std::net::SocketAddr) -> Wire {
    let mut client = Wire::connect(address).await;
    client.send(post("/v1/chat/completions", "", b"{}")).await;
    assert_eq!(client.head().await.unwrap().status(), 200);
    assert_eq!(client.chunk().await.unwrap(), b"data: 0\n\n");
    client
}

// One test, because signals reach the whole process.
#[tokio::test]
async fn a_signal_cuts_none_of_200_streams_and_a_later_one_ends_at_once() {
    let (server, tell) = streaming().await;
    let gateway = house::start(times(house::settings(server.address), 0, 600_000)).await;
    let address = gateway.addresses[0];
    let life = Arc::clone(&gateway.shared.life);
    let ended = tokio::spawn(gateway.until(Signals::catch().unwrap(), Arc::default()));
    let mut streams = Vec::new();
    for _ in 0..200 {
        streams.push(begun(address).await);
    }
    terminate();
    life.stop.accept.cancelled().await;
    tell.send_replace(true);
    for stream in &mut streams {
        for n in 1..6 {
            assert_eq!(stream.chunk().await.unwrap(), format!("data: {n}\n\n").into_bytes());
        }
        assert_eq!(stream.chunk().await.unwrap(), b"");
    }
    assert_eq!(ended.await.unwrap(), Ended::Drained { cut: 0 });
    assert!(tokio::net::TcpStream::connect(address).await.is_err());

    let (server, _tell) = streaming().await;
    let gateway = house::start(times(house::settings(server.address), 600_000, 600_000)).await;
    let (address, admin) = (gateway.addresses[0], gateway.admin.unwrap());
    let life = Arc::clone(&gateway.shared.life);
    let ended = tokio::spawn(gateway.until(Signals::catch().unwrap(), Arc::default()));
    let _stream = begun(address).await;
    let ready =
        || async { Wire::connect(admin).await.ask("GET /readyz HTTP/1.1\r\nhost: localhost\r\n\r\n").await };
    assert_eq!(ready().await.head.status(), 200);
    // Two signals at once count as one. Both arrive before this thread looks.
    signal("INT");
    terminate();
    life.draining().await;
    assert_eq!(ready().await.head.status(), 503);
    tokio::time::sleep(SAME_WISH + Duration::from_millis(100)).await;
    assert!(!ended.is_finished());
    terminate();
    assert_eq!(ended.await.unwrap(), Ended::AtOnce);
}

#[tokio::test]
async fn a_second_signal_waits_for_no_last_snapshot() {
    let (server, _tell) = streaming().await;
    let folder = tempfile::tempdir().unwrap();
    let process = format!(
        "version: 1\ncorpus: {{ snapshot: {} }}\nbackends: [{{ name: b, replicas: [\"http://{}\"] }}]\n",
        folder.path().join("learnt").display(),
        server.address,
    );
    let running = local::proxy(&process, &[]).await.unwrap();
    let (address, life) = (running.gateway.addresses[0], Arc::clone(&running.gateway.shared.life));
    let ended = tokio::spawn(running.until(Signals::catch().unwrap(), Arc::default()));
    let _stream = begun(address).await;
    terminate();
    life.draining().await;
    tokio::time::sleep(SAME_WISH + Duration::from_millis(100)).await;
    let second = Instant::now();
    terminate();
    assert_eq!(ended.await.unwrap(), Ended::AtOnce);
    assert!(second.elapsed() < Duration::from_secs(4), "{:?}", second.elapsed());
}

#[tokio::test]
async fn requests_still_open_after_the_grace_are_cut_and_counted() {
    let (server, _tell) = streaming().await;
    let gateway = house::start(times(house::settings(server.address), 0, 50)).await;
    let address = gateway.addresses[0];
    let life = Arc::clone(&gateway.shared.life);
    let ended = tokio::spawn(gateway.ended());
    let mut stream = begun(address).await;
    assert_eq!(stream.chunk().await.unwrap(), b"data: 1\n\n");
    assert_eq!(stream.chunk().await.unwrap(), b"data: 2\n\n");
    life.drain();
    assert_eq!(ended.await.unwrap(), Ended::Drained { cut: 1 });
    assert_eq!(stream.chunk().await, None);
}

#[tokio::test]
async fn draining_by_the_admin_api_answers_when_empty() {
    let (server, tell) = streaming().await;
    let gateway = house::start(times(house::settings(server.address), 0, 60_000)).await;
    let (address, admin) = (gateway.addresses[0], gateway.admin.unwrap());
    let life = Arc::clone(&gateway.shared.life);
    let ended = tokio::spawn(gateway.ended());
    let mut stream = begun(address).await;
    let waiting = tokio::spawn(async move {
        Wire::connect(admin)
            .await
            .ask("POST /api/drain?wait=1 HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n")
            .await
    });
    life.stop.accept.cancelled().await;
    assert!(!waiting.is_finished());
    tell.send_replace(true);
    while !stream.chunk().await.unwrap().is_empty() {}
    assert_eq!(waiting.await.unwrap().json()["empty"], true);
    assert_eq!(ended.await.unwrap(), Ended::Drained { cut: 0 });
}

/// A process that starts several proxies, as tests do, keeps nothing of those that ended.
#[test]
fn a_proxy_that_ends_releases_everything() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let process = "version: 1\nbackends: [{ name: b, replicas: [\"http://127.0.0.1:9\"] }]\n";
    let running = runtime.block_on(local::proxy(process, &[])).unwrap();
    let held = Arc::downgrade(&running.identities);
    drop(running);
    drop(runtime);
    let begun = Instant::now();
    while held.upgrade().is_some() {
        assert!(begun.elapsed() < PATIENCE, "a reference cycle");
        std::thread::yield_now();
    }
}
