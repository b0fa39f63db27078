//! The measuring client: one persistent HTTP/1.1 connection, one request at a time, every event
//! timed.
//!
//! Concurrent clients share no connection, so that no pool influences the times. `TCP_NODELAY` is
//! set. An event's time is the moment at which the socket delivered its last byte.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::stream::{Answer, Arrival, Events, Failure, message, understand};
use foretell_net::fleet::error::refused_tls;
use foretell_net::fleet::tls;
use foretell_net::http::is_callable;
use foretell_wire::openai::Route;

/// Longest wait for a connection.
const CONNECT: Duration = Duration::from_secs(5);
/// Longest wait for a complete answer.
const ANSWER: Duration = Duration::from_mins(5);

/// Root URL of a server: `http(s)://host:port`, optionally with a path before `/v1`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Url {
    secure: bool,
    host: String,
    port: u16,
    path: String,
}

/// The text is not a valid [`Url`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("allowed http(s)://HOST[:PORT][/PATH], got {0:?}")]
pub struct NoUrl(String);

impl FromStr for Url {
    type Err = NoUrl;

    fn from_str(text: &str) -> Result<Self, NoUrl> {
        let no_url = || NoUrl(text.to_owned());
        let uri: http::Uri = text.parse().map_err(|_| no_url())?;
        let secure = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(no_url()),
        };
        if uri.query().is_some() || !uri.authority().is_some_and(is_callable) {
            return Err(no_url());
        }
        let host = uri.host().filter(|host| !host.is_empty()).ok_or_else(no_url)?.to_owned();
        let path = uri.path().trim_end_matches('/');
        let path = path.strip_suffix("/v1").unwrap_or(path).to_owned();
        Ok(Self { secure, host, port: uri.port_u16().unwrap_or(if secure { 443 } else { 80 }), path })
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.secure { "https" } else { "http" };
        write!(f, "{scheme}://{}:{}{}", self.host, self.port, self.path)
    }
}

impl From<std::net::SocketAddr> for Url {
    fn from(address: std::net::SocketAddr) -> Self {
        let host = match address {
            std::net::SocketAddr::V4(v4) => v4.ip().to_string(),
            std::net::SocketAddr::V6(v6) => format!("[{}]", v6.ip()),
        };
        Self { secure: false, host, port: address.port(), path: String::new() }
    }
}

impl Url {
    /// The URL's path, or `/metrics` if it has none.
    fn page(&self) -> &str {
        if self.path.is_empty() { "/metrics" } else { &self.path }
    }
}

/// Header fields and TLS settings for a server.
#[derive(Clone, Debug, Default)]
pub struct Access {
    /// Header fields of every request, the API key included.
    pub fields: HeaderMap,
    /// TLS settings for https; `None`: the usual public authorities.
    pub tls: Option<Arc<ClientConfig>>,
}

#[derive(Debug)]
pub struct Client {
    url: Url,
    access: Access,
    sender: Option<SendRequest<Full<Bytes>>>,
}

impl Client {
    /// A client without header fields; it connects with its first request.
    pub fn new(url: Url) -> Self {
        Self::with_access(url, Access::default())
    }

    /// As [`Self::new`], with header fields and TLS settings.
    pub fn with_access(url: Url, access: Access) -> Self {
        Self { url, access, sender: None }
    }

    /// Sends a completion request and reads the event stream to its end.
    pub async fn complete(&mut self, route: Route, body: Bytes) -> Result<Answer, Failure> {
        let path = format!("{}{}", self.url.path, route.path());
        let answered = tokio::time::timeout(ANSWER, self.stream(&path, body)).await;
        if !matches!(answered, Ok(Ok(_))) {
            // The rest of a failed answer must not be read as the start of the next one.
            self.sender = None;
        }
        answered.unwrap_or(Err(Failure::TooLate(ANSWER)))
    }

    async fn stream(&mut self, path: &str, body: Bytes) -> Result<Answer, Failure> {
        let (sent, response) = self.send(Method::POST, path, body).await?;
        let status = response.status();
        let mut body = response.into_body();
        if status != StatusCode::OK {
            let body = body.collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
            return Err(refused(status, &body));
        }
        let (mut events, mut arrivals) = (Events::default(), Vec::new());
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| Failure::Cut(error.to_string()))?;
            let at = sent.elapsed();
            if let Ok(bytes) = frame.into_data() {
                events.push(&bytes, |data| arrivals.push(Arrival { at, data }));
            }
        }
        understand(&arrivals)
    }

    /// Reads a page: the URL's path, or `/metrics` if it has none.
    pub async fn page(&mut self) -> Result<String, Failure> {
        let path = self.url.page().to_owned();
        let page = self.fetch(Method::GET, &path, Bytes::new()).await?;
        String::from_utf8(page.into()).map_err(|error| Failure::Unreadable(error.to_string()))
    }

    /// Reads JSON from `path`.
    pub async fn get(&mut self, path: &str) -> Result<serde_json::Value, Failure> {
        let path = format!("{}{path}", self.url.path);
        let body = self.fetch(Method::GET, &path, Bytes::new()).await?;
        serde_json::from_slice(&body).map_err(|error| Failure::Unreadable(error.to_string()))
    }

    /// Posts JSON to `path` and reads the answer.
    pub async fn post(&mut self, path: &str, body: &serde_json::Value) -> Result<Bytes, Failure> {
        let path = format!("{}{path}", self.url.path);
        self.fetch(Method::POST, &path, Bytes::from(body.to_string())).await
    }

    async fn fetch(&mut self, method: Method, path: &str, body: Bytes) -> Result<Bytes, Failure> {
        let answer = async {
            let (_, response) = self.send(method, path, body).await?;
            let status = response.status();
            let body = response.into_body().collect().await;
            let body = body.map_err(|error| Failure::Cut(error.to_string()))?.to_bytes();
            if status == StatusCode::OK { Ok(body) } else { Err(refused(status, &body)) }
        };
        tokio::time::timeout(CONNECT, answer).await.unwrap_or(Err(Failure::TooLate(CONNECT)))
    }

    /// Sends a request; retries it once on a new connection if the old one was closed meanwhile.
    async fn send(
        &mut self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<(Instant, Response<Incoming>), Failure> {
        let request = self.request(method, path, body)?;
        if let Some(mut sender) = self.sender.take()
            && sender.ready().await.is_ok()
        {
            let sent = Instant::now();
            if let Ok(response) = sender.send_request(request.clone()).await {
                self.sender = Some(sender);
                return Ok((sent, response));
            }
        }
        let mut sender = self.connect().await?;
        let sent = Instant::now();
        let response = sender.send_request(request).await;
        let response = response.map_err(|error| Failure::Unreachable(error.to_string()))?;
        self.sender = Some(sender);
        Ok((sent, response))
    }

    fn request(&self, method: Method, path: &str, body: Bytes) -> Result<Request<Full<Bytes>>, Failure> {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, format!("{}:{}", self.url.host, self.url.port))
            .header(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))
            .body(Full::new(body));
        let mut request = request.map_err(|error| Failure::Unreachable(error.to_string()))?;
        request.headers_mut().extend(self.access.fields.clone());
        Ok(request)
    }

    async fn connect(&self) -> Result<SendRequest<Full<Bytes>>, Failure> {
        let unreachable = |error: &dyn fmt::Display| Failure::Unreachable(format!("{}: {error}", self.url));
        let host = self.url.host.trim_matches(['[', ']']);
        let stream = tokio::time::timeout(CONNECT, TcpStream::connect((host, self.url.port)))
            .await
            .map_err(|_| unreachable(&"no connection in time"))?
            .map_err(|error| unreachable(&error))?;
        stream.set_nodelay(true).map_err(|error| unreachable(&error))?;
        if !self.url.secure {
            return speak(stream).await.map_err(|error| unreachable(&error));
        }
        let stream = tokio::time::timeout(CONNECT, self.encrypted(host, stream))
            .await
            .map_err(|_| unreachable(&"no TLS handshake in time"))?
            .map_err(|error| unreachable(&error))?;
        speak(stream).await.map_err(|error| unreachable(&error))
    }

    async fn encrypted(&self, host: &str, stream: TcpStream) -> Result<TlsStream<TcpStream>, String> {
        let config = match &self.access.tls {
            Some(config) => Arc::clone(config),
            None => tls::client(None, None).map_err(|error| error.to_string())?,
        };
        let name = ServerName::try_from(host.to_owned()).map_err(|error| error.to_string())?;
        let shaken = TlsConnector::from(config).connect(name, stream).await;
        shaken.map_err(|error| refused_tls(&error).unwrap_or_else(|| error.to_string()))
    }
}

/// Starts HTTP/1.1 on a connection.
async fn speak<S>(stream: S) -> hyper::Result<SendRequest<Full<Bytes>>>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // The task ends with the connection; errors are reported to the open request.
    tokio::spawn(connection);
    Ok(sender)
}

fn refused(status: StatusCode, body: &[u8]) -> Failure {
    let words = match serde_json::from_slice::<serde_json::Value>(body) {
        Ok(error) => message(&error),
        Err(_) => String::from_utf8_lossy(body).chars().take(200).collect(),
    };
    Failure::Status(status.as_u16(), words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_with_or_without_their_version_path() {
        for (text, shown) in [
            ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
            ("http://host/v1/", "http://host:80"),
            ("http://host:1/llm/v1", "http://host:1/llm"),
            ("http://[::1]:9/", "http://[::1]:9"),
            ("https://host/v1", "https://host:443"),
        ] {
            assert_eq!(text.parse::<Url>().unwrap().to_string(), shown);
        }
        assert_eq!("http://h:1".parse::<Url>().unwrap().page(), "/metrics");
        assert_eq!("http://h:1/stats".parse::<Url>().unwrap().page(), "/stats");
    }

    #[test]
    fn other_schemes_and_nonsense_are_refused() {
        for text in ["ftp://host", "host:80", "", "http://", "http://h/?q=1"] {
            assert!(text.parse::<Url>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_refusal_carries_the_server_s_message() {
        let told = refused(StatusCode::NOT_FOUND, br#"{"error":{"message":"no such model"}}"#);
        assert_eq!(told.to_string(), "HTTP 404: no such model");
        assert_eq!(refused(StatusCode::BAD_GATEWAY, b"<html>").to_string(), "HTTP 502: <html>");
    }
}
