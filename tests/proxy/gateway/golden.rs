//! Five hundred bodies are passed through byte for byte, both ways, with any content and any
//! framing.

use foretell::app::Gateway;
use foretell_core::words::PassthroughReason;
use foretell_net::fleet::ReplicaSettings;
use foretell_net::http::body::Body;
use foretell_proxy::gateway::Settings;
use foretell_proxy::serving::exchange::{Exchange, Serve};
use futures_util::future::BoxFuture;
use http::Response;

use super::house;
use crate::wire::{Server, Wire, chunk};

/// A small generator, so that the five hundred bodies are the same everywhere.
struct SplitMix64(u64);

impl SplitMix64 {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % sides
    }

    fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.roll(256) as u8).collect()
    }

    fn body(&mut self, n: usize) -> Vec<u8> {
        let sizes = [0, 1, 2, 100, 1_000, 4_096, 20_000, 70_000, 200_000];
        let size = sizes[self.roll(sizes.len())];
        let filler: String = (0..size).map(|_| char::from(b'a' + self.roll(26) as u8)).collect();
        match n % 10 {
            0 => self.bytes(size),
            1 => format!("{{\"model\":\"m\",\"prompt\":\"{filler}\",\"n\":1}}").into_bytes(),
            2 => format!("{{\"model\":\"a\",\"model\":\"b\",\"seed\":18446744073709551615,\"x\":1e999,\"p\":\"{filler}\"}}").into_bytes(),
            3 => ["[".repeat(2_000), "]".repeat(2_000)].concat().into_bytes(),
            4 => [b"{\"prompt\":\"\xff\xfe\xc3".to_vec(), filler.into_bytes(), b"\"}".to_vec()].concat(),
            5 => format!("  {{ \"messages\" : [ {{\"role\":\"user\",\"content\":\"\\ud800 {filler}\"}} ] }}\r\n\r\n").into_bytes(),
            6 => format!("NaN {filler} \0 \r\n0\r\n\r\n").into_bytes(),
            7 => [b"\x1f\x8b\x08\0\0\0\0\0\0\x03".to_vec(), self.bytes(size)].concat(),
            8 => format!("data: {filler}\n\ndata: [DONE]\n\n").into_bytes(),
            _ => format!("{{\"model\":\"m\",\"stream\":true,\"é\":\"{filler}\"").into_bytes(),
        }
    }

    /// A body in HTTP/1.1 framing: in chunks of random sizes or with its length; sometimes with
    /// trailers.
    fn framed(&mut self, body: &[u8]) -> (String, Vec<u8>, Vec<String>) {
        match self.roll(3) {
            0 => (format!("content-length: {}\r\n", body.len()), body.to_vec(), Vec::new()),
            style => {
                let mut framed = Vec::new();
                let mut rest = body;
                while !rest.is_empty() {
                    let cut = 1 + self.roll(rest.len().min(30_000));
                    framed.extend(chunk(&rest[..cut]));
                    rest = &rest[cut..];
                }
                framed.extend_from_slice(b"0\r\n");
                let mut head = "transfer-encoding: chunked\r\n".to_owned();
                let mut trailers = Vec::new();
                if style == 2 {
                    let sum = format!("x-sum: {}", body.len());
                    framed.extend_from_slice(format!("{sum}\r\n").as_bytes());
                    head.push_str("trailer: x-sum\r\n");
                    trailers.push(sum);
                }
                framed.extend_from_slice(b"\r\n");
                (head, framed, trailers)
            }
        }
    }
}

struct Never;

impl Serve for Never {
    fn serve(&self, exchange: Exchange) -> BoxFuture<'static, Response<Body>> {
        Box::pin(exchange.decline(PassthroughReason::Fault))
    }
}

/// A gateway that reads and judges bodies, up to a limit that some of them exceed.
async fn judging(backend: std::net::SocketAddr) -> Gateway {
    let mut settings = Settings {
        backends: vec![ReplicaSettings {
            speculates: true,
            ..ReplicaSettings::new("b", format!("http://{backend}"))
        }],
        workers: 2,
        ..house::settings(backend)
    };
    settings.limits.speculate_body = 64 << 10;
    let serving: Option<std::sync::Arc<dyn Serve>> = Some(std::sync::Arc::new(Never));
    Gateway::start(settings, serving, None).await.unwrap()
}

#[tokio::test]
async fn five_hundred_bodies_are_passed_through_byte_equal_in_both_directions() {
    let (seen, mut requests) = tokio::sync::mpsc::unbounded_channel();
    let server = Server::start(move |mut wire| {
        let seen = seen.clone();
        async move {
            let mut answers = 0;
            while let Some(request) = wire.message().await {
                answers += 1;
                let mut rng = SplitMix64(request.body.len() as u64 * 31 + answers);
                let mut body = request.body.clone();
                body.reverse();
                let (head, framed, trailers) = rng.framed(&body);
                seen.send((request, body, trailers)).unwrap();
                let head = format!("HTTP/1.1 200 OK\r\nx-kept: as is\r\n{head}\r\n");
                wire.send([head.into_bytes(), framed].concat()).await;
            }
        }
    })
    .await;
    let gateway = judging(server.address).await;
    let mut client = Wire::connect(gateway.addresses[0]).await;
    let mut rng = SplitMix64(7);
    for n in 0..500 {
        let body = rng.body(n);
        let paths = ["/v1/completions", "/v1/chat/completions", "/v1/embeddings?a=%2F&b", "/x//y/../z"];
        let path = paths[rng.roll(paths.len())];
        let encoding = if n % 10 == 7 { "content-encoding: gzip\r\n" } else { "" };
        let (head, framed, trailers) = rng.framed(&body);
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: api\r\nte: trailers\r\nx-case: {n}\r\n{encoding}{head}\r\n"
        );
        let answer = client.ask([head.into_bytes(), framed].concat()).await;
        let (request, sent_back, answer_trailers) = requests.recv().await.unwrap();
        assert_eq!(request.head.target(), ("POST", path), "case {n}");
        assert_eq!(request.head.get("x-case"), Some(n.to_string().as_str()));
        assert!(request.body == body, "case {n}: the request's body changed");
        assert_eq!(request.trailers, trailers, "case {n}");
        assert_eq!(answer.head.status(), 200, "case {n}");
        assert_eq!(answer.head.get("x-kept"), Some("as is"));
        assert!(answer.body == sent_back, "case {n}: the answer's body changed");
        assert_eq!(answer.trailers, answer_trailers, "case {n}");
        assert_eq!(answer.head.get("x-foretell-path"), Some("passthrough"));
    }
}
