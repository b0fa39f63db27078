//! One memory budget for everything that a client can make the proxy keep.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::kit::{Backend, Proxy, Start, Wire, ask, eventually, post, respond, wait_for};

const MIB: usize = 1 << 20;
/// Resident memory allowed beyond the accounted bytes.
const UNACCOUNTED_BYTES: u64 = 64 << 20;

/// A proxy in front of a service that bills per token, so that its requests are read without a
/// simulated engine.
fn before(backend: SocketAddr, memory: &str) -> Proxy {
    let process = format!(
        "backends: [{{ name: b, billed: true, replicas: [\"http://{backend}\"] }}]\n\
         limits: {{ memory: {memory} }}\n"
    );
    Start::with(&process).start()
}

/// Waits until the service has been asked for its models.
fn known(proxy: &Proxy) {
    proxy.ready();
    let request = || ask(proxy.address, post("/v1/completions", "", r#"{"model":"m","prompt":"x"}"#));
    eventually("it is known", || (request().field("x-foretell-reason") == Some("billed")).then_some(()));
}

/// Answers complete requests with the number of bytes read, which are dropped; the list of its
/// models is empty.
fn counting() -> Backend {
    Backend::start(|mut wire, _| {
        wire.stream.set_read_timeout(None).unwrap();
        while let Some(head) = wire.head() {
            let length = head.field("content-length").and_then(|length| length.parse::<usize>().ok());
            let is_get = head.method() == "GET";
            let mut read = 0;
            while length.is_some_and(|length| read < length) {
                let piece = wire.exactly((length.unwrap() - read).min(MIB));
                if piece.is_empty() {
                    return;
                }
                read += piece.len();
            }
            if length.is_none() && head.method() == "POST" {
                let body = wire.body(head);
                read = body.body.len();
            }
            let models = is_get.then(|| r#"{"data":[]}"#.to_owned());
            let told = models.unwrap_or_else(|| read.to_string());
            if !wire.try_send(respond("200 OK", "content-type: application/json\r\n", told)) {
                return;
            }
        }
    })
}

fn unfinished(proxy: &Proxy, announced: usize, sent: usize) -> Wire {
    let mut wire = Wire::connect(proxy.address);
    wire.send(format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {announced}\r\n\r\n"
    ));
    let piece = vec![b' '; 64 << 10];
    let mut left = sent;
    while left > 0 {
        let now = left.min(piece.len());
        // A refused request is not read to its end.
        if !wire.try_send(&piece[..now]) {
            break;
        }
        left -= now;
    }
    wire
}

/// 7.9 MiB in chunks of one byte, without the final chunk.
fn crumbs(proxy: &Proxy) -> Wire {
    let mut wire = Wire::connect(proxy.address);
    wire.send("POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n");
    let piece = b"1\r\n \r\n".repeat(4096);
    for _ in 0..79 * MIB / 10 / 4096 {
        wire.send(&piece);
    }
    wire
}

fn mebibytes(bytes: u64) -> u64 {
    bytes >> 20
}

/// Memory is given back once the connections are closed.
fn goes_back(proxy: &Proxy, start: u64) {
    wait_for(Duration::from_mins(1), "memory is given back", || {
        (proxy.resident() <= start + UNACCOUNTED_BYTES).then_some(())
    });
    assert_eq!(ask(proxy.address, post("/v1/chat/completions", "", "{}")).text(), "2");
}

fn settled(proxy: &Proxy) -> u64 {
    known(proxy);
    for _ in 0..20 {
        assert_eq!(ask(proxy.address, post("/v1/chat/completions", "", "{}")).text(), "2");
    }
    proxy.reset_peak();
    proxy.resident()
}

#[test]
fn unfinished_bodies_stay_within_the_limit_and_are_forgotten_at_their_end() {
    let backend = counting();
    let proxy = before(backend.address, "128MiB");
    let start = settled(&proxy);
    let held: Vec<Wire> = thread::scope(|scope| {
        let large: Vec<_> =
            (0..200).map(|_| scope.spawn(|| unfinished(&proxy, 8 * MIB, 8 * MIB - 1))).collect();
        let small = scope.spawn(|| crumbs(&proxy));
        large.into_iter().chain([small]).map(|held| held.join().unwrap()).collect()
    });
    thread::sleep(Duration::from_secs(1));
    let peak = proxy.peak();
    let (start_, peak_) = (mebibytes(start), mebibytes(peak));
    eprintln!("resident: {start_} MiB at the start, {peak_} MiB at the most");
    assert!(peak <= start + (128 << 20) + UNACCOUNTED_BYTES, "from {start_} MiB to {peak_} MiB");
    drop(held);
    goes_back(&proxy, start);
}

#[test]
fn tiny_chunks_cost_no_more_than_their_bytes() {
    let backend = counting();
    let proxy = before(backend.address, "512MiB");
    let start = settled(&proxy);
    let mut wire = crumbs(&proxy);
    let rose = proxy.peak() - start;
    assert!(rose <= UNACCOUNTED_BYTES, "{} MiB for 7.9 MiB", mebibytes(rose));
    wire.send("0\r\n\r\n");
    assert_eq!(wire.answer().text(), (79 * MIB / 10 / 4096 * 4096).to_string());
    goes_back(&proxy, start);
}

/// A backend that does not read: passed through bodies are not buffered.
#[test]
fn a_backend_that_does_not_read_makes_nothing_pile_up() {
    let over = Arc::new(AtomicBool::new(false));
    let backend = Backend::start({
        let over = Arc::clone(&over);
        move |mut wire, _| {
            wire.stream.set_read_timeout(None).unwrap();
            let reads = wire.head().is_none_or(|head| head.method() != "POST");
            while !reads && !over.load(Ordering::Relaxed) {
                thread::sleep(Duration::from_millis(50));
            }
        }
    });
    let proxy = before(backend.address, "64MiB");
    proxy.ready();
    let start = proxy.resident();
    proxy.reset_peak();
    let clients: Vec<_> = (0..200)
        .map(|_| {
            let address = proxy.address;
            let mut wire = Wire::connect(address);
            wire.stream.set_write_timeout(Some(Duration::from_secs(2))).unwrap();
            thread::spawn(move || {
                wire.send(format!(
                    "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n",
                    8 * MIB
                ));
                // Until no more is accepted.
                let piece = vec![b' '; 64 << 10];
                while wire.try_send(&piece) {}
                wire
            })
        })
        .collect();
    let held: Vec<Wire> = clients.into_iter().map(|client| client.join().unwrap()).collect();
    let rose = proxy.peak().saturating_sub(start);
    eprintln!("resident: {} MiB more at the most", mebibytes(rose));
    assert!(rose <= (64 << 20) + UNACCOUNTED_BYTES, "{} MiB", mebibytes(rose));
    drop(held);
    over.store(true, Ordering::Relaxed);
    // There is no other request, so only the allocator purge returns the memory.
    wait_for(Duration::from_mins(1), "memory is given back", || {
        (proxy.resident() <= start + UNACCOUNTED_BYTES).then_some(())
    });
}

/// Above the limit a completion is passed through unread; above twice the limit it is refused with
/// `Retry-After`.
#[test]
fn short_memory_passes_through_and_then_refuses_completions() {
    let backend = counting();
    let proxy = before(backend.address, "1MiB");
    known(&proxy);
    let body = format!("{{\"model\":\"m\",\"prompt\":\"{}\"}}", "x".repeat(100 << 10));
    let request = || ask(proxy.address, post("/v1/completions", "", &body));
    let answer = request();
    assert_eq!((answer.text(), answer.field("x-foretell-reason")), (body.len().to_string(), Some("billed")));

    let mut held: Vec<Wire> = Vec::new();
    eventually("a completion is passed through unread", || {
        held.push(unfinished(&proxy, 200 << 10, 190 << 10));
        let answer = request();
        assert_eq!((answer.status(), answer.text()), (200, body.len().to_string()));
        (answer.field("x-foretell-reason") == Some("memory")).then_some(())
    });
    assert!((3..=10).contains(&held.len()), "{} bodies of 190 KiB in 1 MiB", held.len());
    assert!(proxy.metric("foretell_requests_total{path=\"passthrough\",reason=\"memory\"") >= 1.0);

    let mut unread: Vec<Wire> = Vec::new();
    let refused = eventually("a completion is refused", || {
        unread.push(unfinished(&proxy, 200 << 10, 190 << 10));
        thread::sleep(Duration::from_millis(20));
        let answer = request();
        (answer.status() != 200).then_some(answer)
    });
    assert!(unread.len() <= 64, "{} unread in 1 MiB more", unread.len());
    assert_eq!(refused.status(), 503);
    assert!(refused.field("retry-after").is_some_and(|seconds| seconds.parse::<u32>().is_ok()));
    assert_eq!(refused.json()["error"]["code"], "memory");
    // Requests that are not completions are still passed through.
    assert_eq!(ask(proxy.address, post("/v1/files", "", "abc")).text(), "3");

    drop((held, unread));
    eventually("all is as before", || (request().field("x-foretell-reason") == Some("billed")).then_some(()));
}
