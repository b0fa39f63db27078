//! A real server, and sidecars that use it.

use std::process::Stdio;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tokio::net::TcpStream;
use tokio::process::{Child, Command};

use crate::client::metric;
use crate::fakes::Fake;
use crate::fakes::vllm::Vllm;
use crate::groups::house::before;
use crate::reasons::proxy::Proxy;
use crate::wire::PATIENCE;

/// The programs of the server, in Debian's packages of the same names.
const PROGRAMS: [&str; 2] = ["valkey-server", "redis-server"];

/// A running server on a port of its own; it is killed when dropped.
pub struct Server {
    process: Child,
    pub port: u16,
    more: Vec<String>,
    folder: TempDir,
}

impl Server {
    /// Starts one with more arguments; `None` where none is installed, and the test is skipped.
    pub async fn start(more: &[&str]) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let port = free_port();
        let more: Vec<String> = more.iter().map(|&argument| argument.to_owned()).collect();
        let Some(process) = run(port, &more, &folder) else {
            eprintln!("skipped: neither {} nor {} is installed", PROGRAMS[0], PROGRAMS[1]);
            return None;
        };
        let server = Self { process, port, more, folder };
        server.ready().await;
        Some(server)
    }

    /// Ends it; everything that it held is lost.
    pub async fn stop(&mut self) {
        self.process.kill().await.unwrap();
    }

    /// Starts it again, empty.
    pub async fn again(&mut self) {
        self.process = run(self.port, &self.more, &self.folder).expect("it is installed");
        self.ready().await;
    }

    async fn ready(&self) {
        let begun = Instant::now();
        while TcpStream::connect(("127.0.0.1", self.port)).await.is_err() {
            assert!(begun.elapsed() < PATIENCE, "the server does not listen");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Sends a command, as another client.
    pub fn command(&self, words: &[&str]) -> redis::Value {
        let client = redis::Client::open(self.url()).unwrap();
        let mut connection = client.get_connection().unwrap();
        let mut command = redis::cmd(words[0]);
        for word in &words[1..] {
            command.arg(*word);
        }
        command.query(&mut connection).unwrap()
    }

    /// The keys of this form.
    pub fn keys(&self, form: &str) -> Vec<String> {
        redis::from_redis_value(self.command(&["KEYS", form])).unwrap()
    }

    /// Waits until so many keys have this form.
    pub async fn until_keys(&self, form: &str, number: usize) {
        let begun = Instant::now();
        loop {
            let keys = self.keys(form);
            if keys.len() == number {
                return;
            }
            assert!(begun.elapsed() < PATIENCE, "{keys:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

fn run(port: u16, more: &[String], folder: &TempDir) -> Option<Child> {
    let one = |program: &&str| {
        let mut command = Command::new(*program);
        command.args([
            "--port",
            &port.to_string(),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
        ]);
        command.arg("--dir").arg(folder.path()).args(more);
        command.stdout(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true).spawn().ok()
    };
    PROGRAMS.iter().find_map(one)
}

/// A port that nothing listens on.
pub fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// The lines of a config file for a store at `url`; `more`: further members.
pub fn fleet(url: &str, more: &str) -> String {
    format!("fleet: {{ store: {url:?}, sync: 50ms{more} }}\n")
}

/// A sidecar in front of `engine` that uses the store.
pub async fn sidecar(engine: &Fake<Vllm>, url: &str, more: &str, policy: &str) -> Proxy {
    before(engine, &fleet(url, more), "", policy).await
}

/// Waits until a metric of a sidecar has such a value.
pub async fn until(proxy: &Proxy, name: &str, wanted: impl Fn(f64) -> bool) {
    let begun = Instant::now();
    loop {
        let value = metric(proxy.admin, name).await;
        if wanted(value) {
            return;
        }
        assert!(begun.elapsed() < PATIENCE, "{name} is {value}:\n{}", proxy.log());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Waits until the store was used, or (`false`) could not be.
pub async fn until_up(proxy: &Proxy, up: bool) {
    until(proxy, "foretell_store_up ", |value| (value > 0.5) == up).await;
}

/// Waits until the measurements of so many other sidecars were read.
pub async fn until_sidecars(proxy: &Proxy, number: usize) {
    until(proxy, "foretell_store_sidecars ", |value| value as usize == number).await;
}

/// Waits until a fault of this kind was counted.
pub async fn until_fault(proxy: &Proxy, kind: &str) {
    until(proxy, &format!("foretell_store_errors_total{{kind=\"{kind}\"}} "), |value| value > 0.5).await;
}

/// Lines of the log with this text.
pub fn lines(proxy: &Proxy, text: &str) -> usize {
    proxy.log().lines().filter(|line| line.contains(text)).count()
}
