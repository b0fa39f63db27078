//! The background tasks of a fleet: health checks of replicas that are down, and lookups of names.

use std::sync::Arc;
use std::time::Duration;

use http::{Request, StatusCode, Uri};
use tokio_util::sync::CancellationToken;

use super::Fleet;
use super::discover::Resolve;
use super::replica::Replica;
use crate::http::body::full;

/// Interval at which replicas are checked for being due; each is requested far less often.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// Timeout of a health check.
const WITHIN: Duration = Duration::from_secs(2);

impl Fleet {
    /// Starts lookups and health checks, until `stop`.
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

/// Makes a health check, and records the result.
async fn check(replica: &Arc<Replica>) {
    let healthy = tokio::time::timeout(WITHIN, healthy(replica)).await.unwrap_or(false);
    tracing::debug!(replica = replica.label(), healthy, "health check");
    replica.checked(healthy);
}

/// Requests `/health`, or `/v1/models` where an engine has no such page.
async fn healthy(replica: &Arc<Replica>) -> bool {
    match status(replica, "/health").await {
        Some(StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED) => {
            status(replica, "/v1/models").await.is_some_and(|status| !status.is_server_error())
        }
        // 401 and 403 come from access control, and do not indicate bad health.
        Some(status) => !status.is_server_error(),
        None => false,
    }
}

async fn status(replica: &Arc<Replica>, path: &'static str) -> Option<StatusCode> {
    let mut request = Request::new(full(""));
    *request.uri_mut() = Uri::from_static(path);
    Some(replica.own(request).await.ok()?.status())
}
