//! Where the gateway hands an eligible request to the driver of sessions.

use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use http::{Response, request};
use tokio::sync::OwnedSemaphorePermit;

use super::relay::{self, Record, Relay};
use crate::drive::mode::ModeSwitch;
use crate::fleet::{Fleet, Replica, SendError};
use crate::http::body::Body;
use crate::http::drain::Lifecycle;
use crate::http::memory::{Memory, Reservation};
use crate::observe::{Held, Observer};
use crate::openai::{self, Control};
use crate::words::BypassReason;

/// A future that owns all it needs.
pub type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send + 'static>>;

/// Answers eligible requests. Must answer them all: what cannot be driven is given to [`Exchange::relay`].
pub trait Drive: Send + Sync {
    /// The answer to one request. Dropping the future, or the body of the answer, means that the client left.
    fn drive(&self, exchange: Exchange) -> BoxFuture<Response<Body>>;
}

/// An eligible request with everything that belongs to it.
pub struct Exchange {
    /// The head, fit for the backend: hop-by-hop fields and Foretell's own are gone, `x-forwarded-*` are in.
    pub parts: request::Parts,
    /// The body as received.
    pub body: Bytes,
    /// The body understood.
    pub request: Box<openai::Request>,
    /// Who answers for its model. A session stays with its replica.
    pub backend: Arc<Replica>,
    /// Who can answer instead, as long as nothing has been answered.
    pub fleet: Arc<Fleet>,
    /// What the client asked of Foretell; it can only lower what policy and gates allow. Never `Off`.
    pub control: Option<Control>,
    /// The client allows its text to be logged (`x-foretell-text: on`), if the operator does too.
    pub text_allowed: bool,
    /// The client can take trailers.
    pub wants_trailers: bool,
    /// The client's address.
    pub peer: Option<IpAddr>,
    /// `x-request-id` of the client, or Foretell's own.
    pub id: String,
    /// When the request was accepted.
    pub started: Instant,
    /// The operator's switch.
    pub modes: Arc<ModeSwitch>,
    /// Whether the process is stopping.
    pub life: Arc<Lifecycle>,
    /// Where the driver reports the end, once: [`Observer::finish`].
    pub observer: Arc<Observer>,
    /// The account of memory: what a session keeps beyond what its slot accounts for is taken from here.
    pub memory: Arc<Memory>,
    /// Counts the request as in flight and against `limits.sessions`; to be kept until the answer's end.
    pub slot: Slot,
}

/// A place among the sessions that are allowed at once. Dropping it frees the place.
#[derive(Debug)]
pub struct Slot {
    pub(super) _held: Held,
    pub(super) _permit: OwnedSemaphorePermit,
    /// The body as it was understood, and all that the session holds: see [`crate::session::footprint`].
    pub memory: Reservation,
}

impl Exchange {
    /// Gives the request up: it is relayed unchanged, counted as bypass with `reason`. The gateway reports
    /// its end.
    pub async fn relay(self, reason: BypassReason) -> Response<Body> {
        let to = Arc::clone(&self.backend);
        self.spare().relay_to(to, reason).await
    }

    /// What it takes to send the request once more, should its first ride get no answer.
    pub fn spare(&self) -> Spare {
        Spare {
            parts: self.parts.clone(),
            body: self.body.clone(),
            route: self.request.route,
            model: self.request.model.clone(),
            backend: Arc::clone(&self.backend),
            fleet: Arc::clone(&self.fleet),
            id: self.id.clone(),
            started: self.started,
            observer: Arc::clone(&self.observer),
            memory: Arc::clone(&self.memory),
        }
    }
}

/// A request that may still be sent elsewhere.
pub struct Spare {
    parts: request::Parts,
    body: Bytes,
    route: openai::Route,
    model: String,
    backend: Arc<Replica>,
    fleet: Arc<Fleet>,
    id: String,
    started: Instant,
    observer: Arc<Observer>,
    memory: Arc<Memory>,
}

impl Spare {
    /// Who may answer instead, after a call that ended by `error`.
    pub fn elsewhere(&self, error: &SendError) -> Option<Arc<Replica>> {
        self.fleet.elsewhere(&self.backend, error)
    }

    /// Relays the request to `other`. It is a bypass: a session belongs to the replica that it was prepared for.
    pub async fn relay(self, other: Arc<Replica>) -> Response<Body> {
        self.relay_to(other, BypassReason::Fault).await
    }

    async fn relay_to(mut self, backend: Arc<Replica>, reason: BypassReason) -> Response<Body> {
        let mut record = Record::new(self.observer, self.started);
        record.completion(self.route, self.id, reason, None);
        record.model(self.model);
        let body = relay::fit(&backend, &mut self.parts, self.body, &self.memory);
        let repeatable = Some(body.clone());
        let relay = Relay { record, backend, fleet: self.fleet, limit: None, repeatable };
        relay.send_prepared(self.parts, crate::http::body::full(body)).await
    }
}
