//! Types that the gateway hands to the session runner.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::{HeaderMap, Response, request};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::mode::ModeSwitch;
use foretell_core::words::Mode;
use foretell_drafts::joins::{Joins, Terms};
use foretell_net::fleet::{Fleet, Replica};
use foretell_net::http::body::Body;
use foretell_net::http::connections::Connections;
use foretell_net::http::drain::Lifecycle;
use foretell_net::http::memory::Memory;
use foretell_observe::{Observer, Record};
use foretell_policy::Admitted;
use foretell_wire::openai::{self, Api, Control};

/// Answers eligible requests.
pub trait Serve: Send + Sync {
    /// The answer to one request. Dropping the future, or the body of the answer, means that the
    /// client disconnected.
    fn serve(&self, exchange: Exchange) -> BoxFuture<'static, Response<Body>>;

    /// Terms of the rows of a request where its engine asks for drafts, with the policy's name.
    fn terms(&self, _joining: &Joining<'_>) -> (Terms, Option<String>) {
        (Terms::unknown(), None)
    }
}

/// A request that goes to a replica whose engine may ask for drafts.
pub struct Joining<'a> {
    pub admitted: Admitted<'a>,
    pub replica: &'a Arc<Replica>,
    /// The request's text may be added to the corpus, and drafts may come from the corpus.
    pub may_use_corpus: bool,
}

/// State shared by the parts of a running gateway.
#[derive(Clone)]
pub struct Shared {
    /// The configured backends and their replicas.
    pub fleet: Arc<Fleet>,
    /// The operator's switch between `off`, `observe` and `auto`.
    pub modes: Arc<ModeSwitch>,
    /// Metrics, recent requests, log.
    pub observer: Arc<Observer>,
    /// Lifecycle of the process: starting, ready, draining.
    pub life: Arc<Lifecycle>,
    /// `/readyz` requires a reachable replica of every backend.
    pub require_backend: bool,
    /// Permits of concurrent sessions (`limits.sessions`).
    pub sessions: Arc<Semaphore>,
    /// Memory in use on behalf of clients (`limits.memory`).
    pub memory: Arc<Memory>,
    /// Requests whose rows an engine that asks for drafts may join.
    pub joins: Arc<Joins>,
    /// The open connections of clients.
    pub connections: Arc<Connections>,
}

/// An eligible request with everything that belongs to it.
pub struct Exchange {
    /// The head, fit for the backend: without hop-by-hop and `x-foretell` fields, with
    /// `x-forwarded-*`.
    pub head: request::Parts,
    /// The headers that the client sent, which policies match on.
    pub sent: HeaderMap,
    /// The body as received.
    pub body: Bytes,
    /// The parsed body.
    pub request: Box<openai::Request>,
    /// The replica that serves the request; a session never changes it.
    pub replica: Arc<Replica>,
    pub shared: Shared,
    pub client: Client,
    /// The request's record and its session permit.
    pub slot: Slot,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Client {
    /// The API that it uses.
    pub api: Api,
    /// The `x-foretell` header, which can only lower what policy and gates allow; `None` without
    /// it. Never `Off`.
    pub control: Option<Control>,
    /// The stricter of the process's mode and the backend's, as of the admission.
    pub mode: Mode,
    /// The tenant; `None` if not known.
    pub tenant: Option<String>,
    /// The client accepts HTTP trailers.
    pub trailers: bool,
    /// The request's text may be added to the corpus, and drafts may come from the corpus.
    pub may_use_corpus: bool,
}

/// The record of a served request, with its session permit, until the end of the answer.
#[derive(Debug)]
pub struct Slot {
    pub record: Record,
    permit: Option<OwnedSemaphorePermit>,
}

impl Slot {
    /// The record of a request, with the permit taken for it.
    pub fn new(record: Record, permit: OwnedSemaphorePermit) -> Self {
        Self { record, permit: Some(permit) }
    }

    /// Ends the answer and releases the permit. The record ends once the drafters are scored.
    pub fn over(&mut self, client_gone: bool) {
        self.permit = None;
        self.record.over(client_gone);
    }

    /// Releases the permit and returns the record.
    pub fn into_record(self) -> Record {
        self.record
    }
}

/// A request as a backend would receive it without Foretell.
pub struct Unsent {
    /// The head, fit for the backend.
    pub head: request::Parts,
    /// The body as received.
    pub body: Bytes,
    pub replica: Arc<Replica>,
}
