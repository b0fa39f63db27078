//! Decides when a replica is no longer used after failures, and when it is reused.
//!
//! Pure: the time and the jitter are arguments, so a test covers hours without waiting. Only events
//! that depend on the replica count: an error that the client's request caused neither opens nor
//! closes the breaker.

use std::time::Duration;

use foretell_core::units::Tick;

/// Consecutive failures that open it.
const FAILURES: u32 = 5;
/// Failures further apart than this are not consecutive, whatever happened in between.
const FORGOTTEN: Duration = Duration::from_secs(30);
/// The first pause before a trial; doubled after each failed trial.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// The longest pause between trials.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// A trial without a result for this long is abandoned: its client has disconnected.
const TRIAL_LOST: Duration = Duration::from_secs(30);

/// The three states, as in metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BreakerState {
    /// Requests are sent to it.
    Closed,
    /// It answered a health check; one request at a time is sent as a trial.
    HalfOpen,
    /// No requests until a health check succeeds.
    Open,
}

impl BreakerState {
    /// All states, in the order of their value in `foretell_replica_breaker_state`.
    pub const ALL: [Self; 3] = [Self::Closed, Self::HalfOpen, Self::Open];

    /// The name in the admin API and in labels.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::HalfOpen => "half_open",
            Self::Open => "open",
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Inner {
    Closed { failures: u32, last: Tick },
    HalfOpen { trial: Option<Tick> },
    Open { until: Tick },
}

#[derive(Clone, Debug)]
pub struct Breaker {
    inner: Inner,
    /// The next pause, before jitter.
    pause: Duration,
}

impl Default for Breaker {
    fn default() -> Self {
        Self { inner: Inner::Closed { failures: 0, last: Tick(0) }, pause: FIRST_PAUSE }
    }
}

impl Breaker {
    pub const fn state(&self) -> BreakerState {
        match self.inner {
            Inner::Closed { .. } => BreakerState::Closed,
            Inner::HalfOpen { .. } => BreakerState::HalfOpen,
            Inner::Open { .. } => BreakerState::Open,
        }
    }

    /// True if it is closed without a recent failure.
    pub const fn is_calm(&self) -> bool {
        matches!(self.inner, Inner::Closed { failures: 0, .. })
    }

    /// True if a request may be sent to the replica now.
    pub fn admits(&self, now: Tick) -> bool {
        match self.inner {
            Inner::Closed { .. } | Inner::HalfOpen { trial: None } => true,
            Inner::HalfOpen { trial: Some(since) } => now - since >= TRIAL_LOST,
            Inner::Open { .. } => false,
        }
    }

    /// Time at which an open breaker's replica is due for a health check; `None` if it is not open.
    pub const fn due(&self) -> Option<Tick> {
        match self.inner {
            Inner::Open { until } => Some(until),
            Inner::Closed { .. } | Inner::HalfOpen { .. } => None,
        }
    }

    /// Records that a request is sent: in the half-open state, it is the trial.
    pub fn begin(&mut self, now: Tick) {
        if let Inner::HalfOpen { trial } = &mut self.inner {
            *trial = Some(now);
        }
    }

    /// Records that a request is being answered: a trial has succeeded so far, and the next failure
    /// reopens the breaker.
    pub fn answering(&mut self, now: Tick) {
        if let Inner::HalfOpen { .. } = self.inner {
            self.inner = Inner::Closed { failures: FAILURES - 1, last: now };
        }
    }

    /// Records that a request was answered completely and without error.
    pub fn succeeded(&mut self) {
        *self = Self::default();
    }

    /// Records that a request ended without information about the replica.
    pub fn undecided(&mut self) {
        if let Inner::HalfOpen { trial } = &mut self.inner {
            *trial = None;
        }
    }

    /// Records that the replica answered a health check: the next request is a trial.
    pub fn healthy(&mut self) {
        if let Inner::Open { .. } = self.inner {
            self.inner = Inner::HalfOpen { trial: None };
        }
    }

    /// Records that a request or a health check failed. `jitter` in 0..1 spreads the pauses of many
    /// proxies.
    pub fn failed(&mut self, now: Tick, jitter: f64) {
        match &mut self.inner {
            Inner::Closed { failures, last } => {
                *failures = if now - *last < FORGOTTEN { *failures + 1 } else { 1 };
                *last = now;
                if *failures >= FAILURES {
                    self.open(now, jitter);
                }
            }
            Inner::HalfOpen { .. } => self.open(now, jitter),
            // Requests sent before it opened add no information; a due health check does.
            Inner::Open { until } if now >= *until => self.open(now, jitter),
            Inner::Open { .. } => {}
        }
    }

    fn open(&mut self, now: Tick, jitter: f64) {
        let pause = self.pause.mul_f64(0.75 + 0.5 * jitter.clamp(0.0, 1.0));
        self.inner = Inner::Open { until: now.after(pause) };
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIDDLE: f64 = 0.5;

    fn at(millis: u64) -> Tick {
        Tick(millis * 1000)
    }

    fn opened(now: Tick) -> Breaker {
        let mut breaker = Breaker::default();
        (0..FAILURES).for_each(|_| breaker.failed(now, MIDDLE));
        breaker
    }

    #[test]
    fn only_consecutive_failures_open_it() {
        let mut breaker = Breaker::default();
        for _ in 0..100 {
            (1..FAILURES).for_each(|_| breaker.failed(at(0), MIDDLE));
            breaker.undecided();
            assert_eq!(breaker.state(), BreakerState::Closed);
            breaker.succeeded();
        }
        (1..FAILURES).for_each(|_| breaker.failed(at(0), MIDDLE));
        assert!(breaker.admits(at(0)));
        breaker.failed(at(0), MIDDLE);
        assert_eq!(breaker.state(), BreakerState::Open);
        assert!(!breaker.admits(at(0)));
    }

    #[test]
    fn failures_far_apart_are_not_consecutive() {
        let mut breaker = Breaker::default();
        (1..1000).for_each(|n| breaker.failed(at(n * 30_000), MIDDLE));
        assert_eq!(breaker.state(), BreakerState::Closed);
    }

    #[test]
    fn half_open_it_admits_exactly_one_trial() {
        let mut breaker = opened(at(0));
        breaker.healthy();
        assert_eq!(breaker.state(), BreakerState::HalfOpen);
        assert!(breaker.admits(at(1000)));
        breaker.begin(at(1000));
        assert!(!breaker.admits(at(1001)));
        breaker.undecided();
        assert!(breaker.admits(at(1002)), "a refused request decides nothing: the next one is a trial");
        breaker.begin(at(1002));
        breaker.succeeded();
        assert!(breaker.is_calm());
    }

    #[test]
    fn a_trial_that_breaks_off_within_its_answer_opens_it_again_for_longer() {
        let mut breaker = opened(at(0));
        breaker.healthy();
        breaker.begin(at(1000));
        breaker.answering(at(1001));
        assert!(breaker.admits(at(1002)) && !breaker.is_calm());
        breaker.failed(at(1003), MIDDLE);
        assert_eq!(breaker.due(), Some(at(3003)));
    }

    #[test]
    fn a_trial_whose_client_left_is_forgotten() {
        let mut breaker = opened(at(0));
        breaker.healthy();
        breaker.begin(at(1000));
        assert!(!breaker.admits(at(30_999)));
        assert!(breaker.admits(at(31_000)));
    }

    #[test]
    fn pauses_double_up_to_the_longest_and_restart_after_a_success() {
        let mut breaker = opened(at(0));
        let mut now = at(0);
        let mut pauses = Vec::new();
        for _ in 0..7 {
            let due = breaker.due().unwrap();
            pauses.push((due - now).as_millis());
            now = due;
            breaker.failed(now, MIDDLE);
        }
        assert_eq!(pauses, [1000, 2000, 4000, 8000, 16_000, 30_000, 30_000]);
        breaker.healthy();
        breaker.begin(now);
        breaker.failed(now, MIDDLE);
        assert_eq!(breaker.due().unwrap() - now, LONGEST_PAUSE, "a failed trial grows the pause too");
        breaker.succeeded();
        (0..FAILURES).for_each(|_| breaker.failed(now, MIDDLE));
        assert_eq!(breaker.due().unwrap() - now, FIRST_PAUSE);
    }

    #[test]
    fn jitter_spreads_the_pauses_by_a_quarter_each_way() {
        for (jitter, millis) in [(0.0, 750), (1.0, 1250)] {
            let mut breaker = Breaker::default();
            (0..FAILURES).for_each(|_| breaker.failed(at(0), jitter));
            assert_eq!(breaker.due(), Some(at(millis)));
        }
    }

    #[test]
    fn failures_of_requests_in_flight_do_not_prolong_the_pause() {
        let mut breaker = opened(at(0));
        let due = breaker.due();
        (0..50).for_each(|_| breaker.failed(at(10), MIDDLE));
        assert_eq!(breaker.due(), due);
    }
}
