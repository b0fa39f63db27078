//! A client that leaves takes the backend's call with it, wherever the two are.

use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use super::house;
use crate::wire::{EVENTS, PATIENCE, Server, Wire, chunk};

const LIMIT: Duration = Duration::from_millis(100);

#[derive(Debug)]
enum Seen {
    /// The backend is where the client is to leave.
    Reached,
    /// The connection to the backend was closed.
    Closed(Instant),
}

async fn wait(seen: &mut mpsc::UnboundedReceiver<Seen>) -> Seen {
    tokio::time::timeout(PATIENCE, seen.recv()).await.expect("in time").expect("a backend")
}

/// Leaves and says how long the backend's connection outlived it.
async fn leave(client: Wire, seen: &mut mpsc::UnboundedReceiver<Seen>) -> Duration {
    assert!(matches!(wait(seen).await, Seen::Reached));
    let left = Instant::now();
    drop(client);
    match wait(seen).await {
        Seen::Closed(at) => at.saturating_duration_since(left),
        Seen::Reached => panic!("the backend went on"),
    }
}

#[tokio::test]
async fn leaving_while_the_body_is_sent_closes_the_backend_within_100_ms() {
    let (tell, mut seen) = mpsc::unbounded_channel();
    let server = Server::start(move |mut wire| {
        let tell = tell.clone();
        async move {
            let head = wire.head().await.unwrap();
            let wanted: usize = head.get("x-reach").unwrap().parse().unwrap();
            wire.exactly(wanted).await;
            tell.send(Seen::Reached).unwrap();
            wire.closed().await;
            tell.send(Seen::Closed(Instant::now())).unwrap();
        }
    })
    .await;
    let (_gateway, address) = house::before(server.address).await;
    for point in 0..34 {
        let reach = point * 3_000;
        let mut client = Wire::connect(address).await;
        let head = format!(
            "POST /v1/embeddings HTTP/1.1\r\nhost: a\r\nx-reach: {reach}\r\ncontent-length: 200000\r\n\r\n"
        );
        client.send(head).await;
        client.send(vec![b'x'; reach]).await;
        let took = leave(client, &mut seen).await;
        assert!(took <= LIMIT, "point {point}: {took:?}");
    }
}

#[tokio::test]
async fn leaving_before_the_answer_begins_closes_the_backend_within_100_ms() {
    let (tell, mut seen) = mpsc::unbounded_channel();
    let server = Server::start(move |mut wire| {
        let tell = tell.clone();
        async move {
            wire.message().await.unwrap();
            tell.send(Seen::Reached).unwrap();
            wire.closed().await;
            tell.send(Seen::Closed(Instant::now())).unwrap();
        }
    })
    .await;
    let (_gateway, address) = house::before(server.address).await;
    for point in 0..33 {
        let paths = ["/v1/completions", "/v1/chat/completions", "/v1/models"];
        let mut client = Wire::connect(address).await;
        client.send(crate::wire::post(paths[point % 3], "", &vec![b'x'; point * 100])).await;
        let took = leave(client, &mut seen).await;
        assert!(took <= LIMIT, "point {point}: {took:?}");
    }
}

#[tokio::test]
async fn leaving_after_any_event_closes_the_backend_within_100_ms() {
    let (tell, mut seen) = mpsc::unbounded_channel();
    let server = Server::start(move |mut wire| {
        let tell = tell.clone();
        async move {
            let request = wire.message().await.unwrap();
            let events: usize = request.text().parse().unwrap();
            wire.send(EVENTS).await;
            for n in 0..events {
                wire.send(chunk(format!("data: {n}\n\n").as_bytes())).await;
            }
            tell.send(Seen::Reached).unwrap();
            wire.closed().await;
            tell.send(Seen::Closed(Instant::now())).unwrap();
        }
    })
    .await;
    let (gateway, address) = house::before(server.address).await;
    for point in 0..33 {
        let mut client = Wire::connect(address).await;
        let events = point.to_string();
        client.send(crate::wire::post("/v1/chat/completions", "", events.as_bytes())).await;
        client.head().await.unwrap();
        for n in 0..point {
            assert_eq!(client.chunk().await.unwrap(), format!("data: {n}\n\n").into_bytes());
        }
        let took = leave(client, &mut seen).await;
        assert!(took <= LIMIT, "point {point}: {took:?}");
    }
    let metrics = gateway.shared.observer.metrics().text();
    assert!(metrics.contains("foretell_client_disconnects_total 33"), "{metrics}");
    assert!(metrics.contains("foretell_requests_in_flight 0"));
    assert!(metrics.contains("foretell_streams_in_flight 0"));
}
