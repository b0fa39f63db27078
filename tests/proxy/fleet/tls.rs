//! TLS on both ends, with a test authority: names are checked, unknown clients are refused.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use foretell::app::Gateway;
use foretell::app::local;
use foretell_net::fleet::{ReplicaSettings, tls};
use foretell_net::http::listen::Endpoint;
use foretell_proxy::gateway::Settings;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::discovery::Script;
use super::house::{self, Replica, ask};
use crate::wire::PATIENCE;

/// An authority and its certificates, as files.
struct Papers {
    dir: tempfile::TempDir,
    authority: CertifiedIssuer<'static, KeyPair>,
}

impl Papers {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        std::fs::write(dir.path().join("ca.pem"), authority.pem()).unwrap();
        let papers = Self { dir, authority };
        for name in ["localhost", "client"] {
            papers.sign(name);
        }
        papers
    }

    /// Signs another certificate for this name, which replaces the one in the file.
    fn sign(&self, name: &str) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.authority).unwrap();
        for (end, text) in [("pem", certificate.pem()), ("key", key.serialize_pem())] {
            std::fs::write(self.path(&format!("{name}.new")), text).unwrap();
            std::fs::rename(self.path(&format!("{name}.new")), self.path(&format!("{name}.{end}"))).unwrap();
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

/// A gateway that clients reach by TLS only, with a certificate of the test authority.
async fn guarded(papers: &Papers, behind: &Replica) -> Gateway {
    let ca = papers.path("ca.pem");
    let tls = tls::server(&papers.path("localhost.pem"), &papers.path("localhost.key"), Some(&ca)).unwrap();
    let mut settings = house::settings(house::backends(&[behind.address]));
    settings.listen = vec![Endpoint { address: ([127, 0, 0, 1], 0).into(), tls: Some(tls) }];
    house::start(settings).await
}

/// The status that a client gets through a gateway whose backend is `url`.
async fn through(url: String, ca: &Path, identity: Option<(&Path, &Path)>) -> (u16, String) {
    let tls = Some(tls::client(Some(ca), identity).unwrap());
    let backend = ReplicaSettings { tls, ..ReplicaSettings::new("b", url) };
    let gateway = house::start(house::settings(vec![backend])).await;
    let answer = ask(&gateway, house::completion()).await;
    (answer.head.status(), answer.text())
}

#[tokio::test]
async fn a_backend_is_verified_by_authority_and_name_and_requires_a_client_certificate() {
    let (papers, strangers) = (Papers::new(), Papers::new());
    let mut replica = Replica::saying("behind").await;
    let guarded = guarded(&papers, &replica).await;
    let port = guarded.addresses[0].port();
    let (ca, own) = (papers.path("ca.pem"), (papers.path("client.pem"), papers.path("client.key")));
    let identity = || Some((own.0.as_path(), own.1.as_path()));
    let by_name = || format!("https://localhost:{port}");
    assert_eq!(through(by_name(), &ca, identity()).await, (200, "behind".to_owned()));
    let request = replica.next().await.unwrap();
    assert_eq!(request.head.get("x-forwarded-proto"), Some("http"), "the scheme of the first proxy's client");
    let refused = |got: (u16, String)| assert_eq!(got.0, 502, "{}", got.1);
    refused(through(format!("https://127.0.0.1:{port}"), &ca, identity()).await);
    refused(through(by_name(), &strangers.path("ca.pem"), identity()).await);
    refused(through(by_name(), &ca, None).await);
    let stranger = (strangers.path("client.pem"), strangers.path("client.key"));
    refused(through(by_name(), &ca, Some((&stranger.0, &stranger.1))).await);
    refused(through(format!("http://localhost:{port}"), &ca, None).await);
    assert_eq!(replica.requests().len(), 0);
}

#[tokio::test]
async fn behind_a_name_the_certificate_must_be_the_names() {
    let papers = Papers::new();
    let replica = Replica::saying("behind").await;
    let guarded = guarded(&papers, &replica).await;
    let (cert, key) = (papers.path("client.pem"), papers.path("client.key"));
    for (name, status) in [("localhost", 200), ("pods.test", 502)] {
        let backend = ReplicaSettings {
            tls: Some(tls::client(Some(&papers.path("ca.pem")), Some((&cert, &key))).unwrap()),
            discover: Some(std::time::Duration::from_mins(1)),
            ..ReplicaSettings::new("b", format!("https://{name}:8000"))
        };
        let resolver = Script::says_for(name, &[guarded.addresses[0]]);
        let gateway = house::start(Settings { resolver, ..house::settings(vec![backend]) }).await;
        assert_eq!(ask(&gateway, house::completion()).await.head.status(), status, "{name}");
    }
}

async fn connect(gateway: &Gateway, papers: &Papers, protocol: &[u8]) -> TlsStream<TcpStream> {
    let own = (papers.path("client.pem"), papers.path("client.key"));
    let config = tls::client(Some(&papers.path("ca.pem")), Some((&own.0, &own.1))).unwrap();
    let mut config = rustls::ClientConfig::clone(&config);
    config.alpn_protocols = vec![protocol.to_vec()];
    let stream = TcpStream::connect(gateway.addresses[0]).await.unwrap();
    let name = ServerName::try_from("localhost").unwrap();
    TlsConnector::from(Arc::new(config)).connect(name, stream).await.unwrap()
}

#[tokio::test]
async fn a_listener_with_tls_speaks_both_versions_of_http() {
    let papers = Papers::new();
    let mut replica = Replica::saying("behind").await;
    let gateway = guarded(&papers, &replica).await;
    let request = || {
        let body = Full::new(bytes::Bytes::from_static(b"{}"));
        // This client adds no fields: HTTP/1.1 without a Host would be refused.
        http::Request::post("https://localhost/v1/embeddings").header("host", "localhost").body(body).unwrap()
    };
    let stream = connect(&gateway, &papers, b"h2").await;
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let answer = sender.send_request(request()).await.unwrap();
    assert_eq!(answer.into_body().collect().await.unwrap().to_bytes(), "behind");
    let stream = connect(&gateway, &papers, b"http/1.1").await;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let answer = sender.send_request(request()).await.unwrap();
    assert_eq!(answer.into_body().collect().await.unwrap().to_bytes(), "behind");
    for _ in 0..2 {
        let request = replica.next().await.unwrap();
        assert_eq!(request.head.get("x-forwarded-proto"), Some("https"));
    }
}

#[tokio::test]
async fn the_config_file_names_the_certificates_of_both_ends() {
    let papers = Papers::new();
    let replica = Replica::saying("behind").await;
    let show = |name: &str| papers.path(name).display().to_string();
    let front = format!(
        "version: 1\nlisten: [{{ address: \"127.0.0.1:1\", tls: {{ cert: \"{}\", key: \"{}\", client_ca: \"{}\" }} }}]\n\
         backends: [{{ name: b, engine: ollama, replicas: [\"http://{}\"] }}]\n",
        show("localhost.pem"),
        show("localhost.key"),
        show("ca.pem"),
        replica.address
    );
    let front = local::proxy(&front, &[]).await.unwrap();
    let before = |cert: &str| {
        format!(
            "version: 1\nbackends:\n  - name: b\n    engine: ollama\n    replicas: {{ dns: \"localhost:{}\", scheme: https }}\n    \
             connect: {{ tls: {{ ca: \"{}\", cert: \"{cert}\", key: \"{}\" }} }}\n",
            front.gateway.addresses[0].port(),
            show("ca.pem"),
            show("client.key"),
        )
    };
    let running = local::proxy(&before(&show("client.pem")), &[]).await.unwrap();
    // `localhost` may have an IPv6 address too, without a listener.
    assert_eq!(ask(&running.gateway, house::completion()).await.text(), "behind");
    let Err(error) = local::proxy(&before(&show("missing.pem")), &[]).await else { panic!("it started") };
    assert!(error.to_string().contains("missing.pem"), "{error}");
}

/// The certificate of a listener, and the one of its client.
#[tokio::test]
async fn a_replaced_certificate_is_used_without_a_restart() {
    let papers = Papers::new();
    let replica = Replica::saying("behind").await;
    let gateway = guarded(&papers, &replica).await;
    let shown = |stream: &TlsStream<TcpStream>| stream.get_ref().1.peer_certificates().unwrap()[0].clone();
    let old = shown(&connect(&gateway, &papers, b"h2").await);
    assert_eq!(old, tls::certificates(&papers.path("localhost.pem")).unwrap()[0]);
    // An unusable one changes nothing.
    let key = std::fs::read(papers.path("localhost.key")).unwrap();
    std::fs::write(papers.path("localhost.key"), "half a ke").unwrap();
    tokio::time::sleep(std::time::Duration::from_millis(1100)).await;
    assert_eq!(shown(&connect(&gateway, &papers, b"h2").await), old);
    std::fs::write(papers.path("localhost.key"), key).unwrap();

    papers.sign("localhost");
    let new = tls::certificates(&papers.path("localhost.pem")).unwrap()[0].clone();
    tokio::time::timeout(PATIENCE, async {
        while shown(&connect(&gateway, &papers, b"h2").await) != new {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    })
    .await
    .expect("the new one is used");
}
