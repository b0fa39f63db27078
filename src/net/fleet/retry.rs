//! Resends a request, to another replica, if no answer to it has begun.
//!
//! A request of which nothing was sent goes to another replica. One that was written may have
//! reached an engine: it is resent only if processing it twice is harmless, and after a closed
//! connection, never after a timeout. No answer is discarded for another try.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use http::{Request, Response, request};

use super::error::SendErrorKind;
use super::replica::{Fresh, Repeatable, Replica, Unanswered};
use super::{Answer, Fleet, SendError};
use crate::http::body::Body;
use crate::http::replay::Replay;

/// Budget that a request adds; a retry takes [`RETRY`].
const REQUEST: u32 = 1;
/// Budget that a retry takes: a tenth of the requests may be sent twice.
const RETRY: u32 = 10;
/// Maximum burst of retries: as many as may have been under way at a replica that goes away.
const BURST: u32 = 100 * RETRY;

/// Budget of requests that may be sent a second time: a tenth of all, in bursts of up to a hundred.
/// When everything fails, retries must not double the load.
#[derive(Debug)]
pub(super) struct RetryBudget(AtomicU32);

impl Default for RetryBudget {
    fn default() -> Self {
        Self(AtomicU32::new(BURST))
    }
}

impl RetryBudget {
    pub(super) fn request(&self) {
        if self.0.load(Ordering::Relaxed) < BURST {
            self.0.fetch_add(REQUEST, Ordering::Relaxed);
        }
    }

    pub(super) fn retry(&self) -> bool {
        let taken = |budget: u32| budget.checked_sub(RETRY);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, taken).is_ok()
    }
}

impl Fleet {
    /// Sends `request` to `replica`; if no answer to it begins, once more to another replica of its
    /// backend, which `replica` then is, or to the same one where the backend has closed a
    /// connection that had answered before. `repeatable` gives the body if the request may be
    /// resent although it may have arrived; not used where work is billed.
    ///
    /// # Errors
    /// As [`Replica::send`]; the error of the second try if there was one.
    pub async fn send(
        &self,
        replica: &mut Arc<Replica>,
        request: Request<Body>,
        repeatable: Option<Replay>,
    ) -> Result<Response<Answer>, SendError> {
        let mut request = request;
        let free = request.method().is_safe() || !replica.is_billed();
        let repeatable = if free { repeatable } else { None };
        let copy = repeatable.map(|replay| (head_of(&request), replay));
        if copy.is_some() {
            request.extensions_mut().insert(Repeatable);
        }
        let failed = match replica.try_send(request).await {
            Ok(answer) => return Ok(answer),
            Err(failed) => failed,
        };
        let (kind, raced) = (failed.kind(), failed.error.is_race());
        let copied = || copy.and_then(|(head, replay)| Some(Request::from_parts(head, replay.into_body()?)));
        let request = || failed.unsent.map(|unsent| *unsent).or_else(copied);
        let Some((mut request, to)) = self.retry_target(replica, kind, raced, request) else {
            return Err(failed.error);
        };
        if !self.granted(raced) {
            replica.retried(false);
            return Err(failed.error);
        }
        request.extensions_mut().insert(Fresh);
        replica.retried(true);
        tracing::debug!(from = replica.label(), to = to.label(), error = %failed.error, "request retried");
        *replica = to;
        replica.chosen();
        Box::pin(replica.send(request)).await
    }

    /// The replica that may answer a request instead of `replica`, whose call ended with `error`
    /// before an answer had begun: as in [`Self::send`], for callers that use a replica directly.
    /// Counts as a retry.
    pub fn other_for_retry(&self, replica: &Arc<Replica>, error: &SendError) -> Option<Arc<Replica>> {
        let hung_up = matches!(
            error,
            SendError::Connect { .. } | SendError::ConnectTimeout { .. } | SendError::Closed { .. }
        );
        if !hung_up {
            return None;
        }
        let other = self.other(replica)?;
        let granted = self.granted(error.is_race());
        replica.retried(granted);
        granted.then(|| {
            other.chosen();
            other
        })
    }

    /// True if a completion that was sent to `replica` and ended with `error` is to be resent there
    /// over a fresh connection: it has lost the race with the backend's closing of an idle one, and
    /// there is no other replica.
    pub fn resends_to_same(&self, replica: &Arc<Replica>, error: &SendError) -> bool {
        let resends = error.is_race() && !replica.is_billed() && self.other(replica).is_none();
        if resends {
            replica.retried(true);
        }
        resends
    }

    /// True if a request may be resent. One that has lost a race needs no budget: it has used up a
    /// connection that had answered before, so there are never more of these than answers.
    fn granted(&self, raced: bool) -> bool {
        raced || self.budget.retry()
    }

    /// The replica for a second try of a request whose answer from `replica` ended empty: another
    /// one, else the same; `None` if the budget is spent. Counts as a retry.
    pub fn replica_for_retry(&self, replica: &Arc<Replica>) -> Option<Arc<Replica>> {
        let granted = self.budget.retry();
        replica.retried(granted);
        granted.then(|| {
            let to = self.other(replica).unwrap_or_else(|| Arc::clone(replica));
            to.chosen();
            to
        })
    }

    /// The request to resend and its replica; `None` if it must not be resent.
    fn retry_target(
        &self,
        replica: &Arc<Replica>,
        kind: SendErrorKind,
        raced: bool,
        request: impl FnOnce() -> Option<Request<Body>>,
    ) -> Option<(Request<Body>, Arc<Replica>)> {
        let to = match kind {
            SendErrorKind::Closed if raced => self.other(replica).unwrap_or_else(|| Arc::clone(replica)),
            SendErrorKind::Connect | SendErrorKind::Closed => self.other(replica)?,
            SendErrorKind::Timeout
            | SendErrorKind::Protocol
            | SendErrorKind::Changed
            | SendErrorKind::Request => return None,
        };
        Some((request()?, to))
    }
}

fn head_of(request: &Request<Body>) -> request::Parts {
    let mut head = Request::new(()).into_parts().0;
    head.method = request.method().clone();
    head.uri = request.uri().clone();
    head.headers = request.headers().clone();
    head
}

impl Unanswered {
    /// Kind of the failure. A connection that was not made in time counts as refused: nothing was
    /// sent.
    pub(super) fn kind(&self) -> SendErrorKind {
        match &self.error {
            SendError::ConnectTimeout { .. } => SendErrorKind::Connect,
            error => error.kind(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenth_of_the_requests_may_be_sent_again_in_bursts_of_a_hundred() {
        let budget = RetryBudget::default();
        assert_eq!((0..1000).filter(|_| budget.retry()).count(), 100);
        let mut retries = 0;
        for _ in 0..1000 {
            budget.request();
            retries += u32::from(budget.retry());
        }
        assert_eq!(retries, 100);
        (0..1_000_000).for_each(|_| budget.request());
        assert_eq!((0..1000).filter(|_| budget.retry()).count(), 100);
    }
}
