//! The background tasks of a fleet: health checks of replicas that are down, liveness questions to
//! those that are quiet, and lookups of names.

use std::sync::Arc;
use std::time::Duration;

use http::{Request, StatusCode, Uri};
use tokio_util::sync::CancellationToken;

use super::Fleet;
use super::discover::Resolve;
use super::error::{SendError, SendErrorKind};
use super::liveness::{Look, QUESTION_WITHIN};
use super::replica::{Fresh, Replica};
use crate::http::body::full;
use crate::http::gather;

/// Interval at which replicas are checked for being due; each is requested far less often.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// The page that is requested of a quiet replica. Every engine answers it without its model (SGLang
/// computes a token for `/health`), and a refusal is an answer, too.
const QUESTION: &str = foretell_engines::recognise::MODELS;
/// Maximum length of its answer that is read, bytes.
const ANSWER_BYTES: usize = 256 << 10;
/// Timeout of a health check.
const WITHIN: Duration = Duration::from_secs(2);

impl Fleet {
    /// Starts lookups and health checks, until `stop`, and questions to quiet replicas until
    /// `draining`.
    pub fn watch(
        self: &Arc<Self>,
        resolver: &Arc<dyn Resolve>,
        stop: &CancellationToken,
        draining: impl Future<Output = ()> + Send + 'static,
    ) {
        for (name, every) in self.discoveries() {
            let (fleet, resolver, stop) = (Arc::clone(self), Arc::clone(resolver), stop.clone());
            tokio::spawn(fleet.discovery_loop(resolver, name, every, stop));
        }
        let (fleet, stop) = (Arc::clone(self), stop.clone());
        let questioned = Arc::clone(&fleet);
        let until = stop.clone();
        tokio::spawn(async move { until.run_until_cancelled(fleet.health_check_loop()).await });
        tokio::spawn(async move {
            tokio::select! {
                () = questioned.liveness_loop() => {}
                () = draining => {}
                () = stop.cancelled() => {}
            }
        });
    }

    async fn health_check_loop(&self) {
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

    async fn liveness_loop(&self) {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            self.each(|replica| {
                if let Look::QuestionDue { repeated } = replica.look() {
                    let replica = Arc::clone(replica);
                    tokio::spawn(async move { question(&replica, repeated).await });
                }
            });
        }
    }
}

/// Requests a sign of life of a quiet replica, and records if there was none. `fresh`: on a new
/// connection, since a device on the way may have dropped the idle one.
async fn question(replica: &Arc<Replica>, fresh: bool) {
    let mut request = Request::new(full(""));
    *request.uri_mut() = Uri::from_static(QUESTION);
    if fresh {
        request.extensions_mut().insert(Fresh);
    }
    let exchange = async {
        let answer = replica.inquire(request).await?;
        // After an answer that is read to its end the connection stays open.
        let _ = gather::read_all(answer.into_body(), ANSWER_BYTES).await;
        Ok(())
    };
    let unanswered = match tokio::time::timeout(QUESTION_WITHIN, exchange).await {
        Ok(Ok(())) => false,
        Ok(Err(error)) => is_unanswered(replica, &error),
        Err(_) => true,
    };
    replica.questioned(unanswered);
}

/// True if this failure of a question is that of a silent replica.
fn is_unanswered(replica: &Replica, error: &SendError) -> bool {
    match error.kind() {
        SendErrorKind::Timeout => true,
        // A process that closes the connection, or answers something else than HTTP, runs.
        SendErrorKind::Closed | SendErrorKind::Protocol => {
            replica.byte_received();
            false
        }
        SendErrorKind::Connect | SendErrorKind::Request | SendErrorKind::Changed => false,
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
    Some(replica.send_internal(request).await.ok()?.status())
}
