//! The last event of a first call that the session has abandoned.
//!
//! vLLM sends the number of cached prompt tokens, and its fingerprint, in the last event of a
//! stream only. Closing the connection would lose that event, so the call is aborted by another
//! call: its stream ends at once, with that event.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::FutureExt;
use serde_json::Value;
use tokio::task::JoinHandle;
use tracing::Instrument;

use crate::learning::answer_traits::AnswerTraits;
use crate::serving::calls::Calls;
use crate::serving::plain::PlainStream;
use foretell_wire::openai::{Event, Route};

/// Maximum wait for it, from the abort on; the answer may be over by then.
const WITHIN: Duration = Duration::from_millis(500);

/// The `usage.prompt_tokens_details` of an aborted call's last event; `None` if it was not sent.
pub(super) struct AbortedCall(JoinHandle<Option<Value>>);

/// How an aborted call ended.
enum Ended {
    With(Arc<Event>),
    /// Without a last event, or not in time.
    Without,
    /// The server has no endpoint that aborts a call.
    NoCall,
    /// The aborting call failed this time.
    Failed,
}

impl AbortedCall {
    /// Aborts the call that `plain_stream` reads, and reads its stream to the end.
    pub fn abort(
        plain_stream: PlainStream,
        route: Route,
        calls: Calls,
        answer_traits: Arc<AnswerTraits>,
    ) -> Self {
        let ended = async move {
            match calls.abort(route).await {
                Some(true) => plain_stream.last_event().await.map_or(Ended::Without, Ended::With),
                Some(false) => Ended::NoCall,
                None => Ended::Failed,
            }
        };
        let details = async move {
            match tokio::time::timeout(WITHIN, ended).await.unwrap_or(Ended::Without) {
                Ended::With(last) => {
                    let mut last = last.value();
                    answer_traits.has_ended(Some(&last));
                    return Some(last.pointer_mut("/usage/prompt_tokens_details")?.take());
                }
                Ended::NoCall => answer_traits.has_ended(None),
                Ended::Without => answer_traits.has_not_ended(),
                Ended::Failed => {}
            }
            None
        };
        Self(tokio::spawn(details.in_current_span()))
    }
}

impl Future for AbortedCall {
    type Output = Option<Value>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.poll_unpin(context).map(|details| details.ok().flatten())
    }
}
