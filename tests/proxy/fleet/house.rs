//! Scripted replicas, and a gateway in front of them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use foretell::app::Gateway;
use foretell_net::fleet::ReplicaSettings;
use foretell_proxy::gateway::Settings;
use tokio::net::TcpListener;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio_util::sync::CancellationToken;

use crate::wire::{Message, PATIENCE, Wire, post};

/// A replica's reply to a request.
pub enum Reply {
    /// Answers, and keeps the connection.
    Bytes(Vec<u8>),
    /// Sends this and resets the connection.
    Reset(Vec<u8>),
    /// Waits until it is killed.
    Hold,
}

/// A server that can be killed, and brought up again at its address.
pub struct Replica {
    pub address: SocketAddr,
    /// Every request, in order of arrival.
    pub seen: UnboundedReceiver<Message>,
    killed: CancellationToken,
}

impl Replica {
    pub async fn start(reply: impl Fn(&Message) -> Reply + Send + Sync + 'static) -> Self {
        Self::at(SocketAddr::from(([127, 0, 0, 1], 0)), reply).await
    }

    pub async fn at(address: SocketAddr, reply: impl Fn(&Message) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let killed = CancellationToken::new();
        let (sender, seen) = unbounded_channel();
        let reply = Arc::new(reply);
        let stop = killed.clone();
        tokio::spawn(async move {
            loop {
                let stream = tokio::select! {
                    () = stop.cancelled() => return,
                    accepted = listener.accept() => accepted.unwrap().0,
                };
                let (reply, sender, stop) = (Arc::clone(&reply), sender.clone(), stop.clone());
                tokio::spawn(async move {
                    let mut wire = Wire::new(stream);
                    wire.reset();
                    loop {
                        let request = tokio::select! {
                            () = stop.cancelled() => return,
                            request = wire.message() => request,
                        };
                        let Some(request) = request else { return };
                        let reply = reply(&request);
                        let _ = sender.send(request);
                        match reply {
                            Reply::Bytes(bytes) if wire.try_send(&bytes).await => {}
                            Reply::Bytes(_) => return,
                            Reply::Reset(bytes) => {
                                wire.try_send(bytes).await;
                                return;
                            }
                            Reply::Hold => return stop.cancelled().await,
                        }
                    }
                });
            }
        });
        Self { address, seen, killed }
    }

    /// A replica whose answers have this body.
    pub async fn saying(body: &'static str) -> Self {
        Self::start(move |_| Reply::Bytes(answer(200, "", body))).await
    }

    /// One that answers 200 to everything but completions, to which it answers `status` as long as
    /// `sick`.
    pub async fn sick(status: u16, body: &'static str) -> (Self, Arc<AtomicBool>) {
        let sick = Arc::new(AtomicBool::new(true));
        let is_sick = Arc::clone(&sick);
        let replica = Self::start(move |request| {
            let bad = request.head.target().0 == "POST" && is_sick.load(Ordering::Relaxed);
            Reply::Bytes(if bad { answer(status, "", body) } else { answer(200, "", "well") })
        });
        (replica.await, sick)
    }

    /// Kills its process: nothing listens, every connection is reset.
    pub async fn kill(&mut self) {
        self.killed.cancel();
        // The channel closes once the last of its connections is gone.
        while self.next().await.is_some() {}
    }

    /// The next request.
    pub async fn next(&mut self) -> Option<Message> {
        tokio::time::timeout(PATIENCE, self.seen.recv()).await.expect("a request in time")
    }

    /// Requests that it has received since the last look.
    pub fn requests(&mut self) -> Vec<Message> {
        std::iter::from_fn(|| self.seen.try_recv().ok()).collect()
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        self.killed.cancel();
    }
}

pub fn answer(status: u16, fields: &str, body: &str) -> Vec<u8> {
    format!("HTTP/1.1 {status} x\r\n{fields}content-length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

/// A backend `b` at these addresses, one after the other.
pub fn backends(addresses: &[SocketAddr]) -> Vec<ReplicaSettings> {
    addresses.iter().map(|address| ReplicaSettings::new("b", format!("http://{address}"))).collect()
}

pub fn settings(backends: Vec<ReplicaSettings>) -> Settings {
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    let settings = Settings::new(ReplicaSettings::new("b", "http://127.0.0.1:1"));
    Settings { listen: vec![any.into()], admin: Some(any), workers: 0, backends, ..settings }
}

pub async fn start(settings: Settings) -> Gateway {
    Gateway::start(settings, None, None).await.unwrap()
}

/// A gateway in front of these replicas.
pub async fn before(addresses: &[SocketAddr]) -> Gateway {
    start(settings(backends(addresses))).await
}

/// Sends a request by a connection of its own.
pub async fn ask(gateway: &Gateway, request: impl AsRef<[u8]>) -> Message {
    Wire::connect(gateway.addresses[0]).await.ask(request).await
}

pub fn completion() -> Vec<u8> {
    // With `x-foretell: off` the body would stay unread; this one is read, so it can be sent again.
    post("/v1/completions", "", br#"{"model":"m","prompt":"p","max_tokens":4}"#)
}

pub fn metric(gateway: &Gateway, line: &str) -> Option<f64> {
    let text = gateway.shared.observer.metrics().text();
    text.lines().find_map(|found| found.strip_prefix(line)?.trim().parse().ok())
}
