//! Message framing: strict RFC 9112 wherever two readers could otherwise disagree.

use crate::h2::{H2, Outcome};
use crate::kit::{Answer, Backend, Proxy, Start, ask, chunk, get, post, respond};

fn before(backend: &Backend) -> Proxy {
    Start::before(backend.address).start()
}

#[test]
fn well_formed_requests_pass() {
    let backend = Backend::plain();
    let proxy = before(&backend);
    for request in [
        post("/v1/embeddings", "", "{}"),
        b"POST /v1/embeddings HTTP/1.0\r\ncontent-length: 2\r\n\r\n{}".to_vec(),
        b"POST /v1/embeddings HTTP/1.1\r\nhost:\r\ncontent-length: 2\r\n\r\n{}".to_vec(),
        b"POST /v1/embeddings HTTP/1.1\r\nhost: [::1]:80\r\ncontent-length: 2\r\n\r\n{}".to_vec(),
        b"POST http://api/v1/embeddings HTTP/1.1\r\nhost: api\r\ncontent-length: 2\r\n\r\n{}".to_vec(),
        b"POST /v1/embeddings HTTP/1.1\r\nhost: api\r\ntransfer-encoding: Chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
            .to_vec(),
    ] {
        let text = String::from_utf8_lossy(&request).into_owned();
        let answer = ask(proxy.address, request);
        assert_eq!((answer.status(), answer.text().as_str()), (200, "done"), "{text}");
    }
    let seen = backend.requests("/v1/embeddings");
    assert_eq!(seen.len(), 6);
    assert!(seen.iter().all(|request| request.body == b"{}"));
    assert_eq!(ask(proxy.address, get("/nothing", "")).status(), 404);
    assert_eq!(ask(proxy.address, "OPTIONS * HTTP/1.1\r\nhost: a\r\n\r\n").status(), 404);
    assert_eq!(backend.requests("*").len(), 1);
}

/// An answer with both lengths: the chunks count (RFC 9112, 6.3).
#[test]
fn an_answer_with_content_length_and_chunks_is_whole() {
    for length in [0, 2, 4, 6, 50] {
        let backend = Backend::answering(move |_| {
            let head = format!(
                "HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: {length}\r\n\
                 transfer-encoding: chunked\r\n\r\n"
            );
            [head.into_bytes(), chunk("abc"), chunk("def"), chunk("")].concat()
        });
        let proxy = before(&backend);
        for request in [post("/v1/completions", "", "{}"), post("/v1/files", "", "{}"), get("/x", "")] {
            let answer = ask(proxy.address, request);
            let seen =
                (answer.status(), answer.text(), answer.whole, answer.field("content-length").is_some());
            assert_eq!(seen, (200, "abcdef".to_owned(), true, false), "content-length: {length}");
        }
    }
}

/// A transfer coding that is not declared to the next hop would reach the client as content.
#[test]
fn an_answer_with_an_unrequested_transfer_coding_is_an_error() {
    for coding in ["gzip, chunked", "chunked, chunked", "gzip"] {
        let backend = Backend::start(move |mut wire, _| {
            wire.message();
            let head = format!("HTTP/1.1 200 OK\r\ntransfer-encoding: {coding}\r\n\r\n");
            wire.try_send([head.into_bytes(), chunk("abc"), chunk("")].concat());
        });
        let proxy = before(&backend);
        let answer = ask(proxy.address, post("/v1/files", "", "{}"));
        assert_eq!(answer.status(), 502, "{coding}: {}", answer.text());
    }
}

/// A refused request never reaches a backend, and neither do later ones on the same connection.
#[test]
fn a_request_that_two_readers_could_take_differently_is_refused() {
    let backend = Backend::plain();
    let proxy = before(&backend);
    let chunked =
        |coding: &str| format!("POST /bad HTTP/1.1\r\nhost: a\r\n{coding}\r\n2\r\n{{}}\r\n0\r\n\r\n");
    let bad = |rest: &str| format!("POST /bad HTTP/1.1\r\nhost: a\r\n{rest}");
    let cases = [
        (400, "GET /bad HTTP/1.1\r\n\r\n".to_owned()),
        (400, "GET /bad HTTP/1.1\r\nhost: a\r\nhost: a\r\n\r\n".to_owned()),
        (400, "GET /bad HTTP/1.1\r\nhost: a b\r\n\r\n".to_owned()),
        (400, "GET /bad HTTP/1.1\r\nhost: a/b\r\n\r\n".to_owned()),
        (400, "GET /bad HTTP/1.1\r\nhost: user@a\r\n\r\n".to_owned()),
        (400, "GET /bad HTTP/1.1\r\nhost: a:port\r\n\r\n".to_owned()),
        (400, "GET /bad HTTP/1.0\r\nhost: a\r\nhost: b\r\n\r\n".to_owned()),
        (400, "GET bad HTTP/1.1\r\nhost: a\r\n\r\n".to_owned()),
        (400, "GET bad:80 HTTP/1.1\r\nhost: a\r\n\r\n".to_owned()),
        (400, "GET * HTTP/1.1\r\nhost: a\r\n\r\n".to_owned()),
        (400, chunked("transfer-encoding: chunked, chunked\r\n")),
        (400, chunked("transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n")),
        (501, chunked("transfer-encoding: gzip, chunked\r\n")),
        (501, chunked("transfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n")),
        (400, chunked("transfer-encoding: gzip\r\n")),
        (400, chunked("transfer-encoding: xchunked\r\n")),
        (400, chunked("transfer-encoding: chunked, gzip\r\n")),
        (400, "POST /bad HTTP/1.0\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n".to_owned()),
        (400, bad("content-length: 1\r\ncontent-length: 2\r\n\r\nab")),
        (400, bad("content-length: -1\r\n\r\n")),
        (400, bad("x-a : 1\r\n\r\n")),
        (400, bad("x-a: 1\r\n b\r\n\r\n")),
        (400, bad("x-a: \0\r\n\r\n")),
    ];
    for (wanted, request) in cases {
        let answer = ask(proxy.address, format!("{request}GET /canary HTTP/1.1\r\nhost: a\r\n\r\n"));
        assert_eq!(answer.status(), wanted, "{request:?}: {}", answer.text());
    }
    assert_eq!((backend.requests("/bad").len(), backend.requests("/canary").len()), (0, 0));
}

#[test]
fn a_target_that_is_too_long_is_named_as_the_cause() {
    let backend = Backend::plain();
    let proxy = before(&backend);
    for length in [9_000, 40_000, 100_000, 1_000_000] {
        let answer = ask(proxy.address, get(&format!("/{}", "u".repeat(length)), ""));
        assert_eq!(answer.status(), 414, "{length}");
    }
    // The head has a separate limit.
    let answer = ask(proxy.address, get("/", &format!("x-long: {}\r\n", "v".repeat(40 << 10))));
    assert_eq!(answer.status(), 431);
    // So has the number of fields, in both versions of the protocol.
    let fields: Vec<_> = (0..101).map(|n| (format!("x-{n}"), "v".to_owned())).collect();
    let lines: Vec<_> = fields.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let lines = lines.concat();
    assert_eq!(ask(proxy.address, get("/", &lines)).status(), 431);
    assert_eq!(H2::connect(proxy.address).get("/", &fields), Outcome::Status(431));
    assert_eq!(H2::connect(proxy.address).get("/", &fields[..90]), Outcome::Status(404));
    assert_eq!(backend.requests("/").len(), 1);
}

#[test]
fn the_limits_of_the_config_file_are_those_that_apply() {
    let backend = Backend::plain();
    let limits = "limits: { uri: 64B, headers: 20, header_bytes: 16KiB }";
    let proxy = Start::before(backend.address).and(limits).start();
    let uri = |length: usize| ask(proxy.address, get(&format!("/{}", "u".repeat(length - 1)), "")).status();
    assert_eq!((uri(64), uri(65)), (404, 414));
    let fields: Vec<_> = (0..30).map(|n| (format!("x-{n}"), "v".to_owned())).collect();
    assert_eq!(H2::connect(proxy.address).get("/", &fields), Outcome::Status(431));
    let proxy = Start::before(backend.address).and("limits: { uri: 16KiB }").start();
    assert_eq!(ask(proxy.address, get(&format!("/{}", "u".repeat(10_000)), "")).status(), 404);
}

/// Some clients send a body with GET; the backend may know what to do with it.
#[test]
fn a_body_passes_whatever_the_method_and_its_framing() {
    let backend = Backend::answering(|request| respond("200 OK", "", &request.body));
    let proxy = before(&backend);
    for method in ["GET", "DELETE", "PUT", "PATCH", "OPTIONS", "REPORT"] {
        let chunked = format!(
            "{method} /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n"
        );
        let sized = format!("{method} /x HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\n\r\nbody");
        for request in [chunked, sized] {
            assert_eq!(ask(proxy.address, &request).text(), "body", "{request}");
        }
    }
    let without: Vec<Answer> = backend.requests("/x");
    assert_eq!(without.len(), 12);
    assert_eq!(ask(proxy.address, get("/empty", "")).text(), "");
    let empty = backend.requests("/empty").remove(0);
    assert_eq!((empty.field("transfer-encoding"), empty.field("content-length")), (None, None));
}

/// An ambiguous answer is not passed on to the client.
#[test]
fn an_answer_has_one_length_and_the_clients_version() {
    for (fields, body, status) in [
        ("content-length: 3, 3\r\n", "abc", 200),
        ("content-length: 3,3\r\ncontent-length: 3\r\n", "abc", 200),
        ("content-length: 3\r\ncontent-length: 4\r\n", "abc", 502),
        ("content-length: 3, 4\r\n", "abcd", 502),
        ("content-length: +3\r\n", "abc", 502),
    ] {
        for version in ["HTTP/1.1", "HTTP/1.0"] {
            let backend = Backend::start(move |mut wire, _| {
                wire.message();
                wire.try_send(format!("{version} 200 OK\r\n{fields}\r\n{body}"));
            });
            let proxy = before(&backend);
            for request in [post("/v1/completions", "", "{}"), post("/v1/files", "", "{}"), get("/x", "")] {
                let answer = ask(proxy.address, request);
                assert_eq!(answer.status(), status, "{version} {fields:?}");
                assert!(answer.line.starts_with("HTTP/1.1 "), "{}", answer.line);
                let lengths = answer.fields.iter().filter(|(name, _)| name == "content-length");
                let lengths: Vec<&str> = lengths.map(|(_, length)| length.as_str()).collect();
                assert_eq!(lengths, [answer.body.len().to_string()]);
            }
        }
    }
}

/// An answer of HTTP/1.0 that ends with its connection is framed for a client of HTTP/1.1.
#[test]
fn an_answer_that_ends_with_its_connection_is_whole() {
    let backend = Backend::start(move |mut wire, _| {
        wire.message();
        wire.try_send("HTTP/1.0 200 OK\r\ncontent-type: text/plain\r\n\r\nabc");
    });
    let proxy = before(&backend);
    let mut client = crate::kit::Wire::connect(proxy.address);
    for _ in 0..3 {
        let answer = client.ask(get("/x", ""));
        assert_eq!(
            (answer.line.as_str(), answer.text().as_str(), answer.whole),
            ("HTTP/1.1 200 OK", "abc", true)
        );
    }
}
