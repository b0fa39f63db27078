//! A server over loopback, and a client for it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use foretell::app::served;
use foretell_net::http::listen::Stop;
use foretell_onnx::forward::Forward;
use foretell_onnx::target::metrics::Metrics;
use foretell_onnx::target::scheduler::Engine;
use foretell_onnx::target::server::App;
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client as Legacy;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;
use tokio::net::TcpListener;

use super::fake::{Bytes as ByteWords, Fake, Watch};

pub struct Server {
    pub address: SocketAddr,
    pub watch: Watch,
    client: Legacy<HttpConnector, Full<Bytes>>,
    stop: Stop,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.accept.cancel();
        self.stop.cut.cancel();
    }
}

pub async fn serve(model: Fake) -> Server {
    let watch = model.watch.clone();
    serve_as(Box::new(model), watch).await
}

/// Serves a fake inside of another model.
pub async fn serve_as(model: Box<dyn Forward>, watch: Watch) -> Server {
    let metrics = Arc::new(Metrics::new().unwrap());
    let engine = Engine::start(model, Arc::clone(&metrics)).unwrap();
    serve_app(App::new("toy".into(), engine, Arc::new(ByteWords), metrics), watch).await
}

pub async fn serve_app(app: App, watch: Watch) -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let stop = Stop::default();
    tokio::spawn(served::serve(app, listener, stop.clone()));
    let client = Legacy::builder(TokioExecutor::new()).build_http();
    Server { address, watch, client, stop }
}

impl Server {
    pub async fn send(&self, method: Method, path: &str, body: impl Into<Bytes>) -> (StatusCode, Incoming) {
        let uri = format!("http://{}{path}", self.address);
        let request = Request::builder().method(method).uri(uri).body(Full::new(body.into())).unwrap();
        let answer = tokio::time::timeout(Duration::from_secs(30), self.client.request(request));
        let (head, body) = answer.await.expect("no answer in time").unwrap().into_parts();
        (head.status, body)
    }

    pub async fn get(&self, path: &str) -> (StatusCode, String) {
        let (status, body) = self.send(Method::GET, path, "").await;
        (status, String::from_utf8(body.collect().await.unwrap().to_bytes().to_vec()).unwrap())
    }

    pub async fn post(&self, path: &str, body: &Value) -> (StatusCode, Value) {
        let (status, body) = self.send(Method::POST, path, body.to_string()).await;
        let body =
            tokio::time::timeout(Duration::from_secs(30), body.collect()).await.expect("no body in time");
        (status, serde_json::from_slice(&body.unwrap().to_bytes()).unwrap())
    }

    /// The answer to a request that must succeed.
    pub async fn ask(&self, path: &str, body: &Value) -> Value {
        let (status, answer) = self.post(path, body).await;
        assert_eq!(status, StatusCode::OK, "{answer}");
        answer
    }

    /// All events of a stream that must succeed and end with `[DONE]`.
    pub async fn stream(&self, path: &str, body: &Value) -> Vec<Value> {
        let (status, body) = self.send(Method::POST, path, body.to_string()).await;
        assert_eq!(status, StatusCode::OK);
        let text = String::from_utf8(body.collect().await.unwrap().to_bytes().to_vec()).unwrap();
        let mut events: Vec<&str> = text
            .split("\n\n")
            .filter(|event| !event.is_empty())
            .map(|event| event.strip_prefix("data: ").unwrap())
            .collect();
        assert_eq!(events.pop(), Some("[DONE]"));
        events.into_iter().map(|event| serde_json::from_str(event).unwrap()).collect()
    }

    /// The value of a metric.
    pub async fn metric(&self, name: &str) -> f64 {
        let (_, text) = self.get("/metrics").await;
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name} ")));
        line.unwrap_or_else(|| panic!("no {name} in {text}")).parse().unwrap()
    }
}

/// The text of a choice's stream.
pub fn text_of(events: &[Value], index: usize) -> String {
    choices(events, index)
        .map(|choice| choice["text"].as_str().or(choice["delta"]["content"].as_str()).unwrap())
        .collect()
}

/// The token ids of a choice's stream.
pub fn ids_of(events: &[Value], index: usize) -> Vec<u32> {
    choices(events, index).flat_map(|choice| ids(&choice["token_ids"])).collect()
}

pub fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

pub fn choices(events: &[Value], index: usize) -> impl Iterator<Item = &Value> {
    let all = events.iter().flat_map(|event| event["choices"].as_array().unwrap());
    all.filter(move |choice| choice["index"] == index)
}
