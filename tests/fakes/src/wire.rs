//! Hand-written HTTP/1.1 for both ends of a connection: tests see every byte instead of a library's
//! interpretation.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// Maximum time of a single step of a test, on a machine that is busy with something else.
pub const PATIENCE: Duration = Duration::from_mins(5);

/// First line and header fields.
#[derive(Clone, Debug)]
pub struct Head {
    pub line: String,
    pub fields: Vec<(String, String)>,
}

impl Head {
    pub fn get(&self, name: &str) -> Option<&str> {
        self.fields
            .iter()
            .find(|(field, _)| field.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.as_str())
    }

    pub fn status(&self) -> u16 {
        self.line.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0)
    }

    /// Method and target of a request.
    pub fn target(&self) -> (&str, &str) {
        let mut words = self.line.split(' ');
        (words.next().unwrap_or_default(), words.next().unwrap_or_default())
    }

    fn is_chunked(&self) -> bool {
        self.get("transfer-encoding").is_some_and(|coding| coding.contains("chunked"))
    }
}

/// A received message.
#[derive(Clone, Debug)]
pub struct Message {
    pub head: Head,
    pub body: Vec<u8>,
    /// Lines after the last chunk.
    pub trailers: Vec<String>,
}

impl Message {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).expect("a JSON body")
    }
}

/// One connection.
pub struct Wire {
    stream: TcpStream,
    seen: Vec<u8>,
}

impl Wire {
    pub fn new(stream: TcpStream) -> Self {
        stream.set_nodelay(true).unwrap();
        Self { stream, seen: Vec::new() }
    }

    pub async fn connect(address: SocketAddr) -> Self {
        Self::new(TcpStream::connect(address).await.unwrap())
    }

    pub async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream.write_all(bytes.as_ref()).await.unwrap();
    }

    /// As `send`, for a connection that may be gone.
    pub async fn try_send(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        self.stream.write_all(bytes.as_ref()).await.is_ok()
    }

    /// Reads more; false at the end of the connection.
    async fn more(&mut self) -> bool {
        let mut piece = vec![0; 16384];
        let read = tokio::time::timeout(PATIENCE, self.stream.read(&mut piece)).await.expect("bytes in time");
        let n = read.unwrap_or(0);
        self.seen.extend_from_slice(&piece[..n]);
        n > 0
    }

    async fn line(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.seen.windows(2).position(|pair| pair == b"\r\n") {
                let line = self.seen.drain(..end + 2).take(end).collect::<Vec<u8>>();
                return Some(String::from_utf8_lossy(&line).into_owned());
            }
            if !self.more().await {
                return None;
            }
        }
    }

    /// Reads exactly `n` bytes, or all there are before the end.
    pub async fn exactly(&mut self, n: usize) -> Vec<u8> {
        while self.seen.len() < n && self.more().await {}
        let n = n.min(self.seen.len());
        self.seen.drain(..n).collect()
    }

    pub async fn head(&mut self) -> Option<Head> {
        let line = self.line().await?;
        let mut fields = Vec::new();
        loop {
            let field = self.line().await?;
            match field.split_once(':') {
                Some((name, value)) => fields.push((name.to_owned(), value.trim().to_owned())),
                None => return Some(Head { line, fields }),
            }
        }
    }

    /// The next chunk of a chunked body; empty at its end.
    pub async fn chunk(&mut self) -> Option<Vec<u8>> {
        let size = self.line().await?;
        let size = usize::from_str_radix(size.split(';').next()?.trim(), 16).ok()?;
        if size == 0 {
            return Some(Vec::new());
        }
        let chunk = self.exactly(size).await;
        self.exactly(2).await;
        (chunk.len() == size).then_some(chunk)
    }

    /// The body that belongs to `head`; `None` if the connection ended inside it.
    pub async fn body(&mut self, head: Head) -> Option<Message> {
        let mut body = Vec::new();
        let mut trailers = Vec::new();
        if head.is_chunked() {
            loop {
                let chunk = self.chunk().await?;
                if chunk.is_empty() {
                    break;
                }
                body.extend(chunk);
            }
            loop {
                let line = self.line().await?;
                if line.is_empty() {
                    break;
                }
                trailers.push(line);
            }
        } else if let Some(length) = head.get("content-length").and_then(|length| length.parse().ok()) {
            body = self.exactly(length).await;
            if body.len() < length {
                return None;
            }
        }
        Some(Message { head, body, trailers })
    }

    pub async fn message(&mut self) -> Option<Message> {
        let head = self.head().await?;
        self.body(head).await
    }

    /// Sends a request and reads the whole answer.
    pub async fn ask(&mut self, request: impl AsRef<[u8]>) -> Message {
        self.send(request).await;
        self.message().await.expect("an answer")
    }

    /// Ends the connection with a reset, with all pending messages.
    pub fn reset(&mut self) {
        self.stream.set_zero_linger().unwrap();
    }

    /// Waits until the other end has closed.
    pub async fn closed(&mut self) {
        while self.more().await {}
    }
}

/// A server that hands every connection to `serve`.
pub struct Server {
    pub address: SocketAddr,
    task: JoinHandle<()>,
}

impl Server {
    pub async fn start<S, F>(serve: S) -> Self
    where
        S: Fn(Wire) -> F + Send + 'static,
        F: Future<Output = ()> + Send + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(Wire::new(stream)));
            }
        });
        Self { address, task }
    }

    /// A server that answers every request by `answer`, on kept-alive connections.
    pub async fn answering(answer: impl Fn(Message) -> Vec<u8> + Clone + Send + Sync + 'static) -> Self {
        Self::start(move |mut wire| {
            let answer = answer.clone();
            async move {
                while let Some(request) = wire.message().await {
                    if !wire.try_send(answer(request)).await {
                        return;
                    }
                }
            }
        })
        .await
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A request with a known length.
pub fn post(path: &str, fields: &str, body: &[u8]) -> Vec<u8> {
    let mut bytes =
        format!("POST {path} HTTP/1.1\r\nhost: api\r\n{fields}content-length: {}\r\n\r\n", body.len())
            .into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

/// An answer with a known length.
pub fn ok(fields: &str, body: &[u8]) -> Vec<u8> {
    let mut bytes = format!("HTTP/1.1 200 OK\r\n{fields}content-length: {}\r\n\r\n", body.len()).into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

/// One chunk of a chunked body.
pub fn chunk(bytes: &[u8]) -> Vec<u8> {
    let mut framed = format!("{:x}\r\n", bytes.len()).into_bytes();
    framed.extend_from_slice(bytes);
    framed.extend_from_slice(b"\r\n");
    framed
}

/// The head of an event stream.
pub const EVENTS: &str =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
