//! The usage of a first call that the session has left.
//!
//! vLLM tells what it had cached of a prompt, and its fingerprint, in the last event of a stream only. Closing the connection would lose that, so
//! the call is aborted by another call: its stream ends at once, and ends with its usage.

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

/// Longest wait for it, from the moment at which the call is left: an answer may be over by then.
const WITHIN: Duration = Duration::from_millis(500);

/// The usage in the last event of an aborted call; `None` if it was not told.
pub(super) struct LeftUsage(JoinHandle<Option<Value>>);

impl LeftUsage {
    /// Aborts the call whose answer has this id, and reads its stream to the end.
    pub fn ask(ride: Ride, id: String, calls: Calls, manner: &Arc<Manner>) -> Self {
        let manner = Arc::clone(manner);
        let asked = async move {
            if !calls.abort(&id).await {
                manner.has_ended(None);
                return None;
            }
            let mut event = ride.last_event().await?;
            manner.has_ended(Some(&event));
            Some(event.get_mut("usage")?.take())
        };
        let asked = tokio::time::timeout(WITHIN, asked).map(|told| told.ok().flatten());
        Self(tokio::spawn(asked.in_current_span()))
    }
}

impl Future for LeftUsage {
    type Output = Option<Value>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.poll_unpin(context).map(|told| told.ok().flatten())
    }
}
