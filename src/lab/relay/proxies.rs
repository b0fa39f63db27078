//! The proxies of a comparison as child processes on free ports.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child as Process, Command, Stdio};
use std::time::{Duration, Instant};

use super::RelayError;
use super::load::Busy;

const PATIENCE: Duration = Duration::from_secs(10);

/// A proxy that is running.
pub(super) trait Child {
    /// The address that it listens on.
    fn address(&self) -> SocketAddr;
    /// Process id.
    fn id(&self) -> u32;
    /// Processor time used so far by the process and its workers.
    fn busy(&self) -> Busy {
        workers(self.id()).into_iter().map(processor_time).fold(processor_time(self.id()), Busy::plus)
    }
}

fn workers(of: u32) -> Vec<u32> {
    let children = std::fs::read_to_string(format!("/proc/{of}/task/{of}/children")).unwrap_or_default();
    children.split_whitespace().filter_map(|id| id.parse().ok()).collect()
}

/// User and system time of a process, in steps of 10 ms.
fn processor_time(id: u32) -> Busy {
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
    let after_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let mut ticks = after_name.split_whitespace().skip(11).map(|field| field.parse().unwrap_or(0));
    let mut next = || Duration::from_millis(10 * ticks.next().unwrap_or(0));
    Busy { user: next(), system: next() }
}

/// Foretell as a child process.
pub(super) struct Foretell {
    process: Process,
    address: SocketAddr,
}

impl Foretell {
    pub(super) fn start(program: &Path, config: &Path, backend: SocketAddr) -> Result<Self, RelayError> {
        let (address, admin) = (free()?, free()?);
        let mut command = Command::new(program);
        command.args(["serve", "--backend", &format!("http://{backend}"), "--dialect", "openai"]);
        command.args(["--listen", &address.to_string(), "--admin", &admin.to_string()]);
        // The configuration turns off the line per request: nginx writes no access log either.
        command.arg("--config").arg(config).stdin(Stdio::null());
        let process = command.spawn().map_err(RelayError::io(program.display().to_string()))?;
        let started = Self { process, address };
        listening(address, "foretell")?;
        Ok(started)
    }

    /// Its largest resident memory so far, bytes.
    pub(super) fn peak_memory(&self) -> Option<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.id())).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
        line.trim().trim_end_matches("kB").trim().parse::<u64>().ok().map(|kib| kib * 1024)
    }
}

impl Child for Foretell {
    fn address(&self) -> SocketAddr {
        self.address
    }

    fn id(&self) -> u32 {
        self.process.id()
    }
}

impl Drop for Foretell {
    fn drop(&mut self) {
        stop(&mut self.process);
    }
}

/// The bare hyper proxy as a child process.
pub(super) struct Bare {
    process: Process,
    address: SocketAddr,
}

impl Bare {
    /// This program, as the bare proxy.
    pub(super) fn start(backend: SocketAddr) -> Result<Self, RelayError> {
        let address = free()?;
        let program = std::env::current_exe().map_err(RelayError::io("foretell-lab".to_owned()))?;
        let mut command = Command::new(&program);
        command.args(["relay", "--bare", &address.to_string(), "--before", &backend.to_string()]);
        let process = command.stdin(Stdio::null()).spawn();
        let process = process.map_err(RelayError::io(program.display().to_string()))?;
        let started = Self { process, address };
        listening(address, "bare hyper")?;
        Ok(started)
    }
}

impl Child for Bare {
    fn address(&self) -> SocketAddr {
        self.address
    }

    fn id(&self) -> u32 {
        self.process.id()
    }
}

impl Drop for Bare {
    fn drop(&mut self) {
        stop(&mut self.process);
    }
}

/// nginx as a child process with a temporary folder.
pub(super) struct Nginx {
    process: Process,
    address: SocketAddr,
    folder: PathBuf,
}

impl Nginx {
    pub(super) fn start(program: &Path, config: &Path, backend: SocketAddr) -> Result<Self, RelayError> {
        let address = free()?;
        let text = std::fs::read_to_string(config).map_err(RelayError::io(config.display().to_string()))?;
        let text = text
            .replace("127.0.0.1:18080", &backend.to_string())
            .replace("127.0.0.1:18081", &address.to_string());
        let folder = std::env::temp_dir().join(format!("foretell-relay-{}", std::process::id()));
        let written =
            std::fs::create_dir_all(&folder).and_then(|()| std::fs::write(folder.join("nginx.conf"), text));
        written.map_err(RelayError::io(folder.display().to_string()))?;
        let mut command = Command::new(program);
        command.arg("-p").arg(&folder).arg("-c").arg(folder.join("nginx.conf")).args(["-e", "stderr"]);
        let process = command.stdin(Stdio::null()).spawn();
        let process =
            process.map_err(RelayError::io(format!("{} (Debian package nginx)", program.display())))?;
        let started = Self { process, address, folder };
        listening(address, "nginx")?;
        Ok(started)
    }
}

impl Child for Nginx {
    fn address(&self) -> SocketAddr {
        self.address
    }

    fn id(&self) -> u32 {
        self.process.id()
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        stop(&mut self.process);
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Sends SIGTERM twice, which stops both programs at once; kills the process if it is still running
/// after 2 s.
fn stop(process: &mut Process) {
    let id = process.id().to_string();
    for _ in 0..2 {
        let _ = Command::new("kill").args(["-TERM", &id]).stderr(Stdio::null()).status();
    }
    let until = Instant::now() + Duration::from_secs(2);
    while Instant::now() < until {
        if matches!(process.try_wait(), Ok(Some(_)) | Err(_)) {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let _ = process.kill();
    let _ = process.wait();
}

fn free() -> Result<SocketAddr, RelayError> {
    let bound = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    bound.map_err(RelayError::io("a free address"))
}

fn listening(address: SocketAddr, name: &'static str) -> Result<(), RelayError> {
    let until = Instant::now() + PATIENCE;
    while Instant::now() < until {
        match TcpStream::connect(address) {
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
            Err(error) => return Err(RelayError::Io { what: name.to_owned(), error }),
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Err(RelayError::Silent(name))
}
