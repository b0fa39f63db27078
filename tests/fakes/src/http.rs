//! Hand-written HTTP/1.1, so that a fault can occur at any byte and a closed connection is noticed
//! at once.

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

use super::fault::Fault;

/// A received request.
#[derive(Clone, Debug)]
pub struct Request {
    pub method: String,
    pub path: String,
    pub query: String,
    pub fields: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Request {
    pub fn get(&self, name: &str) -> Option<&str> {
        self.fields
            .iter()
            .find(|(field, _)| field.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.as_str())
    }

    pub fn json(&self) -> Option<Value> {
        serde_json::from_slice(&self.body).ok()
    }

    pub fn route(&self) -> (&str, &str) {
        (&self.method, &self.path)
    }
}

/// The reading end of a connection.
pub struct Reader {
    stream: OwnedReadHalf,
    seen: Vec<u8>,
}

impl Reader {
    pub fn new(stream: OwnedReadHalf) -> Self {
        Self { stream, seen: Vec::new() }
    }

    async fn more(&mut self) -> Option<()> {
        let read = self.stream.read_buf(&mut self.seen).await.ok()?;
        (read > 0).then_some(())
    }

    async fn line(&mut self) -> Option<String> {
        let mut from = 0;
        loop {
            if let Some(end) = self.seen[from..].windows(2).position(|pair| pair == b"\r\n") {
                let line: Vec<u8> = self.seen.drain(..from + end + 2).collect();
                return Some(String::from_utf8_lossy(&line[..from + end]).into_owned());
            }
            from = self.seen.len().saturating_sub(1);
            self.more().await?;
        }
    }

    async fn exactly(&mut self, n: usize) -> Option<Vec<u8>> {
        while self.seen.len() < n {
            self.more().await?;
        }
        Some(self.seen.drain(..n).collect())
    }

    async fn chunked(&mut self) -> Option<Vec<u8>> {
        let mut body = Vec::new();
        loop {
            let size = usize::from_str_radix(self.line().await?.split(';').next()?.trim(), 16).ok()?;
            body.extend(self.exactly(size).await?);
            self.line().await?;
            if size == 0 {
                return Some(body);
            }
        }
    }

    /// The next request; `None` if the client has disconnected.
    pub async fn request(&mut self, writer: &mut OwnedWriteHalf) -> Option<Request> {
        let line = self.line().await?;
        let mut words = line.split(' ');
        let (method, target) = (words.next()?.to_owned(), words.next()?.to_owned());
        let (path, query) = target.split_once('?').unwrap_or((&target, ""));
        let mut request = Request {
            method,
            path: path.to_owned(),
            query: query.to_owned(),
            fields: Vec::new(),
            body: Vec::new(),
        };
        loop {
            let field = self.line().await?;
            let Some((name, value)) = field.split_once(':') else { break };
            request.fields.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
        if request.get("expect").is_some() {
            writer.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await.ok()?;
        }
        if request.get("transfer-encoding").is_some() {
            request.body = self.chunked().await?;
        } else if let Some(length) = request.get("content-length").and_then(|length| length.parse().ok()) {
            request.body = self.exactly(length).await?;
        }
        Some(request)
    }

    /// Waits until the client has closed; bytes received meanwhile are kept.
    pub async fn closed(&mut self) {
        while self.more().await.is_some() {}
    }
}

/// The client has disconnected, or the server pretends to be down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gone;

pub type Sent = Result<(), Gone>;

/// Output of an answer, with its fault.
pub struct Out {
    writer: OwnedWriteHalf,
    pub fault: Option<Fault>,
    events: usize,
}

impl Out {
    pub fn new(writer: OwnedWriteHalf) -> Self {
        Self { writer, fault: None, events: 0 }
    }

    pub fn writer(&mut self) -> &mut OwnedWriteHalf {
        &mut self.writer
    }

    /// Starts the answer to the next request, with this fault.
    pub fn begin(&mut self, fault: Option<Fault>) {
        self.fault = fault;
        self.events = 0;
    }

    pub async fn send(&mut self, bytes: &[u8]) -> Sent {
        self.writer.write_all(bytes).await.map_err(|_| Gone)
    }

    /// Ends the connection with a reset.
    pub fn reset(&self) -> Sent {
        self.writer.as_ref().set_zero_linger().map_err(|_| Gone)?;
        Err(Gone)
    }

    /// A whole answer.
    pub async fn whole(&mut self, status: u16, fields: &[(&str, &str)], body: &[u8]) -> Sent {
        let doctored = self.doctored(body);
        let body = doctored.as_deref().unwrap_or(body);
        if matches!(self.fault, Some(Fault::HalfAsWhole(_))) {
            let head = format!(
                "HTTP/1.1 {status} {}\r\nconnection: close\r\ncontent-type: application/json\r\n\r\n",
                word(status)
            );
            self.send(head.as_bytes()).await?;
            self.send(&body[..body.len() / 2]).await?;
            return Err(Gone);
        }
        let mut head = format!("HTTP/1.1 {status} {}\r\ncontent-length: {}\r\n", word(status), body.len());
        for (name, value) in fields {
            head.extend([name, ": ", value, "\r\n"]);
        }
        head.push_str("\r\n");
        self.send(head.as_bytes()).await?;
        if self.fault == Some(Fault::Half) {
            self.send(&body[..body.len() / 2]).await?;
            return Err(Gone);
        }
        self.send(body).await
    }

    /// JSON with the content type of some engines.
    pub async fn json_utf8(&mut self, status: u16, body: &Value) -> Sent {
        let fields = [("content-type", "application/json; charset=utf-8")];
        self.whole(status, &fields, body.to_string().as_bytes()).await
    }

    pub async fn json(&mut self, status: u16, body: &Value) -> Sent {
        self.whole(status, &[("content-type", "application/json")], body.to_string().as_bytes()).await
    }

    pub async fn text(&mut self, status: u16, body: &str) -> Sent {
        self.whole(status, &[("content-type", "text/plain; version=0.0.4; charset=utf-8")], body.as_bytes())
            .await
    }

    /// An answer without a body.
    pub async fn empty(&mut self, status: u16) -> Sent {
        self.whole(status, &[], b"").await
    }

    /// The head of a stream of this type.
    pub async fn stream(&mut self, of: &str) -> Sent {
        let head = format!("HTTP/1.1 200 OK\r\ncontent-type: {of}\r\ntransfer-encoding: chunked\r\n\r\n");
        self.send(head.as_bytes()).await
    }

    pub async fn events(&mut self) -> Sent {
        self.stream("text/event-stream; charset=utf-8").await
    }

    /// One server-sent event.
    pub async fn event(&mut self, data: impl std::fmt::Display) -> Sent {
        let data = data.to_string();
        let doctored = self.doctored(data.as_bytes());
        let data = doctored.and_then(|data| String::from_utf8(data).ok()).unwrap_or(data);
        self.piece(format!("data: {data}\n\n").as_bytes()).await
    }

    /// The falsified JSON answer, if the fault falsifies it.
    fn doctored(&self, json: &[u8]) -> Option<Vec<u8>> {
        let fault = self.fault.as_ref().filter(|fault| fault.doctors())?;
        let mut answer: Value = serde_json::from_slice(json).ok()?;
        fault.doctor(&mut answer);
        Some(answer.to_string().into_bytes())
    }

    /// A piece of a stream in a chunk of its own: an event, a line, a comment.
    pub async fn piece(&mut self, bytes: &[u8]) -> Sent {
        let at = self.events;
        self.events += 1;
        match self.fault {
            Some(Fault::CutAfter(after)) if at == after => Err(Gone),
            Some(Fault::ResetAfter(after)) if at == after => self.reset(),
            Some(Fault::HangAfter(after)) if at == after => std::future::pending().await,
            Some(Fault::HalfEventAfter(after)) if at == after => {
                self.chunk(&bytes[..bytes.len() / 2]).await?;
                Err(Gone)
            }
            Some(Fault::HalfAsWhole(after)) if at == after => {
                self.chunk(&bytes[..bytes.len() / 2]).await?;
                self.end().await?;
                Err(Gone)
            }
            Some(Fault::GarbageAfter(after)) if at == after => {
                self.chunk(b"data: {\"id\":!\n\n").await?;
                Err(Gone)
            }
            Some(Fault::ErrorAfter(after)) if at == after => {
                self.chunk(b"data: {\"error\":{\"message\":\"out of memory\",\"code\":500}}\n\n").await?;
                Err(Gone)
            }
            _ => self.chunk(bytes).await,
        }
    }

    async fn chunk(&mut self, bytes: &[u8]) -> Sent {
        let mut framed = format!("{:x}\r\n", bytes.len()).into_bytes();
        framed.extend_from_slice(bytes);
        framed.extend_from_slice(b"\r\n");
        self.send(&framed).await
    }

    /// The end of a stream.
    pub async fn end(&mut self) -> Sent {
        self.send(b"0\r\n\r\n").await
    }
}

fn word(status: u16) -> &'static str {
    http::StatusCode::from_u16(status).ok().and_then(|status| status.canonical_reason()).unwrap_or("Trouble")
}
