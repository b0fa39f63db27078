//! The last event of a first call that the session has left.
//!
//! vLLM tells what it had cached of a prompt, and its fingerprint, in the last event of a stream only. Closing the connection
//! would lose that, so the call is aborted by another call: its stream ends at once, with that event.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::FutureExt;
use serde_json::Value;
use tokio::task::JoinHandle;
use tracing::Instrument;

use crate::drive::calls::Calls;
use crate::drive::manner::Manner;
use crate::drive::ride::Ride;
use crate::openai::Route;

/// Longest wait for it, from the moment at which the call is left: an answer may be over by then.
const WITHIN: Duration = Duration::from_millis(500);

/// What the last event of an aborted call says of the prompt (`usage.prompt_tokens_details`); `None` if it was not told.
pub(super) struct LeftDetails(JoinHandle<Option<Value>>);

/// How an aborted call ended.
enum Ended {
    /// With this event.
    With(Value),
    /// Without a last event, or not in time.
    Without,
    /// The server has no call that aborts.
    NoCall,
    /// That call failed this time.
    Failed,
}

impl LeftDetails {
    /// Aborts the call that `ride` reads, and reads its stream to the end.
    pub fn ask(ride: Ride, route: Route, calls: Calls, manner: Arc<Manner>) -> Self {
        let ended = async move {
            match calls.abort(route).await {
                Some(true) => ride.last_event().await.map_or(Ended::Without, Ended::With),
                Some(false) => Ended::NoCall,
                None => Ended::Failed,
            }
        };
        let told = async move {
            match tokio::time::timeout(WITHIN, ended).await.unwrap_or(Ended::Without) {
                Ended::With(mut last) => {
                    manner.has_ended(Some(&last));
                    return Some(last.pointer_mut("/usage/prompt_tokens_details")?.take());
                }
                Ended::NoCall => manner.has_ended(None),
                Ended::Without => manner.has_not_ended(),
                Ended::Failed => {}
            }
            None
        };
        Self(tokio::spawn(told.in_current_span()))
    }
}

impl Future for LeftDetails {
    type Output = Option<Value>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.poll_unpin(context).map(|told| told.ok().flatten())
    }
}
