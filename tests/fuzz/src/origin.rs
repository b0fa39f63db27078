//! A whole Foretell before a server that is known to the byte, over loopback.
//!
//! The server says that it is vLLM, in the words that were recorded from it, and answers everything else with what an
//! input wants. It keeps what it was asked, and takes nothing that two readers could read in two ways.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use foretell::app::Running;
use foretell::lab::local;
use serde_json::Value;
use tokio::runtime::Runtime;

/// A request as the server read it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    /// Method and target.
    pub line: String,
    /// Its body.
    pub body: Vec<u8>,
}

/// What the server does with requests.
#[derive(Default)]
struct Script {
    /// The body of its answers to completions, in these pieces.
    pieces: Vec<Vec<u8>>,
    /// The answer breaks off after the last piece.
    broken: bool,
    asked: Vec<Asked>,
    /// What it was asked in a form that must not be sent.
    faults: Vec<String>,
}

/// The server, the proxies before it, and what runs them.
pub struct World {
    /// The proxy.
    pub proxy: SocketAddr,
    script: Arc<Mutex<Script>>,
    _running: Running,
    _runtime: Runtime,
}

/// Bodies that vLLM has answered with.
const MODELS: &str = include_str!("../../goldens/vllm/models.json");
const VERSION: &str = include_str!("../../goldens/vllm/version.json");
const METRICS: &str = include_str!("../../goldens/vllm/metrics.json");
/// The model whose tokens the recorded answers are made of.
const TOKENIZER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../onnx/models/target/tokenizer.json");
/// Longest wait for anything.
const PATIENCE: Duration = Duration::from_secs(30);

/// The one world of this process; `more` are lines of its process file.
pub fn world(more: &str) -> &'static World {
    static WORLD: OnceLock<World> = OnceLock::new();
    WORLD.get_or_init(|| World::start(more))
}

impl World {
    fn start(more: &str) -> Self {
        let script = Arc::<Mutex<Script>>::default();
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let direct = listener.local_addr().expect("an address");
        let shared = Arc::clone(&script);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let script = Arc::clone(&shared);
                thread::spawn(move || serve(&stream, &script));
            }
        });
        let process = format!(
            "version: 1\nbackends:\n  - name: b\n    replicas: [\"http://{direct}\"]\n    \
             models: [{{ id: \"*\", tokenizer: \"{TOKENIZER}\" }}]\n    probe: {{ when: never }}\n    \
             load: {{ url: /metrics, every: 1h }}\n{more}"
        );
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("threads");
        let running = runtime.block_on(local::proxy(&process, &[])).expect("a proxy");
        let proxy = running.gateway.addresses[0];
        let world = Self { proxy, script, _running: running, _runtime: runtime };
        if !more.contains("mode:") {
            world.wait_until_known();
        }
        world
    }

    /// Waits until the proxy knows the engine: only then there are sessions.
    fn wait_until_known(&self) {
        let event = br#"{"choices":[{"index":0,"text":" #","token_ids":[5],"finish_reason":"stop"}]}"#;
        let begun = Instant::now();
        loop {
            self.answers(vec![[b"data: ", &event[..], b"\n\ndata: [DONE]\n\n"].concat()], false);
            let body =
                br#"{"model":"foretell-target","prompt":"x","temperature":0,"max_tokens":4,"stream":true}"#;
            let answer = post(self.proxy, "/v1/completions", "", body);
            if String::from_utf8_lossy(&answer.head).contains("x-foretell-path: eligible") {
                return;
            }
            assert!(
                begun.elapsed() < PATIENCE,
                "the engine is not known: {}",
                String::from_utf8_lossy(&answer.head)
            );
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// What completions are answered with from now on.
    pub fn answers(&self, pieces: Vec<Vec<u8>>, broken: bool) {
        *locked(&self.script) = Script { pieces, broken, ..Script::default() };
    }

    /// What the server was asked since.
    pub fn asked(&self) -> Vec<Asked> {
        let script = locked(&self.script);
        assert!(script.faults.is_empty(), "{:?}", script.faults);
        script.asked.clone()
    }
}

fn locked(script: &Mutex<Script>) -> std::sync::MutexGuard<'_, Script> {
    script.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Serves one connection.
fn serve(stream: &TcpStream, script: &Mutex<Script>) {
    let _ = stream.set_read_timeout(Some(PATIENCE));
    let _ = stream.set_nodelay(true);
    let mut reader = BufReader::new(stream);
    loop {
        let (asked, of_client) = match read(&mut reader) {
            Ok(Some(asked)) => asked,
            Ok(None) => return,
            Err(fault) => return locked(script).faults.push(fault),
        };
        if of_client {
            locked(script).asked.push(asked.clone());
        }
        if !answer(stream, script, &asked) {
            return;
        }
    }
}

/// Answers a request; whether the connection goes on.
fn answer(mut stream: &TcpStream, script: &Mutex<Script>, asked: &Asked) -> bool {
    let own = match asked.line.as_str() {
        "GET /v1/models" => Some(MODELS),
        "GET /version" => Some(VERSION),
        "GET /metrics" => Some(METRICS),
        _ => None,
    };
    let mut out = Vec::new();
    if let Some(recorded) = own {
        let recorded: Value = serde_json::from_str(recorded).expect("a recorded answer");
        let body = recorded["body"].as_str().map_or_else(|| recorded["body"].to_string(), ToOwned::to_owned);
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

/// The next request, and whether it is a client's, which the proxy adds a field to; `None` where the connection ends. The
/// error is what is wrong with it.
fn read(reader: &mut impl BufRead) -> Result<Option<(Asked, bool)>, String> {
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
    let of_client = !all("x-forwarded-for").is_empty();
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
    Ok(Some((Asked { line, body }, of_client)))
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

/// Sends a request on a connection of its own and reads the answer.
pub fn post(to: SocketAddr, path: &str, fields: &str, body: &[u8]) -> Answer {
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\nconnection: close\r\n{fields}content-length: {}\r\n\r\n",
        body.len()
    );
    let raw = exchange(to, &[head.as_bytes(), body].concat());
    let mut reader = BufReader::new(raw.as_slice());
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") && reader.read_until(b'\n', &mut head).is_ok_and(|read| read > 0) {}
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
    Answer { head, body, whole }
}

/// Writes bytes to a connection of its own, and reads what comes back until it is closed.
pub fn exchange(to: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let mut back = Vec::new();
    let Ok(mut stream) = TcpStream::connect(to) else { panic!("{to} accepts no connection") };
    let _ = stream.set_read_timeout(Some(PATIENCE));
    let _ = stream.set_nodelay(true);
    let _ = stream.write_all(bytes);
    let begun = Instant::now();
    let _ = stream.read_to_end(&mut back);
    assert!(begun.elapsed() < PATIENCE, "a connection stays open and brings nothing");
    back
}
