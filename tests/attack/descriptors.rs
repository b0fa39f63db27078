//! More connections than the process may have descriptors.

use std::net::TcpStream;
use std::thread;
use std::time::Duration;

use crate::h2::H2;
use crate::kit::{Backend, Proxy, Start, Wire, get, post};

const HELD: usize = 400;
const REQUESTS: usize = 200;

/// Every request is answered, and the log stays short.
fn all_are_answered(proxy: &Proxy) {
    let clients: Vec<_> = (0..8)
        .map(|_| {
            let address = proxy.address;
            thread::spawn(move || {
                for _ in 0..REQUESTS / 8 {
                    let answer = Wire::connect(address).ask(post("/v1/files", "", "{}"));
                    assert_eq!((answer.status(), answer.text().as_str()), (200, "done"));
                }
            })
        })
        .collect();
    for client in clients {
        client.join().unwrap();
    }
    let log = proxy.stderr();
    let loud = log.lines().filter(|line| line.contains("WARN") || line.contains("ERROR")).count();
    assert!(loud <= 3, "{loud} warnings");
}

fn start(backend: &Backend) -> Proxy {
    let proxy = Start { descriptors: Some(256), ..Start::before(backend.address) };
    proxy.start()
}

fn hold(proxy: &Proxy, say: &[u8]) -> Vec<TcpStream> {
    let held: Vec<Wire> = (0..HELD)
        .map(|_| {
            let mut wire = Wire::connect(proxy.address);
            wire.send(say);
            wire
        })
        .collect();
    // Long enough for all of them to be accepted if there were descriptors.
    thread::sleep(Duration::from_secs(1));
    held.into_iter().map(|wire| wire.stream).collect()
}

#[test]
fn silent_and_idle_connections_block_no_client() {
    for say in [Vec::new(), get("/", "")] {
        let backend = Backend::plain();
        let proxy = start(&backend);
        let held = hold(&proxy, &say);
        all_are_answered(&proxy);
        drop(held);
    }
}

/// The proxy waits for the rest of a head, but no longer than `timeouts.header`.
#[test]
fn incomplete_heads_hold_a_connection_until_the_timeout() {
    let backend = Backend::plain();
    let start = Start { descriptors: Some(256), ..Start::before(backend.address) };
    let proxy = start.and("timeouts: { header: 2s }").start();
    let held = hold(&proxy, b"POST /v1/files HTTP/1.1\r\nhost:");
    all_are_answered(&proxy);
    drop(held);
}

/// As many concurrent requests as there can be clients: each needs a second descriptor, for the
/// backend.
#[test]
fn requests_that_are_being_answered_have_a_descriptor_for_their_backend() {
    let backend = Backend::answering(|request| match request.method() {
        "POST" => {
            thread::sleep(Duration::from_millis(500));
            crate::kit::respond("200 OK", "", "done")
        }
        _ => crate::kit::respond("404 Not Found", "", ""),
    });
    let proxy = start(&backend);
    let clients: Vec<_> = (0..HELD)
        .map(|_| {
            let mut wire = Wire::connect(proxy.address);
            wire.send(post("/v1/files", "", "{}"));
            wire
        })
        .collect();
    for mut client in clients {
        assert_eq!(client.answer().text(), "done");
    }
    all_are_answered(&proxy);
}

/// The operator's `limits.connections`.
#[test]
fn limits_connections_is_the_most_that_are_open() {
    let backend = Backend::plain();
    let proxy = Start::before(backend.address).and("limits: { connections: 8 }").start();
    proxy.ready();
    let before = proxy.descriptors();
    let held: Vec<_> = (0..50).map(|_| Wire::connect(proxy.address)).collect();
    all_are_answered(&proxy);
    // A backend connection for each of the eight, and the connection that is being accepted.
    assert!(proxy.descriptors() <= before + 24, "{} after {before}", proxy.descriptors());
    drop(held);
}

/// HTTP/2 streams share one client descriptor but need one backend descriptor each.
#[test]
fn the_streams_of_a_few_clients_block_no_client() {
    let backend = Backend::answering(|request| match request.target() {
        "/slow" => {
            thread::sleep(Duration::from_secs(2));
            crate::kit::respond("200 OK", "", "late")
        }
        _ => crate::kit::respond("200 OK", "", "done"),
    });
    let proxy = start(&backend);
    let mut greedy: Vec<H2> = (0..3).map(|_| H2::connect(proxy.address)).collect();
    for client in &mut greedy {
        for _ in 0..200 {
            client.request("GET", "/slow", &[], 5);
        }
    }
    all_are_answered(&proxy);
    assert_eq!(proxy.admin_get("/api/replicas").json()["replicas"][0]["state"], "ready");
}
