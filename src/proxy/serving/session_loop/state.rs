//! Parts of the session loop's state, each with the few operations on it.

use futures_util::future::{AbortHandle, Abortable, BoxFuture};
use futures_util::stream::{FuturesUnordered, StreamExt};
use futures_util::{Future, FutureExt};

use super::aborted::AbortedCall;
use crate::serving::drafting::Reply;
use crate::serving::exchange::Unsent;
use crate::serving::failure::Failure;
use foretell_core::session::ActionId;
use foretell_core::words::PlainReason;
use foretell_net::fleet::FirstCall;
use foretell_wire::openai::UsageText;

pub(super) struct FirstAnswer {
    /// The request, which may be resent while the client has received nothing: for a stream until
    /// the first event is read, for a buffered answer until its end.
    pub unsent: Option<Unsent>,
    /// Its first call, until its answer turns out to be unreadable.
    call: Option<FirstCall>,
    /// It could not be read to its end.
    pub is_unreadable: bool,
    /// An event of it has been read.
    pub has_begun: bool,
    /// No plain call after the first has been started.
    pub is_current: bool,
}

impl FirstAnswer {
    pub fn new(unsent: Unsent, call: Option<FirstCall>) -> Self {
        Self { unsent: Some(unsent), call, is_unreadable: false, has_begun: false, is_current: true }
    }

    /// Records an event with choices: from now on a stream's request cannot be resent.
    pub fn begin(&mut self, is_buffered: bool) {
        self.has_begun = true;
        if !is_buffered {
            self.unsent = None;
        }
        if let Some(call) = &mut self.call {
            call.read();
        }
    }

    /// Records that it cannot be read, for the requests that follow.
    pub fn set_unreadable(&mut self, cause: &str) {
        self.is_unreadable = true;
        if let Some(call) = self.call.take() {
            call.unreadable(cause);
        }
    }
}

/// Usage and counts reported by the first call.
#[derive(Default)]
pub(super) struct ReportedUsage {
    /// The backend's usage, as last reported.
    pub value: Option<UsageText>,
    /// `value` covers the complete call.
    pub is_complete: bool,
    /// Output tokens so far, as counted by the engine; `None` if it does not count.
    pub counted: Option<u32>,
    /// The prompt's ids came from a separate call and have not been compared with the backend's
    /// count.
    pub prompt_unchecked: bool,
    /// Request for the cached tokens of the prompt, made once the session has abandoned its first
    /// call; `None` if not needed.
    pub aborted_call: Option<AbortedCall>,
}

impl ReportedUsage {
    pub fn completion_tokens(&self) -> Option<u32> {
        self.value.as_ref()?.completion_tokens().and_then(|count| u32::try_from(count).ok())
    }

    pub fn prompt_tokens(&self) -> Option<u64> {
        self.value.as_ref()?.prompt_tokens()
    }
}

/// Result of an action; no reply if it was cancelled.
type Ended = (ActionId, Option<Reply>);

/// The session's actions in flight.
#[derive(Default)]
pub(super) struct Actions {
    pending: FuturesUnordered<BoxFuture<'static, Ended>>,
    aborts: Vec<(ActionId, AbortHandle)>,
    /// A deadline of the session has just passed: actions cancelled now are counted as late.
    pub late: bool,
}

impl Actions {
    pub fn start(&mut self, id: ActionId, reply: impl Future<Output = Reply> + Send + 'static) {
        let (handle, registration) = AbortHandle::new_pair();
        self.aborts.push((id, handle));
        let reply = Abortable::new(reply, registration).map(move |reply| (id, reply.ok()));
        self.pending.push(reply.boxed());
    }

    pub fn abort(&self, target: ActionId) {
        for (_, handle) in self.aborts.iter().filter(|(id, _)| *id == target) {
            handle.abort();
        }
    }

    /// The next action that ends; `None` if none is in flight.
    pub async fn next(&mut self) -> Option<Ended> {
        let (id, reply) = self.pending.next().await?;
        self.aborts.retain(|(pending, _)| *pending != id);
        Some((id, reply))
    }
}

/// Reason for which speculation is not allowed now; `None` if it is.
pub type ClosedGate = Box<dyn Fn() -> Option<PlainReason> + Send + Sync>;

/// The gates, and the state that the session was last informed of.
pub(super) struct Gates {
    closed: ClosedGate,
    pub reported: Option<PlainReason>,
}

impl Gates {
    pub fn new(closed: ClosedGate) -> Self {
        Self { closed, reported: None }
    }

    /// Reads the gates; true if the state differs from the one reported before.
    pub fn update(&mut self) -> bool {
        let closed = (self.closed)();
        let changed = closed != self.reported;
        self.reported = closed;
        changed
    }
}

/// Failure of the last plain call.
pub(super) struct PlainFailure {
    /// The error for the client if the output has no end.
    pub failure: Failure,
    /// Causes of broken plain calls, as text for the operator.
    pub causes: Vec<String>,
}

impl PlainFailure {
    pub const fn new() -> Self {
        Self { failure: Failure::BrokeOff, causes: Vec::new() }
    }

    /// Adds a cause; the first and the last are stored.
    pub fn add_cause(&mut self, cause: String) {
        self.causes.truncate(1);
        self.causes.push(cause);
    }

    /// The causes in one line.
    pub fn text(&self) -> String {
        if self.causes.is_empty() { self.failure.to_string() } else { self.causes.join("; then ") }
    }
}
