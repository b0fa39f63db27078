//! Timeouts of clients that keep a connection open without progress.

use std::time::{Duration, Instant};

use crate::h2::{END_HEADERS, H2, Outcome};
use crate::kit::{Backend, Start, Wire, eventually, get, respond, wait_for};

const HALF: &str = "POST /v1/files HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\nhalf";
const HALF_COMPLETION: &str = "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n{";

/// A backend that waits for the rest of every request with a body.
fn waiting() -> Backend {
    Backend::start(|mut wire, _| {
        wire.stream.set_read_timeout(None).unwrap();
        while wire.head().is_some_and(|head| head.method() == "GET") {
            wire.try_send(respond("404 Not Found", "", ""));
        }
        while wire.more() {}
    })
}

/// With the default timeouts.
#[test]
fn a_body_that_does_not_go_on_is_given_up() {
    let backend = waiting();
    let proxy = Start::before(backend.address).start();
    let mut halves: Vec<Wire> = [HALF, HALF_COMPLETION]
        .into_iter()
        .map(|half| {
            let mut wire = Wire::connect(proxy.address);
            wire.send(half);
            wire
        })
        .collect();
    let mut unfinished = H2::connect(proxy.address);
    let stream = unfinished.request("POST", "/v1/files", &[], END_HEADERS);
    // A few single bytes do not count as progress.
    let mut dripping = Wire::connect(proxy.address);
    dripping.send("POST /v1/files HTTP/1.1\r\nhost: a\r\ncontent-length: 100000\r\n\r\n");
    let start = Instant::now();
    eventually("a dripping body is given up", || {
        dripping.try_send("x");
        dripping.closes_within(Duration::from_millis(500)).then_some(())
    });
    assert!(start.elapsed() > Duration::from_secs(20), "after {:?} already", start.elapsed());
    for wire in &mut halves {
        let answer = wire.answer();
        assert_eq!((answer.status(), answer.field("connection")), (408, Some("close")));
        assert!(wire.closes_within(Duration::from_secs(30)));
    }
    assert_eq!(unfinished.outcome(stream), Outcome::Status(408));
}

#[test]
fn a_body_that_goes_on_slowly_is_waited_for() {
    let backend = Backend::plain();
    let proxy = Start::before(backend.address).and("timeouts: { body: 5s }").start();
    let mut wire = Wire::connect(proxy.address);
    wire.send("POST /v1/files HTTP/1.1\r\nhost: a\r\ncontent-length: 16384\r\n\r\n");
    // Longer than the limit in total, with each pause far shorter.
    for _ in 0..8 {
        std::thread::sleep(Duration::from_millis(750));
        wire.send([b'x'; 2048]);
    }
    assert_eq!(wire.answer().text(), "done");
    assert_eq!(backend.requests("/v1/files")[0].body.len(), 16384);
}

/// Idle time between requests has another timeout than an incomplete head.
#[test]
fn an_idle_connection_is_kept_for_longer_than_a_head_may_take() {
    let backend = Backend::plain();
    let proxy = Start::before(backend.address).and("timeouts: { header: 500ms }").start();
    let mut wire = Wire::connect(proxy.address);
    for _ in 0..3 {
        assert_eq!(wire.ask(get("/", "")).status(), 404);
        assert!(!wire.closes_within(Duration::from_secs(2)));
    }
    wire.send("GET / HT");
    assert!(wire.closes_within(Duration::from_secs(30)), "half a head");
    let mut silent = Wire::connect(proxy.address);
    assert!(silent.closes_within(Duration::from_secs(30)), "nothing at all");
    let mut silent = H2::connect(proxy.address);
    assert!(silent.wire.closes_within(Duration::from_secs(30)), "no request");
}

#[test]
fn an_idle_connection_is_not_kept_for_ever() {
    let backend = Backend::plain();
    let proxy = Start::before(backend.address).and("timeouts: { keep_alive: 1s }").start();
    let mut old = Wire::connect(proxy.address);
    assert_eq!(old.ask(get("/", "")).status(), 404);
    let mut new = H2::connect(proxy.address);
    assert_eq!(new.get("/", &[]), Outcome::Status(404));
    assert!(old.closes_within(Duration::from_secs(30)), "http/1.1");
    // Frames other than requests do not keep a connection alive.
    wait_for(Duration::from_secs(30), "h2 closes", || {
        new.frame(6, 0, 0, b"pingpong");
        new.wire.closes_within(Duration::from_millis(100)).then_some(())
    });
}

/// There is no limit to the time of an answer in progress.
#[test]
fn an_answer_under_way_is_not_idle() {
    let backend = Backend::start(|mut wire, _| {
        if wire.message().is_some() {
            std::thread::sleep(Duration::from_secs(3));
            wire.try_send("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n");
            std::thread::sleep(Duration::from_secs(3));
            wire.try_send("1\r\nb\r\n0\r\n\r\n");
        }
    });
    let times = "timeouts: { header: 500ms, body: 500ms, keep_alive: 500ms }";
    let proxy = Start::before(backend.address).and(times).start();
    let mut new = H2::connect(proxy.address);
    let stream = new.request("GET", "/", &[], 5);
    let answer = Wire::connect(proxy.address).ask(get("/", ""));
    assert_eq!((answer.status(), answer.text().as_str(), answer.whole), (200, "ab", true));
    assert_eq!(new.outcome(stream), Outcome::Status(200));
}

/// A client that stalls in the middle of a request does not delay a drain.
#[test]
fn a_stuck_body_does_not_hold_the_drain() {
    let backend = waiting();
    let times = "drain: { delay: 0s, grace: 1h }\ntimeouts: { body: 1s }";
    let mut proxy = Start::before(backend.address).and(times).start();
    let mut stuck = Wire::connect(proxy.address);
    stuck.send(HALF);
    let mut unfinished = H2::connect(proxy.address);
    unfinished.request("POST", "/v1/files", &[], END_HEADERS);
    let mut idle = H2::connect(proxy.address);
    assert_eq!(idle.get("/", &[]), Outcome::Status(404));
    proxy.signal("TERM");
    assert!(proxy.wait().success());
}

#[test]
fn a_proxy_in_use_serves_on_until_balancers_have_noticed() {
    let backend = Backend::plain();
    let proxy = Start::before(backend.address).and("drain: { delay: 10m, grace: 10m }").start();
    assert_eq!(Wire::connect(proxy.address).ask(get("/", "")).status(), 404);
    proxy.signal("TERM");
    eventually("it drains", || (proxy.admin_get("/readyz").status() == 503).then_some(()));
    for _ in 0..5 {
        let answer = Wire::connect(proxy.address).ask(get("/", ""));
        assert_eq!((answer.status(), answer.field("connection")), (404, Some("close")));
    }
}

/// A client that does not read its answer keeps neither its connection nor the backend's time.
#[test]
fn a_client_that_does_not_read_is_cut() {
    let (tell, told) = std::sync::mpsc::channel();
    let backend = Backend::start(move |mut wire, _| {
        if wire.message().is_some_and(|request| request.target() == "/endless") {
            wire.try_send("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n");
            let chunk = format!("{:x}\r\n{}\r\n", 64 << 10, " ".repeat(64 << 10));
            while wire.try_send(&chunk) {}
            let _ = tell.send(());
        }
    });
    let proxy = Start::before(backend.address).and("timeouts: { keep_alive: 1s }").start();
    let mut deaf = Wire::connect(proxy.address);
    deaf.send("GET /endless HTTP/1.1\r\nhost: a\r\n\r\n");
    told.recv_timeout(crate::kit::PATIENCE).expect("the backend's connection is closed");
}

/// Over HTTP/2 only the stream's window shows it, while the connection is still read.
#[test]
fn a_client_whose_window_stays_shut_is_cut() {
    let backend = Backend::answering(|_| respond("200 OK", "", vec![b' '; 1 << 20]));
    let proxy = Start::before(backend.address).and("timeouts: { keep_alive: 1s }").start();
    let mut shut = H2::shut(proxy.address);
    let stream = shut.request("GET", "/large", &[], 5);
    assert_eq!(shut.outcome(stream), Outcome::Status(200));
    eventually("it is cut", || shut.wire.closes_within(Duration::from_millis(500)).then_some(()));
    eventually("its request is over", || (proxy.metric("foretell_requests_in_flight") < 0.5).then_some(()));
}
