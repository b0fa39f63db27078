//! A client that disconnects ends the backend's call, at every stage of the two.

use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use super::house;
use crate::wire::{EVENTS, PATIENCE, Server, Wire, chunk};

/// Extra time that a backend's connection may outlive the client because of the proxy.
const LIMIT: Duration = Duration::from_millis(100);

#[derive(Debug)]
enum Seen {
    /// The backend is at the stage where the client disconnects.
    Reached,
    /// The connection to the backend was closed.
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

/// Times that connections outlived their clients: without the proxy and through it, alternating.
#[derive(Default)]
struct Took {
    direct: Vec<Duration>,
    through: Vec<Duration>,
}

impl Took {
    /// Every connection was closed; compares the medians, since a busy machine delays both ways
    /// alike.
    fn assert_prompt(mut self) {
        self.direct.sort_unstable();
        self.through.sort_unstable();
        let (direct, through) = (self.direct[self.direct.len() / 2], self.through[self.through.len() / 2]);
        assert!(through <= LIMIT + direct * 4, "{through:?} through Foretell, {direct:?} without it");
    }
}

#[tokio::test]
async fn leaving_while_the_body_is_sent_closes_the_backend_promptly() {
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
    let mut took = Took::default();
    for point in 0..34 {
        let reach = point * 3_000;
        let head = format!(
            "POST /v1/embeddings HTTP/1.1\r\nhost: a\r\nx-reach: {reach}\r\ncontent-length: 200000\r\n\r\n"
        );
        for (to, took) in [(server.address, &mut took.direct), (address, &mut took.through)] {
            let mut client = Wire::connect(to).await;
            client.send(&head).await;
            client.send(vec![b'x'; reach]).await;
            took.push(leave(client, &mut seen).await);
        }
    }
    took.assert_prompt();
}

#[tokio::test]
async fn leaving_before_the_answer_begins_closes_the_backend_promptly() {
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
    let mut took = Took::default();
    for point in 0..33 {
        let paths = ["/v1/completions", "/v1/chat/completions", "/v1/models"];
        for (to, took) in [(server.address, &mut took.direct), (address, &mut took.through)] {
            let mut client = Wire::connect(to).await;
            client.send(crate::wire::post(paths[point % 3], "", &vec![b'x'; point * 100])).await;
            took.push(leave(client, &mut seen).await);
        }
    }
    took.assert_prompt();
}

#[tokio::test]
async fn leaving_after_any_event_closes_the_backend_promptly() {
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
    let mut took = Took::default();
    for point in 0..33 {
        let events = point.to_string();
        for (to, took) in [(server.address, &mut took.direct), (address, &mut took.through)] {
            let mut client = Wire::connect(to).await;
            client.send(crate::wire::post("/v1/chat/completions", "", events.as_bytes())).await;
            client.head().await.unwrap();
            for n in 0..point {
                assert_eq!(client.chunk().await.unwrap(), format!("data: {n}\n\n").into_bytes());
            }
            took.push(leave(client, &mut seen).await);
        }
    }
    took.assert_prompt();
    let metrics = gateway.shared.observer.metrics().text();
    assert!(metrics.contains("foretell_client_disconnects_total 33"), "{metrics}");
    assert!(metrics.contains("foretell_requests_in_flight 0"));
    assert!(metrics.contains("foretell_streams_in_flight 0"));
}
