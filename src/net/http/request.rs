//! The body of a client's request, with a time limit for its progress.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::time::{Instant, Sleep};

use crate::http::body::{self, BoxError};

/// A body makes progress if this many bytes of it, or its end, arrive within the time limit: a slow
/// trickle fails like a pause.
const PROGRESS: usize = 1 << 10;

/// The request body made no progress within this time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the request body made no progress within {0:?}")]
pub struct Silent(pub Duration);

/// The body of a client's request. Fails with [`Silent`] if it makes no progress; time during which
/// it is not read does not count.
pub struct RequestBody(Source);

/// Source of the bytes.
enum Source {
    /// The client's connection.
    Client(Incoming, ProgressTimer),
    /// A body of which a part has been read, by one that had the time limit.
    Resumed(body::Body),
}

impl RequestBody {
    /// A body that must make progress within `limit`.
    pub fn new(inner: Incoming, limit: Duration) -> Self {
        Self(Source::Client(inner, ProgressTimer::new(limit)))
    }

    /// A body that was read before, in part or completely.
    pub fn resumed(body: body::Body) -> Self {
        Self(Source::Resumed(body))
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let (inner, timer) = match &mut self.0 {
            Source::Client(inner, timer) => (inner, timer),
            Source::Resumed(body) => return Pin::new(body).poll_frame(cx),
        };
        match Pin::new(inner).poll_frame(cx) {
            Poll::Ready(frame) => {
                let data = frame.as_ref().and_then(|frame| frame.as_ref().ok()?.data_ref());
                timer.received(data.map_or(0, Bytes::len));
                Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
            }
            Poll::Pending => timer.poll_silent(cx).map(|silent| Some(Err(silent.into()))),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            Source::Client(inner, _) => inner.is_end_stream(),
            Source::Resumed(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            Source::Client(inner, _) => inner.size_hint(),
            Source::Resumed(body) => body.size_hint(),
        }
    }
}

/// Measures the time of waiting for the body.
struct ProgressTimer {
    limit: Duration,
    remaining: Duration,
    /// Bytes received since `remaining` was last reset to `limit`.
    bytes: usize,
    waiting: Option<Instant>,
    sleep: Option<Pin<Box<Sleep>>>,
}

impl ProgressTimer {
    fn new(limit: Duration) -> Self {
        Self { limit, remaining: limit, bytes: 0, waiting: None, sleep: None }
    }

    fn received(&mut self, bytes: usize) {
        if let Some(since) = self.waiting.take() {
            self.remaining = self.remaining.saturating_sub(since.elapsed());
        }
        self.bytes += bytes;
        if self.bytes >= PROGRESS {
            self.bytes = 0;
            self.remaining = self.limit;
        }
    }

    fn poll_silent(&mut self, cx: &mut Context<'_>) -> Poll<Silent> {
        let sleep = self.sleep.get_or_insert_with(|| Box::pin(tokio::time::sleep(self.remaining)));
        if self.waiting.is_none() {
            let now = Instant::now();
            self.waiting = Some(now);
            sleep.as_mut().reset(now + self.remaining);
        }
        sleep.as_mut().poll(cx).map(|()| Silent(self.limit))
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn over(timer: &mut ProgressTimer) -> bool {
        timer.poll_silent(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    #[tokio::test(start_paused = true)]
    async fn a_trickling_body_fails_like_a_silent_one() {
        let mut timer = ProgressTimer::new(30 * SECOND);
        for n in 0..3 {
            assert!(!over(&mut timer), "drop {n}");
            tokio::time::advance(9 * SECOND).await;
            timer.received(10);
        }
        assert!(!over(&mut timer));
        tokio::time::advance(4 * SECOND).await;
        assert!(over(&mut timer));
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_makes_progress_gets_the_full_time_again() {
        let mut timer = ProgressTimer::new(30 * SECOND);
        for _ in 0..10 {
            assert!(!over(&mut timer));
            tokio::time::advance(29 * SECOND).await;
            assert!(!over(&mut timer));
            timer.received(PROGRESS);
        }
        // No one reads the body.
        tokio::time::advance(1000 * SECOND).await;
        assert!(!over(&mut timer));
        tokio::time::advance(31 * SECOND).await;
        assert!(over(&mut timer));
    }
}
