//! The admin API: metrics, health checks, state, and the settings that can be changed at run time.

pub mod configured;
mod corpus;
pub mod explain;
mod guard;
mod page;
pub mod status;

use std::sync::Arc;

use bytes::Bytes;
use futures_util::FutureExt;
use http::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, WWW_AUTHENTICATE, X_CONTENT_TYPE_OPTIONS};
use http::{HeaderValue, Method, Request, Response, StatusCode, request};
use serde::Deserialize;
use serde_json::{Value, json};
use tower::ServiceBuilder;
use tower_http::set_header::SetResponseHeaderLayer;

pub use configured::{Configured, Known, ReloadSource};
use explain::Question;
pub use guard::Guard;

use foretell_config::problem::Problem;
use foretell_config::values;
use foretell_core::words::Mode;
use foretell_drafts::totals::Totals;
use foretell_net::clock::unix_time;
use foretell_net::fleet::Replica;
use foretell_net::fleet::first_calls::PassedThrough;
use foretell_net::http::answer::{error_response, json_response};
use foretell_net::http::body::Body;
use foretell_net::http::body::full;
use foretell_net::http::gather::{self, Gathered, Stopped};
use foretell_net::http::listen::App;
use foretell_net::http::request::RequestBody;
use foretell_proxy::gateway::Shared;
use foretell_proxy::serving::failure::Failure;

const BODY: usize = 8 << 20;
/// Prefix of the paths of single completions.
const SESSION: &str = "/api/sessions/";
/// Prefix of the paths of one replica's actions.
const REPLICA: &str = "/api/replicas/";
const VERBS: [&str; 3] = ["disable", "enable", "reprobe"];

/// A problem in a configuration file, as the answer of a reload lists it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct FileError {
    pub file: String,
    /// Line, counted from 1; 0 if the problem has no line.
    pub line: usize,
    /// Path of the setting, such as `drafters[0].model`.
    pub path: String,
    /// The fault, the allowed values and the value found.
    pub message: String,
}

impl From<&Problem> for FileError {
    fn from(problem: &Problem) -> Self {
        Self {
            file: problem.file.clone(),
            line: problem.line.map_or(0, |line| usize::try_from(line).unwrap_or(usize::MAX)),
            path: problem.path.clone(),
            message: problem.explanation(),
        }
    }
}

/// The admin API of a running gateway.
pub struct Admin {
    shared: Shared,
    configured: Option<Arc<Configured>>,
    guard: Guard,
}

/// Body of the answer of `/readyz`.
const READY: &str = "ready";

impl Admin {
    /// Requests are checked against `guard`. Without `configured`, paths that need the
    /// configuration answer 404.
    #[must_use]
    pub fn new(shared: Shared, configured: Option<Arc<Configured>>, guard: Guard) -> Self {
        Self { shared, configured, guard }
    }

    /// Answers a request on the metrics-only listener: for scrapers and health checks from outside
    /// of the pod or machine.
    pub fn answer_metrics(&self, request: &Request<RequestBody>) -> Response<Body> {
        match (request.method(), request.uri().path()) {
            (&Method::GET, "/metrics") => self.metrics(),
            (_, "/healthz") => text("ok"),
            (_, "/readyz") => self.ready(),
            _ => not_found(),
        }
    }

    /// The admin listener's service: no answer may be cached, or read as another content type.
    pub fn layered(self: Arc<Self>) -> impl App {
        let set = |name, value| SetResponseHeaderLayer::overriding(name, HeaderValue::from_static(value));
        ServiceBuilder::new()
            .layer(set(CACHE_CONTROL, "no-store"))
            .layer(set(X_CONTENT_TYPE_OPTIONS, "nosniff"))
            .service_fn(move |request| Arc::clone(&self).answer(request).map(Ok))
    }

    async fn answer(self: Arc<Self>, request: Request<RequestBody>) -> Response<Body> {
        let (parts, body) = request.into_parts();
        let path = parts.uri.path();
        match path {
            "/healthz" => return text("ok"),
            "/readyz" => return self.ready(),
            _ => {}
        }
        // The page prompts for the token, so it is served without one; it contains no data of the
        // process.
        if let Some(file) = page::file(path) {
            return match self.guard.stranger(&parts) {
                Some(refused) => refused,
                None if parts.method == Method::GET => file.response(),
                None => not_allowed("GET"),
            };
        }
        if let Some(refused) = self.guard.refusal(&parts) {
            return refused;
        }
        match (&parts.method, path) {
            (&Method::GET, "/metrics") => self.metrics(),
            (&Method::GET, "/api/status") => self.status(parts.uri.query()),
            (&Method::GET, "/api/sessions") => self.sessions(parts.uri.query()),
            (&Method::GET, "/api/coverage") => self.coverage(),
            (&Method::GET, "/api/replicas") => json_response(StatusCode::OK, &self.replicas()),
            (&Method::GET, "/api/policies") => self.policies(),
            (&Method::GET, "/api/corpus") => match &self.configured {
                Some(configured) => corpus::shown(configured.corpus()),
                None => not_found(),
            },
            (&Method::POST, "/api/corpus/clear") => match &self.configured {
                Some(configured) => match read(body).await {
                    Ok(body) => corpus::cleared(configured.corpus(), parts.uri.query(), &body).await,
                    Err(refused) => refused,
                },
                None => not_found(),
            },
            (&Method::POST, "/api/mode") => self.mode(body).await,
            (&Method::POST, "/api/reload") => self.reload().await,
            (&Method::POST, "/api/explain") => self.explain(&parts, body).await,
            (&Method::POST, "/api/drain") => self.drain(parts.uri.query()).await,
            (method, path) if path.starts_with(REPLICA) => self.replica(method, path),
            (&Method::GET, path) if path.starts_with(SESSION) => self.session(path),
            (_, path) if path.starts_with(SESSION) => not_allowed("GET"),
            (
                _,
                "/metrics" | "/api/status" | "/api/sessions" | "/api/coverage" | "/api/replicas"
                | "/api/policies" | "/api/corpus",
            ) => not_allowed("GET"),
            (_, "/api/mode" | "/api/reload" | "/api/explain" | "/api/drain" | "/api/corpus/clear") => {
                not_allowed("POST")
            }
            _ => not_found(),
        }
    }

    fn ready(&self) -> Response<Body> {
        let Some(why) = self.shared.unready() else {
            return text(self.ready_words());
        };
        let mut response = text(why);
        *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
        response
    }

    /// The words for a process that is ready, with its faults as on the status page.
    fn ready_words(&self) -> String {
        let in_force = self.configured.as_ref().is_none_or(|configured| configured.is_synchronized());
        let out = self.shared.fleet.out();
        let outage = (!out.is_empty()).then(|| format!("; outage: {}", out.join(", ")));
        let files = (!in_force).then_some("; the configuration's files are not in force");
        format!("{READY}{}{}", outage.unwrap_or_default(), files.unwrap_or_default())
    }

    fn metrics(&self) -> Response<Body> {
        let metrics = self.shared.observer.metrics();
        let mut response = Response::new(full(metrics.text()));
        let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
        response.headers_mut().insert(CONTENT_TYPE, kind);
        response
    }

    /// `GET /api/status?after=N`: the state that changes all the time, with the samples after
    /// number N.
    fn status(&self, query: Option<&str>) -> Response<Body> {
        let after = query.map_or(Some("0"), |query| query.strip_prefix("after="));
        let Some(Ok(after)) = after.map(str::parse) else {
            return bad_request("allowed after=NUMBER, or nothing", Some("after"));
        };
        json_response(StatusCode::OK, &status::shown(&self.shared, self.configured.as_deref(), after))
    }

    /// `GET /api/sessions`, with `?rounds=no` without the single rounds.
    fn sessions(&self, query: Option<&str>) -> Response<Body> {
        let recent = self.shared.observer.recent();
        let sessions = match query {
            None => recent.to_json(),
            Some("rounds=no") => recent.brief(),
            Some(_) => return bad_request("allowed rounds=no, or nothing", Some("rounds")),
        };
        json_response(StatusCode::OK, &json!({ "sessions": sessions }))
    }

    /// `GET /api/sessions/{number}`: one completion with its rounds.
    fn session(&self, path: &str) -> Response<Body> {
        let number = path.strip_prefix(SESSION).and_then(|number| number.parse().ok());
        match number.and_then(|number| self.shared.observer.recent().one(number)) {
            Some(session) => json_response(StatusCode::OK, &session),
            None => not_found(),
        }
    }

    /// `GET /api/coverage`: output tokens since the start by path and reason.
    fn coverage(&self) -> Response<Body> {
        let observer = &self.shared.observer;
        let projected = self.configured.as_ref().map(|configured| configured.projected());
        let since = unix_time(observer.started().0).as_secs_f64();
        let report = observer.coverage().report(since, &projected.unwrap_or_default());
        json_response(StatusCode::OK, &json!(report))
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
            "backend": replica.backend(),
            "url": replica.url(),
            "rank": replica.rank(),
            "engine": *replica.dialect(),
            "engine_start": null,
            "up": replica.is_up(),
            "state": replica.health_state().name(),
            "breaker": replica.breaker().name(),
            "last_error": replica.last_error().map(|error| {
                json!({
                    "text": error.text,
                    "at": unix_time(error.at).as_secs_f64(),
                    "age_seconds": error.age().as_secs_f64(),
                })
            }),
            "unreadable": unreadable(replica),
            "in_flight": replica.in_flight(),
            "verify": [],
            "load": load,
            "inject": self.injected(replica),
            "probe": null,
        });
        let known = self.configured.as_ref().and_then(|configured| configured.replica(replica));
        if let (Some(shown), Some(Value::Object(known))) = (shown.as_object_mut(), known) {
            shown.extend(known);
        }
        shown
    }

    /// The engine of this replica, if it asks for drafts inside its steps.
    fn injected(&self, replica: &Replica) -> Option<Value> {
        let engine = self.configured.as_ref()?.engine_that_asks(replica.label())?;
        let Totals { steps, drafted, accepted, late, waited, saved, wasted, rows, cost } = engine.totals;
        let cost = cost.map(|cost| {
            json!({ "plain_seconds": cost.plain, "first_token_seconds": cost.any, "token_seconds": cost.token })
        });
        Some(json!({
            "engine_version": engine.hello.engine_version,
            "max_draft": engine.hello.max_draft,
            "rows": rows,
            "steps": steps.answered(),
            "late": late,
            "waited_seconds": waited as f64 * 1e-6,
            "drafted": drafted.sum(),
            "accepted": accepted.sum(),
            "saved_seconds": saved,
            "wasted_seconds": wasted,
            "cost": cost,
        }))
    }

    /// `/api/replicas/{n}/disable|enable|reprobe`; `n` is the name of the replica, or its index in
    /// `/api/replicas`, from 0, which changes with the addresses that a DNS name has.
    fn replica(&self, method: &Method, path: &str) -> Response<Body> {
        let action = path.strip_prefix(REPLICA).and_then(|rest| rest.rsplit_once('/'));
        let Some((named, verb)) = action.filter(|(_, verb)| VERBS.contains(verb)) else { return not_found() };
        if method != Method::POST {
            return not_allowed("POST");
        }
        let replicas = self.shared.fleet.replicas();
        let name = values::percent_decoded(named).unwrap_or_default();
        let by_name = replicas.iter().find(|replica| replica.label() == name);
        let by_index = || named.parse().ok().and_then(|index: usize| replicas.get(index));
        let Some(replica) = by_name.or_else(by_index) else { return not_found() };
        if verb == "reprobe" {
            let Some(configured) = &self.configured else { return not_found() };
            return match configured.reprobe(replica) {
                Ok(done) => json_response(StatusCode::OK, &done),
                Err(message) => error_response(StatusCode::CONFLICT, &message, None, "conflict"),
            };
        }
        replica.disable(verb == "disable");
        tracing::info!(replica = replica.label(), verb, "replica switched");
        if verb == "disable" && self.shared.fleet.is_sole(replica) {
            let replica = replica.label();
            tracing::warn!(
                replica,
                "it is the only replica of its backend: it keeps serving, but no request is speculated on there"
            );
        }
        json_response(StatusCode::OK, &self.shown(replica))
    }

    fn policies(&self) -> Response<Body> {
        let Some(configured) = &self.configured else { return not_found() };
        json_response(StatusCode::OK, &configured.shown())
    }

    /// Reloads the policies, on a thread that may block: a drafter's model may have to be loaded.
    async fn reload(&self) -> Response<Body> {
        let Some(configured) = self.configured.clone() else { return not_found() };
        let shared = self.shared.clone();
        let reloaded =
            tokio::task::spawn_blocking(move || configured.reload(ReloadSource::Operator, &shared)).await;
        let Ok(Some(reloaded)) = reloaded else { return Failure::Internal.response() };
        match reloaded {
            Ok(done) => json_response(StatusCode::OK, &done),
            Err(problems) => {
                let errors: Vec<FileError> = problems.iter().map(FileError::from).collect();
                json_response(StatusCode::UNPROCESSABLE_ENTITY, &json!({ "errors": errors }))
            }
        }
    }

    /// `POST /api/explain?route=chat|completions&tenant=T&peer=IP`, each optional; body and headers
    /// are those of the request to explain.
    async fn explain(&self, parts: &request::Parts, body: RequestBody) -> Response<Body> {
        let Some(configured) = &self.configured else { return not_found() };
        let limit = configured.speculate_body();
        let body = match gather::gather(body, limit, &self.shared.memory).await {
            Ok(Gathered::Complete(body)) => Some(body),
            Ok(Gathered::Partial(_, Stopped::Limit)) => None,
            Ok(Gathered::Partial(_, Stopped::Memory)) => return Failure::Memory.response(),
            Err(error) => return bad_request(&error.to_string(), None),
        };
        match Question::of_call(parts, body.as_deref(), limit) {
            Ok(question) => {
                json_response(StatusCode::OK, &json!(configured.explain(&question, &self.shared)))
            }
            Err(parameter) => bad_request("not understood", Some(parameter)),
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
        let ttl = match wanted.ttl.as_deref().map(values::duration_or_why).transpose() {
            Ok(ttl) => ttl,
            Err(wrong) => return bad_request(&wrong, Some("ttl")),
        };
        self.shared.modes.set(wanted.mode, wanted.backend.as_deref(), ttl);
        tracing::info!(mode = wanted.mode.name(), backend = wanted.backend, ttl = wanted.ttl, "mode set");
        let now =
            wanted.backend.as_deref().map_or(self.shared.modes.process(), |name| self.shared.modes.of(name));
        let set = json!({ "mode": now.name(), "backend": wanted.backend, "ttl": wanted.ttl });
        json_response(StatusCode::OK, &set)
    }

    async fn drain(&self, query: Option<&str>) -> Response<Body> {
        tracing::info!("draining, requested through the admin API");
        self.shared.life.drain();
        let wait = query.unwrap_or_default().split('&').any(|pair| pair == "wait=1");
        if wait {
            self.shared.life.emptied().await;
        }
        json_response(StatusCode::OK, &json!({ "draining": true, "empty": wait }))
    }
}

async fn read(body: RequestBody) -> Result<Vec<u8>, Response<Body>> {
    gather::read_all(body, BODY).await.map_err(|error| bad_request(&error.to_string(), None))
}

fn unauthorized(message: &str) -> Response<Body> {
    let mut refused = error_response(StatusCode::UNAUTHORIZED, message, None, "unauthorized");
    refused.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    refused
}

fn forbidden(message: &str) -> Response<Body> {
    error_response(StatusCode::FORBIDDEN, message, None, "forbidden")
}

fn text(words: impl Into<Bytes>) -> Response<Body> {
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

/// The routes whose requests are passed through, because answers could not be read.
fn unreadable(replica: &Replica) -> Vec<Value> {
    let line = |passed: PassedThrough| {
        json!({
            "route": passed.route.path(),
            "cause": passed.cause,
            "trial_in_seconds": passed.trial_in.as_secs_f64(),
        })
    };
    replica.first_calls().passed_through().map(line).collect()
}
