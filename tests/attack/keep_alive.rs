//! A backend closes a connection just as a request goes out over it: completions are sent again,
//! all other requests avoid that race.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::kit::{Backend, Proxy, Start, Wire, get, post, respond};

const COMPLETION: &str = r#"{"model":"m","prompt":"a","max_tokens":1}"#;

/// Answers the first request of every connection; at the second it closes without an answer, as
/// after an idle timeout. Counts the requests of this path that it closed on.
fn closing(path: &'static str) -> (Backend, Arc<AtomicUsize>) {
    let lost = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&lost);
    let backend = Backend::start(move |mut wire, seen| {
        for n in 0.. {
            let Some(request) = wire.message() else { return };
            let (ours, closes) = (request.target() == path, n > 0);
            if ours {
                seen.lock().unwrap().push(request);
            }
            if closes {
                count.fetch_add(usize::from(ours), Ordering::Relaxed);
                return;
            }
            wire.try_send(respond("200 OK", "content-type: application/json\r\n", "{}"));
        }
    });
    (backend, lost)
}

/// Sends requests one after the other over one connection and returns the statuses.
fn statuses(proxy: &Proxy, request: impl AsRef<[u8]>, count: usize) -> Vec<u16> {
    let mut client = Wire::connect(proxy.address);
    (0..count).map(|_| client.ask(request.as_ref()).status()).collect()
}

fn chunked(path: &str) -> Vec<u8> {
    let head = format!("POST {path} HTTP/1.1\r\nhost: api\r\ntransfer-encoding: chunked\r\n\r\n");
    [head.as_bytes(), &crate::kit::chunk(COMPLETION), b"0\r\n\r\n"].concat()
}

#[test]
fn a_completion_is_retried_once_over_a_fresh_connection_in_every_mode() {
    for mode in ["off", "observe", "auto"] {
        for path in ["/v1/completions", "/v1/chat/completions"] {
            let (backend, lost) = closing(path);
            let proxy = Start::before(backend.address).and(&format!("mode: {mode}")).start();
            for request in [post(path, "", COMPLETION), chunked(path)] {
                let got = statuses(&proxy, request, 12);
                assert!(got.iter().all(|status| *status == 200), "{mode} {path}: {got:?}");
            }
            let (asked, lost) = (backend.requests(path).len(), lost.load(Ordering::Relaxed));
            assert!(lost > 0, "{mode} {path}: the race was run");
            assert_eq!(asked, 24 + lost, "{mode} {path}: once more for each that was lost, and no more");
            assert!(
                backend.requests(path).iter().all(|request| request.text() == COMPLETION),
                "whole each time"
            );
        }
    }
}

/// A request to a billed backend is never sent twice, for any outcome of the first attempt.
#[test]
fn billed_requests_are_not_repeated() {
    let path = "/v1/chat/completions";
    let (backend, lost) = closing(path);
    let process =
        format!("backends: [{{ name: b, replicas: [\"http://{}\"], billed: true }}]\n", backend.address);
    let proxy = Start::with(&process).start();
    let got = statuses(&proxy, post(path, "", COMPLETION), 12);
    assert_eq!(backend.requests(path).len(), 12, "{got:?}");
    assert_eq!(got.iter().filter(|status| **status != 200).count(), lost.load(Ordering::Relaxed));
}

/// Idle timeout of the backend, and the time that it takes to close a connection after that.
const IDLE: Duration = Duration::from_millis(300);
const CLOSING: Duration = Duration::from_millis(100);

/// Decides to close after [`IDLE`] and takes [`CLOSING`] to do so: a request that arrives in
/// between is lost.
fn slow_to_close() -> Backend {
    Backend::start(|mut wire, seen| {
        loop {
            let since = Instant::now();
            wire.stream.set_read_timeout(Some(IDLE + CLOSING)).unwrap();
            if wire.stream.peek(&mut [0]).is_err() || since.elapsed() >= IDLE {
                return;
            }
            wire.stream.set_read_timeout(Some(crate::kit::PATIENCE)).unwrap();
            let Some(request) = wire.message() else { return };
            let body = request.text();
            seen.lock().unwrap().push(request);
            wire.try_send(respond("200 OK", "", body));
        }
    })
}

/// Uploads and similar requests cannot be repeated, so they use no connection that the backend may
/// be about to close.
#[test]
fn unrepeatable_requests_avoid_the_race() {
    for (path, billed) in [("/v1/files", false), ("/v1/responses", false), ("/v1/completions", true)] {
        let backend = slow_to_close();
        let process = format!(
            "backends: [{{ name: b, replicas: [\"http://{}\"], billed: {billed} }}]\n",
            backend.address
        );
        let proxy = Start::with(&process).start();
        let mut client = Wire::connect(proxy.address);
        for n in 0..8 {
            let answer = client.ask(post(path, "", format!("{{\"model\":\"m\",\"n\":{n}}}")));
            assert_eq!(answer.status(), 200, "{path} {n}: {}", answer.text());
            thread::sleep(IDLE + CLOSING / 2);
        }
        assert_eq!(backend.requests(path).len(), 8, "{path}: each was sent once");
    }
}

/// If the backend keeps its connections, they are reused also for requests that cannot be repeated.
#[test]
fn a_connection_that_lasts_is_used_again() {
    let opened = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&opened);
    let backend = Backend::start(move |mut wire, _| {
        let mut first = true;
        while let Some(request) = wire.message() {
            let ours = request.target() == "/v1/files";
            count.fetch_add(usize::from(ours && std::mem::take(&mut first)), Ordering::Relaxed);
            if !wire.try_send(respond("200 OK", "", "{}")) {
                return;
            }
        }
    });
    let proxy = Start::before(backend.address).start();
    let got = statuses(&proxy, post("/v1/files", "", "{}"), 100);
    assert!(got.iter().all(|status| *status == 200));
    assert_eq!(statuses(&proxy, get("/x", ""), 1), [200]);
    let opened = opened.load(Ordering::Relaxed);
    assert!(opened <= 50, "{opened} connections for 100 requests");
}
