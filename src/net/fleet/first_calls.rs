//! Decides whether a replica's answers to altered first calls can be read.
//!
//! The first call of an eligible request is the client's request with a few additional fields. A
//! gateway in front of the engine may rewrite the answer, in the same way at every request, into a
//! form that cannot be read here; the request is then resent as the client wrote it. So a request
//! may cost two generations, and the number of such requests is bounded: an unreadable answer takes
//! a credit, a hundred readable ones give it back. Without credit, requests are passed through
//! unaltered, and one of them is a trial after a pause that grows.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use foretell_wire::openai::Route;

/// Credit of one unreadable answer; a readable one gives back 1.
const UNREADABLE: u32 = 100;
/// Maximum credit: unreadable answers in a row before requests are passed through.
const MAX_CREDIT: u32 = 2 * UNREADABLE;
/// The first pause; doubled after each failed trial.
const FIRST_PAUSE: Duration = Duration::from_mins(5);
const LONGEST_PAUSE: Duration = Duration::from_hours(1);

#[derive(Debug)]
pub struct FirstCalls {
    replica: String,
    completions: Mutex<Account>,
    chats: Mutex<Account>,
    unreadable: AtomicU64,
}

/// Requests of one route that are passed through because answers could not be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PassedThrough {
    pub route: Route,
    /// Cause of the last unreadable answer.
    pub cause: String,
    /// Time until the next trial.
    pub trial_in: Duration,
}

/// A first call under way. Until its answer is read, it decides nothing.
#[derive(Debug)]
pub struct FirstCall {
    calls: Arc<FirstCalls>,
    route: Route,
    /// It counts among those under way.
    open: bool,
}

impl FirstCalls {
    pub(super) fn new(replica: &str) -> Self {
        Self {
            replica: replica.to_owned(),
            completions: Mutex::default(),
            chats: Mutex::default(),
            unreadable: AtomicU64::new(0),
        }
    }

    /// Begins an altered first call; `None` if the request is to be passed through.
    pub fn begin(self: &Arc<Self>, route: Route) -> Option<FirstCall> {
        self.account(route).lock().begin(Instant::now()).then(|| FirstCall {
            calls: Arc::clone(self),
            route,
            open: true,
        })
    }

    /// True if requests of this route are passed through now.
    pub fn passes_through(&self, route: Route) -> bool {
        self.account(route).lock().remaining(Instant::now()).is_some()
    }

    /// The routes whose requests are passed through now.
    pub fn passed_through(&self) -> impl Iterator<Item = PassedThrough> + '_ {
        let now = Instant::now();
        [Route::Completions, Route::Chat].into_iter().filter_map(move |route| {
            let account = self.account(route).lock();
            let trial_in = account.remaining(now)?;
            Some(PassedThrough { route, cause: account.cause.clone(), trial_in })
        })
    }

    pub fn unreadable(&self) -> u64 {
        self.unreadable.load(Ordering::Relaxed)
    }

    /// Another engine, or another start of it, is there: nothing is known of its answers.
    pub fn forget(&self) {
        for account in [&self.completions, &self.chats] {
            let mut account = account.lock();
            *account = Account { in_flight: account.in_flight, ..Account::default() };
        }
    }

    fn account(&self, route: Route) -> &Mutex<Account> {
        match route {
            Route::Completions => &self.completions,
            Route::Chat => &self.chats,
        }
    }
}

impl FirstCall {
    /// Its answer can be read so far.
    pub fn read(&mut self) {
        if std::mem::take(&mut self.open) && self.calls.account(self.route).lock().read() {
            tracing::info!(
                replica = self.calls.replica,
                route = self.route.path(),
                "answers are readable: requests are eligible"
            );
        }
    }

    /// Its answer cannot be read.
    pub fn unreadable(mut self, cause: &str) {
        let open = std::mem::take(&mut self.open);
        self.calls.unreadable.fetch_add(1, Ordering::Relaxed);
        let refused = self.calls.account(self.route).lock().unreadable(open, cause, Instant::now());
        if let Some(pause) = refused {
            tracing::warn!(
                replica = self.calls.replica,
                route = self.route.path(),
                cause,
                trial_in_s = pause.as_secs(),
                "answers of this replica cannot be read: requests are passed through; \
                 look for a gateway between Foretell and the engine that rewrites answers"
            );
        }
    }

    /// True if a refusal of it may be compared with the answer to the client's request: the
    /// additional fields may be the cause. Few refusals are.
    pub fn may_compare(&self) -> bool {
        self.calls.account(self.route).lock().may_compare()
    }
}

impl Drop for FirstCall {
    fn drop(&mut self) {
        if self.open {
            self.calls.account(self.route).lock().close();
        }
    }
}

/// Credit and trials of one route. The time is an argument.
#[derive(Debug)]
struct Account {
    credit: u32,
    /// Credit of refusals that are compared; a request gives back 1.
    comparisons: u32,
    /// First calls under way, which may take credit.
    in_flight: u32,
    refused_until: Option<Instant>,
    pause: Duration,
    cause: String,
}

impl Default for Account {
    fn default() -> Self {
        Self {
            credit: MAX_CREDIT,
            comparisons: MAX_CREDIT,
            in_flight: 0,
            refused_until: None,
            pause: FIRST_PAUSE,
            cause: String::new(),
        }
    }
}

impl Account {
    /// True if an altered first call may be sent. Once an answer could not be read, no more of them
    /// are under way than there is credit for.
    fn begin(&mut self, now: Instant) -> bool {
        if self.remaining(now).is_some() {
            return false;
        }
        let limit = if self.refused_until.is_some() { 1 } else { self.credit / UNREADABLE };
        if self.credit < MAX_CREDIT && self.in_flight >= limit {
            return false;
        }
        self.comparisons = (self.comparisons + 1).min(MAX_CREDIT);
        self.in_flight += 1;
        true
    }

    /// Time until a request may be tried; `None` if none has to wait.
    fn remaining(&self, now: Instant) -> Option<Duration> {
        self.refused_until?.checked_duration_since(now).filter(|remaining| !remaining.is_zero())
    }

    /// A readable answer; true if it ended a pause.
    fn read(&mut self) -> bool {
        self.close();
        self.credit = (self.credit + 1).min(MAX_CREDIT);
        if self.credit == MAX_CREDIT {
            self.pause = FIRST_PAUSE;
        }
        let ended = self.refused_until.take().is_some();
        if ended {
            self.credit = UNREADABLE;
        }
        ended
    }

    /// An unreadable answer of a call that counts as under way if it is `open`; the pause that
    /// begins with it, if one does.
    fn unreadable(&mut self, open: bool, cause: &str, now: Instant) -> Option<Duration> {
        if open {
            self.close();
        }
        cause.clone_into(&mut self.cause);
        self.credit = self.credit.saturating_sub(UNREADABLE);
        if self.credit >= UNREADABLE || self.remaining(now).is_some() {
            return None;
        }
        let pause = self.pause;
        self.refused_until = Some(now + pause);
        self.pause = (pause * 2).min(LONGEST_PAUSE);
        Some(pause)
    }

    fn may_compare(&mut self) -> bool {
        let may = self.comparisons >= UNREADABLE;
        if may {
            self.comparisons -= UNREADABLE;
        }
        may
    }

    fn close(&mut self) {
        self.in_flight = self.in_flight.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends requests one after the other, and returns how many of them cost a second generation.
    fn resends(requests: u32, bent: impl Fn(u32) -> bool) -> u32 {
        let (mut account, now) = (Account::default(), Instant::now());
        (0..requests)
            .filter(|&number| {
                let altered = account.begin(now);
                match (altered, bent(number)) {
                    (true, true) => drop(account.unreadable(true, "bent", now)),
                    (true, false) => drop(account.read()),
                    (false, _) => {}
                }
                altered && bent(number)
            })
            .count() as u32
    }

    #[test]
    fn however_answers_are_bent_few_requests_cost_a_second_generation() {
        assert_eq!(resends(150, |_| true), 2);
        assert_eq!(resends(150, |number| number % 2 == 0), 2);
        assert_eq!(resends(150, |number| number % 60 == 59), 2);
        assert_eq!(resends(1010, |number| number % 101 == 100), 10, "one in a hundred is tolerated for ever");
    }

    #[test]
    fn a_trial_follows_after_a_pause_that_grows() {
        let (mut account, mut now) = (Account::default(), Instant::now());
        for _ in 0..2 {
            assert!(account.begin(now));
            account.unreadable(true, "bent", now);
        }
        for pause in [300, 600, 1200, 2400, 3600, 3600] {
            assert!(!account.begin(now), "{pause}");
            now += Duration::from_secs(pause);
            assert!(account.begin(now), "the trial");
            assert!(!account.begin(now), "one at a time");
            account.unreadable(true, "bent", now);
        }
        now += LONGEST_PAUSE;
        assert!(account.begin(now));
        assert!(account.read(), "the pauses are over");
        assert!(account.begin(now) && !account.begin(now), "credit for one");
        assert!(!account.read());
        assert!(account.begin(now));
        assert_eq!(account.unreadable(true, "bent", now), Some(LONGEST_PAUSE), "it was not read for long");
    }

    #[test]
    fn an_answer_that_becomes_unreadable_in_its_middle_counts_as_one_that_was_never_read() {
        let calls = Arc::new(FirstCalls::new("b/0"));
        for _ in 0..2 {
            let mut call = calls.begin(Route::Chat).unwrap();
            call.read();
            call.unreadable("bent");
        }
        assert!(calls.passes_through(Route::Chat));
        assert_eq!(calls.unreadable(), 2);
    }

    #[test]
    fn few_refusals_are_compared() {
        let calls = Arc::new(FirstCalls::new("b/0"));
        let compared =
            |times: u32| (0..times).filter(|_| calls.begin(Route::Chat).unwrap().may_compare()).count();
        assert_eq!(compared(150), 3);
    }

    #[test]
    fn a_call_that_is_dropped_decides_nothing() {
        let calls = Arc::new(FirstCalls::new("b/0"));
        calls.begin(Route::Chat).unwrap().unreadable("bent");
        let second = calls.begin(Route::Chat).unwrap();
        assert!(calls.begin(Route::Chat).is_none(), "credit for one");
        assert!(calls.begin(Route::Completions).is_some(), "the other route has its own");
        drop(second);
        calls.begin(Route::Chat).unwrap().unreadable("bent again");
        assert!(calls.passes_through(Route::Chat) && !calls.passes_through(Route::Completions));
        let shown: Vec<_> = calls.passed_through().map(|passed| (passed.route, passed.cause)).collect();
        assert_eq!(shown, [(Route::Chat, "bent again".to_owned())]);
        calls.forget();
        assert!(!calls.passes_through(Route::Chat));
    }
}
