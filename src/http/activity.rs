//! What a client's connection is doing, and until when it may go on like that.
//!
//! hyper has one timer for the head of a request, which also runs while a connection is idle, and none for HTTP/2. So
//! it has none here: the socket says when bytes come, the service says when a request begins and ends, and from both
//! follows the one time at which the connection is overdue.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::task::AtomicWaker;
use http::Version;
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::http::listen::Bounds;

/// How long an HTTP/2 client has to notice that its connection is to end, once nothing is under way.
const LINGER: Duration = Duration::from_secs(10);
/// The same where others wait for its place.
const HURRY: Duration = Duration::from_secs(1);

/// What one connection is doing.
#[derive(Debug)]
pub struct Activity {
    state: Mutex<State>,
    changed: AtomicWaker,
}

#[derive(Debug)]
struct State {
    /// Requests under way.
    requests: usize,
    /// A request has come, and by which version.
    asked: Option<Version>,
    /// A part of a head has come.
    reading: bool,
    /// It belongs to another protocol now.
    switched: bool,
    /// Its place is wanted.
    wanted: bool,
    /// It is to end, at the latest then.
    leaving: Option<Instant>,
    /// Since when it has been doing what it does.
    since: Instant,
}

/// Why a connection is overdue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overdue {
    /// No head within `timeouts.header`: there is nobody to say goodbye to.
    Head,
    /// Idle for `timeouts.keep_alive`, or others want its place: it is asked to end.
    Idle,
    /// It was asked to end and has not.
    Left,
}

impl Activity {
    /// A connection from which nothing has come.
    #[must_use]
    pub fn begin() -> Arc<Self> {
        let state = State {
            requests: 0,
            asked: None,
            reading: false,
            switched: false,
            wanted: false,
            leaving: None,
            since: Instant::now(),
        };
        Arc::new(Self { state: Mutex::new(state), changed: AtomicWaker::new() })
    }

    /// Bytes have come.
    pub fn read(&self) {
        let mut state = self.state.lock();
        // Between the requests of HTTP/2 there are frames that are no requests.
        if state.requests == 0 && !state.reading && state.asked != Some(Version::HTTP_2) {
            state.reading = true;
            // The first head is due from connecting on, however little of it has come.
            if state.asked.is_some() {
                state.since = Instant::now();
            }
        }
    }

    /// Bytes have gone.
    pub fn written(&self) {
        let mut state = self.state.lock();
        let idle = state.requests == 0 && !state.reading;
        if idle && state.asked.is_some_and(|version| version != Version::HTTP_2) {
            state.since = Instant::now();
        }
    }

    /// A request has come; it is under way until the result is dropped.
    pub fn request(self: &Arc<Self>, version: Version) -> UnderWay {
        let mut state = self.state.lock();
        state.requests += 1;
        state.asked = Some(version);
        state.reading = false;
        UnderWay(Arc::clone(self))
    }

    /// The connection speaks another protocol from now on.
    pub fn switch(&self) {
        self.state.lock().switched = true;
    }

    /// It is to end as soon as nothing is under way.
    pub fn leave(&self) {
        let mut state = self.state.lock();
        state.leaving = Some(Instant::now() + if state.wanted { HURRY } else { LINGER });
    }

    /// Since when it has been idle: it could end and nobody would lose an answer. None if it is to end anyway.
    pub fn idle_since(&self) -> Option<Instant> {
        let state = self.state.lock();
        let busy = state.requests > 0 || state.reading || state.switched;
        let going = state.wanted || state.leaving.is_some();
        (!busy && !going).then_some(state.since)
    }

    /// Others want its place.
    pub fn want_place(&self) {
        self.state.lock().wanted = true;
        self.changed.wake();
    }

    /// When it is overdue, and why; never while a request is under way.
    fn due(&self, bounds: &Bounds) -> Option<(Instant, Overdue)> {
        let state = self.state.lock();
        if state.requests > 0 || state.switched {
            return None;
        }
        Some(match state.leaving {
            // Over HTTP/1.1 hyper ends it at once, but for a client that still takes the last answer.
            Some(by) if state.asked != Some(Version::HTTP_2) => {
                (by.max(state.since + bounds.keep_alive), Overdue::Left)
            }
            Some(by) => (by, Overdue::Left),
            None if state.wanted && !state.reading => (state.since, Overdue::Idle),
            None if state.reading || state.asked.is_none() => {
                (state.since + bounds.header_timeout, Overdue::Head)
            }
            None => (state.since + bounds.keep_alive, Overdue::Idle),
        })
    }

    /// Waits until it is overdue. To be polled after everything that can change what it is doing.
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
            // A timer that fires too early is cheaper than one that is set anew for every request.
            if sleep.is_elapsed() || at < sleep.deadline() {
                sleep.as_mut().reset(at);
            }
            std::task::ready!(sleep.as_mut().poll(cx));
        }
    }
}

/// A request under way.
#[derive(Debug)]
pub struct UnderWay(Arc<Activity>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.requests -= 1;
        if state.requests == 0 {
            state.since = Instant::now();
            // The requests of HTTP/2 end in tasks of their own.
            if state.asked == Some(Version::HTTP_2) {
                drop(state);
                self.0.changed.wake();
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

    /// Lets time pass until it is overdue: after how many seconds, and why.
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
            assert_eq!(overdue(&activity).await, (10, Overdue::Left));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn frames_that_are_no_requests_do_not_keep_http2_open() {
        let activity = Activity::begin();
        drop(activity.request(Version::HTTP_2));
        tokio::time::advance(70 * SECOND).await;
        activity.read();
        activity.written();
        assert_eq!(overdue(&activity).await, (5, Overdue::Idle));
        // A client that still takes the last answer of HTTP/1.1 is not idle.
        let activity = Activity::begin();
        drop(activity.request(Version::HTTP_11));
        tokio::time::advance(70 * SECOND).await;
        activity.written();
        assert_eq!(overdue(&activity).await, (75, Overdue::Idle));
    }

    #[tokio::test(start_paused = true)]
    async fn a_place_that_is_wanted_is_left_at_once_but_not_in_the_middle_of_anything() {
        let activity = Activity::begin();
        let under_way = activity.request(Version::HTTP_2);
        activity.want_place();
        assert!(never(&activity));
        drop(under_way);
        assert_eq!(overdue(&activity).await, (0, Overdue::Idle));
        activity.leave();
        assert_eq!(overdue(&activity).await, (1, Overdue::Left));

        let activity = Activity::begin();
        activity.read();
        activity.want_place();
        assert_eq!(overdue(&activity).await, (10, Overdue::Head));

        let activity = Activity::begin();
        activity.switch();
        assert!(never(&activity) && activity.idle_since().is_none());
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
