//! One request, and its path and reason in every report about it.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::proxy::Proxy;
use crate::wire::{Message, Wire, post};

/// `foretell_requests_total` by `path/reason`.
type Counters = BTreeMap<String, u64>;

/// A request of a client.
#[derive(Clone, Debug)]
pub struct Ask {
    pub path: &'static str,
    /// More lines of its head.
    pub fields: &'static str,
    pub body: Body,
}

/// Its body.
#[derive(Clone, Debug)]
pub enum Body {
    /// A completion, which can be requested whole and as a stream.
    Json(Value),
    Raw(&'static str),
}

impl Ask {
    pub fn bytes(&self, stream: bool, id: &str) -> Vec<u8> {
        let fields = format!("x-request-id: {id}\r\nte: trailers\r\n{}", self.fields);
        match &self.body {
            Body::Raw(raw) => post(self.path, &fields, raw.as_bytes()),
            Body::Json(body) => {
                let mut body = body.clone();
                body["stream"] = json!(stream);
                if stream {
                    body["stream_options"] = json!({"include_usage": true});
                }
                post(self.path, &fields, body.to_string().as_bytes())
            }
        }
    }

    /// Sends it and collects the reports about it.
    pub async fn told(&self, proxy: &Proxy, stream: bool, id: &str) -> Told {
        let before = counters(proxy).await;
        let message = Wire::connect(proxy.front).await.ask(self.bytes(stream, id)).await;
        // The record is written after the last byte is sent; the counters rise before the line.
        let line = proxy.line_of(id).await;
        let mut risen = counters(proxy).await;
        for (name, value) in &mut risen {
            *value -= before.get(name).copied().unwrap_or(0);
        }
        risen.retain(|_, risen| *risen > 0);
        Told { message, stream, line, risen }
    }
}

/// The reports about one request.
#[derive(Debug)]
pub struct Told {
    message: Message,
    stream: bool,
    line: Value,
    risen: Counters,
}

impl Told {
    /// Its path and reason in the log, as `path/reason`.
    pub fn way(&self) -> String {
        format!("{}/{}", self.line["path"].as_str().unwrap(), self.line["reason"].as_str().unwrap_or("none"))
    }

    /// Asserts that answer and metrics agree with the log.
    pub fn assert_agreed(&self) {
        let (path, reason) = (self.line["path"].as_str().unwrap(), self.line["reason"].as_str());
        let passthrough = path == "passthrough";
        let risen = (format!("{path}/{}", reason.unwrap_or("none")), 1);
        assert_eq!(self.risen, Counters::from_iter([risen]), "{self:?}");
        let heads = (self.message.head.get("x-foretell-path"), self.message.head.get("x-foretell-reason"));
        if passthrough {
            assert_eq!(heads, (Some(path), reason), "{self:?}");
            return assert_eq!(self.foretell(), Value::Null, "{self:?}");
        }
        let foretell = self.foretell();
        if path == "speculated" {
            assert_eq!((&foretell["path"], &foretell["reason"]), (&json!(path), &json!(reason)), "{self:?}");
        } else {
            assert_eq!(foretell, Value::Null, "an answer that stayed plain is the backend's own: {self:?}");
        }
        // An error is no stream, whatever was asked for.
        if self.stream && self.message.head.status() == 200 {
            assert_eq!(heads, (Some("eligible"), None), "{self:?}");
            let trailers = (self.trailer("x-foretell-path"), self.trailer("x-foretell-reason"));
            assert_eq!(trailers, (Some(path), reason), "{self:?}");
        } else {
            assert_eq!(heads, (Some(path), reason), "{self:?}");
        }
    }

    fn trailer(&self, name: &str) -> Option<&str> {
        let named = |line: &'_ String| line.split_once(": ").is_some_and(|(found, _)| found == name);
        let line = self.message.trailers.iter().find(|line| named(line))?;
        line.split_once(": ").map(|(_, value)| value)
    }

    /// `usage.foretell` of a whole answer, or of the last event of a stream that has one.
    fn foretell(&self) -> Value {
        let text = self.message.text();
        let events = text.split("\n\n").map(|event| event.strip_prefix("data: ").unwrap_or(event));
        let answers = events.filter_map(|event| serde_json::from_str::<Value>(event).ok());
        let foretell = answers.map(|answer| answer["usage"]["foretell"].clone());
        foretell.filter(|foretell| !foretell.is_null()).last().unwrap_or(Value::Null)
    }
}

/// All counters of reasons now.
async fn counters(proxy: &Proxy) -> Counters {
    let page = proxy.get("/metrics").await.text();
    let mut counters = Counters::new();
    for line in page.lines().filter_map(|line| line.strip_prefix("foretell_requests_total{")) {
        let label = |name: &str| line.split_once(&format!("{name}=\"")).unwrap().1.split_once('"').unwrap().0;
        let reason = Some(label("reason")).filter(|reason| !reason.is_empty()).unwrap_or("none");
        let value: u64 = line.rsplit_once(' ').unwrap().1.parse().unwrap();
        *counters.entry(format!("{}/{reason}", label("path"))).or_default() += value;
    }
    counters
}
