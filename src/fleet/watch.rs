//! Asking replicas that are down for their health, and names for their addresses.

use std::sync::Arc;
use std::time::Duration;

use http::{Request, StatusCode, Uri};
use tokio_util::sync::CancellationToken;

use super::Fleet;
use super::discover::Resolve;
use super::replica::Replica;
use crate::http::body::full;

/// How often it is looked whether a replica is due; the replicas themselves are asked seldom.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// An engine that takes longer to say that it lives, does not.
const WITHIN: Duration = Duration::from_secs(2);

impl Fleet {
    /// Starts what runs beside the requests, until `stop`.
    pub fn watch(self: &Arc<Self>, resolver: &Arc<dyn Resolve>, stop: &CancellationToken) {
        for (name, every) in self.discoveries() {
            let (fleet, resolver, stop) = (Arc::clone(self), Arc::clone(resolver), stop.clone());
            tokio::spawn(fleet.keep_discovering(resolver, name, every, stop));
        }
        let (fleet, stop) = (Arc::clone(self), stop.clone());
        tokio::spawn(async move { stop.run_until_cancelled(fleet.keep_checking()).await });
    }

    async fn keep_checking(&self) {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            self.each(|replica| {
                if replica.wants_check() {
                    let replica = Arc::clone(replica);
                    tokio::spawn(async move { check(&replica).await });
                }
            });
        }
    }
}

/// Asks a replica for its health, and notes it.
async fn check(replica: &Arc<Replica>) {
    let healthy = tokio::time::timeout(WITHIN, healthy(replica)).await.unwrap_or(false);
    tracing::debug!(replica = replica.label(), healthy, "health check");
    replica.checked(healthy);
}

/// By `/health`, or by `/v1/models` where an engine has no such page.
async fn healthy(replica: &Arc<Replica>) -> bool {
    match status(replica, "/health").await {
        Some(StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED) => {
            status(replica, "/v1/models").await.is_some_and(|status| !status.is_server_error())
        }
        // A wall before it (401, 403) is no sign of illness.
        Some(status) => !status.is_server_error(),
        None => false,
    }
}

async fn status(replica: &Arc<Replica>, path: &'static str) -> Option<StatusCode> {
    let mut request = Request::new(full(""));
    *request.uri_mut() = Uri::from_static(path);
    Some(replica.own(request).await.ok()?.status())
}
