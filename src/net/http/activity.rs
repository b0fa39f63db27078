//! State of a client's connection, and when it becomes overdue.
//!
//! hyper has a single timer for request heads, which also runs while a connection is idle, and none
//! for HTTP/2. It is disabled here. Instead the socket reports bytes, the service reports the start
//! and end of requests, and this module derives from both the one time at which the connection is
//! overdue.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::task::AtomicWaker;
use http::Version;
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::http::service::Bounds;
use crate::http::workers::Share;

/// Time for an HTTP/2 client to react to `GOAWAY`, counted from sending it.
const LINGER: Duration = Duration::from_secs(10);
/// As [`LINGER`], while other clients wait for a connection slot.
const SHORT_LINGER: Duration = Duration::from_secs(1);

/// State of one connection.
#[derive(Debug)]
pub struct Activity {
    state: Mutex<ConnectionState>,
    changed: AtomicWaker,
}

#[derive(Debug)]
struct ConnectionState {
    /// Number of requests being served.
    requests: usize,
    /// HTTP version of the latest request; `None` before the first.
    version: Option<Version>,
    /// True if a part of the next request head has arrived.
    reading: bool,
    /// True if it was upgraded to another protocol.
    switched: bool,
    /// True if its connection slot is needed for another client.
    wanted: bool,
    /// Time by which it must have ended, once it was requested to end; else `None`.
    leaving: Option<Instant>,
    /// Start of the current state (reading, idle).
    since: Instant,
    /// Time since which the client has taken none of the bytes to send; `None` if none wait.
    blocked: Option<Instant>,
    /// Number of answers over HTTP/2 that wait for the client to open its window.
    shut: usize,
    /// Time at which an answer over HTTP/2 last made progress, or began to wait for the window.
    moved: Instant,
    /// True once its listener has stopped: `leaving` is to be set, once.
    stopped: bool,
    /// True once its listener no longer waits.
    cut: bool,
    /// Its share in the load of its thread: it counts until its first request is served, and during
    /// every later one.
    share: Share,
}

/// Reason that a connection is overdue: its time limit, or its listener's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overdue {
    /// No complete head within `timeouts.header`: it is cut.
    Head,
    /// Idle for `timeouts.keep_alive`, or its slot is needed: it is requested to end.
    Idle,
    /// It was requested to end and has not ended: it is cut.
    Lingering,
    /// Its client has taken nothing of an answer for `timeouts.keep_alive`: it is cut.
    Blocked,
    /// Its listener has stopped: it is requested to end.
    Stopped,
    /// Its listener no longer waits: it is cut.
    Cut,
}

impl Activity {
    /// A connection that has not sent anything yet.
    #[must_use]
    pub fn begin() -> Arc<Self> {
        let state = ConnectionState {
            requests: 0,
            version: None,
            reading: false,
            switched: false,
            wanted: false,
            leaving: None,
            since: Instant::now(),
            blocked: None,
            shut: 0,
            moved: Instant::now(),
            stopped: false,
            cut: false,
            share: Share::default(),
        };
        Arc::new(Self { state: Mutex::new(state), changed: AtomicWaker::new() })
    }

    /// Sets its part in the load of the thread that serves it.
    pub fn counts_in(&self, share: Share) {
        self.state.lock().share = share;
    }

    /// Bytes have been received.
    pub fn read(&self) {
        let mut state = self.state.lock();
        // Between requests, HTTP/2 sends frames that do not start a request.
        if state.requests == 0 && !state.reading && state.version != Some(Version::HTTP_2) {
            state.reading = true;
            // The time for the first head starts with the connection, not with the head's first
            // byte.
            if state.version.is_some() {
                state.since = Instant::now();
            }
        }
    }

    /// Bytes are to be sent, but the client takes none now.
    pub fn blocked(&self) {
        self.state.lock().blocked.get_or_insert_with(Instant::now);
    }

    /// Bytes have been sent.
    pub fn written(&self) {
        let mut state = self.state.lock();
        state.blocked = None;
        let idle = state.requests == 0 && !state.reading;
        if idle && state.version.is_some_and(|version| version != Version::HTTP_2) {
            state.since = Instant::now();
        }
    }

    /// A request head has been received; the request counts as being served until the result is
    /// dropped.
    pub fn request(self: &Arc<Self>, version: Version) -> UnderWay {
        let mut state = self.state.lock();
        state.requests += 1;
        state.version = Some(version);
        state.reading = false;
        state.share.set(true);
        UnderWay { activity: Arc::clone(self), shut: false }
    }

    /// The connection is upgraded to another protocol.
    pub fn switch(&self) {
        self.state.lock().switched = true;
    }

    /// Requests that the connection ends once it serves no request.
    pub fn leave(&self) {
        let mut state = self.state.lock();
        state.leaving = Some(Instant::now() + if state.wanted { SHORT_LINGER } else { LINGER });
    }

    /// True if it was requested to end.
    pub fn is_leaving(&self) -> bool {
        self.state.lock().leaving.is_some()
    }

    /// Time since which it has been idle and could be closed without losing an answer; `None` if it
    /// is busy or was already requested to end.
    pub fn idle_since(&self) -> Option<Instant> {
        let state = self.state.lock();
        let busy = state.requests > 0 || state.reading || state.switched;
        let going = state.wanted || state.leaving.is_some();
        (!busy && !going).then_some(state.since)
    }

    /// Requests the slot of an idle connection for another client.
    pub fn want_slot(&self) {
        self.state.lock().wanted = true;
        self.changed.wake();
    }

    /// Records that its listener has stopped. (A token polled by every connection would be one lock
    /// for all of them, at every poll.)
    pub fn stop(&self) {
        self.state.lock().stopped = true;
        self.changed.wake();
    }

    /// Records that its listener no longer waits.
    pub fn cut(&self) {
        self.state.lock().cut = true;
        self.changed.wake();
    }

    /// Time at which it becomes overdue, and the reason; `None` while a request is being served to
    /// a client that takes the bytes.
    fn due(&self, bounds: &Bounds) -> Option<(Instant, Overdue)> {
        let state = self.state.lock();
        if state.cut {
            return Some((state.since, Overdue::Cut));
        }
        if state.stopped && state.leaving.is_none() {
            return Some((state.since, Overdue::Stopped));
        }
        if state.requests > 0 || state.switched {
            // One answer with progress is enough: the others share its connection.
            let shut = (state.shut > 0 && state.shut == state.requests).then_some(state.moved);
            let since = state.blocked.into_iter().chain(shut).min();
            return since.map(|since| (since + bounds.keep_alive, Overdue::Blocked));
        }
        Some(match state.leaving {
            // Over HTTP/1.1 hyper closes it at once, unless the client is still receiving the last
            // answer.
            Some(by) if state.version != Some(Version::HTTP_2) => {
                (by.max(state.since + bounds.keep_alive), Overdue::Lingering)
            }
            Some(by) => (by, Overdue::Lingering),
            None if state.wanted && !state.reading => (state.since, Overdue::Idle),
            None if state.reading || state.version.is_none() => {
                (state.since + bounds.header_timeout, Overdue::Head)
            }
            None => (state.since + bounds.keep_alive, Overdue::Idle),
        })
    }

    /// Waits until it is overdue. Must be polled after every event that may change the state.
    pub fn poll_overdue(
        &self,
        cx: &mut Context<'_>,
        bounds: &Bounds,
        mut sleep: std::pin::Pin<&mut tokio::time::Sleep>,
    ) -> Poll<Overdue> {
        self.changed.register(cx.waker());
        loop {
            let Some((at, why)) = self.due(bounds) else { return Poll::Pending };
            if at <= Instant::now() {
                return Poll::Ready(why);
            }
            // A timer that fires too early is cheaper than one that is reset for every request.
            if sleep.is_elapsed() || at < sleep.deadline() {
                sleep.as_mut().reset(at);
            }
            std::task::ready!(sleep.as_mut().poll(cx));
        }
    }
}

/// A request being served; it ends when this is dropped.
#[derive(Debug)]
pub struct UnderWay {
    activity: Arc<Activity>,
    shut: bool,
}

impl UnderWay {
    /// Sets whether its answer has bytes that wait for the client's HTTP/2 window. hyper requests
    /// more of a body only while the window is open.
    pub fn window_shut(&mut self, shut: bool) {
        let mut state = self.activity.state.lock();
        state.shut = state.shut - usize::from(self.shut) + usize::from(shut);
        state.moved = Instant::now();
        self.shut = shut;
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let mut state = self.activity.state.lock();
        state.requests -= 1;
        state.shut -= usize::from(self.shut);
        if state.requests == 0 {
            state.since = Instant::now();
            let switched = state.switched;
            state.share.set(switched);
            // HTTP/2 requests end in separate tasks, so the connection must be woken.
            if state.version == Some(Version::HTTP_2) {
                drop(state);
                self.activity.changed.wake();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn bounds() -> Bounds {
        Bounds { header_timeout: 10 * SECOND, keep_alive: 75 * SECOND, ..Bounds::default() }
    }

    /// Advances the time until it is overdue; returns the seconds that took, and the reason.
    async fn overdue(activity: &Activity) -> (u64, Overdue) {
        let sleep = tokio::time::sleep(Duration::ZERO);
        tokio::pin!(sleep);
        let start = Instant::now();
        let why = std::future::poll_fn(|cx| activity.poll_overdue(cx, &bounds(), sleep.as_mut())).await;
        (start.elapsed().as_secs(), why)
    }

    fn never(activity: &Activity) -> bool {
        activity.due(&bounds()).is_none()
    }

    #[tokio::test(start_paused = true)]
    async fn a_head_is_due_from_connecting_or_from_its_first_byte() {
        let activity = Activity::begin();
        tokio::time::advance(4 * SECOND).await;
        activity.read();
        assert_eq!(overdue(&activity).await, (6, Overdue::Head));

        drop(activity.request(Version::HTTP_11));
        tokio::time::advance(60 * SECOND).await;
        activity.read();
        tokio::time::advance(5 * SECOND).await;
        activity.read();
        assert_eq!(overdue(&activity).await, (5, Overdue::Head));
    }

    #[tokio::test(start_paused = true)]
    async fn an_idle_connection_may_stay_for_longer() {
        for version in [Version::HTTP_11, Version::HTTP_2] {
            let activity = Activity::begin();
            let under_way = activity.request(version);
            assert!(never(&activity) && activity.idle_since().is_none());
            tokio::time::advance(1000 * SECOND).await;
            drop(under_way);
            assert_eq!(activity.idle_since(), Some(Instant::now()));
            assert_eq!(overdue(&activity).await, (75, Overdue::Idle), "{version:?}");
            activity.leave();
            assert_eq!(overdue(&activity).await, (10, Overdue::Lingering));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn frames_other_than_requests_do_not_keep_http2_open() {
        let activity = Activity::begin();
        drop(activity.request(Version::HTTP_2));
        tokio::time::advance(70 * SECOND).await;
        activity.read();
        activity.written();
        assert_eq!(overdue(&activity).await, (5, Overdue::Idle));
        // An HTTP/1.1 client that is still receiving the last answer is not idle.
        let activity = Activity::begin();
        drop(activity.request(Version::HTTP_11));
        tokio::time::advance(70 * SECOND).await;
        activity.written();
        assert_eq!(overdue(&activity).await, (75, Overdue::Idle));
    }

    #[tokio::test(start_paused = true)]
    async fn a_wanted_slot_is_freed_at_once_but_not_while_busy() {
        let activity = Activity::begin();
        let under_way = activity.request(Version::HTTP_2);
        activity.want_slot();
        assert!(never(&activity));
        drop(under_way);
        assert_eq!(overdue(&activity).await, (0, Overdue::Idle));
        activity.leave();
        assert_eq!(overdue(&activity).await, (1, Overdue::Lingering));

        let activity = Activity::begin();
        activity.read();
        activity.want_slot();
        assert_eq!(overdue(&activity).await, (10, Overdue::Head));

        let activity = Activity::begin();
        activity.switch();
        assert!(never(&activity) && activity.idle_since().is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_stopped_listener_asks_once_and_cuts_after_its_wait() {
        for requests in [0, 1] {
            let activity = Activity::begin();
            let _under_way: Vec<_> = (0..requests).map(|_| activity.request(Version::HTTP_11)).collect();
            activity.stop();
            assert_eq!(overdue(&activity).await, (0, Overdue::Stopped));
            activity.leave();
            assert_ne!(activity.due(&bounds()).map(|(_, why)| why), Some(Overdue::Stopped));
            activity.cut();
            assert_eq!(overdue(&activity).await, (0, Overdue::Cut));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_window_that_stays_shut_is_overdue_unless_another_answer_moves() {
        let activity = Activity::begin();
        let mut answers = [activity.request(Version::HTTP_2), activity.request(Version::HTTP_2)];
        answers[0].window_shut(true);
        assert!(never(&activity), "the other one waits for the backend");
        tokio::time::advance(50 * SECOND).await;
        answers[1].window_shut(true);
        assert_eq!(overdue(&activity).await, (75, Overdue::Blocked));
        answers[1].window_shut(false);
        assert!(never(&activity));
        drop(answers);
        assert_eq!(overdue(&activity).await, (75, Overdue::Idle));
    }

    #[tokio::test(start_paused = true)]
    async fn the_end_of_the_last_request_of_http2_is_noticed() {
        let activity = Activity::begin();
        let under_way = activity.request(Version::HTTP_2);
        let sleep = tokio::time::sleep(Duration::ZERO);
        tokio::pin!(sleep);
        let mut cx = Context::from_waker(Waker::noop());
        assert!(activity.poll_overdue(&mut cx, &bounds(), sleep.as_mut()).is_pending());
        let waiting = tokio::spawn({
            let activity = Arc::clone(&activity);
            async move { overdue(&activity).await }
        });
        tokio::task::yield_now().await;
        drop(under_way);
        assert_eq!(waiting.await.unwrap(), (75, Overdue::Idle));
    }
}
