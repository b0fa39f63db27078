//! Replicas behind a name, with a scripted resolver.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use foretell::app::Gateway;
use foretell_net::fleet::discover::Resolving;
use foretell_net::fleet::{ReplicaSettings, Resolve};
use foretell_proxy::gateway::Settings;
use parking_lot::Mutex;
use tokio::time::timeout;

use super::house::{self, Replica, Reply, ask};
use crate::wire::{EVENTS, PATIENCE, Wire, chunk};

/// The answers of the name server.
#[derive(Debug)]
pub struct Script {
    name: String,
    answer: Mutex<Option<Vec<SocketAddr>>>,
}

impl Script {
    pub fn says(addresses: &[SocketAddr]) -> Arc<Self> {
        Self::says_for("pods.test", addresses)
    }

    pub fn says_for(host: &str, addresses: &[SocketAddr]) -> Arc<Self> {
        Arc::new(Self { name: format!("{host}:8000"), answer: Mutex::new(Some(addresses.to_vec())) })
    }

    pub fn set(&self, addresses: Option<&[SocketAddr]>) {
        *self.answer.lock() = addresses.map(<[_]>::to_vec);
    }
}

impl Resolve for Script {
    fn resolve(&self, name: &str) -> Resolving {
        assert_eq!(name, self.name);
        let answer = self.answer.lock().clone().ok_or_else(|| io::Error::other("no name server"));
        Box::pin(std::future::ready(answer))
    }
}

async fn before(script: &Arc<Script>) -> Gateway {
    let backend = ReplicaSettings {
        discover: Some(Duration::from_millis(10)),
        ..ReplicaSettings::new("b", "http://pods.test:8000")
    };
    let resolver: Arc<dyn Resolve> = script.clone();
    house::start(Settings { resolver, ..house::settings(vec![backend]) }).await
}

fn urls(gateway: &Gateway) -> Vec<String> {
    gateway.shared.fleet.replicas().iter().map(|replica| replica.url().to_owned()).collect()
}

async fn until(gateway: &Gateway, wanted: &[SocketAddr]) {
    let wanted: Vec<String> = wanted.iter().map(|address| format!("http://{address}")).collect();
    let mut changes = gateway.shared.fleet.changes();
    while urls(gateway) != wanted {
        changes.changed().await.unwrap();
    }
}

#[tokio::test]
async fn replicas_come_and_go_with_the_name_and_running_answers_go_on() {
    let mut old =
        Replica::start(|_| Reply::Bytes([EVENTS.as_bytes(), &chunk(b"data: 1\n\n")].concat())).await;
    let new = Replica::saying("new").await;
    let script = Script::says(&[old.address]);
    let gateway = before(&script).await;
    // The first addresses are known before the gateway listens.
    let mut streaming = Wire::connect(gateway.addresses[0]).await;
    streaming.send(house::completion()).await;
    let host = old.next().await.unwrap().head.get("host").unwrap().to_owned();
    assert_eq!(host, "pods.test:8000", "the name, not the address behind it");
    assert_eq!(streaming.head().await.unwrap().status(), 200);
    assert_eq!(streaming.chunk().await.unwrap(), b"data: 1\n\n");
    script.set(Some(&[new.address]));
    until(&gateway, &[new.address]).await;
    assert_eq!(ask(&gateway, house::completion()).await.text(), "new");
    assert_eq!(old.requests().len(), 0);
    // The old replica's answer is still in flight, so its client must not send another request yet.
    assert_eq!(gateway.shared.fleet.replicas().len(), 1);
    old.kill().await;
    assert_eq!(streaming.chunk().await, None, "until then it was not cut");
    let metrics = gateway.shared.observer.metrics().text();
    assert!(
        metrics.contains("foretell_replica_up{replica=\"b/1\"} 1")
            || metrics.contains("foretell_replica_up{replica=\"b/0\"} 1")
    );
}

#[tokio::test]
async fn a_failing_name_server_changes_nothing() {
    let replica = Replica::saying("here").await;
    let script = Script::says(&[replica.address]);
    let gateway = before(&script).await;
    for trouble in [None, Some(&[][..])] {
        script.set(trouble);
        // Many answers have been refused before the next good one.
        tokio::time::timeout(Duration::from_millis(100), until(&gateway, &[])).await.unwrap_err();
        assert_eq!(ask(&gateway, house::completion()).await.text(), "here");
    }
}

/// Answers for every name but one, whose name server never answers.
#[derive(Debug)]
struct Hanging(SocketAddr);

impl Resolve for Hanging {
    fn resolve(&self, name: &str) -> Resolving {
        match name {
            "a.test:8000" => Box::pin(std::future::pending()),
            _ => Box::pin(std::future::ready(Ok(vec![self.0]))),
        }
    }
}

#[tokio::test]
async fn a_name_that_cannot_be_resolved_does_not_hold_up_another() {
    let replica = Replica::saying("here").await;
    let behind = |name: &str, host: &str| ReplicaSettings {
        discover: Some(Duration::from_mins(1)),
        ..ReplicaSettings::new(name, format!("http://{host}:8000"))
    };
    let backends = vec![behind("a", "a.test"), behind("b", "b.test")];
    let resolver: Arc<dyn Resolve> = Arc::new(Hanging(replica.address));
    let gateway = house::start(Settings { resolver, ..house::settings(backends) }).await;
    assert_eq!(urls(&gateway), [format!("http://{}", replica.address)], "as soon as it listens");
}

#[tokio::test]
async fn a_name_without_an_address_is_asked_for_again_at_once() {
    let script = Script::says(&[]);
    let backend = ReplicaSettings {
        discover: Some(Duration::from_hours(1)),
        ..ReplicaSettings::new("b", "http://pods.test:8000")
    };
    let resolver: Arc<dyn Resolve> = script.clone();
    let gateway = house::start(Settings { resolver, ..house::settings(vec![backend]) }).await;
    let replica = Replica::saying("here").await;
    script.set(Some(&[replica.address]));
    timeout(PATIENCE, until(&gateway, &[replica.address])).await.expect("usually within a second");
}

#[tokio::test]
async fn a_name_without_an_address_is_a_502_until_it_has_one() {
    let script = Script::says(&[]);
    let gateway = before(&script).await;
    let answer = ask(&gateway, house::completion()).await;
    assert_eq!((answer.head.status(), &answer.json()["error"]["code"]), (502, &"no_backend".into()));
    let replica = Replica::saying("here").await;
    script.set(Some(&[replica.address]));
    until(&gateway, &[replica.address]).await;
    assert_eq!(ask(&gateway, house::completion()).await.text(), "here");
}
