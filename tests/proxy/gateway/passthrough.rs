//! Duties of a reverse proxy beyond passing bodies on.

use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::sync::{Semaphore, mpsc};

use super::house;
use crate::wire::{EVENTS, Message, Server, Wire, chunk, ok, post};

/// A backend that answers `ok` and hands over its requests.
async fn listening(fields: &'static str) -> (Server, mpsc::UnboundedReceiver<Message>) {
    let (tell, seen) = mpsc::unbounded_channel();
    let server = Server::answering(move |request| {
        tell.send(request).unwrap();
        ok(fields, b"hello")
    })
    .await;
    (server, seen)
}

#[tokio::test]
async fn an_event_arrives_before_the_next_is_made() {
    let next = Arc::new(Semaphore::new(0));
    let gate = Arc::clone(&next);
    let server = Server::start(move |mut wire| {
        let gate = Arc::clone(&gate);
        async move {
            wire.message().await.unwrap();
            wire.send(EVENTS).await;
            for n in 0..20 {
                gate.acquire().await.unwrap().forget();
                wire.send(chunk(format!("data: {n}\n\n").as_bytes())).await;
            }
            wire.send("0\r\n\r\n").await;
            wire.closed().await;
        }
    })
    .await;
    let (_gateway, address) = house::before(server.address).await;
    let mut client = Wire::connect(address).await;
    client.send(post("/v1/chat/completions", "", b"{}")).await;
    // The head comes before the first event.
    assert_eq!(client.head().await.unwrap().status(), 200);
    for n in 0..20 {
        next.add_permits(1);
        assert_eq!(client.chunk().await.unwrap(), format!("data: {n}\n\n").into_bytes());
    }
    assert_eq!(client.chunk().await.unwrap(), b"");
}

#[tokio::test]
async fn a_request_body_is_passed_on_while_it_is_still_being_sent() {
    let (tell, mut seen) = mpsc::unbounded_channel();
    let server = Server::start(move |mut wire| {
        let tell = tell.clone();
        async move {
            wire.head().await.unwrap();
            while let Some(piece) = wire.chunk().await.filter(|piece| !piece.is_empty()) {
                tell.send(piece).unwrap();
            }
            wire.send(ok("", b"")).await;
        }
    })
    .await;
    let (_gateway, address) = house::before(server.address).await;
    let mut client = Wire::connect(address).await;
    client.send("POST /v1/audio HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n").await;
    for n in 0..10 {
        let piece = format!("piece {n}");
        client.send(chunk(piece.as_bytes())).await;
        assert_eq!(seen.recv().await.unwrap(), piece.into_bytes());
    }
    client.send("0\r\n\r\n").await;
    assert_eq!(client.message().await.unwrap().head.status(), 200);
}

#[tokio::test]
async fn hop_by_hop_fields_end_here_and_all_others_pass() {
    let (server, mut seen) = listening(
        "connection: x-back\r\nx-back: 1\r\nkeep-alive: timeout=5\r\nx-stays: yes\r\nserver: theirs\r\nset-cookie: a=1\r\nset-cookie: b=2\r\n",
    )
    .await;
    let (_gateway, address) = house::before(server.address).await;
    let mut client = Wire::connect(address).await;
    let fields = "connection: x-foo, keep-alive\r\nx-foo: 1\r\nkeep-alive: 5\r\nte: gzip\r\nproxy-connection: k\r\n\
                  x-foretell: plain\r\nauthorization: Bearer k\r\nuser-agent: me\r\nx-forwarded-for: 1.1.1.1\r\n";
    let answer = client.ask(post("/v1/completions?q=%41", fields, b"{}")).await;
    let request = seen.recv().await.unwrap().head;
    for gone in
        ["connection", "x-foo", "keep-alive", "te", "proxy-connection", "x-foretell", "transfer-encoding"]
    {
        assert_eq!(request.get(gone), None, "{gone}");
    }
    assert_eq!(request.target(), ("POST", "/v1/completions?q=%41"));
    assert_eq!(request.get("authorization"), Some("Bearer k"));
    assert_eq!(request.get("user-agent"), Some("me"));
    assert_eq!(request.get("host"), Some(server.address.to_string().as_str()));
    assert_eq!(request.get("x-forwarded-for"), Some("1.1.1.1, 127.0.0.1"));
    assert_eq!(request.get("x-forwarded-proto"), Some("http"));
    assert_eq!(request.get("x-forwarded-host"), Some("api"));
    for gone in ["connection", "x-back", "keep-alive"] {
        assert_eq!(answer.head.get(gone), None, "{gone}");
    }
    assert_eq!(answer.head.get("x-stays"), Some("yes"));
    assert_eq!(answer.head.get("server"), Some("theirs"));
    let cookies = answer.head.fields.iter().filter(|(name, _)| name == "set-cookie");
    assert_eq!(cookies.map(|(_, value)| value.as_str()).collect::<Vec<_>>(), ["a=1", "b=2"]);
    assert_eq!(answer.text(), "hello");
}

#[tokio::test]
async fn a_websocket_is_joined_and_echoes_through() {
    let server = Server::start(|mut wire| async move {
        let head = wire.head().await.unwrap();
        assert_eq!(head.get("upgrade"), Some("websocket"));
        assert_eq!(head.get("sec-websocket-key"), Some("abc"));
        wire.send("HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-accept: xyz\r\n\r\nwelcome").await;
        loop {
            let byte = wire.exactly(1).await;
            if byte.is_empty() || !wire.try_send(byte.to_ascii_uppercase()).await {
                return;
            }
        }
    })
    .await;
    let (gateway, address) = house::before(server.address).await;
    let mut client = Wire::connect(address).await;
    client
        .send("GET /v1/realtime HTTP/1.1\r\nhost: a\r\nconnection: keep-alive, Upgrade\r\nupgrade: websocket\r\nsec-websocket-key: abc\r\n\r\n")
        .await;
    let head = client.head().await.unwrap();
    assert_eq!(head.status(), 101);
    assert_eq!(head.get("upgrade"), Some("websocket"));
    assert_eq!(head.get("sec-websocket-accept"), Some("xyz"));
    assert_eq!(client.exactly(7).await, b"welcome");
    for word in ["one", "two", "three"] {
        client.send(word).await;
        assert_eq!(client.exactly(word.len()).await, word.to_uppercase().into_bytes());
    }
    drop(client);
    // Draining waits for open tunnels; this one ends because the client has disconnected.
    gateway.shared.life.drain();
    gateway.shared.life.stop.accept.cancel();
}

#[tokio::test]
async fn bytes_sent_after_an_upgrade_that_was_refused_never_reach_the_backend() {
    let (tell, mut seen) = mpsc::unbounded_channel();
    let server = Server::start(move |mut wire| {
        let tell = tell.clone();
        async move {
            while let Some(request) = wire.message().await {
                tell.send(request.head.line.clone()).unwrap();
                wire.send(ok("", b"no")).await;
            }
        }
    })
    .await;
    let (_gateway, address) = house::before(server.address).await;
    let mut client = Wire::connect(address).await;
    let smuggled = "GET /a HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: ws\r\n\r\nGET /b HTTP/1.1\r\nhost: a\r\n\r\n";
    client.send(smuggled).await;
    assert_eq!(client.message().await.unwrap().text(), "no");
    // The second is a separate request: it is read as one, after the first was answered.
    assert_eq!(client.message().await.unwrap().text(), "no");
    assert_eq!(seen.recv().await.unwrap(), "GET /a HTTP/1.1");
    assert_eq!(seen.recv().await.unwrap(), "GET /b HTTP/1.1");
}

#[tokio::test]
async fn http2_clients_are_served_on_the_same_port() {
    let (server, mut seen) = listening("x-stays: yes\r\n").await;
    let (_gateway, address) = house::before(server.address).await;
    let stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    for n in 0..5 {
        let request = http::Request::post("http://api.example/v1/chat/completions")
            .header("cookie", "a=1")
            .header("cookie", "b=2")
            .body(Full::new(bytes::Bytes::from(format!("{{\"n\":{n}}}"))))
            .unwrap();
        let answer = sender.send_request(request).await.unwrap();
        assert_eq!(answer.headers()["x-stays"], "yes");
        assert_eq!(answer.headers()["x-foretell-path"], "passthrough");
        assert_eq!(answer.into_body().collect().await.unwrap().to_bytes(), "hello");
        let request = seen.recv().await.unwrap();
        assert_eq!(request.head.get("cookie"), Some("a=1; b=2"));
        assert_eq!(request.head.get("x-forwarded-host"), Some("api.example"));
        assert_eq!(request.text(), format!("{{\"n\":{n}}}"));
    }
}

#[tokio::test]
async fn methods_statuses_and_bodiless_answers_pass_unchanged() {
    let server = Server::answering(|request| match request.head.target() {
        ("HEAD", _) => b"HTTP/1.1 200 OK\r\ncontent-length: 1234\r\n\r\n".to_vec(),
        ("DELETE", _) => b"HTTP/1.1 204 No Content\r\nx-kept: 1\r\n\r\n".to_vec(),
        ("GET", "/cached") => b"HTTP/1.1 304 Not Modified\r\netag: \"a\"\r\n\r\n".to_vec(),
        ("OPTIONS", _) => b"HTTP/1.1 418 teapot\r\ncontent-length: 0\r\n\r\n".to_vec(),
        (method, _) => ok("", method.as_bytes()),
    })
    .await;
    let (_gateway, address) = house::before(server.address).await;
    let mut client = Wire::connect(address).await;
    client.send("HEAD /v1/models HTTP/1.1\r\nhost: a\r\n\r\n").await;
    let head = client.head().await.unwrap();
    assert_eq!((head.status(), head.get("content-length")), (200, Some("1234")));
    let deleted = client.ask("DELETE /v1/files/1 HTTP/1.1\r\nhost: a\r\n\r\n").await;
    assert_eq!((deleted.head.status(), deleted.head.get("x-kept")), (204, Some("1")));
    let cached = client.ask("GET /cached HTTP/1.1\r\nhost: a\r\n\r\n").await;
    assert_eq!((cached.head.status(), cached.head.get("etag")), (304, Some("\"a\"")));
    assert_eq!(client.ask("OPTIONS /x HTTP/1.1\r\nhost: a\r\n\r\n").await.head.status(), 418);
    assert_eq!(client.ask("PROPFIND /x HTTP/1.1\r\nhost: a\r\n\r\n").await.text(), "PROPFIND");
}

#[tokio::test]
async fn a_backend_that_closes_idle_connections_is_never_noticed() {
    let server = Server::start(|mut wire| async move {
        if wire.message().await.is_some() {
            wire.send(ok("", b"once")).await;
        }
    })
    .await;
    let (_gateway, address) = house::before(server.address).await;
    let mut client = Wire::connect(address).await;
    for n in 0..100 {
        let answer = client.ask(post("/v1/embeddings", "", b"{}")).await;
        assert_eq!((answer.head.status(), answer.text().as_str()), (200, "once"), "request {n}");
    }
}

#[tokio::test]
async fn a_connection_to_the_backend_is_reused_and_closed_when_idle() {
    let (tell, mut seen) = mpsc::unbounded_channel();
    let server = Server::start(move |mut wire| {
        let tell = tell.clone();
        async move {
            tell.send("opened").unwrap();
            while let Some(request) = wire.message().await {
                match request.text().as_str() {
                    "stream" => wire.send([EVENTS.as_bytes(), b"3\r\nabc\r\n0\r\n\r\n"].concat()).await,
                    "empty" => wire.send(ok("", b"")).await,
                    _ => wire.send(ok("", &vec![b'x'; 100_000])).await,
                }
            }
            tell.send("closed").unwrap();
        }
    })
    .await;
    let mut settings = house::settings(server.address);
    settings.backends[0].pool_idle = Duration::from_secs(1);
    let gateway = house::start(settings).await;
    let mut client = Wire::connect(gateway.addresses[0]).await;
    for _ in 0..5 {
        for kind in ["stream", "empty", "long"] {
            // A request that may be sent twice takes any idle connection.
            assert_eq!(client.ask(post("/v1/completions", "", kind.as_bytes())).await.head.status(), 200);
        }
    }
    let mut opened = 0;
    while tokio::time::timeout(crate::wire::PATIENCE, seen.recv()).await.unwrap() != Some("closed") {
        opened += 1;
    }
    // A machine on which a request takes a second opens a few more.
    assert!((1..15).contains(&opened), "{opened} connections for 15 requests");
}

#[tokio::test]
async fn a_backend_that_goes_silent_in_the_middle_is_dropped_after_the_idle_timeout_if_one_is_set() {
    let server = Server::start(|mut wire| async move {
        wire.message().await.unwrap();
        wire.send([EVENTS.as_bytes(), &chunk(b"data: 1\n\n")].concat()).await;
        wire.closed().await;
    })
    .await;
    let begin = async |idle| {
        let mut settings = house::settings(server.address);
        settings.backends[0].idle = idle;
        let gateway = house::start(settings).await;
        let mut client = Wire::connect(gateway.addresses[0]).await;
        client.send(post("/v1/chat/completions", "", b"{}")).await;
        assert_eq!(client.head().await.unwrap().status(), 200);
        assert_eq!(client.chunk().await.unwrap(), b"data: 1\n\n");
        (gateway, client)
    };
    let (_patient, mut waiting) = begin(None).await;
    let (gateway, mut client) = begin(Some(Duration::from_millis(100))).await;
    assert_eq!(client.chunk().await, None, "an answer that broke off has no end");
    let metrics = gateway.shared.observer.metrics().text();
    let counted = "foretell_replica_errors_total{kind=\"backend_timeout\",replica=\"b/0\"} 1";
    assert!(metrics.contains(counted), "{metrics}");
    let more = tokio::time::timeout(Duration::from_millis(200), waiting.chunk()).await;
    assert!(more.is_err(), "without a limit it keeps waiting");
}

#[rstest::rstest]
#[case::silent("")]
#[case::a_letter("P")]
#[case::half_a_head("POST /v1/completions HTTP/1.1\r\nhost: a\r\n")]
#[tokio::test]
async fn a_client_that_sends_no_request_is_disconnected(#[case] says: &str) {
    let (server, _seen) = listening("").await;
    let mut settings = house::settings(server.address);
    settings.limits.head.header_timeout = Duration::from_millis(50);
    let gateway = house::start(settings).await;
    let mut client = Wire::connect(gateway.addresses[0]).await;
    client.send(says).await;
    client.closed().await;
}

#[tokio::test]
async fn expect_continue_is_answered_here() {
    let (server, mut seen) = listening("").await;
    let (_gateway, address) = house::before(server.address).await;
    let mut client = Wire::connect(address).await;
    client
        .send("POST /v1/files HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 4\r\n\r\n")
        .await;
    assert_eq!(client.head().await.unwrap().status(), 100);
    let answer = client.ask("body").await;
    assert_eq!(answer.text(), "hello");
    let request = seen.recv().await.unwrap();
    assert_eq!((request.head.get("expect"), request.text().as_str()), (None, "body"));
}
