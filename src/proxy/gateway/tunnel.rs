//! Connections that have switched protocols: bytes are copied both ways until one side closes.

use bytes::Bytes;
use http::header::{CONNECTION, UPGRADE};
use http::{HeaderValue, Response, StatusCode, request};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument;

use crate::serving::passthrough::{Passthrough, answered, fail, pass_back};
use foretell_net::http::body::{Body, full};
use foretell_net::http::headers;
use foretell_observe::Record;

/// All open tunnels, so that draining can wait for them and cut them.
#[derive(Clone, Debug, Default)]
pub struct Tunnels {
    tasks: TaskTracker,
    cut: CancellationToken,
}

impl Tunnels {
    /// Tunnels that end when `cut` is cancelled.
    #[must_use]
    pub fn new(cut: CancellationToken) -> Self {
        Self { tasks: TaskTracker::new(), cut }
    }

    /// Sends a request to switch protocols; if the backend agrees, the two connections are joined.
    pub(super) async fn switch(
        &self,
        mut passthrough: Passthrough,
        mut record: Record,
        (parts, body): (request::Parts, Body),
        client: OnUpgrade,
    ) -> Response<Body> {
        let mut response = match passthrough.exchange(&mut record, parts, body).await {
            Err(failure) => return fail(record, &failure),
            Ok(response) => response,
        };
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            return pass_back(record, response);
        }
        let backend = hyper::upgrade::on(&mut response);
        let (mut parts, _) = response.into_parts();
        if let Some(protocol) = headers::from_backend(&mut parts.headers) {
            parts.headers.insert(UPGRADE, protocol);
        }
        parts.headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        let mut response = Response::from_parts(parts, full(Bytes::new()));
        answered(&mut record, &mut response);
        self.join(client, backend, record);
        response
    }

    /// Joins two connections as soon as both sides have switched.
    fn join(&self, client: OnUpgrade, backend: OnUpgrade, record: Record) {
        let cut = self.cut.clone();
        let span = record.span().clone();
        let joined = async move {
            let mut record = record;
            tokio::select! {
                () = cut.cancelled() => {}
                ended = copy(client, backend) => {
                    if let Err(error) = ended {
                        tracing::debug!(%error, "tunnel ended");
                    }
                }
            }
            record.end(false);
        };
        self.tasks.spawn(joined.instrument(span));
    }

    /// Waits until all tunnels have ended.
    pub async fn ended(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }

    pub fn open(&self) -> usize {
        self.tasks.len()
    }
}

async fn copy(client: OnUpgrade, backend: OnUpgrade) -> Result<(), foretell_net::http::body::BoxError> {
    let (client, backend) = tokio::try_join!(client, backend)?;
    tokio::io::copy_bidirectional(&mut TokioIo::new(client), &mut TokioIo::new(backend)).await?;
    Ok(())
}
