//! A fake engine with the whole proxy in front.

use std::net::SocketAddr;
use std::time::Duration;

use foretell::app::Running;
use foretell::app::local;
use serde_json::Value;

use super::table::{Row, Server};
use crate::client::{Answer, Ask, FORCED, get, panics, watch_panics};
use crate::fakes::{Setup, Temper, toy};

/// The model of the contract tests; it sometimes ends a text.
pub fn setup(eos_every: Option<u64>) -> Setup {
    Setup { temper: Temper { eos_every, ..Temper::default() }, ..Setup::default() }
}

/// Runs `check` on each of these engines (or routes), on all concurrently: most of the time is
/// spent waiting for engines.
pub async fn on_each<I, T, F>(all: impl Iterator<Item = I>, check: impl Fn(I) -> F) -> Vec<T>
where
    T: Send + 'static,
    F: Future<Output = T> + Send + 'static,
{
    let running: Vec<_> = all.map(|one| tokio::spawn(check(one))).collect();
    let mut results = Vec::new();
    for one in running {
        match one.await {
            Ok(result) => results.push(result),
            Err(failed) => std::panic::resume_unwind(failed.into_panic()),
        }
    }
    results
}

pub struct House {
    pub row: &'static Row,
    pub engine: Box<dyn Server>,
    pub proxy: Running,
}

impl House {
    pub async fn build(row: &'static Row, setup: Setup) -> Self {
        Self::under(row, setup, &[FORCED]).await
    }

    /// The same, with these policies.
    pub async fn under(row: &'static Row, setup: Setup, policies: &[&str]) -> Self {
        watch_panics();
        let engine = (row.start)(setup).await;
        let process = format!(
            "version: 1\ntimeouts: {{ verify: 10s }}\nbackends:\n  - name: toy\n    replicas: [\"http://{}\"]\n    \
             models: [{{ id: toy, tokenizer: {} }}]\n    probe: {{ when: never }}\n",
            engine.address(),
            toy::folder().join("tokenizer.json").display(),
        );
        let proxy = local::proxy(&process, policies).await.unwrap();
        let house = Self { row, engine, proxy };
        house.is_known().await;
        house
    }

    /// Waits until the proxy knows the engine.
    async fn is_known(&self) {
        let known = async {
            while !self.admin("/api/replicas").await["replicas"][0]["engine_start"].is_string() {
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        };
        let known = tokio::time::timeout(crate::wire::PATIENCE, known).await;
        assert!(known.is_ok(), "{}: not known", self.row.name);
    }

    pub fn front(&self) -> SocketAddr {
        self.proxy.gateway.addresses[0]
    }

    /// The engine's own answer.
    pub async fn direct(&self, ask: &Ask) -> Answer {
        ask.send(self.engine.address(), "").await
    }

    /// The answer through the proxy.
    pub async fn through(&self, ask: &Ask) -> Answer {
        ask.send(self.front(), "").await
    }

    pub async fn admin(&self, path: &str) -> Value {
        get(self.proxy.gateway.admin.unwrap(), path).await.json()
    }

    /// Makes the engine's steps longer by this factor: time for the proxy's calls during a plain
    /// request on a busy machine.
    pub fn slow_down(&self, times: u32) {
        self.engine.house().pace.lock().step *= times;
    }

    /// Verify requests so far.
    pub fn rounds(&self) -> usize {
        let tally = self.engine.house().tally();
        self.row.verifies.iter().map(|path| tally.calls_of(path)).sum()
    }

    /// Asserts that no call would have crashed the real engine, that no sequence still runs and
    /// that no thread panicked.
    pub async fn leave(self) {
        let house = self.engine.house();
        let idle = async {
            while house.running() > 0 {
                tokio::task::yield_now().await;
            }
        };
        let waited = tokio::time::timeout(crate::wire::PATIENCE, idle).await;
        assert!(waited.is_ok(), "{}: {} sequences still run", self.row.name, house.running());
        assert_eq!(house.fatal(), Vec::<String>::new(), "{}", self.row.name);
        assert_eq!(panics(), Vec::<String>::new(), "panics");
    }
}
