//! The proxy as deployed: the binary itself, whose log is read line by line.

use std::net::SocketAddr;
use std::process::Stdio;
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStderr, Command};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::wire::{Message, PATIENCE, Wire};

/// The log lines of finished requests.
struct Requests {
    coming: UnboundedReceiver<Value>,
    /// Lines that no test has asked for yet.
    others: Vec<Value>,
}

/// The file of the policy.
const POLICY: &str = "policy.yaml";

/// A running `foretell serve`; it is killed when dropped.
pub struct Proxy {
    pub front: SocketAddr,
    pub admin: SocketAddr,
    requests: tokio::sync::Mutex<Requests>,
    log: Arc<Mutex<String>>,
    process: Child,
    folder: TempDir,
}

impl Proxy {
    /// Starts it with these files and waits until it is ready: its backends have been identified.
    pub async fn start(process: &str, policy: &str) -> Self {
        Self::start_with(process, policy, &[]).await
    }

    /// As [`Self::start`], with more flags.
    pub async fn start_with(process: &str, policy: &str, flags: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (file, policies) = (folder.path().join("foretell.yaml"), folder.path().join("policies"));
        std::fs::create_dir(&policies).unwrap();
        let process = process.replace("FOLDER", &folder.path().display().to_string());
        std::fs::write(&file, process).unwrap();
        std::fs::write(policies.join(POLICY), policy).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_foretell"));
        command.arg("serve").arg("--config").arg(&file).arg("--policies").arg(&policies).args(flags);
        command.args(["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]);
        command.stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().unwrap();
        let log: Arc<Mutex<String>> = Arc::default();
        let (sender, coming) = unbounded_channel();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let front = address(&mut lines, "listening", &log).await;
        let admin = address(&mut lines, "admin", &log).await;
        tokio::spawn(read_log(lines, Arc::clone(&log), sender));
        let requests = tokio::sync::Mutex::new(Requests { coming, others: Vec::new() });
        Self { front, admin, requests, log, process: child, folder }
    }

    /// The log line of a finished request.
    pub async fn line_of(&self, id: &str) -> Value {
        let mut requests = self.requests.lock().await;
        let Requests { coming, others } = &mut *requests;
        let is_it = |line: &Value| line["id"] == id;
        if let Some(at) = others.iter().position(is_it) {
            return others.remove(at);
        }
        let found = async {
            loop {
                let line = coming.recv().await.expect("the process still runs");
                if is_it(&line) {
                    return line;
                }
                others.push(line);
            }
        };
        let found = tokio::time::timeout(PATIENCE, found).await;
        found.unwrap_or_else(|_| panic!("no line of {id:?} in:\n{}", self.log.lock()))
    }

    /// An answer of the admin interface.
    pub async fn get(&self, path: &str) -> Message {
        Wire::connect(self.admin).await.ask(format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n")).await
    }

    /// An answer of the admin interface to a command.
    pub async fn post(&self, path: &str) -> Message {
        let request = format!("POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n");
        Wire::connect(self.admin).await.ask(request).await
    }

    /// Its replicas, as the admin interface shows them.
    pub async fn replicas(&self) -> Value {
        self.get("/api/replicas").await.json()["replicas"].take()
    }

    /// The folder of its files: `foretell.yaml`, and `policies`.
    pub fn folder(&self) -> &std::path::Path {
        self.folder.path()
    }

    /// Its log so far.
    pub fn log(&self) -> String {
        self.log.lock().clone()
    }

    /// Sends it a signal by name.
    pub async fn signal(&self, name: &str) {
        let id = self.process.id().expect("it runs").to_string();
        assert!(Command::new("kill").args([name, &id]).status().await.unwrap().success());
    }

    /// Puts another policy in force.
    pub async fn adopt(&self, policy: &str) {
        std::fs::write(self.folder.path().join("policies").join(POLICY), policy).unwrap();
        let answer = self.post("/api/reload").await;
        assert_eq!(answer.head.status(), 200, "{}", answer.text());
    }

    /// Ends it in order, and waits until it has ended.
    pub async fn end(mut self) {
        self.signal("-TERM").await;
        let status = tokio::time::timeout(PATIENCE, self.process.wait()).await.expect("it ends").unwrap();
        assert!(status.success(), "{status}:\n{}", self.log.lock());
    }

    /// Its first replica in `/api/replicas`.
    pub async fn replica(&self) -> Value {
        self.get("/api/replicas").await.json()["replicas"][0].clone()
    }
}

/// Its address, from the log line with this message.
async fn address(said: &mut Lines<BufReader<ChildStderr>>, what: &str, log: &Mutex<String>) -> SocketAddr {
    let found = async {
        loop {
            let line = said.next_line().await.unwrap();
            let line = line.unwrap_or_else(|| panic!("it did not start:\n{}", log.lock()));
            log.lock().extend([line.as_str(), "\n"]);
            let line: Value = serde_json::from_str(&line).unwrap_or_default();
            if line["message"] == what {
                return line["address"].as_str().unwrap().parse().unwrap();
            }
        }
    };
    tokio::time::timeout(PATIENCE, found).await.unwrap_or_else(|_| panic!("not ready:\n{}", log.lock()))
}

/// Keeps the log, and hands on the lines of finished requests.
async fn read_log(
    mut errors: Lines<BufReader<ChildStderr>>,
    log: Arc<Mutex<String>>,
    to: UnboundedSender<Value>,
) {
    while let Ok(Some(line)) = errors.next_line().await {
        let parsed: Option<Value> = serde_json::from_str(&line).ok();
        if let Some(request) = parsed.filter(|parsed| parsed["message"] == "request") {
            // At the end of a test the receiver may be gone.
            let _ = to.send(request);
        }
        log.lock().extend([line.as_str(), "\n"]);
    }
}
