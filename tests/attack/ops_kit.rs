//! Additions to the kit for the operation tests: commands that run to their end, servers at a fixed
//! address that go away and come back, the lines of the log, certificates, and a real engine.

use std::io::{BufRead, BufReader, Read};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use serde_json::{Value, json};

use crate::kit::{self, Answer, PATIENCE, Proxy, Wire, respond};

/// Exit code and output of a finished command.
#[derive(Debug)]
pub struct CommandOutput {
    /// `None`: it did not end by itself.
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl CommandOutput {
    /// Standard output and standard error.
    pub fn all(&self) -> String {
        format!("{}{}", self.out, self.err)
    }
}

/// Runs the binary in `folder` to its end, without any of Foretell's environment variables.
pub fn foretell(folder: &Path, args: &[&str]) -> CommandOutput {
    let mut command = Command::new(kit::binary());
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("FORETELL_") {
            command.env_remove(name);
        }
    }
    command.args(args).current_dir(folder).stdin(Stdio::null());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary starts");
    let reading = |mut from: Box<dyn Read + Send>| {
        thread::spawn(move || {
            let mut text = Vec::new();
            let _ = from.read_to_end(&mut text);
            String::from_utf8_lossy(&text).into_owned()
        })
    };
    let out = reading(Box::new(child.stdout.take().unwrap()));
    let err = reading(Box::new(child.stderr.take().unwrap()));
    let code = end(&mut child);
    CommandOutput { code, out: out.join().unwrap(), err: err.join().unwrap() }
}

/// Its exit code, if it ends by itself; else it is killed.
fn end(child: &mut Child) -> Option<i32> {
    let start = Instant::now();
    while start.elapsed() < PATIENCE {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        thread::sleep(Duration::from_millis(20));
    }
    let _ = child.kill();
    let _ = child.wait();
    None
}

/// Writes files below `folder`.
pub fn write(folder: &Path, files: &[(&str, &str)]) {
    for (name, text) in files {
        let path = folder.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
}

/// The lines of a proxy's log that are JSON.
pub fn log(proxy: &Proxy) -> Vec<Value> {
    proxy.stderr().lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// Its lines of this level that mention `word`.
pub fn lines(proxy: &Proxy, level: &str, word: &str) -> Vec<String> {
    let of_level =
        |line: &Value| line["level"].as_str().is_some_and(|found| found.eq_ignore_ascii_case(level));
    log(proxy)
        .iter()
        .filter(|line| of_level(line))
        .map(ToString::to_string)
        .filter(|line| line.contains(word))
        .collect()
}

/// The line of the finished request with this id.
pub fn request_line(proxy: &Proxy, id: &str) -> Value {
    kit::eventually("the line of the request", || {
        log(proxy).into_iter().find(|line| line["message"] == "request" && line["id"] == id)
    })
}

/// A completion with an id of its own.
pub fn completion(id: &str, fields: &str, body: &Value) -> Vec<u8> {
    kit::post("/v1/completions", &format!("x-request-id: {id}\r\n{fields}"), body.to_string())
}

/// A server that can be stopped with all its connections, so that another can take its address.
pub struct Spot {
    pub address: SocketAddr,
    seen: Arc<Mutex<Vec<(Instant, Answer)>>>,
    open: Arc<Mutex<Vec<TcpStream>>>,
    stop: Arc<AtomicBool>,
    accepting: Option<thread::JoinHandle<()>>,
}

impl Spot {
    /// Answers every request by `answer`.
    pub fn new(answer: impl Fn(&Answer) -> Vec<u8> + Send + Sync + 'static) -> Self {
        Self::at(SocketAddr::from(([127, 0, 0, 1], 0)), answer)
    }

    pub fn at(address: SocketAddr, answer: impl Fn(&Answer) -> Vec<u8> + Send + Sync + 'static) -> Self {
        let listener = kit::eventually("the address is free", || TcpListener::bind(address).ok());
        let address = listener.local_addr().unwrap();
        let (seen, open, stop) = (Arc::default(), Arc::default(), Arc::new(AtomicBool::new(false)));
        let mut spot = Self { address, seen, open, stop, accepting: None };
        let (seen, open, stop) = (Arc::clone(&spot.seen), Arc::clone(&spot.open), Arc::clone(&spot.stop));
        let answer = Arc::new(answer);
        let accepting = thread::spawn(move || {
            for stream in listener.incoming() {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                let Ok(stream) = stream else { continue };
                open.lock().unwrap().push(stream.try_clone().unwrap());
                let (answer, seen) = (Arc::clone(&answer), Arc::clone(&seen));
                thread::spawn(move || serve(stream, answer.as_ref(), &seen));
            }
        });
        spot.accepting = Some(accepting);
        spot
    }

    /// Number of requests for this target so far.
    pub fn count(&self, target: &str) -> usize {
        self.all().iter().filter(|(_, request)| request.target() == target).count()
    }

    /// Every request so far, with its time.
    pub fn all(&self) -> Vec<(Instant, Answer)> {
        self.seen.lock().unwrap().clone()
    }

    /// Stops the server and returns its address.
    pub fn leave(self) -> SocketAddr {
        self.address
    }
}

fn serve(
    stream: TcpStream,
    answer: &(impl Fn(&Answer) -> Vec<u8> + ?Sized),
    seen: &Mutex<Vec<(Instant, Answer)>>,
) {
    let mut wire = Wire::new(stream);
    wire.stream.set_read_timeout(None).unwrap();
    while let Some(request) = wire.message() {
        let bytes = answer(&request);
        let close = bytes.is_empty();
        seen.lock().unwrap().push((Instant::now(), request));
        if close || !wire.try_send(bytes) {
            return;
        }
    }
}

impl Drop for Spot {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.address);
        if let Some(accepting) = self.accepting.take() {
            let _ = accepting.join();
        }
        for stream in self.open.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// An answer in JSON.
pub fn json_answer(status: &str, body: &Value) -> Vec<u8> {
    respond(status, "content-type: application/json\r\n", body.to_string())
}

/// A list of one model.
pub fn models() -> Vec<u8> {
    json_answer("200 OK", &json!({"object": "list", "data": [{"id": "m", "object": "model", "created": 1}]}))
}

/// A whole streamed completion of two tokens.
pub fn streamed() -> Vec<u8> {
    let chunk = |text: &str, finish: Value| {
        json!({"id": "c", "object": "text_completion", "created": 1, "model": "m",
            "choices": [{"index": 0, "text": text, "finish_reason": finish}]})
    };
    let usage = json!({"id": "c", "object": "text_completion", "created": 1, "model": "m", "choices": [],
        "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}});
    let events = [chunk(" a", Value::Null), chunk(" b", json!("length")), usage]
        .map(|event| format!("data: {event}\n\n"));
    respond("200 OK", "content-type: text/event-stream\r\n", events.concat() + "data: [DONE]\n\n")
}

/// The `authorization` value of a request.
pub fn bearer(request: &Answer) -> Option<&str> {
    request.field("authorization")
}

/// A real engine: `foretell target` with the bundled model. Ends when dropped.
pub struct Target {
    child: Child,
    pub address: SocketAddr,
}

impl Target {
    pub fn start() -> Self {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("onnx/models/target");
        let mut command = Command::new(kit::binary());
        command.arg("target").arg("--model").arg(model).args(["--listen", "127.0.0.1:0", "--threads", "1"]);
        let mut child =
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address =
            line.split("http://").nth(1).and_then(|rest| rest.split_whitespace().next()?.parse().ok());
        Self { address: address.unwrap_or_else(|| panic!("no target: {line:?}")), child }
    }

    /// Its model's id.
    pub fn model() -> &'static str {
        "target"
    }

    /// Kills the process.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A self-signed certificate and one signed by an authority, as files.
pub struct Papers {
    pub folder: tempfile::TempDir,
}

impl Papers {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: String| std::fs::write(folder.path().join(name), text).unwrap();
        let names = || CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        let key = KeyPair::generate().unwrap();
        let mut own = names();
        own.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        write("own.pem", own.self_signed(&key).unwrap().pem());
        write("own.key", key.serialize_pem());
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        write("ca.pem", authority.pem());
        let key = KeyPair::generate().unwrap();
        write("signed.pem", names().signed_by(&key, &authority).unwrap().pem());
        write("signed.key", key.serialize_pem());
        Self { folder }
    }

    pub fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }
}
