//! Shared test kit: a running binary, its addresses and memory, raw HTTP/1.1 for both ends, tiny
//! backends.
//!
//! The standard library, `serde_json` and `tempfile` only. Waiting means polling for a condition
//! with a generous limit.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

/// Maximum time of one step of a test, on a machine that is busy with something else.
pub const PATIENCE: Duration = Duration::from_mins(5);

/// The binary under attack.
pub fn binary() -> PathBuf {
    std::env::var_os("FORETELL_BIN").map_or_else(|| env!("CARGO_BIN_EXE_foretell").into(), PathBuf::from)
}

/// Polls `found` until it has something. Panics with `what` after `limit`.
pub fn wait_for<T>(limit: Duration, what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(start.elapsed() < limit, "not within {limit:?}: {what}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// As [`wait_for`] with [`PATIENCE`].
pub fn eventually<T>(what: &str, found: impl FnMut() -> Option<T>) -> T {
    wait_for(PATIENCE, what, found)
}

// --------------------------------------------------------------------- The proxy

/// Each listener has its own loopback address, so that the sockets of the process identify it
/// without any printed or logged output.
const CLIENTS: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const ADMIN: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));
const METRICS: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 3));

/// Configuration with which a proxy is started.
pub struct Start {
    /// The config file without `version`; `listen` and `admin` are added if it has none.
    pub process: String,
    /// Policy files: name and text. Without any, the built-in policy is in force.
    pub policies: Vec<(&'static str, String)>,
    /// Environment variables.
    pub env: Vec<(&'static str, String)>,
    /// More arguments after `serve --config F`.
    pub args: Vec<String>,
    /// Where standard error goes; by default a file of its own, see [`Proxy::stderr`].
    pub stderr: Option<Stdio>,
    /// Where standard output goes; by default a file of its own.
    pub stdout: Option<Stdio>,
    /// Maximum number of open descriptors of the process.
    pub descriptors: Option<u32>,
    /// The loopback listeners of the config file that the start waits for.
    pub listeners: Vec<IpAddr>,
}

impl Start {
    /// One backend at `backend`.
    pub fn before(backend: SocketAddr) -> Self {
        Self::with(&format!("backends: [{{ name: b, replicas: [\"http://{backend}\"] }}]\n"))
    }

    /// With this config file.
    pub fn with(process: &str) -> Self {
        Self {
            process: process.to_owned(),
            policies: Vec::new(),
            env: Vec::new(),
            args: Vec::new(),
            stderr: None,
            stdout: None,
            descriptors: None,
            listeners: vec![CLIENTS, ADMIN],
        }
    }

    /// Adds lines to the config file.
    #[must_use]
    pub fn and(mut self, lines: &str) -> Self {
        self.process.push_str(lines);
        if !lines.ends_with('\n') {
            self.process.push('\n');
        }
        self
    }

    /// The command with its folder and output redirections, not yet started.
    fn command(&mut self) -> (Command, TempDir) {
        let folder = tempfile::tempdir().unwrap();
        let mut process = format!("version: 1\n{}", self.process);
        for (field, value) in
            [("listen:", "[{ address: \"127.0.0.1:0\" }]"), ("admin:", "{ address: \"127.0.0.2:0\" }")]
        {
            if !process.lines().any(|line| line.starts_with(field)) {
                writeln!(process, "{field} {value}").unwrap();
            }
        }
        if !self.policies.is_empty() {
            let policies = folder.path().join("policies");
            std::fs::create_dir(&policies).unwrap();
            for (name, text) in &self.policies {
                std::fs::write(policies.join(name), text).unwrap();
            }
            writeln!(process, "policies: {{ dir: {} }}", policies.display()).unwrap();
        }
        let file = folder.path().join("foretell.yaml");
        std::fs::write(&file, process).unwrap();
        let mut command = match self.descriptors {
            None => Command::new(binary()),
            Some(limit) => {
                let mut shell = Command::new("/bin/sh");
                shell.arg("-c").arg(format!("ulimit -n {limit} && exec \"$0\" \"$@\"")).arg(binary());
                shell
            }
        };
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("FORETELL_") {
                command.env_remove(name);
            }
        }
        command.arg("serve").arg("--config").arg(file).args(&self.args).current_dir(folder.path());
        command.envs(self.env.iter().map(|(name, value)| (name, value)));
        let output = |name: &str| Stdio::from(std::fs::File::create(folder.path().join(name)).unwrap());
        command.stdin(Stdio::null());
        command.stdout(self.stdout.take().unwrap_or_else(|| output("stdout")));
        command.stderr(self.stderr.take().unwrap_or_else(|| output("stderr")));
        (command, folder)
    }

    /// Starts it and waits until it listens.
    pub fn start(mut self) -> Proxy {
        let (mut command, folder) = self.command();
        let child = command.spawn().expect("the binary starts");
        let mut proxy = Proxy { child, folder, address: nowhere(), admin: nowhere(), metrics: nowhere() };
        for _ in 0..self.listeners.len() {
            let (ip, address) = eventually("every listener is open", || {
                if let Some(status) = proxy.child.try_wait().unwrap() {
                    panic!("ended with {status}: {}", proxy.stderr());
                }
                let open = listening(proxy.id());
                let missing = self.listeners.iter().find(|ip| proxy.at(**ip).port() == 0)?;
                open.iter().find(|address| address.ip() == *missing).map(|address| (*missing, *address))
            });
            *proxy.at_mut(ip) = address;
        }
        proxy
    }

    /// Runs a process that must end by itself; returns its exit status and standard error.
    pub fn fails(mut self) -> (ExitStatus, String) {
        let (mut command, folder) = self.command();
        let mut child = command.spawn().expect("the binary starts");
        let start = Instant::now();
        let status = loop {
            match child.try_wait().unwrap() {
                Some(status) => break status,
                None if start.elapsed() > PATIENCE => {
                    let _ = child.kill();
                    let _ = child.wait();
                    panic!("it runs, though it should have refused to start");
                }
                None => thread::sleep(Duration::from_millis(20)),
            }
        };
        (status, read(&folder.path().join("stderr")))
    }
}

fn nowhere() -> SocketAddr {
    SocketAddr::from(([0, 0, 0, 0], 0))
}

fn read(path: &Path) -> String {
    std::fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
}

/// A running proxy. Ends when dropped.
pub struct Proxy {
    child: Child,
    /// Its working directory, which holds its config file and its output.
    pub folder: TempDir,
    /// Where clients connect.
    pub address: SocketAddr,
    /// Where the operator connects.
    pub admin: SocketAddr,
    /// The listener for `/metrics` alone, if the config file has one at 127.0.0.3.
    pub metrics: SocketAddr,
}

impl Proxy {
    fn at(&self, ip: IpAddr) -> SocketAddr {
        match ip {
            ADMIN => self.admin,
            METRICS => self.metrics,
            _ => self.address,
        }
    }

    fn at_mut(&mut self, ip: IpAddr) -> &mut SocketAddr {
        match ip {
            ADMIN => &mut self.admin,
            METRICS => &mut self.metrics,
            _ => &mut self.address,
        }
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Its standard error so far, if that was not redirected.
    pub fn stderr(&self) -> String {
        read(&self.folder.path().join("stderr"))
    }

    /// Its standard output so far, if that was not redirected.
    pub fn stdout(&self) -> String {
        read(&self.folder.path().join("stdout"))
    }

    /// Resident memory, bytes.
    pub fn resident(&self) -> u64 {
        self.status("VmRSS:")
    }

    /// Peak resident memory, bytes; [`Self::reset_peak`] starts over.
    pub fn peak(&self) -> u64 {
        self.status("VmHWM:")
    }

    /// Resets the peak of resident memory.
    pub fn reset_peak(&self) {
        std::fs::write(format!("/proc/{}/clear_refs", self.id()), "5").unwrap();
    }

    fn status(&self, name: &str) -> u64 {
        let status = read(Path::new(&format!("/proc/{}/status", self.id())));
        let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("the process lives");
        let kibibytes: u64 = line.trim().trim_end_matches("kB").trim().parse().unwrap();
        kibibytes << 10
    }

    /// Number of its open descriptors.
    pub fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.id())).map_or(0, Iterator::count)
    }

    /// Sends it a signal by name, e.g. `TERM`.
    pub fn signal(&self, name: &str) {
        self.signals(&[name]);
    }

    /// Sends several signals together, even on a busy machine.
    pub fn signals(&self, names: &[&str]) {
        let kills: Vec<String> = names.iter().map(|name| format!("kill -{name} {}", self.id())).collect();
        let sent = Command::new("/bin/sh").arg("-c").arg(kills.join(" && ")).status();
        assert!(sent.unwrap().success(), "{kills:?}");
    }

    /// Its exit status, if it has ended.
    pub fn exited(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }

    /// Waits for its end.
    pub fn wait(&mut self) -> ExitStatus {
        eventually("the process ends", || self.exited())
    }

    /// `GET path` of the admin listener.
    pub fn admin_get(&self, path: &str) -> Answer {
        ask(self.admin, format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"))
    }

    /// `POST path` of the admin listener.
    pub fn admin_post(&self, path: &str, body: &str) -> Answer {
        ask(
            self.admin,
            format!(
                "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
                body.len()
            ),
        )
    }

    /// Sum of all samples whose line begins with `name`, which may include labels.
    pub fn metric(&self, name: &str) -> f64 {
        let page = self.admin_get("/metrics").text();
        let (name, labels) = name.split_once('{').unwrap_or((name, ""));
        let labels: Vec<&str> =
            labels.trim_end_matches('}').split(',').filter(|label| !label.is_empty()).collect();
        let samples = page.lines().filter_map(|line| line.rsplit_once(' ')).filter(|(series, _)| {
            let (found, has) = series.split_once('{').unwrap_or((series, ""));
            let has: Vec<&str> = has.trim_end_matches('}').split(',').collect();
            found == name && labels.iter().all(|label| has.contains(label))
        });
        samples.filter_map(|(_, value)| value.parse::<f64>().ok()).sum()
    }

    /// Waits until `/readyz` answers 200.
    pub fn ready(&self) {
        eventually("ready", || (self.admin_get("/readyz").status() == 200).then_some(()));
    }

    /// Waits until the first replica is recognised as `dialect` and has a verification method.
    pub fn knows(&self, dialect: &str) {
        eventually("the replica is recognised", || {
            let shown = self.admin_get("/api/replicas").json();
            let replica = &shown["replicas"][0];
            let methods = replica["verify"].as_array().is_some_and(|methods| !methods.is_empty());
            (methods && replica["engine"] == dialect).then_some(())
        });
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            eprintln!("--- standard error of the proxy\n{}", self.stderr());
        }
    }
}

/// The TCP sockets on which a process listens.
fn listening(id: u32) -> Vec<SocketAddr> {
    let Ok(open) = std::fs::read_dir(format!("/proc/{id}/fd")) else { return Vec::new() };
    let links = open.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    let held: Vec<String> = links.map(|link| link.to_string_lossy().into_owned()).collect();
    let table = read(Path::new(&format!("/proc/{id}/net/tcp")));
    let rows = table.lines().skip(1).filter_map(|row| {
        let fields: Vec<&str> = row.split_whitespace().collect();
        let inode = format!("socket:[{}]", fields.get(9)?);
        if *fields.get(3)? != "0A" || !held.contains(&inode) {
            return None;
        }
        let (ip, port) = fields.get(1)?.split_once(':')?;
        let ip = u32::from_str_radix(ip, 16).ok()?.to_le_bytes();
        Some(SocketAddr::from((ip, u16::from_str_radix(port, 16).ok()?)))
    });
    rows.collect()
}

// ---------------------------------------------------------------------- The wire

/// A received answer or request.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    /// The first line.
    pub line: String,
    /// Header fields in their order, names in lower case.
    pub fields: Vec<(String, String)>,
    /// The body without its framing.
    pub body: Vec<u8>,
    /// True if the body came to its proper end.
    pub whole: bool,
}

impl Answer {
    pub fn status(&self) -> u16 {
        self.line.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0)
    }

    /// Method of a request.
    pub fn method(&self) -> &str {
        self.line.split(' ').next().unwrap_or_default()
    }

    /// Target of a request.
    pub fn target(&self) -> &str {
        self.line.split(' ').nth(1).unwrap_or_default()
    }

    pub fn field(&self, name: &str) -> Option<&str> {
        self.fields.iter().find(|(field, _)| field == name).map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or(Value::Null)
    }
}

/// One connection, blocking, with [`PATIENCE`] for every read and write.
pub struct Wire {
    pub stream: TcpStream,
    seen: Vec<u8>,
    ended: bool,
}

impl Wire {
    pub fn new(stream: TcpStream) -> Self {
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        Self { stream, seen: Vec::new(), ended: false }
    }

    pub fn connect(address: SocketAddr) -> Self {
        Self::new(TcpStream::connect(address).unwrap())
    }

    pub fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream.write_all(bytes.as_ref()).unwrap();
    }

    /// As `send`, for a connection that may be gone.
    pub fn try_send(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        self.stream.write_all(bytes.as_ref()).is_ok()
    }

    /// Reads once; false if there is nothing more.
    pub fn more(&mut self) -> bool {
        let mut piece = [0; 16 << 10];
        let n = match self.stream.read(&mut piece) {
            Ok(n) => n,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                panic!("nothing came for {PATIENCE:?}; before it: {}", String::from_utf8_lossy(&self.seen))
            }
            Err(_) => 0,
        };
        self.seen.extend_from_slice(&piece[..n]);
        self.ended = n == 0;
        n > 0
    }

    /// Received bytes that are not consumed yet.
    pub fn seen(&self) -> &[u8] {
        &self.seen
    }

    fn line(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.seen.windows(2).position(|pair| pair == b"\r\n") {
                let line = self.seen.drain(..end + 2).take(end).collect::<Vec<u8>>();
                return Some(String::from_utf8_lossy(&line).into_owned());
            }
            if !self.more() {
                return None;
            }
        }
    }

    /// Reads exactly `n` bytes, or all there are before the end.
    pub fn exactly(&mut self, n: usize) -> Vec<u8> {
        while self.seen.len() < n && self.more() {}
        let n = n.min(self.seen.len());
        self.seen.drain(..n).collect()
    }

    /// First line and fields; `None` at the end of the connection.
    pub fn head(&mut self) -> Option<Answer> {
        let line = self.line()?;
        let mut fields = Vec::new();
        loop {
            let field = self.line()?;
            match field.split_once(':') {
                Some((name, value)) => fields.push((name.to_ascii_lowercase(), value.trim().to_owned())),
                None => return Some(Answer { line, fields, ..Answer::default() }),
            }
        }
    }

    /// The body that belongs to `head`, as RFC 9112 6.3 frames it.
    pub fn body(&mut self, mut head: Answer) -> Answer {
        let answer = head.line.starts_with("HTTP/");
        if head.field("transfer-encoding").is_some_and(|coding| coding.contains("chunked")) {
            head.whole = self.chunks(&mut head.body);
        } else if let Some(length) = head.field("content-length").and_then(|length| length.parse().ok()) {
            head.body = self.exactly(length);
            head.whole = head.body.len() == length;
        } else if answer && !matches!(head.status(), 100..200 | 204 | 304) {
            while self.more() {}
            head.body = std::mem::take(&mut self.seen);
            head.whole = true;
        } else {
            head.whole = true;
        }
        head
    }

    fn chunks(&mut self, body: &mut Vec<u8>) -> bool {
        loop {
            let Some(line) = self.line() else { return false };
            let size = line.split(';').next().unwrap_or_default().trim();
            let Ok(size) = usize::from_str_radix(size, 16) else { return false };
            if size == 0 {
                return std::iter::from_fn(|| self.line()).any(|line| line.is_empty());
            }
            let chunk = self.exactly(size);
            body.extend_from_slice(&chunk);
            if chunk.len() < size || self.exactly(2) != b"\r\n" {
                return false;
            }
        }
    }

    /// The next whole message; `None` at the end of the connection.
    pub fn message(&mut self) -> Option<Answer> {
        let head = self.head()?;
        Some(self.body(head))
    }

    /// The next answer that is not interim; an empty one (status 0) at the end of the connection.
    pub fn answer(&mut self) -> Answer {
        loop {
            match self.message() {
                Some(answer) if answer.status() / 100 == 1 => {}
                Some(answer) => return answer,
                None => return Answer::default(),
            }
        }
    }

    /// Sends a request and reads the answer to it.
    pub fn ask(&mut self, request: impl AsRef<[u8]>) -> Answer {
        // A server may answer and close before it has read everything.
        self.try_send(request);
        self.answer()
    }

    /// True if the other end closes within `limit`; bytes received before that are kept.
    pub fn closes_within(&mut self, limit: Duration) -> bool {
        let start = Instant::now();
        let mut piece = [0; 16 << 10];
        while let Some(left) = limit.checked_sub(start.elapsed()).filter(|left| !left.is_zero()) {
            self.stream.set_read_timeout(Some(left)).unwrap();
            let read = self.stream.read(&mut piece);
            self.stream.set_read_timeout(Some(PATIENCE)).unwrap();
            match read {
                Ok(0) => return true,
                Ok(n) => self.seen.extend_from_slice(&piece[..n]),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    return false;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return true,
            }
        }
        false
    }

    /// Shuts down the sending side.
    pub fn finish(&self) {
        let _ = self.stream.shutdown(Shutdown::Write);
    }
}

/// One request over its own connection.
pub fn ask(address: SocketAddr, request: impl AsRef<[u8]>) -> Answer {
    Wire::connect(address).ask(request)
}

/// A request with a body of a known length. `fields` are whole lines with their line ends.
pub fn post(path: &str, fields: &str, body: impl AsRef<[u8]>) -> Vec<u8> {
    let body = body.as_ref();
    let mut bytes =
        format!("POST {path} HTTP/1.1\r\nhost: api\r\n{fields}content-length: {}\r\n\r\n", body.len())
            .into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

/// A request without a body.
pub fn get(path: &str, fields: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nhost: api\r\n{fields}\r\n").into_bytes()
}

/// An answer with a known length.
pub fn respond(status: &str, fields: &str, body: impl AsRef<[u8]>) -> Vec<u8> {
    let body = body.as_ref();
    let mut bytes =
        format!("HTTP/1.1 {status}\r\n{fields}content-length: {}\r\n\r\n", body.len()).into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

/// One chunk of a chunked body; an empty one ends it.
pub fn chunk(bytes: impl AsRef<[u8]>) -> Vec<u8> {
    let bytes = bytes.as_ref();
    let mut framed = format!("{:x}\r\n", bytes.len()).into_bytes();
    framed.extend_from_slice(bytes);
    framed.extend_from_slice(b"\r\n");
    framed
}

// ------------------------------------------------------------------- The backend

/// A tiny backend: a thread per connection. Stops accepting when dropped.
pub struct Backend {
    pub address: SocketAddr,
    seen: Arc<Mutex<Vec<Answer>>>,
    stop: Arc<AtomicBool>,
}

impl Backend {
    /// Hands every connection to `serve`.
    pub fn start(serve: impl Fn(Wire, &Mutex<Vec<Answer>>) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (seen, stop) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(false)));
        let (kept, stopped, serve) = (Arc::clone(&seen), Arc::clone(&stop), Arc::new(serve));
        thread::spawn(move || {
            for stream in listener.incoming() {
                if stopped.load(Ordering::Relaxed) {
                    return;
                }
                let Ok(stream) = stream else { continue };
                let (serve, kept) = (Arc::clone(&serve), Arc::clone(&kept));
                // No test depends on the end of a connection inside a message.
                thread::spawn(move || serve(Wire::new(stream), &kept));
            }
        });
        Self { address, seen, stop }
    }

    /// Answers every request by `answer`, on connections that are kept alive.
    pub fn answering(answer: impl Fn(&Answer) -> Vec<u8> + Send + Sync + 'static) -> Self {
        Self::start(move |mut wire, seen| {
            // A connection may be idle for as long as the test runs.
            wire.stream.set_read_timeout(None).unwrap();
            while let Some(request) = wire.message() {
                let bytes = answer(&request);
                seen.lock().unwrap().push(request);
                if !wire.try_send(bytes) {
                    return;
                }
            }
        })
    }

    /// Answers `POST` and `PUT` with 200 and the text `done`, everything else with 404: a server
    /// that no dialect recognises.
    pub fn plain() -> Self {
        Self::answering(|request| match request.method() {
            "POST" | "PUT" => respond("200 OK", "content-type: text/plain\r\n", "done"),
            _ => respond("404 Not Found", "", ""),
        })
    }

    /// The complete requests with this target so far.
    pub fn requests(&self, target: &str) -> Vec<Answer> {
        let seen = self.seen.lock().unwrap();
        seen.iter().filter(|request| request.target() == target).cloned().collect()
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.address);
    }
}

/// Number of occurrences of each value.
pub fn tally<T: std::hash::Hash + Eq>(values: impl IntoIterator<Item = T>) -> HashMap<T, usize> {
    let mut counts = HashMap::new();
    for value in values {
        *counts.entry(value).or_insert(0) += 1;
    }
    counts
}
