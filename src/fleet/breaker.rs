//! When a replica is no longer trusted, and how it earns trust again.
//!
//! Pure: the moment and the jitter are arguments, so a test covers hours without waiting. Only what tells something
//! about the replica counts: an error that the client's own request caused neither opens nor closes it.

use std::time::Duration;

use crate::units::Tick;

/// Failures in a row that open it.
const FAILURES: u32 = 5;
/// Failures further apart than this are not in a row, whatever was between them.
const FORGOTTEN: Duration = Duration::from_secs(30);
/// The first pause before it is tried again; doubled after each trial that fails.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// A trial without a result for so long is given up: its client has left.
const TRIAL_LOST: Duration = Duration::from_secs(30);

/// The three states, as in metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BreakerState {
    /// Trusted: requests are sent to it.
    Closed,
    /// It answered a health check; one request at a time tries it.
    HalfOpen,
    /// Not trusted: no requests until a health check succeeds.
    Open,
}

impl BreakerState {
    /// All, in the order of their value in `foretell_replica_breaker_state`.
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

/// The circuit breaker of one replica.
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
    /// The current state.
    pub const fn state(&self) -> BreakerState {
        match self.inner {
            Inner::Closed { .. } => BreakerState::Closed,
            Inner::HalfOpen { .. } => BreakerState::HalfOpen,
            Inner::Open { .. } => BreakerState::Open,
        }
    }

    /// Whether it is closed without a recent failure.
    pub const fn is_calm(&self) -> bool {
        matches!(self.inner, Inner::Closed { failures: 0, .. })
    }

    /// Whether a request may be sent to the replica now.
    pub fn admits(&self, now: Tick) -> bool {
        match self.inner {
            Inner::Closed { .. } | Inner::HalfOpen { trial: None } => true,
            Inner::HalfOpen { trial: Some(since) } => now - since >= TRIAL_LOST,
            Inner::Open { .. } => false,
        }
    }

    /// When an open breaker's replica is due for a health check; `None` if it is not open.
    pub const fn due(&self) -> Option<Tick> {
        match self.inner {
            Inner::Open { until } => Some(until),
            Inner::Closed { .. } | Inner::HalfOpen { .. } => None,
        }
    }

    /// Notes that a request goes there: in the half-open state, it is the trial.
    pub fn begin(&mut self, now: Tick) {
        if let Inner::HalfOpen { trial } = &mut self.inner {
            *trial = Some(now);
        }
    }

    /// Notes that a request is being answered: a trial has gone well so far, and the next failure opens it again.
    pub fn answering(&mut self, now: Tick) {
        if let Inner::HalfOpen { .. } = self.inner {
            self.inner = Inner::Closed { failures: FAILURES - 1, last: now };
        }
    }

    /// Notes that a request was answered well, to its end.
    pub fn succeeded(&mut self) {
        *self = Self::default();
    }

    /// Notes that a request ended in a way that tells nothing about the replica.
    pub fn undecided(&mut self) {
        if let Inner::HalfOpen { trial } = &mut self.inner {
            *trial = None;
        }
    }

    /// Notes that it answered a health check: the next request is its trial.
    pub fn healthy(&mut self) {
        if let Inner::Open { .. } = self.inner {
            self.inner = Inner::HalfOpen { trial: None };
        }
    }

    /// Notes that a request or a health check failed. `jitter` in 0..1 spreads the pauses of many proxies.
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
            // Requests that were on their way when it opened tell nothing new; a health check that was due does.
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
    fn only_failures_in_a_row_open_it() {
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
    fn failures_that_are_far_apart_are_not_in_a_row() {
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
        assert!(breaker.admits(at(1002)), "a refused request is no verdict: the next one tries");
        breaker.begin(at(1002));
        breaker.succeeded();
        assert!(breaker.is_calm());
    }

    #[test]
    fn a_trial_that_breaks_off_inside_its_answer_opens_it_again_for_longer() {
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
    fn pauses_double_up_to_the_longest_and_start_anew_after_a_success() {
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
    fn failures_of_requests_that_were_on_their_way_do_not_prolong_the_pause() {
        let mut breaker = opened(at(0));
        let due = breaker.due();
        (0..50).for_each(|_| breaker.failed(at(10), MIDDLE));
        assert_eq!(breaker.due(), due);
    }
}
