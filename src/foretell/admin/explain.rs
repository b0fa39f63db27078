//! Explains a request: collects the facts as they are now and passes them to
//! [`policy::explain`](foretell_policy::explain::explain()).
//!
//! The running proxy uses its knowledge of its servers. `foretell explain` without a running proxy
//! calls the server, and passes the answers to the same function.

use std::net::IpAddr;
use std::sync::Arc;

use http::header::{AUTHORIZATION, CONNECTION, CONTENT_LENGTH, HOST, TRANSFER_ENCODING};
use http::request::Parts;
use http::{HeaderMap, HeaderName};
use serde::de::IgnoredAny;

use foretell_config::process::{ClientControl, Process};
use foretell_config::values::percent_decoded;
use foretell_core::words::PlainReason;
use foretell_net::fleet::{HealthState, Replica};
use foretell_net::http::headers;
use foretell_net::http::listen::Peer;
use foretell_policy::explain::{Besides, Explanation, Measure};
use foretell_policy::{
    self as policy, Body, Fact, Facts, Groups, Models, PolicySet, Ruling, Understood, Wish,
};
use foretell_proxy::gateway::facts;
use foretell_proxy::gateway::{Shared, tenant};
use foretell_wire::openai::{self, Request, Route};

/// Prefix for header fields of `POST /api/explain` that the call needs for itself:
/// `x-explain-authorization` stands for the explained request's `authorization`.
pub const PREFIX: &str = "x-explain-";
/// Header fields that belong to the call itself, not to the explained request.
const CALL_FIELDS: [HeaderName; 5] = [HOST, AUTHORIZATION, CONNECTION, CONTENT_LENGTH, TRANSFER_ENCODING];

/// The headers of the explained request, from those of the call.
pub fn headers_of(call: &HeaderMap) -> HeaderMap {
    let mut headers = call.clone();
    for name in &CALL_FIELDS {
        headers.remove(name);
    }
    let prefixed = |name: &HeaderName| name.as_str().strip_prefix(PREFIX).map(ToOwned::to_owned);
    for name in call.keys() {
        let Some(bare) = prefixed(name).and_then(|bare| HeaderName::try_from(bare).ok()) else { continue };
        headers.remove(name);
        headers.remove(&bare);
        for value in call.get_all(name) {
            headers.append(&bare, value.clone());
        }
    }
    headers
}

/// A request to be explained, from the command line or the admin API.
pub struct Question {
    /// API route.
    pub route: Route,
    /// Headers as the client would send them.
    pub headers: HeaderMap,
    /// IP address of the client; `None` if it is not known.
    pub peer: Option<IpAddr>,
    /// Tenant to assume; `None`: determined from headers and peer.
    pub tenant: Option<String>,
    /// The parsed body; `None` if it is larger than the limit.
    pub body: Option<Understood>,
    /// Cause for which the body is no valid JSON object, with line and column.
    unreadable: Option<String>,
}

impl Question {
    /// A request with this body, which is ignored if larger than `limit` bytes. Without `route`, a
    /// body with messages is a chat request.
    pub fn new(route: Option<Route>, headers: HeaderMap, body: &[u8], limit: usize) -> Self {
        let route = route.unwrap_or_else(|| guess(body));
        let understood = (body.len() <= limit).then(|| openai::understand(route, body));
        let is_unreadable = understood.as_ref().is_some_and(Option::is_none);
        let unreadable = is_unreadable.then(|| unreadable(body));
        Self { route, headers, peer: None, tenant: None, body: understood, unreadable }
    }

    /// The request that a call of `POST /api/explain` describes; `body` is `None` if it is larger
    /// than `limit` bytes.
    ///
    /// # Errors
    /// Name of the query parameter that is invalid; `query` for one that is none.
    pub fn of_call(call: &Parts, body: Option<&[u8]>, limit: usize) -> Result<Self, &'static str> {
        let query = ExplainQuery::read(call.uri.query().unwrap_or_default())?;
        let mut question = Self::new(query.route, headers_of(&call.headers), body.unwrap_or_default(), limit);
        if body.is_none() {
            question.body = None;
        }
        let caller = call.extensions.get::<Peer>().map(|peer| peer.address.ip());
        question.peer = query.peer.or(caller);
        question.tenant = query.tenant;
        Ok(question)
    }

    /// The model id in the body, if the body could be parsed.
    pub fn model(&self) -> Option<&str> {
        self.request().map(|request| request.model.as_str())
    }

    /// The request, if the body could be parsed.
    pub fn request(&self) -> Option<&Request> {
        let (request, _) = self.body.as_ref()?.as_ref()?;
        Some(request)
    }
}

/// Cause for which this is no valid JSON object, without any of its text.
fn unreadable(body: &[u8]) -> String {
    match serde_json::from_slice::<IgnoredAny>(body) {
        Err(error) => format!("The body is not JSON: {error}."),
        Ok(_) => "The body is JSON, but no object with the fields of a request.".to_owned(),
    }
}

/// The query parameters of a call of `POST /api/explain`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExplainQuery {
    /// API route; `None`: guessed from the body.
    pub route: Option<Route>,
    /// IP address of the client; `None`: that of the caller.
    pub peer: Option<IpAddr>,
    /// Tenant to assume; `None`: determined from headers and peer.
    pub tenant: Option<String>,
}

impl ExplainQuery {
    fn read(query: &str) -> Result<Self, &'static str> {
        let mut parsed = Self::default();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').ok_or("query")?;
            match name {
                "route" => parsed.route = Some(Route::parse(value).ok_or("route")?),
                "peer" => {
                    parsed.peer =
                        Some(percent_decoded(value).and_then(|peer| peer.parse().ok()).ok_or("peer")?);
                }
                "tenant" => parsed.tenant = Some(percent_decoded(value).ok_or("tenant")?),
                _ => return Err("query"),
            }
        }
        Ok(parsed)
    }

    /// The parameters as the query string of a call.
    pub fn query(&self) -> String {
        let route = self.route.map(|route| format!("route={}", route.name()));
        let peer = self.peer.map(|peer| format!("peer={}", encoded(&peer.to_string())));
        let tenant = self.tenant.as_ref().map(|tenant| format!("tenant={}", encoded(tenant)));
        [route, peer, tenant].into_iter().flatten().collect::<Vec<_>>().join("&")
    }
}

/// Percent-encodes every byte that is not an ASCII letter or digit.
fn encoded(text: &str) -> String {
    let escape = |byte: u8| {
        if byte.is_ascii_alphanumeric() { char::from(byte).to_string() } else { format!("%{byte:02X}") }
    };
    text.bytes().map(escape).collect()
}

/// Chat if the body has messages, completions otherwise.
fn guess(body: &[u8]) -> Route {
    let understood = openai::understand(Route::Chat, body);
    let messages =
        understood.is_some_and(|(request, _)| request.body.get("messages").is_some_and(|it| !it.is_null()));
    if messages { Route::Chat } else { Route::Completions }
}

/// Facts about the server that the request would go to.
pub struct ServerFacts<'a> {
    /// Their source: `proxy`, `server` or `nobody` (not known).
    pub source: &'static str,
    /// The replica that would be chosen; `None` if there is none.
    pub replica: Option<&'a Arc<Replica>>,
    /// The server at its address.
    pub server: Fact<policy::ServerState<'a>>,
    /// State of a drafter model, by its name in the config file.
    pub models: Models<'a>,
    /// The group that the policy's comparison would put the request in.
    pub group: Groups<'a>,
    /// The gate that is closed there now, for a session with this ruling.
    pub closed: &'a dyn Fn(&Ruling) -> Option<PlainReason>,
    /// Current figures of a running proxy for a session with this ruling.
    pub now: Measure<'a>,
    /// Further remarks, one sentence each.
    pub notes: Vec<String>,
}

/// Explains how a proxy with these settings would serve a request.
pub fn explain(
    question: &Question,
    process: &Process,
    policies: &PolicySet,
    shared: &Shared,
    known: ServerFacts<'_>,
) -> Explanation {
    let may_control = process.client.control == ClientControl::Bounded;
    let wish = may_control.then(|| question.headers.get_all(headers::CONTROL)).into_iter().flatten();
    let tenant =
        question.tenant.clone().or_else(|| tenant::of(&process.tenant, question.peer, &question.headers));
    let request = (question.route, question.route.into(), &question.headers);
    let head = facts::of_head(request, tenant.as_deref(), Wish::read(wish), shared);
    let backend = known.replica.map(|replica| facts::backend(replica, shared));
    let facts = Facts {
        head,
        body: Fact::Known(question.body.as_ref().map_or(Body::TooLarge, Body::from)),
        backend: Fact::Known(backend),
        session: Fact::Known(shared.sessions.available_permits() > 0),
        server: known.server,
        policies: Fact::Known(policies),
        models: known.models,
        group: known.group,
    };
    let replica = known.replica.map(|replica| format!("{} at {}", replica.label(), replica.url()));
    let mut notes = known.notes;
    notes.extend(question.unreadable.clone());
    if let Some(doubt) = tenant::doubt(&process.tenant, question.peer, &question.headers) {
        notes.push(format!("The request is refused with 400: {}.", doubt.words()));
    }
    let besides = Besides { facts_from: known.source, replica, notes };
    let parameters = question.body.iter().flatten().map(|(_, parameters)| &**parameters).next();
    policy::explain::explain(&facts, parameters.unwrap_or_default(), besides, known.closed, known.now)
}

/// Reason for which a replica is considered down, from its latest calls; `None` if it is not.
pub fn down(replica: &Replica) -> Option<&'static str> {
    match replica.health_state() {
        HealthState::Silent => Some("the server answers neither requests nor health checks"),
        HealthState::Down => Some("the last call did not reach the server"),
        HealthState::Broken => Some("the circuit breaker is open after repeated failures"),
        HealthState::Ready | HealthState::Disabled => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn query_parameters_are_read_back() {
        let peer = Some("::1".parse().unwrap());
        let asked = ExplainQuery { route: Some(Route::Chat), peer, tenant: Some("a b&c=ü%".to_owned()) };
        assert_eq!(ExplainQuery::read(&asked.query()), Ok(asked));
        assert_eq!(ExplainQuery::read(""), Ok(ExplainQuery::default()));
        for (query, parameter) in [
            ("route=chats", "route"),
            ("peer=x", "peer"),
            ("tenant=%4", "tenant"),
            ("tenat=a", "query"),
            ("route=chat&tenant", "query"),
        ] {
            assert_eq!(ExplainQuery::read(query), Err(parameter), "{query}");
        }
    }

    #[test]
    fn a_call_s_own_fields_are_not_those_of_the_explained_request() {
        let mut call = HeaderMap::new();
        for (name, value) in [
            ("host", "localhost"),
            ("authorization", "Bearer admin"),
            ("content-length", "2"),
            ("x-team", "web"),
            ("x-foretell", "plain"),
            ("x-explain-x-team", "ide"),
            ("x-explain-authorization", "Bearer client"),
        ] {
            call.append(name, value.parse().unwrap());
        }
        let headers = headers_of(&call);
        let told: Vec<_> =
            headers.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
        assert_eq!(told.len(), 3, "{told:?}");
        for line in [("x-foretell", "plain"), ("x-team", "ide"), ("authorization", "Bearer client")] {
            assert!(told.contains(&line), "{told:?}");
        }
    }
}
