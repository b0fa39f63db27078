//! The operator's API: metrics, health, state, and the few switches that work at run time.

pub mod page;

use std::sync::Arc;
use std::time::Duration;

use http::header::{ALLOW, AUTHORIZATION, CONTENT_TYPE, HOST, ORIGIN, WWW_AUTHENTICATE};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::fleet::Replica;
use crate::gateway::Shared;
use crate::http::answer::{error_response, json_response};
use crate::http::body::Body;
use crate::http::body::full;
use crate::http::gather;
use crate::http::request::RequestBody;
use crate::words::Mode;

const BODY: usize = 8 << 20;
/// What can be done with one replica, below this path.
const REPLICA: &str = "/api/replicas/";
const VERBS: [&str; 3] = ["disable", "enable", "reprobe"];

/// One fault in a configuration file.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct FileError {
    /// The file.
    pub file: String,
    /// Line, from 1; 0 if it has none.
    pub line: usize,
    /// Path of the field.
    pub path: String,
    /// What is wrong.
    pub message: String,
}

/// What only the configuration can answer. Everything that is not built answers `None`, and so 404.
pub trait Hooks: Send + Sync {
    /// The entries of `/api/policies`: name, revision, mode, synchronized.
    fn policies(&self) -> Option<Value> {
        None
    }
    /// Takes the files again.
    fn reload(&self) -> Option<Result<Value, Vec<FileError>>> {
        None
    }
    /// Says what would be done with a request body.
    fn explain(&self, _body: &[u8]) -> Option<Result<Value, String>> {
        None
    }
    /// What is known about a replica: epoch, plans, probe.
    fn replica(&self, _replica: &Arc<Replica>) -> Option<Value> {
        None
    }
    /// Measures a replica again; answers when that has begun.
    fn reprobe(&self, _replica: &Arc<Replica>) -> Option<Result<Value, String>> {
        None
    }
}

/// The admin API of a running gateway.
pub struct Admin {
    shared: Shared,
    hooks: Option<Arc<dyn Hooks>>,
    token: Option<String>,
}

impl Admin {
    /// With a token, every request but those of health checks must bring it.
    #[must_use]
    pub fn new(shared: Shared, hooks: Option<Arc<dyn Hooks>>, token: Option<String>) -> Self {
        Self { shared, hooks, token }
    }

    /// Answers on the metrics-only listener.
    pub fn answer_metrics(&self, request: &Request<RequestBody>) -> Response<Body> {
        match (request.method(), request.uri().path()) {
            (&Method::GET, "/metrics") => self.metrics(),
            _ => not_found(),
        }
    }

    /// Answers on the admin listener.
    pub async fn answer(self: Arc<Self>, request: Request<RequestBody>) -> Response<Body> {
        let (parts, body) = request.into_parts();
        let path = parts.uri.path();
        match path {
            "/healthz" => return text("ok"),
            "/readyz" => return self.ready(),
            _ => {}
        }
        if !self.allowed(&parts.headers) {
            let mut refused = error_response(
                StatusCode::UNAUTHORIZED,
                "the admin token is missing or wrong",
                None,
                "unauthorized",
            );
            refused.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            return refused;
        }
        if parts.method == Method::POST && from_a_page(&parts.headers) {
            let message = "requests of web pages are refused";
            return error_response(StatusCode::FORBIDDEN, message, None, "forbidden");
        }
        match (&parts.method, path) {
            (&Method::GET, "/metrics") => self.metrics(),
            (&Method::GET, "/") => self.page(),
            (&Method::GET, "/api/sessions") => {
                json_response(StatusCode::OK, &json!({ "sessions": self.shared.observer.recent().to_json() }))
            }
            (&Method::GET, "/api/replicas") => json_response(StatusCode::OK, &self.replicas()),
            (&Method::GET, "/api/policies") => self.policies(),
            (&Method::POST, "/api/mode") => self.mode(body).await,
            (&Method::POST, "/api/reload") => self.reload(),
            (&Method::POST, "/api/explain") => self.explain(body).await,
            (&Method::POST, "/api/drain") => self.drain(parts.uri.query()).await,
            (method, path) if path.starts_with(REPLICA) => self.replica(method, path),
            (_, "/" | "/metrics" | "/api/sessions" | "/api/replicas" | "/api/policies") => not_allowed("GET"),
            (_, "/api/mode" | "/api/reload" | "/api/explain" | "/api/drain") => not_allowed("POST"),
            _ => not_found(),
        }
    }

    fn allowed(&self, headers: &HeaderMap) -> bool {
        let Some(token) = &self.token else { return is_local(headers) };
        let given = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
        let given = given.and_then(|value| value.strip_prefix("Bearer ")).unwrap_or_default();
        same(given.as_bytes(), token.as_bytes())
    }

    fn ready(&self) -> Response<Body> {
        if self.shared.life.is_ready() {
            return text("ready");
        }
        let mut response = text(if self.shared.life.is_draining() { "draining" } else { "starting" });
        *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
        response
    }

    fn metrics(&self) -> Response<Body> {
        let metrics = self.shared.observer.metrics();
        let mut response = Response::new(full(metrics.text()));
        let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
        response.headers_mut().insert(CONTENT_TYPE, kind);
        response
    }

    fn page(&self) -> Response<Body> {
        let mut response = Response::new(full(page::render(&self.shared)));
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8"));
        response
    }

    fn replicas(&self) -> Value {
        let replicas = self.shared.fleet.replicas();
        json!({ "replicas": replicas.iter().map(|replica| self.shown(replica)).collect::<Vec<_>>() })
    }

    fn shown(&self, replica: &Arc<Replica>) -> Value {
        let load = replica.load().map(|load| {
            json!({
                "running": load.running,
                "waiting": load.waiting,
                "kv_usage": load.kv_usage,
                "age_seconds": load.at.elapsed().as_secs_f64(),
            })
        });
        let mut shown = json!({
            "name": replica.label(),
            "backend": replica.name(),
            "url": replica.url(),
            "rank": replica.rank(),
            "dialect": *replica.dialect(),
            "epoch": null,
            "up": replica.is_up(),
            "state": replica.standing().name(),
            "breaker": replica.breaker().name(),
            "in_flight": replica.in_flight(),
            "plans": [],
            "load": load,
            "probe": null,
        });
        let known = self.hooks.as_ref().and_then(|hooks| hooks.replica(replica));
        if let (Some(shown), Some(Value::Object(known))) = (shown.as_object_mut(), known) {
            shown.extend(known);
        }
        shown
    }

    /// `/api/replicas/{n}/disable|enable|reprobe`: `n` is the place in `/api/replicas`, from 0.
    fn replica(&self, method: &Method, path: &str) -> Response<Body> {
        let asked = path.strip_prefix(REPLICA).and_then(|rest| rest.split_once('/'));
        let Some((number, verb)) = asked.filter(|(_, verb)| VERBS.contains(verb)) else { return not_found() };
        if method != Method::POST {
            return not_allowed("POST");
        }
        let replicas = self.shared.fleet.replicas();
        let Some(replica) = number.parse().ok().and_then(|number: usize| replicas.get(number)) else {
            return not_found();
        };
        if verb == "reprobe" {
            return match self.hooks.as_ref().and_then(|hooks| hooks.reprobe(replica)) {
                None => not_found(),
                Some(Ok(done)) => json_response(StatusCode::OK, &done),
                Some(Err(message)) => error_response(StatusCode::CONFLICT, &message, None, "conflict"),
            };
        }
        replica.disable(verb == "disable");
        tracing::info!(replica = replica.label(), verb, "replica switched");
        json_response(StatusCode::OK, &self.shown(replica))
    }

    fn policies(&self) -> Response<Body> {
        match self.hooks.as_ref().and_then(|hooks| hooks.policies()) {
            Some(policies) => json_response(StatusCode::OK, &json!({ "policies": policies })),
            None => not_found(),
        }
    }

    fn reload(&self) -> Response<Body> {
        match self.hooks.as_ref().and_then(|hooks| hooks.reload()) {
            None => not_found(),
            Some(Ok(done)) => json_response(StatusCode::OK, &done),
            Some(Err(errors)) => {
                json_response(StatusCode::UNPROCESSABLE_ENTITY, &json!({ "errors": errors }))
            }
        }
    }

    async fn explain(&self, body: RequestBody) -> Response<Body> {
        let Some(hooks) = &self.hooks else { return not_found() };
        let body = match read(body).await {
            Ok(body) => body,
            Err(refused) => return refused,
        };
        match hooks.explain(&body) {
            None => not_found(),
            Some(Ok(explained)) => json_response(StatusCode::OK, &explained),
            Some(Err(message)) => bad_request(&message, None),
        }
    }

    async fn mode(&self, body: RequestBody) -> Response<Body> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Wanted {
            mode: Mode,
            backend: Option<String>,
            ttl: Option<String>,
        }
        let body = match read(body).await {
            Ok(body) => body,
            Err(refused) => return refused,
        };
        let wanted: Wanted = match serde_json::from_slice(&body) {
            Ok(wanted) => wanted,
            Err(error) => return bad_request(&error.to_string(), None),
        };
        let known = |name: &String| self.shared.fleet.names().any(|known| known == name);
        if wanted.backend.as_ref().is_some_and(|name| !known(name)) {
            return bad_request("no such backend", Some("backend"));
        }
        let ttl = wanted.ttl.as_deref().map(duration);
        if ttl == Some(None) {
            return bad_request("allowed a number and ms, s, m or h", Some("ttl"));
        }
        self.shared.modes.set(wanted.mode, wanted.backend.as_deref(), ttl.flatten());
        tracing::info!(mode = wanted.mode.name(), backend = wanted.backend, ttl = wanted.ttl, "mode set");
        let now =
            wanted.backend.as_deref().map_or(self.shared.modes.process(), |name| self.shared.modes.of(name));
        let set = json!({ "mode": now.name(), "backend": wanted.backend, "ttl": wanted.ttl });
        json_response(StatusCode::OK, &set)
    }

    async fn drain(&self, query: Option<&str>) -> Response<Body> {
        self.shared.life.drain();
        let wait = query.unwrap_or_default().split('&').any(|pair| pair == "wait=1");
        if wait {
            self.shared.life.emptied().await;
        }
        json_response(StatusCode::OK, &json!({ "draining": true, "empty": wait }))
    }
}

async fn read(body: RequestBody) -> Result<Vec<u8>, Response<Body>> {
    gather::whole(body, BODY).await.map_err(|error| bad_request(&error.to_string(), None))
}

/// Compares in the same time wherever the difference is.
fn same(given: &[u8], wanted: &[u8]) -> bool {
    given.len() == wanted.len() && given.iter().zip(wanted).fold(0, |all, (a, b)| all | (a ^ b)) == 0
}

/// Whether the client names this machine: a web page that had its own name point here would not.
fn is_local(headers: &HeaderMap) -> bool {
    let Some(host) = headers.get(HOST).and_then(|host| host.to_str().ok()) else { return true };
    let Ok(host) = host.parse::<http::uri::Authority>() else { return false };
    let name = host.host().trim_start_matches('[').trim_end_matches(']');
    name.eq_ignore_ascii_case("localhost") || name.parse::<std::net::IpAddr>().is_ok()
}

/// Whether a browser sends it on behalf of a page.
fn from_a_page(headers: &HeaderMap) -> bool {
    headers.contains_key(ORIGIN)
}

/// Reads `\d+(ms|s|m|h)`.
pub fn duration(text: &str) -> Option<Duration> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at_checked(digits)?;
    let number: u64 = number.parse().ok()?;
    let millis = match unit {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return None,
    };
    number.checked_mul(millis).map(Duration::from_millis)
}

fn text(words: &'static str) -> Response<Body> {
    let mut response = Response::new(full(words));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    response
}

fn bad_request(message: &str, param: Option<&str>) -> Response<Body> {
    error_response(StatusCode::BAD_REQUEST, message, param, "invalid_request")
}

fn not_found() -> Response<Body> {
    error_response(StatusCode::NOT_FOUND, "not found", None, "not_found")
}

fn not_allowed(allow: &'static str) -> Response<Body> {
    let mut response =
        error_response(StatusCode::METHOD_NOT_ALLOWED, "method not allowed", None, "method_not_allowed");
    response.headers_mut().insert(ALLOW, HeaderValue::from_static(allow));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[rstest::rstest]
    #[case("250ms", Some(250))]
    #[case("5m", Some(300_000))]
    #[case("1h", Some(3_600_000))]
    #[case("s", None)]
    #[case("5", None)]
    #[case("-5s", None)]
    #[case("99999999999999999h", None)]
    fn durations_are_a_number_and_a_unit(#[case] text: &str, #[case] millis: Option<u64>) {
        assert_eq!(duration(text), millis.map(Duration::from_millis));
    }

    #[rstest::rstest]
    #[case(None, true)]
    #[case(Some("127.0.0.1:9464"), true)]
    #[case(Some("localhost"), true)]
    #[case(Some("[::1]:9464"), true)]
    #[case(Some("evil.example"), false)]
    fn only_this_machines_own_names_reach_a_listener_without_token(
        #[case] host: Option<&str>,
        #[case] ok: bool,
    ) {
        let headers = host.map(|host| (HOST, host.parse().unwrap())).into_iter().collect();
        assert_eq!(is_local(&headers), ok);
    }

    #[test]
    fn a_token_is_right_only_as_a_whole() {
        assert!(same(b"abc", b"abc"));
        assert!(!same(b"abd", b"abc") && !same(b"ab", b"abc") && !same(b"", b"abc"));
    }
}
