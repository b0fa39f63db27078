//! Policies that change under a running proxy: changes that are taken or refused, and their effect
//! on requests.

mod bad;
mod live;
mod matching;
#[cfg(feature = "onnx")]
mod models;
mod taken;

use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use crate::reasons::proxy::Proxy;
use crate::wire::PATIENCE;

/// Waits until `holds` is true of `/api/policies`, within a limit for busy machines.
async fn comes(proxy: &Proxy, holds: impl Fn(&Value) -> bool) {
    let found = async {
        loop {
            if holds(&proxy.get("/api/policies").await.json()) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let log = || proxy.log();
    tokio::time::timeout(PATIENCE, found).await.unwrap_or_else(|_| panic!("it never came:\n{}", log()));
}

fn write(folder: &Path, name: &str, text: &str) {
    // In one step, as an operator's tools do: the watcher may read at any moment.
    let new = folder.join(format!(".{name}.new"));
    std::fs::write(&new, text).unwrap();
    std::fs::rename(new, folder.join(name)).unwrap();
}

fn is_named(policies: &Value, name: &str) -> bool {
    policies["policies"][0]["name"] == name
}
