//! Each fault of the store: requests are answered as without it, one line says so, and a metric.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::house::{Server, lines, sidecar, until, until_fault, until_sidecars, until_up};
use crate::fakes::vllm::Vllm;
use crate::fakes::{Fake, Pace};
use crate::groups::house::{engine, forced, send};
use crate::reasons::proxy::Proxy;

const ALONE: &str = "goes on alone";
const SHARED: &str = "measurements are shared";

/// Requests are answered, and speculated on.
async fn works(engine: &Fake<Vllm>, proxy: &Proxy) {
    for answer in send(engine, proxy, 0..4).await {
        assert_eq!(answer.foretell()["path"], "speculated", "{}", answer.message.text());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn down_at_the_start_and_later_and_empty_after_a_restart() {
    let Some(mut server) = Server::start(&[]).await else { return };
    let engine = engine(Pace::default()).await;
    server.stop().await;
    let first = sidecar(&engine, &server.url(), "", &forced("kept")).await;
    until_fault(&first, "connect").await;
    works(&engine, &first).await;
    assert_eq!((lines(&first, ALONE), lines(&first, SHARED)), (1, 0), "{}", first.log());

    server.again().await;
    until_up(&first, true).await;
    let second = sidecar(&engine, &server.url(), "", &forced("kept")).await;
    works(&engine, &second).await;
    until_sidecars(&first, 1).await;

    server.stop().await;
    until_up(&first, false).await;
    works(&engine, &first).await;
    server.again().await;
    until_up(&first, true).await;
    until_sidecars(&first, 1).await;
    until_sidecars(&second, 1).await;
    assert_eq!((lines(&first, ALONE), lines(&first, SHARED)), (2, 2), "{}", first.log());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_store_is_still_read() {
    let Some(server) = Server::start(&[]).await else { return };
    let engine = engine(Pace::default()).await;
    let first = sidecar(&engine, &server.url(), "", &forced("kept")).await;
    works(&engine, &first).await;
    let second = sidecar(&engine, &server.url(), "", &forced("kept")).await;
    until_sidecars(&second, 1).await;
    server.command(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
    server.command(&["CONFIG", "SET", "maxmemory", "1"]);
    works(&engine, &second).await;
    until_fault(&second, "full").await;
    until_up(&second, false).await;
    until_sidecars(&second, 1).await;
    assert_eq!(lines(&second, ALONE), 1, "{}", second.log());
    server.command(&["CONFIG", "SET", "maxmemory", "0"]);
    until_up(&second, true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_password_is_a_fault_and_never_shown_and_a_file_holds_the_right_one() {
    let Some(server) = Server::start(&["--requirepass", "the-right-one"]).await else { return };
    let engine = engine(Pace::default()).await;
    let url = |login: &str| format!("redis://{login}127.0.0.1:{}", server.port);
    for login in ["", ":the-wrong-one@", "somebody:the-wrong-one@"] {
        let proxy = sidecar(&engine, &url(login), "", &forced("kept")).await;
        until_fault(&proxy, "password").await;
        works(&engine, &proxy).await;
        assert_eq!(lines(&proxy, ALONE), 1, "{}", proxy.log());
        assert!(!proxy.log().contains("the-wrong-one"), "{}", proxy.log());
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("password");
    std::fs::write(&file, "the-wrong-one\n").unwrap();
    let more = format!(", password_file: {:?}", file.display().to_string());
    let proxy = sidecar(&engine, &url(""), &more, &forced("kept")).await;
    until_fault(&proxy, "password").await;
    std::fs::write(&file, "the-right-one\n").unwrap();
    until_up(&proxy, true).await;
    let proxy = sidecar(&engine, &url("default:the-right%2Done@"), "", &forced("kept")).await;
    until_up(&proxy, true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_version_and_unreadable_entries_are_left_out() {
    let Some(server) = Server::start(&[]).await else { return };
    let engine = engine(Pace::default()).await;
    let (now, sidecars) = ("4000000000", "foretell:sidecars");
    server.command(&["ZADD", sidecars, now, "99/stranger"]);
    for (id, entry) in [("a", "no JSON"), ("b", "{}"), ("c", "{\"saved\":1,\"learnt\":{\"models\":7}}")] {
        server.command(&["SET", &format!("foretell:2:sidecar:{id}"), entry]);
        server.command(&["ZADD", sidecars, now, &format!("2/{id}")]);
    }
    let first = sidecar(&engine, &server.url(), "", &forced("kept")).await;
    until_fault(&first, "version").await;
    until_fault(&first, "answer").await;
    works(&engine, &first).await;
    let second = sidecar(&engine, &server.url(), "", &forced("kept")).await;
    until_sidecars(&second, 1).await;
    until_up(&first, true).await;
    assert_eq!(lines(&first, "sidecars of another version"), 1, "{}", first.log());
    assert_eq!(lines(&first, "entries of the fleet store cannot be read"), 1, "{}", first.log());
    // A key of another kind than Foretell's.
    server.command(&["DEL", sidecars]);
    server.command(&["SET", sidecars, "somebody else's"]);
    until_fault(&first, "refused").await;
    works(&engine, &first).await;
}

/// Passes each answer of `server` on a second late.
async fn slow(server: u16) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let upstream = TcpStream::connect(("127.0.0.1", server)).await.unwrap();
            let ((mut from_client, mut to_client), (mut from_server, mut to_server)) =
                (client.into_split(), upstream.into_split());
            tokio::spawn(async move { tokio::io::copy(&mut from_client, &mut to_server).await });
            tokio::spawn(async move {
                let mut piece = vec![0; 1 << 16];
                while let Ok(read @ 1..) = from_server.read(&mut piece).await {
                    tokio::time::sleep(Duration::from_secs(1)).await;
                    if to_client.write_all(&piece[..read]).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    port
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_takes_a_second_for_each_answer_works() {
    let Some(server) = Server::start(&[]).await else { return };
    let engine = engine(Pace::default()).await;
    let first = sidecar(&engine, &server.url(), "", &forced("kept")).await;
    works(&engine, &first).await;
    let url = format!("redis://127.0.0.1:{}", slow(server.port).await);
    let second = sidecar(&engine, &url, "", &forced("kept")).await;
    works(&engine, &second).await;
    until_sidecars(&second, 1).await;
    until_up(&second, true).await;
}

/// No request waits for the store: they are all answered while it answers nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_a_store_hangs_requests_are_answered() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("redis://{}", listener.local_addr().unwrap());
    let (accepted, mut connections) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((connection, _)) = listener.accept().await {
            let _ = accepted.send(connection);
        }
    });
    let engine = engine(Pace::default()).await;
    let proxy = sidecar(&engine, &url, "", &forced("kept")).await;
    let _held = connections.recv().await.expect("it connects");
    for _ in 0..4 {
        works(&engine, &proxy).await;
    }
    until_fault(&proxy, "timeout").await;
    works(&engine, &proxy).await;
    assert_eq!(lines(&proxy, ALONE), 1, "{}", proxy.log());
    proxy.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_speaks_another_protocol_is_a_fault() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("redis://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut connection, _)) = listener.accept().await {
            tokio::spawn(async move {
                // Open until the other end closes: the answer is wrong, not the connection.
                while let Ok(1..) = connection.read(&mut [0; 1 << 10]).await {
                    let _ = connection.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
                }
            });
        }
    });
    let engine = engine(Pace::default()).await;
    let proxy = sidecar(&engine, &url, "", &forced("kept")).await;
    until(&proxy, "foretell_store_errors_total", |faults| faults > 0.5).await;
    works(&engine, &proxy).await;
    assert_eq!(lines(&proxy, ALONE), 1, "{}", proxy.log());
}
