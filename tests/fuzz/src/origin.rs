//! A whole Foretell in front of a server whose bytes are known, over loopback.
//!
//! The server identifies itself as vLLM with recorded answers, and answers everything else with
//! bytes of the input. It records its requests, and refuses any that two readers could read
//! differently.

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use foretell::app::Running;
use foretell::app::local;
use serde_json::Value;
use tokio::net::TcpSocket;
use tokio::runtime::Runtime;

/// A request as read by the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReceivedRequest {
    /// Method and target.
    pub line: String,
    /// Its body.
    pub body: Vec<u8>,
}

/// Behaviour of the server.
#[derive(Default)]
struct Script {
    /// The body of its answers to completions, in these pieces.
    pieces: Vec<Vec<u8>>,
    /// The answer breaks off after the last piece.
    broken: bool,
    /// The requests of clients, by the client's address, so that a late one is not attributed to
    /// the next client.
    asked: BTreeMap<String, Vec<ReceivedRequest>>,
    /// Requests in a form that must not be sent.
    faults: Vec<String>,
}

/// The server, the proxy in front of it, and their runtime.
pub struct World {
    server: SocketAddr,
    script: Arc<Mutex<Script>>,
    /// Lines of the config file.
    more: &'static str,
    state: Mutex<State>,
}

/// The proxy, and the number of its clients so far.
struct State {
    proxy: Option<Proxy>,
    clients: u32,
}

struct Proxy {
    address: SocketAddr,
    running: Running,
    runtime: Runtime,
}

/// A client's turn: the server serves and records only this client's requests.
pub struct Turn<'a> {
    script: &'a Mutex<Script>,
    state: MutexGuard<'a, State>,
}

/// Recorded answers of vLLM.
const MODELS: &str = include_str!("../../goldens/vllm/models.json");
const VERSION: &str = include_str!("../../goldens/vllm/version.json");
const METRICS: &str = include_str!("../../goldens/vllm/metrics.json");
/// Start time of its process, which is not in the recording. A server without it is probed with
/// verify requests before it is recognised, and the bytes of an input are not a verification
/// result.
const START: &str = "\nprocess_start_time_seconds 1763900000.0\n";
/// Tokenizer of the model of the recorded answers.
const TOKENIZER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../onnx/models/target/tokenizer.json");
/// Number of clients of a proxy: too few to use up its retry budget, which would change its
/// answers.
const TURNS: u32 = 32;
/// Maximum wait: less than an input may take (`run.py`), so that the test can report what it waited
/// for.
const PATIENCE: Duration = Duration::from_secs(8);

/// The world of this process whose config file has these lines.
pub fn world(more: &'static str) -> &'static World {
    static WORLDS: Mutex<BTreeMap<&str, &World>> = Mutex::new(BTreeMap::new());
    locked(&WORLDS).entry(more).or_insert_with(|| Box::leak(Box::new(World::start(more))))
}

impl World {
    fn start(more: &'static str) -> Self {
        let script = Arc::<Mutex<Script>>::default();
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let server = listener.local_addr().expect("an address");
        let shared = Arc::clone(&script);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let script = Arc::clone(&shared);
                thread::spawn(move || serve(&stream, &script));
            }
        });
        Self { server, script, more, state: Mutex::new(State { proxy: None, clients: 0 }) }
    }

    /// Waits for a turn.
    pub fn turn(&self) -> Turn<'_> {
        let mut state = locked(&self.state);
        let renewed = state.clients.is_multiple_of(TURNS);
        state.clients += 1;
        if renewed {
            state.proxy = None;
            state.proxy = Some(Proxy::start(self.server, self.more));
        }
        let mut turn = Turn { script: &self.script, state };
        // There are sessions only once the engine is recognised.
        if renewed && !self.more.contains("mode:") {
            turn.wait_until_known();
        }
        *locked(&self.script) = Script::default();
        turn
    }
}

impl Proxy {
    fn start(server: SocketAddr, more: &str) -> Self {
        let process = format!(
            "version: 1\nbackends:\n  - name: b\n    replicas: [\"http://{server}\"]\n    \
             models: [{{ id: \"*\", tokenizer: \"{TOKENIZER}\" }}]\n    probe: {{ when: never }}\n    \
             load: {{ url: /metrics, every: 1h }}\n{more}"
        );
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("threads");
        let running = runtime.block_on(local::proxy(&process, &[])).expect("a proxy");
        Self { address: running.gateway.addresses[0], running, runtime }
    }
}

impl Turn<'_> {
    fn proxy(&self) -> &Proxy {
        self.state.proxy.as_ref().expect("a proxy")
    }

    fn wait_until_known(&mut self) {
        let event = br#"{"choices":[{"index":0,"text":" #","token_ids":[5],"finish_reason":"stop"}]}"#;
        self.answers(vec![[b"data: ", &event[..], b"\n\ndata: [DONE]\n\n"].concat()], false);
        let begun = Instant::now();
        loop {
            // The recorded server does not show its own defaults.
            let body = br#"{"model":"foretell-target","prompt":"x","temperature":0,"presence_penalty":0,
                "frequency_penalty":0,"repetition_penalty":1,"top_p":1,"top_k":-1,"min_p":0,
                "max_tokens":4,"stream":true}"#;
            let answer = self.post("/v1/completions", "", body);
            if String::from_utf8_lossy(&answer.head).contains("x-foretell-path: eligible") {
                return;
            }
            assert!(begun.elapsed() < PATIENCE, "the engine is not known: {:?}, {answer:?}", self.known());
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// The proxy's knowledge about the server.
    fn known(&self) -> Vec<Value> {
        let identities = &self.proxy().running.identities;
        identities.all().iter().filter_map(|(replica, _)| identities.shown(replica)).collect()
    }

    /// Sets the answer to completions from now on.
    pub fn answers(&self, pieces: Vec<Vec<u8>>, broken: bool) {
        let mut script = locked(self.script);
        (script.pieces, script.broken) = (pieces, broken);
    }

    /// The server's requests from this client.
    pub fn asked(&self) -> Vec<ReceivedRequest> {
        let script = locked(self.script);
        assert!(script.faults.is_empty(), "{:?}", script.faults);
        script.asked.get(&self.address().to_string()).cloned().unwrap_or_default()
    }

    /// An address of the loopback network for each client.
    fn address(&self) -> Ipv4Addr {
        let [_, high, middle, low] = self.state.clients.to_be_bytes();
        Ipv4Addr::new(127, high | 1, middle, low)
    }

    /// Sends a request on a new connection and reads the answer.
    pub fn post(&mut self, path: &str, fields: &str, body: &[u8]) -> Answer {
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\nconnection: close\r\n{fields}content-length: {}\r\n\r\n",
            body.len()
        );
        Answer::read(&self.exchange(&[head.as_bytes(), body].concat(), None))
    }

    /// Writes bytes to a new connection and reads until it is closed. A client with `patience`
    /// closes its side after a silence of that length.
    pub fn exchange(&mut self, bytes: &[u8], patience: Option<Duration>) -> Vec<u8> {
        let mut back = Vec::new();
        let mut stream = self.connect().expect("a connection");
        let _ = stream.set_nodelay(true);
        let _ = stream.write_all(bytes);
        let begun = Instant::now();
        let _ = stream.set_read_timeout(Some(patience.unwrap_or(PATIENCE)));
        let mut piece = [0; 4096];
        loop {
            match stream.read(&mut piece) {
                Ok(0) => break,
                Ok(read) => back.extend_from_slice(&piece[..read]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if is_silence(&error) && patience.is_some() && begun.elapsed() < PATIENCE => {
                    let _ = stream.shutdown(Shutdown::Write);
                    let _ = stream.set_read_timeout(Some(PATIENCE));
                }
                Err(_) => break,
            }
        }
        assert!(begun.elapsed() < PATIENCE, "a connection stays open and brings nothing");
        back
    }

    /// A connection from the client's own address.
    fn connect(&self) -> io::Result<TcpStream> {
        let connected = self.proxy().runtime.block_on(async {
            let socket = TcpSocket::new_v4()?;
            socket.bind(SocketAddr::from((self.address(), 0)))?;
            socket.connect(self.proxy().address).await
        });
        let stream = connected?.into_std()?;
        stream.set_nonblocking(false)?;
        Ok(stream)
    }
}

fn is_silence(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

fn locked<T>(held: &Mutex<T>) -> MutexGuard<'_, T> {
    held.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Serves one connection.
fn serve(stream: &TcpStream, script: &Mutex<Script>) {
    let _ = stream.set_read_timeout(Some(PATIENCE));
    let _ = stream.set_nodelay(true);
    let mut reader = BufReader::new(stream);
    loop {
        let (asked, client) = match read(&mut reader) {
            Ok(Some(asked)) => asked,
            Ok(None) => return,
            Err(fault) => return locked(script).faults.push(fault),
        };
        if let Some(client) = client {
            locked(script).asked.entry(client).or_default().push(asked.clone());
        }
        if !answer(stream, script, &asked) {
            return;
        }
    }
}

/// Answers a request; returns true if the connection stays open.
fn answer(mut stream: &TcpStream, script: &Mutex<Script>, asked: &ReceivedRequest) -> bool {
    let (recorded, more) = match asked.line.as_str() {
        "GET /v1/models" => (Some(MODELS), ""),
        "GET /version" => (Some(VERSION), ""),
        "GET /metrics" => (Some(METRICS), START),
        _ => (None, ""),
    };
    let mut out = Vec::new();
    if let Some(recorded) = recorded {
        let recorded: Value = serde_json::from_str(recorded).expect("a recorded answer");
        let body = recorded["body"].as_str().map_or_else(|| recorded["body"].to_string(), ToOwned::to_owned);
        let body = body + more;
        out.extend(format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len()).bytes());
        return stream.write_all(&out).is_ok();
    }
    let completion = asked.line.starts_with("POST /v1/c") && !asked.line.ends_with("/render");
    let (pieces, broken) = {
        let script = locked(script);
        (script.pieces.clone(), script.broken)
    };
    if !completion {
        return stream.write_all(b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\nno").is_ok();
    }
    out.extend(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n");
    for piece in pieces.iter().filter(|piece| !piece.is_empty()) {
        out.extend(format!("{:x}\r\n", piece.len()).bytes());
        out.extend(piece);
        out.extend(b"\r\n");
    }
    if !broken {
        out.extend(b"0\r\n\r\n");
    }
    stream.write_all(&out).is_ok() && !broken
}

/// The next request, and the address of its client, which the proxy adds; `None` where the
/// connection ends. The error describes an invalid request.
fn read(reader: &mut impl BufRead) -> Result<Option<(ReceivedRequest, Option<String>)>, String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match reader.read_until(b'\n', &mut head) {
            Ok(0) | Err(_) if head.is_empty() => return Ok(None),
            Ok(0) | Err(_) => return Ok(None),
            Ok(_) => {}
        }
    }
    let shown = || String::from_utf8_lossy(&head).into_owned();
    let mut fields = [httparse::EMPTY_HEADER; 256];
    let mut request = httparse::Request::new(&mut fields);
    if !matches!(request.parse(&head), Ok(httparse::Status::Complete(_))) {
        return Err(format!("no head: {}", shown()));
    }
    let all = |name: &str| -> Vec<&[u8]> {
        let named = request.headers.iter().filter(|field| field.name.eq_ignore_ascii_case(name));
        named.map(|field| field.value).collect()
    };
    let (lengths, codings) = (all("content-length"), all("transfer-encoding"));
    if all("host").len() != 1 || lengths.len() + codings.len() > 1 {
        return Err(format!("two readers could differ: {}", shown()));
    }
    let chain = all("x-forwarded-for").last().map(|chain| String::from_utf8_lossy(chain).into_owned());
    let client = chain.and_then(|chain| chain.rsplit(',').next().map(|client| client.trim().to_owned()));
    let line = format!("{} {}", request.method.unwrap_or_default(), request.path.unwrap_or_default());
    let mut body = Vec::new();
    if let Some(length) = lengths.first() {
        let length =
            std::str::from_utf8(length).ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
        let length: u64 =
            length.and_then(|text| text.parse().ok()).ok_or_else(|| format!("length: {}", shown()))?;
        if reader.take(length).read_to_end(&mut body).is_err() || (body.len() as u64) < length {
            return Ok(None);
        }
    } else if let Some(coding) = codings.first() {
        if !coding.eq_ignore_ascii_case(b"chunked") {
            return Err(format!("coding: {}", shown()));
        }
        if chunks(reader, &mut body).is_none() {
            return Ok(None);
        }
    }
    Ok(Some((ReceivedRequest { line, body }, client)))
}

/// A chunked body to its end; `None` if it breaks off.
fn chunks(reader: &mut impl BufRead, body: &mut Vec<u8>) -> Option<()> {
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok().filter(|&read| read > 0)?;
        let size = u64::from_str_radix(line.trim().split(';').next()?, 16).ok()?;
        let before = body.len();
        reader.take(size).read_to_end(body).ok()?;
        if ((body.len() - before) as u64) < size {
            return None;
        }
        if size == 0 {
            // Trailers end with an empty line.
            loop {
                let mut line = String::new();
                reader.read_line(&mut line).ok().filter(|&read| read > 0)?;
                if line.trim().is_empty() {
                    return Some(());
                }
            }
        }
        let mut end = [0; 2];
        reader.read_exact(&mut end).ok()?;
    }
}

/// An answer as a client reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Status line and fields.
    pub head: Vec<u8>,
    /// The body, without its framing.
    pub body: Vec<u8>,
    /// It came to its end.
    pub whole: bool,
}

impl Answer {
    fn read(raw: &[u8]) -> Self {
        let mut reader = BufReader::new(raw);
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") && reader.read_until(b'\n', &mut head).is_ok_and(|read| read > 0) {
        }
        let mut body = Vec::new();
        let text = String::from_utf8_lossy(&head).to_ascii_lowercase();
        let whole = if text.contains("transfer-encoding: chunked") {
            chunks(&mut reader, &mut body).is_some()
        } else {
            let _ = reader.read_to_end(&mut body);
            let length =
                text.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse::<usize>().ok());
            length.is_none_or(|length| length == body.len())
        };
        Self { head, body, whole }
    }
}
