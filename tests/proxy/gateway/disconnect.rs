//! A client that disconnects ends the backend's call, at every stage of the two.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use super::house;
use crate::wire::{EVENTS, PATIENCE, Server, Wire, chunk};

/// Extra time that a backend's connection may outlive the client because of the proxy.
const LIMIT: Duration = Duration::from_millis(100);

#[derive(Debug)]
enum Seen {
    Reached,
    Closed(Instant),
}

async fn wait(seen: &mut mpsc::UnboundedReceiver<Seen>) -> Seen {
    tokio::time::timeout(PATIENCE, seen.recv()).await.expect("in time").expect("a backend")
}

/// Disconnects; returns how long the backend's connection outlived the client.
async fn leave(client: Wire, seen: &mut mpsc::UnboundedReceiver<Seen>) -> Duration {
    assert!(matches!(wait(seen).await, Seen::Reached));
    let left = Instant::now();
    drop(client);
    match wait(seen).await {
        Seen::Closed(at) => at.saturating_duration_since(left),
        Seen::Reached => panic!("the backend went on"),
    }
}

/// The backend at the stage where the client disconnects.
async fn reached(mut wire: Wire, tell: mpsc::UnboundedSender<Seen>) {
    tell.send(Seen::Reached).unwrap();
    wire.closed().await;
    tell.send(Seen::Closed(Instant::now())).unwrap();
}

/// Clients leave at 34 points, which `begin` takes them to: without the proxy and through it,
/// alternating. Every connection is closed; the medians are compared, since a busy machine delays
/// both ways alike.
async fn assert_prompt(
    server: &Server,
    through: SocketAddr,
    mut seen: mpsc::UnboundedReceiver<Seen>,
    begin: impl AsyncFn(&mut Wire, usize),
) {
    let mut took = [Vec::new(), Vec::new()];
    for point in 0..34 {
        for (to, took) in [server.address, through].into_iter().zip(&mut took) {
            let mut client = Wire::connect(to).await;
            begin(&mut client, point).await;
            took.push(leave(client, &mut seen).await);
        }
    }
    let [direct, through] = took.map(|mut took| {
        took.sort_unstable();
        took[took.len() / 2]
    });
    assert!(through <= LIMIT + direct * 4, "{through:?} through Foretell, {direct:?} without it");
}

#[tokio::test]
async fn leaving_while_the_body_is_sent_closes_the_backend_promptly() {
    let (tell, seen) = mpsc::unbounded_channel();
    let server = Server::start(move |mut wire| {
        let tell = tell.clone();
        async move {
            let head = wire.head().await.unwrap();
            let wanted: usize = head.get("x-reach").unwrap().parse().unwrap();
            wire.exactly(wanted).await;
            reached(wire, tell).await;
        }
    })
    .await;
    let (_gateway, address) = house::before(server.address).await;
    assert_prompt(&server, address, seen, async |client, point| {
        let reach = point * 3_000;
        let head = format!(
            "POST /v1/embeddings HTTP/1.1\r\nhost: a\r\nx-reach: {reach}\r\ncontent-length: 200000\r\n\r\n"
        );
        client.send(&head).await;
        client.send(vec![b'x'; reach]).await;
    })
    .await;
}

#[tokio::test]
async fn leaving_before_the_answer_begins_closes_the_backend_promptly() {
    let (tell, seen) = mpsc::unbounded_channel();
    let server = Server::start(move |mut wire| {
        let tell = tell.clone();
        async move {
            wire.message().await.unwrap();
            reached(wire, tell).await;
        }
    })
    .await;
    let (_gateway, address) = house::before(server.address).await;
    assert_prompt(&server, address, seen, async |client, point| {
        let paths = ["/v1/completions", "/v1/chat/completions", "/v1/models"];
        client.send(crate::wire::post(paths[point % 3], "", &vec![b'x'; point * 100])).await;
    })
    .await;
}

#[tokio::test]
async fn leaving_after_any_event_closes_the_backend_promptly() {
    let (tell, seen) = mpsc::unbounded_channel();
    let server = Server::start(move |mut wire| {
        let tell = tell.clone();
        async move {
            let request = wire.message().await.unwrap();
            let events: usize = request.text().parse().unwrap();
            wire.send(EVENTS).await;
            for n in 0..events {
                wire.send(chunk(format!("data: {n}\n\n").as_bytes())).await;
            }
            reached(wire, tell).await;
        }
    })
    .await;
    let (gateway, address) = house::before(server.address).await;
    assert_prompt(&server, address, seen, async |client, point| {
        client.send(crate::wire::post("/v1/chat/completions", "", point.to_string().as_bytes())).await;
        client.head().await.unwrap();
        for n in 0..point {
            assert_eq!(client.chunk().await.unwrap(), format!("data: {n}\n\n").into_bytes());
        }
    })
    .await;
    let metrics = gateway.shared.observer.metrics().text();
    assert!(metrics.contains("foretell_client_disconnects_total 34"), "{metrics}");
    assert!(metrics.contains("foretell_requests_in_flight 0"));
    assert!(metrics.contains("foretell_streams_in_flight 0"));
}
