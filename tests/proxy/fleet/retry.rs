//! The effect of a dying replica on its clients.

use foretell::app::Gateway;
use foretell_net::fleet::ReplicaSettings;

use super::house::{self, Replica, Reply, answer, ask, metric};
use crate::wire::{Message, Wire, post};

/// Two backends, so that every body is read for its model and completions can be sent again.
async fn reading(one: &Replica, two: &Replica) -> Gateway {
    let mut backends = house::backends(&[one.address, two.address]);
    backends.push(ReplicaSettings::new("other", "http://127.0.0.1:1"));
    house::start(house::settings(backends)).await
}

fn get() -> &'static str {
    "GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n"
}

#[tokio::test]
async fn a_replica_killed_in_mid_traffic_is_not_noticed_while_another_is_up() {
    let mut dying = Replica::start(|_| Reply::Hold).await;
    let mut living = Replica::saying("alive").await;
    let gateway = reading(&dying, &living).await;
    let asking: Vec<_> = (0..40)
        .map(|_| {
            let address = gateway.addresses[0];
            tokio::spawn(async move { Wire::connect(address).await.ask(house::completion()).await })
        })
        .collect();
    // Both have requests: one half is answered, the other half waits for its first byte.
    for _ in 0..5 {
        dying.next().await.unwrap();
        living.next().await.unwrap();
    }
    dying.kill().await;
    for answer in asking {
        let answer = answer.await.unwrap();
        assert_eq!((answer.head.status(), answer.text().as_str()), (200, "alive"));
    }
    // New requests do not try it.
    for _ in 0..40 {
        assert_eq!(ask(&gateway, house::completion()).await.text(), "alive");
    }
    assert!(
        metric(&gateway, "foretell_replica_retries_total{replica=\"b/0\",result=\"sent\"}").unwrap() >= 5.0
    );
    assert_eq!(metric(&gateway, "foretell_replica_up{replica=\"b/1\"}"), Some(1.0));
    assert_eq!(metric(&gateway, "foretell_replica_requests_in_flight{replica=\"b/0\"}"), Some(0.0));
}

#[tokio::test]
async fn a_request_that_was_not_sent_goes_to_another_replica_whatever_it_is() {
    // Bound and not listening: connections are refused, and no other process can get the port.
    let gone = tokio::net::TcpSocket::new_v4().unwrap();
    gone.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let living = Replica::saying("alive").await;
    let gateway = house::before(&[gone.local_addr().unwrap(), living.address]).await;
    let upload = || post("/v1/files", "", &vec![7; 100_000]);
    let is_down = || metric(&gateway, "foretell_replica_up{replica=\"b/0\"}") == Some(0.0);
    let mut sent = 0;
    // The first of the two is chosen at random.
    while sent < 10 || (!is_down() && sent < 100) {
        // Its body is passed on while it arrives, and is still complete.
        assert_eq!(ask(&gateway, upload()).await.text(), "alive");
        gateway.shared.fleet.replicas().iter().for_each(|replica| assert!(replica.in_flight() <= 1));
        sent += 1;
    }
    assert!(is_down());
}

async fn after_a_reset(sent: &'static str, request: Vec<u8>) -> (Option<Message>, usize) {
    let mut broken = Replica::start(move |_| Reply::Reset(sent.as_bytes().to_vec())).await;
    let mut living = Replica::saying("alive").await;
    let gateway = reading(&broken, &living).await;
    loop {
        let mut client = Wire::connect(gateway.addresses[0]).await;
        client.send(&request).await;
        let answer = client.message().await;
        let others = living.requests().len();
        if !broken.requests().is_empty() {
            return (answer, others);
        }
    }
}

#[tokio::test]
async fn idempotent_requests_are_sent_again_if_the_connection_ends_before_an_answer() {
    for request in [house::completion(), get().into()] {
        let (answer, others) = after_a_reset("", request).await;
        assert_eq!((answer.unwrap().text().as_str(), others), ("alive", 1));
    }
}

#[tokio::test]
async fn requests_with_effects_are_not_sent_twice() {
    for path in ["/v1/files", "/v1/embeddings"] {
        let (answer, others) = after_a_reset("", post(path, "", b"{}")).await;
        let answer = answer.unwrap();
        assert_eq!((answer.head.status(), &answer.json()["error"]["code"]), (502, &"backend_closed".into()));
        assert_eq!(others, 0, "{path}");
    }
}

#[tokio::test]
async fn nothing_is_sent_again_once_a_byte_was_answered() {
    for begun in [
        "HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n",
        "garbage\r\n\r\n",
    ] {
        let (answer, others) = after_a_reset(begun, house::completion()).await;
        assert_eq!(others, 0, "{begun:?}");
        assert!(answer.is_none_or(|answer| answer.head.status() == 502), "{begun:?}");
    }
}

#[tokio::test]
async fn an_error_of_the_backend_is_the_answer() {
    for status in [400, 404, 422, 429, 500, 502, 503] {
        let mut sore =
            Replica::start(move |_| Reply::Bytes(answer(status, "retry-after: 7\r\n", "no"))).await;
        let mut living = Replica::saying("alive").await;
        let gateway = reading(&sore, &living).await;
        while sore.requests().is_empty() {
            living.requests();
            let answer = ask(&gateway, house::completion()).await;
            if answer.head.status() == 200 {
                continue;
            }
            assert_eq!((answer.head.status(), answer.text().as_str()), (status, "no"));
            assert_eq!(answer.head.get("retry-after"), Some("7"));
            assert_eq!(living.requests().len(), 0, "{status}");
        }
    }
}
