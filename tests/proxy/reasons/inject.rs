//! An engine that asks for drafts: its plug-in is played by the strict client of the protocol.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use serde_json::json;

use super::scene::{Stage, completion};
use crate::drafts_client::Client;

/// Where the service listens; `FOLDER` is that of the proxy's files.
pub const LISTENS: &str = "drafts: { listen: \"unix:FOLDER/drafts.sock\" }\n";

/// The id of the requests whose rows join.
const ID: &str = "joins";

/// Connects a plug-in whose rows join requests, until the replica is known to be its engine's.
pub fn joined(stage: &Stage) -> BoxFuture<'_, ()> {
    async {
        let done = Arc::new(AtomicBool::new(false));
        let (path, until) = (stage.proxy.folder().join("drafts.sock"), Arc::clone(&done));
        let rows = tokio::task::spawn_blocking(move || {
            let mut client = Client::connect(&path, 8, 50_000);
            for row in 1.. {
                if until.load(Ordering::Relaxed) {
                    break;
                }
                client.begin(row, 4, 0.0, &format!("cmpl-{ID}-0-0badcafe"));
                client.step(20_000, false, &[]);
            }
            // It stays connected until the process ends.
            std::mem::forget(client);
        });
        while stage.proxy.replicas().await[0]["inject"].is_null() {
            completion(&json!({})).told(&stage.proxy, false, ID).await;
        }
        done.store(true, Ordering::Relaxed);
        rows.await.unwrap();
    }
    .boxed()
}
