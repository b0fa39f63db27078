//! One replica of a backend and its connections.
//!
//! Every network thread has its own pool: a connection lives on the thread that opened it, so a request
//! that finds one there is answered without waking another thread.

use std::cell::Cell;
use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
use http::header::{AUTHORIZATION, HOST};
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{HeaderValue, Request, Response, Uri, Version};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use parking_lot::Mutex;
use tower::ServiceExt;

use super::error::SendError;
use super::link::{Answer, Link, Pool};
use super::models::{Fit, ModelName};
use crate::gateway::listen::Body;

/// Most models that are remembered to take no prediction; beyond that each is tried anew.
const UNPREDICTED: usize = 256;

type Connector = HttpsConnector<HttpConnector>;

thread_local! {
    static LANE: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Says which pool the calling thread uses from now on. Threads that never say share one of their own.
pub fn set_lane(lane: usize) {
    LANE.set(Some(lane));
}

/// How to reach one replica.
#[derive(Clone, Debug)]
pub struct BackendSettings {
    /// The name in metrics, logs and errors; replicas of one backend share it.
    pub name: String,
    /// `http(s)://host[:port][/base]`. A base that ends in `/v1` is taken to mean the server above it, since
    /// that is how OpenAI base URLs are written.
    pub url: String,
    /// The dialect as configured; `auto` until it is known.
    pub dialect: String,
    /// Whether that dialect can verify drafts.
    pub speculates: bool,
    /// It bills per token, so nothing is asked of it but what clients ask.
    pub billed: bool,
    /// A likely answer may be sent along as OpenAI's `prediction`.
    pub predicts: bool,
    /// The models that it answers for.
    pub models: Vec<ModelName>,
    /// Takes what no entry of `models` fits.
    pub default: bool,
    /// `host: backend` sends the backend's own authority; otherwise the client's `Host` goes through.
    pub keep_client_host: bool,
    /// Sent as `Authorization` instead of the client's.
    pub authorization: Option<HeaderValue>,
    /// Longest time to connect.
    pub connect_timeout: Duration,
    /// How long an idle connection is kept; shorter than the keep-alive of common servers (5 s).
    pub pool_idle: Duration,
    /// Longest wait for an answer's first byte; unlimited by default, prompts can be long.
    pub first_byte: Option<Duration>,
    /// Number of network threads, so of pools.
    pub lanes: usize,
}

impl BackendSettings {
    /// Defaults for everything but name and address: relay only.
    #[must_use]
    pub fn new(name: impl Into<String>, url: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            url: url.into(),
            dialect: "auto".to_owned(),
            speculates: false,
            billed: false,
            predicts: false,
            models: Vec::new(),
            default: false,
            keep_client_host: false,
            authorization: None,
            connect_timeout: Duration::from_secs(2),
            pool_idle: Duration::from_secs(3),
            first_byte: None,
            lanes: 1,
        }
    }
}

/// An address that no request can be sent to.
#[derive(Debug, thiserror::Error)]
#[error("backend url `{url}`: {detail}, allowed http(s)://host[:port][/path]")]
pub struct InvalidUrl {
    /// As given.
    pub url: String,
    /// What is wrong with it.
    pub detail: String,
}

/// One replica: its address, its connections, and what is known about it.
pub struct Backend {
    settings: BackendSettings,
    address: Uri,
    connector: Connector,
    host: HeaderValue,
    prefix: String,
    pools: Vec<Arc<Pool>>,
    dialect: ArcSwap<String>,
    speculates: AtomicBool,
    up: AtomicBool,
    unpredicted: Mutex<HashSet<String>>,
}

impl fmt::Debug for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Backend")
            .field("name", &self.settings.name)
            .field("url", &self.settings.url)
            .finish_non_exhaustive()
    }
}

impl Backend {
    /// A replica at `settings.url`. Nothing is connected yet.
    ///
    /// # Errors
    /// The address has no host, or a scheme other than http and https.
    pub fn new(settings: BackendSettings) -> Result<Self, InvalidUrl> {
        let invalid = |detail: &str| InvalidUrl { url: settings.url.clone(), detail: detail.to_owned() };
        let uri: Uri = settings.url.parse().map_err(|error| invalid(&format!("{error}")))?;
        let parts = uri.into_parts();
        let scheme = parts.scheme.ok_or_else(|| invalid("no scheme"))?;
        if scheme != Scheme::HTTP && scheme != Scheme::HTTPS {
            return Err(invalid("not http or https"));
        }
        let authority = parts.authority.ok_or_else(|| invalid("no host"))?;
        if parts.path_and_query.as_ref().is_some_and(|path| path.query().is_some()) {
            return Err(invalid("has a query"));
        }
        let host = host_of(&scheme, &authority).ok_or_else(|| invalid("host cannot be a header"))?;
        let path = parts.path_and_query.as_ref().map_or("", PathAndQuery::path).trim_end_matches('/');
        let prefix = path.strip_suffix("/v1").unwrap_or(path).to_owned();
        Ok(Self {
            address: address(scheme, authority).map_err(|error| invalid(&error.to_string()))?,
            connector: connector(&settings)?,
            host,
            prefix,
            pools: (0..=settings.lanes).map(|_| Arc::new(Pool::new(settings.pool_idle))).collect(),
            dialect: ArcSwap::from_pointee(settings.dialect.clone()),
            speculates: AtomicBool::new(settings.speculates),
            up: AtomicBool::new(true),
            unpredicted: Mutex::default(),
            settings,
        })
    }

    /// The name in metrics, logs and errors.
    pub fn name(&self) -> &str {
        &self.settings.name
    }

    /// The address as configured.
    pub fn url(&self) -> &str {
        &self.settings.url
    }

    /// The dialect as far as it is known.
    pub fn dialect(&self) -> Arc<String> {
        self.dialect.load_full()
    }

    /// Says which dialect was found, and whether it can verify drafts.
    pub fn set_dialect(&self, dialect: impl Into<String>, speculates: bool) {
        self.dialect.store(Arc::new(dialect.into()));
        self.speculates.store(speculates, Ordering::Release);
    }

    /// Whether its dialect can verify drafts.
    pub fn speculates(&self) -> bool {
        self.speculates.load(Ordering::Acquire)
    }

    /// Whether it bills per token.
    pub fn is_billed(&self) -> bool {
        self.settings.billed
    }

    /// Whether a likely answer may be sent along for some model.
    pub fn predicts(&self) -> bool {
        self.settings.predicts
    }

    /// Whether a likely answer may be sent along for this model.
    pub fn predicts_for(&self, model: &str) -> bool {
        self.settings.predicts && !self.unpredicted.lock().contains(model)
    }

    /// Notes that it takes no prediction for this model.
    pub fn refuses_prediction(&self, model: &str) {
        let mut unpredicted = self.unpredicted.lock();
        if unpredicted.len() < UNPREDICTED {
            unpredicted.insert(model.to_owned());
        }
    }

    /// Whether the last call reached it. True until something is known.
    pub fn is_up(&self) -> bool {
        self.up.load(Ordering::Relaxed)
    }

    /// Notes whether it could be reached.
    pub fn mark(&self, up: bool) {
        if self.up.load(Ordering::Relaxed) != up {
            self.up.store(up, Ordering::Relaxed);
        }
    }

    /// Takes what no entry of any backend's models fits.
    pub fn is_default(&self) -> bool {
        self.settings.default
    }

    /// How well it fits `model`, if at all.
    pub fn answers_for(&self, model: &str) -> Option<Fit> {
        self.settings.models.iter().filter_map(|name| name.fit(model)).min()
    }

    /// Sends `request`, whose target is a path of this server (its own scheme and host are ignored), and
    /// returns when the answer's head is there. Dropping the future or the answer closes the connection. A
    /// pooled connection that turns out dead before a byte was written is replaced by a fresh one.
    ///
    /// # Errors
    /// See [`SendError`]; none of them means that the backend answered.
    pub async fn send(&self, mut request: Request<Body>) -> Result<Response<Answer>, SendError> {
        *request.uri_mut() = self.target(request.uri())?;
        *request.version_mut() = Version::HTTP_11;
        if !self.settings.keep_client_host || !request.headers().contains_key(HOST) {
            request.headers_mut().insert(HOST, self.host.clone());
        }
        if let Some(authorization) = &self.settings.authorization {
            request.headers_mut().insert(AUTHORIZATION, authorization.clone());
        }
        let answer = self.call(request);
        let answer = match self.settings.first_byte {
            None => answer.await,
            Some(after) => tokio::time::timeout(after, answer).await.unwrap_or_else(|_| {
                Err(SendError::FirstByteTimeout { backend: self.settings.name.clone(), after })
            }),
        };
        match &answer {
            Ok(_) => self.mark(true),
            Err(SendError::Connect { .. } | SendError::ConnectTimeout { .. }) => self.mark(false),
            Err(_) => {}
        }
        answer
    }

    async fn call(&self, mut request: Request<Body>) -> Result<Response<Answer>, SendError> {
        let lane = LANE.get().unwrap_or(self.settings.lanes).min(self.settings.lanes);
        let Some(pool) = self.pools.get(lane) else { return Err(self.unsendable("no connection pool")) };
        loop {
            let pooled = pool.take();
            let reused = pooled.is_some();
            let mut link = match pooled {
                Some(link) => link,
                None => self.connect().await?,
            };
            let mut error = match link.call(request).await {
                Ok(response) => return Ok(Answer::response(response, link, pool)),
                Err(error) => error,
            };
            request = match error.take_message() {
                Some(unsent) if reused => unsent,
                _ => return Err(SendError::of_call(&self.settings.name, error.error())),
            };
        }
    }

    async fn connect(&self) -> Result<Link, SendError> {
        let name = &self.settings.name;
        let stream = self.connector.clone().oneshot(self.address.clone()).await;
        let stream = stream.map_err(|error| SendError::of_connecting(name, error.as_ref()))?;
        Link::new(stream).await.map_err(|error| SendError::of_call(name, &error))
    }

    fn target(&self, asked: &Uri) -> Result<Uri, SendError> {
        let path = asked.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
        Ok(Uri::from(match self.prefix.as_str() {
            "" => path,
            prefix => format!("{prefix}{path}").parse().map_err(|error| self.unsendable(error))?,
        }))
    }

    fn unsendable(&self, detail: impl fmt::Display) -> SendError {
        SendError::Unsendable { backend: self.settings.name.clone(), detail: detail.to_string() }
    }
}

fn host_of(scheme: &Scheme, authority: &Authority) -> Option<HeaderValue> {
    let usual = if *scheme == Scheme::HTTPS { 443 } else { 80 };
    let host = match authority.port_u16() {
        Some(port) if port != usual => format!("{}:{port}", authority.host()),
        _ => authority.host().to_owned(),
    };
    HeaderValue::try_from(host).ok()
}

fn address(scheme: Scheme, authority: Authority) -> Result<Uri, http::Error> {
    Uri::builder().scheme(scheme).authority(authority).path_and_query("/").build()
}

fn connector(settings: &BackendSettings) -> Result<Connector, InvalidUrl> {
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_connect_timeout(Some(settings.connect_timeout));
    tcp.set_keepalive(Some(Duration::from_mins(1)));
    let tls = HttpsConnectorBuilder::new()
        .with_provider_and_webpki_roots(rustls::crypto::ring::default_provider())
        .map_err(|error| InvalidUrl { url: settings.url.clone(), detail: format!("TLS: {error}") })?;
    Ok(tls.https_or_http().enable_http1().wrap_connector(tcp))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(url: &str, path: &str) -> String {
        let backend = Backend::new(BackendSettings::new("b", url)).unwrap();
        backend.target(&path.parse().unwrap()).unwrap().to_string()
    }

    #[rstest::rstest]
    #[case("http://h:8000", "/v1/models?a=%20b", "/v1/models?a=%20b")]
    #[case("http://h:8000/", "/x", "/x")]
    #[case("http://h/v1", "/v1/models", "/v1/models")]
    #[case("https://h/base/", "/v1/models", "/base/v1/models")]
    #[case("https://h/base/v1/", "/v1/models", "/base/v1/models")]
    #[case("http://h", "http://other/p?q", "/p?q")]
    fn the_path_goes_below_the_base(#[case] url: &str, #[case] path: &str, #[case] wanted: &str) {
        assert_eq!(target(url, path), wanted);
    }

    #[rstest::rstest]
    #[case("h:8000")]
    #[case("ftp://h")]
    #[case("/path")]
    #[case("http://h/?q")]
    fn an_address_that_cannot_be_called_is_refused(#[case] url: &str) {
        assert!(Backend::new(BackendSettings::new("b", url)).is_err());
    }
}
