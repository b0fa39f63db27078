//! What the gateway hands to the driver of sessions, and what it may get back.

use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use http::header::CONTENT_LENGTH;
use http::{Response, request};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::mode::ModeSwitch;
use crate::fleet::{Fleet, Replica};
use crate::http::body::Body;
use crate::http::connections::Connections;
use crate::http::drain::Lifecycle;
use crate::http::memory::Memory;
use crate::observe::{Observer, Record};
use crate::openai::{self, Control};
use crate::words::BypassReason;

/// A future that owns all it needs.
pub type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send + 'static>>;

/// The answer to a request, or the request itself, of which nothing has been answered yet.
pub type Driven = Result<Response<Body>, Box<Declined>>;

/// Answers eligible requests, or gives them back.
pub trait Drive: Send + Sync {
    /// The answer to one request. Dropping the future, or the body of the answer, means that the client left.
    fn drive(&self, exchange: Exchange) -> BoxFuture<Driven>;
}

/// What the parts of a running gateway share.
#[derive(Clone)]
pub struct Shared {
    /// The servers behind.
    pub fleet: Arc<Fleet>,
    /// The operator's switch.
    pub modes: Arc<ModeSwitch>,
    /// Metrics, recent requests, log.
    pub observer: Arc<Observer>,
    /// Where the process stands between start and stop.
    pub life: Arc<Lifecycle>,
    /// It is ready only while a replica of every backend can be reached.
    pub require_backend: bool,
    /// The places for driven sessions.
    pub sessions: Arc<Semaphore>,
    /// What clients make the process keep.
    pub memory: Arc<Memory>,
    /// The clients that are connected.
    pub connections: Arc<Connections>,
}

/// An eligible request with everything that belongs to it.
pub struct Exchange {
    /// The head, fit for the backend: hop-by-hop fields and Foretell's own are gone, `x-forwarded-*` are in.
    pub head: request::Parts,
    /// The body as received.
    pub body: Bytes,
    /// The body understood.
    pub request: Box<openai::Request>,
    /// Who answers for its model. A session stays with its replica.
    pub replica: Arc<Replica>,
    /// What the parts of the gateway share.
    pub shared: Shared,
    /// What the client wants of Foretell.
    pub client: Client,
    /// The request's record, and its place among the sessions.
    pub slot: Slot,
}

/// What a client wants of Foretell.
#[derive(Clone, Debug, PartialEq)]
pub struct Client {
    /// `x-foretell`: can only lower what policy and gates allow. Never `Off`.
    pub control: Option<Control>,
    /// Who the request belongs to, if that is known.
    pub tenant: Option<String>,
    /// It can take trailers.
    pub trailers: bool,
}

/// The record of a request that is driven, with its place among the sessions that are allowed at once. To be kept
/// until the end of the answer.
#[derive(Debug)]
pub struct Slot {
    /// The request's one record.
    pub record: Record,
    _place: OwnedSemaphorePermit,
}

impl Slot {
    /// A place that has been taken for the request of `record`.
    pub fn new(record: Record, place: OwnedSemaphorePermit) -> Self {
        Self { record, _place: place }
    }

    /// Gives the place up.
    pub fn into_record(self) -> Record {
        self.record
    }
}

impl Exchange {
    /// Gives the request back, to be relayed unchanged.
    pub fn decline(self, reason: BypassReason) -> Box<Declined> {
        let Self { head, body, replica, slot, .. } = self;
        Box::new(Declined { unsent: Unsent { head, body, replica }, slot, reason })
    }
}

/// A request as a backend would be sent it without Foretell.
pub struct Unsent {
    /// The head, fit for the backend.
    pub head: request::Parts,
    /// The body as received.
    pub body: Bytes,
    /// Who is to answer it.
    pub replica: Arc<Replica>,
}

/// A completion's body as `replica` takes it: without the client's own `prediction`, where its engine would refuse the
/// whole request for it.
pub fn fit(replica: &Replica, head: &mut request::Parts, body: Bytes) -> Bytes {
    match replica.refuses_prediction().then(|| openai::without_prediction(&body)).flatten() {
        Some(without) => {
            head.headers.remove(CONTENT_LENGTH);
            without.into()
        }
        None => body,
    }
}

/// A request that is given back: nothing of an answer has gone to the client.
pub struct Declined {
    /// What is to be sent.
    pub unsent: Unsent,
    /// Its record and place.
    pub slot: Slot,
    /// Why it is not driven.
    pub reason: BypassReason,
}
