//! Notifications to the service manager: the datagrams of `NOTIFY_SOCKET`.

use std::os::unix::net::UnixDatagram;

use crate::kit::{PATIENCE, Proxy, Start};
use crate::ops_kit::log;

/// An address without a listener; none is needed.
const BACKENDS: &str = "backends: [{ name: b, replicas: [\"http://127.0.0.1:9\"] }]\n";

/// The manager's end of the socket.
struct Manager {
    socket: UnixDatagram,
    folder: tempfile::TempDir,
}

impl Manager {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = UnixDatagram::bind(Self::path(&folder)).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        Self { socket, folder }
    }

    fn path(folder: &tempfile::TempDir) -> std::path::PathBuf {
        folder.path().join("notify")
    }

    /// A proxy with one policy that reports to this manager.
    fn starts(&self, env: &[(&'static str, &str)]) -> Proxy {
        let mut start = Start::with(BACKENDS);
        start.policies = vec![("a.yaml", policy("before"))];
        start.env = vec![("NOTIFY_SOCKET", Self::path(&self.folder).display().to_string())];
        start.env.extend(env.iter().map(|(name, value)| (*name, (*value).to_owned())));
        start.start()
    }

    /// The next message, as its lines.
    fn told(&self) -> Vec<String> {
        let mut bytes = [0; 4096];
        let length = self.socket.recv(&mut bytes).expect("a message");
        String::from_utf8_lossy(&bytes[..length]).lines().map(str::to_owned).collect()
    }
}

fn policy(name: &str) -> String {
    format!("version: 1\nname: {name}\nmode: shadow\n")
}

fn write(proxy: &Proxy, text: &str) {
    std::fs::write(proxy.folder.path().join("policies/a.yaml"), text).unwrap();
}

/// The machine's uptime, microseconds.
fn uptime_us() -> u128 {
    let text = std::fs::read_to_string("/proc/uptime").unwrap();
    let seconds: f64 = text.split(' ').next().unwrap().parse().unwrap();
    (seconds * 1e6) as u128
}

#[test]
fn the_manager_is_notified_of_readiness_reloads_and_the_end() {
    let manager = Manager::new();
    let mut proxy = manager.starts(&[]);
    let ready = manager.told();
    let status = format!("STATUS=serving on {}, admin on {}", proxy.address, proxy.admin);
    assert_eq!(ready, ["READY=1".to_owned(), status]);

    write(&proxy, &policy("after"));
    proxy.signal("HUP");
    let told = manager.told();
    assert_eq!((told.len(), told[0].as_str()), (2, "RELOADING=1"));
    let at: u128 = told[1].strip_prefix("MONOTONIC_USEC=").unwrap().parse().unwrap();
    // The uptime includes suspended time and has a resolution of 10 ms.
    assert!((1..=uptime_us() + 10_000).contains(&at), "{at}");
    assert_eq!(manager.told(), ["READY=1", "STATUS=reloaded"]);
    assert_eq!(proxy.admin_get("/api/policies").json()["policies"][0]["name"], "after");

    write(&proxy, "version: 1\nname: wrong\nmode: nonsense\n");
    proxy.signal("HUP");
    assert_eq!(manager.told()[0], "RELOADING=1");
    let told = manager.told();
    assert_eq!(told[0], "READY=1");
    assert!(told[1].starts_with("STATUS=reload refused, what was in force stays: "), "{told:?}");
    assert!(told[1].contains("a.yaml:3: mode: "), "{told:?}");
    assert_eq!(proxy.admin_get("/api/policies").json()["policies"][0]["name"], "after");

    proxy.signal("TERM");
    assert_eq!(manager.told(), ["STOPPING=1", "STATUS=draining"]);
    assert!(proxy.wait().success());
}

#[test]
fn a_drain_through_the_api_is_notified_and_logged_too() {
    let manager = Manager::new();
    let mut proxy = manager.starts(&[]);
    assert_eq!(manager.told()[0], "READY=1");
    assert_eq!(proxy.admin_post("/api/drain", "").status(), 200);
    assert_eq!(manager.told()[0], "STOPPING=1");
    assert!(proxy.wait().success());
    let said = |line: &serde_json::Value| line["message"].as_str().is_some_and(|said| said.contains("drain"));
    assert!(log(&proxy).iter().any(said), "{}", proxy.stderr());
}

#[test]
fn the_watchdog_is_notified_until_the_process_ends() {
    let manager = Manager::new();
    let mut proxy = manager.starts(&[("WATCHDOG_USEC", "20000")]);
    let mut beats = 0;
    let mut ready = false;
    while beats < 5 || !ready {
        let told = manager.told();
        beats += usize::from(ready && told == ["WATCHDOG=1"]);
        ready |= told[0] == "READY=1";
    }
    proxy.signal("TERM");
    while manager.told()[0] != "STOPPING=1" {}
    assert!(proxy.wait().success());
}

#[test]
fn a_foreign_watchdog_and_a_missing_manager_change_nothing() {
    let manager = Manager::new();
    let mut proxy = manager.starts(&[("WATCHDOG_USEC", "1000"), ("WATCHDOG_PID", "1")]);
    assert_eq!(manager.told()[0], "READY=1");
    std::fs::remove_file(Manager::path(&manager.folder)).unwrap();
    proxy.signal("HUP");
    proxy.ready();
    proxy.signal("TERM");
    assert!(proxy.wait().success());
    let log = proxy.stderr();
    assert!(log.contains("the service manager cannot be notified"), "{log}");
    manager.socket.set_nonblocking(true).unwrap();
    assert!(
        manager.socket.recv(&mut [0; 64]).is_err(),
        "the manager was told of the watchdog of another process"
    );
}
