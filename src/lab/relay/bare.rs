//! The simplest reverse proxy that hyper allows, to show how much of Foretell's time is hyper's.
//!
//! It forwards requests and answers and does nothing else: no limits, no decisions, no records, no
//! metrics, no retries. It has as many network threads as Foretell, each with its own pool of
//! connections.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use http::uri::{Authority, Scheme};
use http::{Request, Response, StatusCode, Uri};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpListener;
use tokio_util::task::TaskTracker;

use foretell::gateway::default_workers;
use foretell::http::body::{Body, full};
use foretell::http::workers::Workers;

type Upstream = Client<HttpConnector, Incoming>;

/// Serves on `listen` and forwards to `backend` until the process ends.
///
/// # Errors
/// The address cannot be bound, or the system cannot create a thread.
pub async fn serve(listen: SocketAddr, backend: Authority) -> io::Result<Infallible> {
    let listener = TcpListener::bind(listen).await?;
    let workers = Workers::start(default_workers())?;
    let connections = TaskTracker::new();
    let upstreams: Arc<[Upstream]> = (0..default_workers()).map(|_| upstream()).collect();
    let mut next = 0;
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        let upstream = upstreams.get(next % upstreams.len()).cloned().unwrap_or_else(upstream);
        next += 1;
        let backend = backend.clone();
        workers.spawn(stream, &connections, move |stream, share| async move {
            let service = service_fn(move |request| pass(upstream.clone(), backend.clone(), request));
            let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
            drop(share);
        })?;
    }
}

fn upstream() -> Upstream {
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    Client::builder(TokioExecutor::new()).build(connector)
}

async fn pass(
    upstream: Upstream,
    backend: Authority,
    mut request: Request<Incoming>,
) -> Result<Response<Body>, Infallible> {
    let mut parts = request.uri().clone().into_parts();
    (parts.scheme, parts.authority) = (Some(Scheme::HTTP), Some(backend));
    if let Ok(uri) = Uri::from_parts(parts) {
        *request.uri_mut() = uri;
    }
    if let Ok(response) = upstream.request(request).await {
        return Ok(response.map(|body| body.map_err(Into::into).boxed_unsync()));
    }
    let mut failed = Response::new(full(Vec::new()));
    *failed.status_mut() = StatusCode::BAD_GATEWAY;
    Ok(failed)
}
