//! A fake, the proxy in front of it, and a client that compares.

use std::net::SocketAddr;

use foretell::app::Running;
use foretell::app::local;

use crate::client::{Answer, FORCED};
use crate::fakes::toy;

/// A proxy that speculates wherever it may. `more` are lines of the backend.
pub async fn before(backend: SocketAddr, more: &str) -> Running {
    let tokenizer = toy::folder();
    let process = format!(
        "version: 1\nbackends:\n  - name: toy\n    replicas: [\"http://{backend}\"]\n    \
         models: [{{ id: \"*\", tokenizer: {:?} }}]\n    probe: {{ when: never }}\n{more}",
        tokenizer.display().to_string()
    );
    local::proxy(&process, &[FORCED]).await.unwrap()
}

/// Path and reason of an answer.
pub fn way(answer: &Answer) -> (Option<&str>, Option<&str>) {
    (answer.message.head.get("x-foretell-path"), answer.message.head.get("x-foretell-reason"))
}

pub fn front(proxy: &Running) -> SocketAddr {
    proxy.gateway.addresses[0]
}
