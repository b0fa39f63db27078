//! What would happen to a request: the facts of the moment, put to [`policy::decide`](crate::policy::decide()).
//!
//! The running proxy answers from what it knows of its servers. `foretell explain` without a proxy asks the server
//! itself, and puts what it was told to the same function.

use std::net::IpAddr;
use std::sync::Arc;

use http::header::{AUTHORIZATION, CONNECTION, CONTENT_LENGTH, HOST, TRANSFER_ENCODING};
use http::request::Parts;
use http::{HeaderMap, HeaderName};

use crate::config::process::{ClientControl, Process};
use crate::fleet::{Replica, Standing};
use crate::gateway::facts::{self, Head};
use crate::gateway::{Shared, route, tenant};
use crate::http::headers;
use crate::http::listen::Peer;
use crate::openai::{self, Finding, Request, Route};
use crate::policy::explain::{Besides, Explanation};
use crate::policy::part::ModelState;
use crate::policy::{self, Body, Fact, Facts, PolicySet, Ruling, Wish};
use crate::words::RideReason;

/// A field of a call of `POST /api/explain` that begins so stands for the field of the request whose name follows, for
/// those that the call needs for itself.
pub const PREFIX: &str = "x-explain-";
/// What belongs to the call, not to the request that it asks about.
const OWN: [HeaderName; 5] = [HOST, AUTHORIZATION, CONNECTION, CONTENT_LENGTH, TRANSFER_ENCODING];

/// The headers of the request that a call of `POST /api/explain` asks about.
pub fn headers_of(call: &HeaderMap) -> HeaderMap {
    let mut headers = call.clone();
    for name in &OWN {
        headers.remove(name);
    }
    let prefixed = |name: &HeaderName| name.as_str().strip_prefix(PREFIX).map(ToOwned::to_owned);
    for name in call.keys() {
        let Some(own) = prefixed(name).and_then(|own| HeaderName::try_from(own).ok()) else { continue };
        headers.remove(name);
        headers.remove(&own);
        for value in call.get_all(name) {
            headers.append(&own, value.clone());
        }
    }
    headers
}

/// A request to be explained.
pub struct Question {
    /// Its route.
    pub route: Route,
    /// Its headers.
    pub headers: HeaderMap,
    /// The address that it comes from.
    pub peer: Option<IpAddr>,
    /// Its tenant, whatever its headers say.
    pub tenant: Option<String>,
    /// Its body, if that is not too large to be read.
    pub body: Option<Understood>,
}

/// What a body says.
pub struct Understood(Option<(Request, Vec<Finding>)>);

impl Question {
    /// A request with this body. Without a route a body with messages is a chat.
    pub fn new(route: Option<Route>, headers: HeaderMap, body: &[u8], limit: usize) -> Self {
        let route = route.unwrap_or_else(|| guess(body));
        let body = (body.len() <= limit).then(|| Understood(openai::understand(route, body)));
        Self { route, headers, peer: None, tenant: None, body }
    }

    /// The model that it names.
    pub fn model(&self) -> Option<&str> {
        self.request().map(|request| request.model.as_str())
    }

    fn understood(&self) -> Option<&(Request, Vec<Finding>)> {
        self.body.as_ref()?.0.as_ref()
    }

    fn request(&self) -> Option<&Request> {
        self.understood().map(|(request, _)| request)
    }

    fn parameters(&self) -> &[Finding] {
        self.understood().map_or(&[], |(_, findings)| findings)
    }

    fn judged(&self) -> Body<'_> {
        match &self.body {
            None => Body::TooLarge,
            Some(Understood(None)) => {
                Body::Refused { reason: crate::words::BypassReason::Body, parameter: None, request: None }
            }
            Some(Understood(Some((request, findings)))) => match openai::refusal(findings) {
                Some((reason, parameter)) => {
                    Body::Refused { reason, parameter: Some(parameter), request: Some(request) }
                }
                None => Body::Eligible(request),
            },
        }
    }
}

/// The request that a call of `POST /api/explain` asks about; `body` is `None` if it is larger than `limit`.
///
/// # Errors
/// The parameter of the call that is not understood.
pub fn asked(call: &Parts, body: Option<&[u8]>, limit: usize) -> Result<Question, &'static str> {
    let asked = Asked::read(call.uri.query().unwrap_or_default())?;
    let mut question = Question::new(asked.route, headers_of(&call.headers), body.unwrap_or_default(), limit);
    if body.is_none() {
        question.body = None;
    }
    let caller = call.extensions.get::<Peer>().map(|peer| peer.address.ip());
    (question.peer, question.tenant) = (asked.peer.or(caller), asked.tenant);
    Ok(question)
}

/// What a call says about the request beside its fields and its body.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Asked {
    /// Its route.
    pub route: Option<Route>,
    /// The address that it comes from; without one, that of the caller.
    pub peer: Option<IpAddr>,
    /// Its tenant.
    pub tenant: Option<String>,
}

impl Asked {
    fn read(query: &str) -> Result<Self, &'static str> {
        let mut asked = Self::default();
        for (name, value) in query.split('&').filter_map(|pair| pair.split_once('=')) {
            match name {
                "route" => asked.route = Some(Route::parse(value).ok_or("route")?),
                "peer" => asked.peer = Some(decoded(value).and_then(|peer| peer.parse().ok()).ok_or("peer")?),
                "tenant" => asked.tenant = Some(decoded(value).ok_or("tenant")?),
                _ => {}
            }
        }
        Ok(asked)
    }

    /// As the query of a call.
    pub fn query(&self) -> String {
        let route = self.route.map(|route| format!("route={}", route.name()));
        let peer = self.peer.map(|peer| format!("peer={}", encoded(&peer.to_string())));
        let tenant = self.tenant.as_ref().map(|tenant| format!("tenant={}", encoded(tenant)));
        [route, peer, tenant].into_iter().flatten().collect::<Vec<_>>().join("&")
    }
}

/// Percent-encodes all that is not a letter or a digit.
fn encoded(text: &str) -> String {
    let escape = |byte: u8| {
        if byte.is_ascii_alphanumeric() { char::from(byte).to_string() } else { format!("%{byte:02X}") }
    };
    text.bytes().map(escape).collect()
}

fn decoded(text: &str) -> Option<String> {
    let mut pieces = text.split('%');
    let mut bytes = pieces.next()?.as_bytes().to_vec();
    for piece in pieces {
        let (digits, rest) = piece.split_at_checked(2)?;
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        bytes.extend_from_slice(rest.as_bytes());
    }
    String::from_utf8(bytes).ok()
}

/// Chat bodies have messages.
fn guess(body: &[u8]) -> Route {
    let understood = openai::understand(Route::Chat, body);
    let messages =
        understood.is_some_and(|(request, _)| request.body.get("messages").is_some_and(|it| !it.is_null()));
    if messages { Route::Chat } else { Route::Completions }
}

/// What is known of the server that a request would go to.
pub struct ServerFacts<'a> {
    /// Who was asked: `proxy`, `server` or `nobody`.
    pub asked: &'static str,
    /// The replica that it would go to, if there is one.
    pub replica: Option<&'a Arc<Replica>>,
    /// Who answers there.
    pub server: Fact<policy::ServerState<'a>>,
    /// What is known of the drafter models.
    pub models: &'a (dyn Fn(&str) -> ModelState + Sync),
    /// The gate that is closed there now, for a session of a ruling.
    pub closed: &'a dyn Fn(&Ruling) -> Option<RideReason>,
    /// What should be known besides.
    pub notes: Vec<String>,
}

/// Explains a request to a proxy with these settings.
pub fn explain(
    question: &Question,
    process: &Process,
    policies: &PolicySet,
    shared: &Shared,
    known: ServerFacts<'_>,
) -> Explanation {
    let wish = question.headers.get(headers::CONTROL).filter(|_| process.client == ClientControl::Bounded);
    let tenant =
        question.tenant.clone().or_else(|| tenant::of(&process.tenant, question.peer, &question.headers));
    let head = Head {
        route: question.route,
        headers: &question.headers,
        tenant: tenant.as_deref(),
        wish: Wish::read(wish),
        encoded: route::is_encoded(&question.headers),
    };
    let model = question.model().unwrap_or_default();
    let backend = known.replica.map(|replica| facts::backend(replica, model, &shared.modes));
    let facts = Facts {
        body: Fact::Known(question.judged()),
        backend: Fact::Known(backend),
        session: Fact::Known(shared.sessions.available_permits() > 0),
        server: known.server,
        policies: Fact::Known(policies),
        models: known.models,
        ..facts::of_head(&head, shared)
    };
    let replica = known.replica.map(|replica| format!("{} at {}", replica.label(), replica.url()));
    let besides = Besides { asked: known.asked, replica, notes: known.notes };
    policy::explain::explain(&facts, question.parameters(), besides, known.closed)
}

/// Why a replica does not answer, as far as its calls tell.
pub fn down(replica: &Replica) -> Option<&'static str> {
    match replica.standing() {
        Standing::Down => Some("the last call did not reach it"),
        Standing::Broken => Some("its circuit breaker is open after repeated failures"),
        Standing::Ready | Standing::Disabled => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_call_says_besides_is_read_back() {
        let peer = Some("::1".parse().unwrap());
        let asked = Asked { route: Some(Route::Chat), peer, tenant: Some("a b&c=ü%".to_owned()) };
        assert_eq!(Asked::read(&asked.query()), Ok(asked));
        assert_eq!(Asked::read(""), Ok(Asked::default()));
        for (query, parameter) in [("route=chats", "route"), ("peer=x", "peer"), ("tenant=%4", "tenant")] {
            assert_eq!(Asked::read(query), Err(parameter), "{query}");
        }
    }

    #[test]
    fn a_call_s_own_fields_are_not_those_of_the_request_that_it_asks_about() {
        let mut call = HeaderMap::new();
        for (name, value) in [
            ("host", "localhost"),
            ("authorization", "Bearer admin"),
            ("content-length", "2"),
            ("x-team", "web"),
            ("x-foretell", "ride"),
            ("x-explain-x-team", "ide"),
            ("x-explain-authorization", "Bearer client"),
        ] {
            call.append(name, value.parse().unwrap());
        }
        let headers = headers_of(&call);
        let told: Vec<_> =
            headers.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
        assert_eq!(told.len(), 3, "{told:?}");
        for line in [("x-foretell", "ride"), ("x-team", "ide"), ("authorization", "Bearer client")] {
            assert!(told.contains(&line), "{told:?}");
        }
    }
}
