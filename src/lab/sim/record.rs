//! Record of a simulation.

use super::engine::Computed;
use super::sidecar::Reported;
use foretell_core::session::Summary;
use foretell_core::units::Tick;

/// One request that was served to its end.
#[derive(Clone, Debug, PartialEq)]
pub struct Served {
    pub stream: usize,
    pub began: Tick,
    /// Time of its first token.
    pub first: Tick,
    pub ended: Tick,
    pub tokens: usize,
    /// Summary of its session; `None` for a direct call.
    pub summary: Option<Summary>,
}

impl Served {
    /// Seconds from its beginning to its end.
    pub fn seconds(&self) -> f64 {
        self.ended.seconds_since(self.began)
    }

    pub fn first_token(&self) -> f64 {
        self.first.seconds_since(self.began)
    }
}

/// One interval of the simulated time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Interval {
    /// Tokens that reached clients.
    pub tokens: usize,
    /// Verify requests sent.
    pub rounds: usize,
    pub drafted: usize,
    /// Number of these that match the true text.
    pub followed: usize,
    /// Reports of the engine's load.
    pub reports: usize,
    /// Sum over the reports of the running sequences.
    pub running: usize,
    /// Sum over the reports of the waiting requests.
    pub waiting: usize,
}

impl Interval {
    /// Mean number of running sequences; 0 without a report.
    pub fn running(&self) -> f64 {
        self.running as f64 / self.reports.max(1) as f64
    }

    /// Mean number of waiting requests; 0 without a report.
    pub fn waiting(&self) -> f64 {
        self.waiting as f64 / self.reports.max(1) as f64
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Record {
    /// Every request, in the order in which they ended.
    pub served: Vec<Served>,
    pub interval: f64,
    pub course: Vec<Interval>,
    /// Tokens computed by the engine.
    pub computed: Computed,
    /// Seconds that the drafter has computed.
    pub drafting: f64,
    /// Time of the last event.
    pub ended: Tick,
}

impl Record {
    /// An empty record with intervals of `interval` seconds.
    pub fn new(interval: f64) -> Self {
        Self { interval: interval.max(1e-3), ..Self::default() }
    }

    fn current(&mut self, now: Tick) -> Option<&mut Interval> {
        let position = (now.seconds_since(Tick(0)) / self.interval) as usize;
        if position >= self.course.len() {
            self.course.resize(position + 1, Interval::default());
        }
        self.course.get_mut(position)
    }

    /// The end of the last interval with a token or a round.
    pub(super) fn latest(&self) -> Tick {
        let seen = |at: &Interval| at.tokens > 0 || at.rounds > 0;
        let last = self.course.iter().rposition(seen).map_or(0, |position| position + 1);
        super::at(last as f64 * self.interval)
    }

    pub(super) fn emitted(&mut self, now: Tick, tokens: usize) {
        if let Some(interval) = self.current(now) {
            interval.tokens += tokens;
        }
    }

    pub(super) fn round(&mut self, now: Tick, drafted: usize, followed: usize) {
        if let Some(interval) = self.current(now) {
            interval.rounds += 1;
            interval.drafted += drafted;
            interval.followed += followed;
        }
    }

    pub(super) fn load(&mut self, now: Tick, report: Reported) {
        if let Some(interval) = self.current(now) {
            interval.reports += 1;
            interval.running += report.running;
            interval.waiting += report.waiting;
        }
    }

    pub(super) fn add(&mut self, served: Served) {
        self.served.push(served);
    }
}
