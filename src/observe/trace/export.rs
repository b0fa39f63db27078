//! Sends spans to a collector, by OTLP over HTTP.
//!
//! No request waits for it: a task sends the spans from a queue of limited length, and spans that
//! find no room, or that the collector refuses, are dropped and counted.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http::{Request, Response, Uri};
use http_body_util::{BodyExt, Full, Limited};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use opentelemetry_http::{HttpClient, HttpError};
use opentelemetry_otlp::{SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SpanData, SpanExporter as _};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use foretell_net::fleet::tls;

/// Maximum number of requests whose spans wait.
const WAITING: usize = 1_024;
/// Number of spans from which on a batch is sent at once.
const BATCH: usize = 512;
/// Maximum time that spans wait for a batch to fill.
const EVERY: Duration = Duration::from_secs(1);
/// Timeout of a call to the collector.
const WITHIN: Duration = Duration::from_secs(5);
/// Maximum bytes of an answer that are read.
const ANSWER: usize = 64 << 10;

/// Cause for which no spans can be sent.
#[derive(Debug, thiserror::Error)]
pub enum CollectorError {
    /// The public certificates cannot be used.
    #[error(transparent)]
    Tls(#[from] tls::TlsError),
    /// The exporter cannot be built.
    #[error("observe.otlp: {0}")]
    Exporter(#[from] opentelemetry_otlp::ExporterBuildError),
}

#[derive(Clone, Debug)]
pub struct Collector {
    queue: mpsc::Sender<Vec<SpanData>>,
    dropped: Arc<AtomicU64>,
}

/// The other end of the queue, to be run by a task.
#[derive(Debug)]
pub struct Spans {
    queue: mpsc::Receiver<Vec<SpanData>>,
    exporter: SpanExporter,
    dropped: Arc<AtomicU64>,
}

impl Collector {
    /// The queue to the collector at this base URL, to which `/v1/traces` is added.
    ///
    /// # Errors
    /// [`CollectorError`]
    pub fn at(url: &Uri) -> Result<(Self, Spans), CollectorError> {
        let endpoint = format!("{}/v1/traces", url.to_string().trim_end_matches('/'));
        let mut exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(Caller::new()?)
            .with_endpoint(endpoint)
            .with_timeout(WITHIN)
            .build()?;
        exporter.set_resource(&Resource::builder().with_service_name("foretell").build());
        let (queue, spans) = mpsc::channel(WAITING);
        let dropped = Arc::new(AtomicU64::new(0));
        Ok((Self { queue, dropped: Arc::clone(&dropped) }, Spans { queue: spans, exporter, dropped }))
    }

    /// Takes the spans of a request, or counts them as dropped.
    pub(crate) fn take(&self, spans: Vec<SpanData>) {
        let count = spans.len() as u64;
        if self.queue.try_send(spans).is_err() {
            self.dropped.fetch_add(count, Ordering::Relaxed);
        }
    }

    /// Spans that were dropped so far.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }
}

impl Spans {
    /// Sends spans until `stop`, and then those that wait.
    pub async fn send(mut self, stop: CancellationToken) {
        let mut batch: Vec<SpanData> = Vec::new();
        while let Some(first) = stop.run_until_cancelled(self.queue.recv()).await.flatten() {
            batch.extend(first);
            let gathered = async {
                while let Some(more) = self.queue.recv().await {
                    batch.extend(more);
                    if batch.len() >= BATCH {
                        return;
                    }
                }
            };
            let _ = stop.run_until_cancelled(tokio::time::timeout(EVERY, gathered)).await;
            self.export(std::mem::take(&mut batch)).await;
        }
        while let Ok(more) = self.queue.try_recv() {
            batch.extend(more);
        }
        if !batch.is_empty() {
            self.export(batch).await;
        }
    }

    async fn export(&self, batch: Vec<SpanData>) {
        let count = batch.len() as u64;
        if let Err(error) = self.exporter.export(batch).await {
            let before = self.dropped.fetch_add(count, Ordering::Relaxed);
            // Once, and then for every thousandth: otherwise an unreachable collector would fill
            // the log.
            if before == 0 || before / 1_000 != (before + count) / 1_000 {
                tracing::warn!(%error, dropped = before + count, "spans cannot be sent");
            }
        }
    }
}

/// Calls the collector, over TLS where its URL says so.
#[derive(Clone)]
struct Caller(Client<HttpsConnector<HttpConnector>, Full<Bytes>>);

impl fmt::Debug for Caller {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Caller")
    }
}

impl Caller {
    fn new() -> Result<Self, tls::TlsError> {
        let config = tls::client(None, None)?;
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(rustls::ClientConfig::clone(&config))
            .https_or_http()
            .enable_http1()
            .build();
        Ok(Self(Client::builder(TokioExecutor::new()).build(connector)))
    }
}

#[async_trait]
impl HttpClient for Caller {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let call = async {
            let (head, body) = self.0.request(request.map(Full::new)).await?.into_parts();
            let body = Limited::new(body, ANSWER).collect().await?.to_bytes();
            Ok(Response::from_parts(head, body))
        };
        tokio::time::timeout(WITHIN, call).await?
    }
}
