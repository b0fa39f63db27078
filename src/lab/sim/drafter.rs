//! The model drafter of a fleet: one queue, one run at a time, which serves all open requests.

use serde::Deserialize;

use super::values::{count, seconds};
use foretell_core::session::ActionId;

/// Costs of a drafter, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DrafterSpec {
    /// Seconds of a drafted token, for one session.
    #[serde(deserialize_with = "seconds::<_, 0, 60>")]
    pub token: f64,
    /// Seconds for each token of text that it has not read yet.
    #[serde(deserialize_with = "seconds::<_, 0, 60>")]
    pub read: f64,
    /// Relative increase of a run's time for each further session in it.
    pub growth: f64,
    /// Maximum number of sessions whose text it stores (drafter slots); a session beyond them gets
    /// a fault.
    #[serde(deserialize_with = "count")]
    pub slots: usize,
    /// It computes on the processor of the engine: while one computes, the other waits.
    pub shared: bool,
}

impl Default for DrafterSpec {
    fn default() -> Self {
        Self::BUNDLED
    }
}

impl DrafterSpec {
    /// The bundled drafter on two separate cores.
    pub const BUNDLED: Self = Self { token: 0.5e-3, read: 0.02e-3, growth: 0.3, slots: 64, shared: false };
}

/// A request of a session to the drafter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question {
    /// Number of the client's request.
    pub request: usize,
    pub action: ActionId,
    /// Runs that it takes: one for each drafted token, one for a shadow pass.
    pub runs: usize,
    /// Tokens to be read first.
    pub unread: usize,
}

#[derive(Debug)]
pub struct Drafter {
    spec: DrafterSpec,
    open: Vec<Question>,
    /// Runs until the next of the requests is answered; `None` between runs.
    under_way: Option<usize>,
    in_slots: Vec<usize>,
}

impl Drafter {
    /// A drafter that has read nothing.
    pub fn new(spec: DrafterSpec) -> Self {
        Self { spec, open: Vec::new(), under_way: None, in_slots: Vec::new() }
    }

    /// Takes a request; false if there is no free slot for its session.
    pub fn submit(&mut self, question: Question) -> bool {
        if !self.in_slots.contains(&question.request) {
            if self.in_slots.len() >= self.spec.slots {
                return false;
            }
            self.in_slots.push(question.request);
        }
        self.open.push(question);
        true
    }

    pub fn cancel(&mut self, request: usize, action: ActionId) {
        self.open.retain(|question| (question.request, question.action) != (request, action));
    }

    /// The session has ended.
    pub fn leave(&mut self, request: usize) {
        self.open.retain(|question| question.request != request);
        self.in_slots.retain(|&in_slots| in_slots != request);
    }

    /// True if a run could begin.
    pub fn has_work(&self) -> bool {
        self.under_way.is_none() && !self.open.is_empty()
    }

    /// True if a run is under way.
    pub fn is_running(&self) -> bool {
        self.under_way.is_some()
    }

    /// True if it shares the engine's processor.
    pub fn is_shared(&self) -> bool {
        self.spec.shared
    }

    /// Starts a run over all open requests that lasts until the first of them is answered; returns
    /// its seconds.
    pub fn start(&mut self) -> Option<f64> {
        if !self.has_work() {
            return None;
        }
        let runs = self.open.iter().map(|question| question.runs.max(1)).min()?;
        let unread: usize = self.open.iter_mut().map(|question| std::mem::take(&mut question.unread)).sum();
        self.under_way = Some(runs);
        let concurrency = 1.0 + self.spec.growth * (self.open.len() - 1) as f64;
        Some(runs as f64 * self.spec.token * concurrency + unread as f64 * self.spec.read)
    }

    /// Ends the run; returns the requests that it has answered.
    pub fn finish(&mut self) -> Vec<Question> {
        let runs = self.under_way.take().unwrap_or(0);
        // Requests that arrived during the run have not been read yet and were not part of it.
        let (mut answered, mut open) = (Vec::new(), Vec::new());
        for mut question in self.open.drain(..) {
            if question.unread > 0 {
                open.push(question);
                continue;
            }
            question.runs = question.runs.saturating_sub(runs);
            if question.runs == 0 { answered.push(question) } else { open.push(question) }
        }
        self.open = open;
        answered
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question(request: usize, runs: usize) -> Question {
        Question { request, action: ActionId(1), runs, unread: 100 }
    }

    #[test]
    fn requests_run_together_and_the_shortest_is_answered_first() {
        let spec = DrafterSpec { token: 1.0, read: 0.01, growth: 0.5, slots: 2, shared: false };
        let mut drafter = Drafter::new(spec);
        assert!(drafter.submit(question(1, 2)) && drafter.submit(question(2, 5)));
        assert!(!drafter.submit(question(3, 1)), "both slots are taken");
        assert_eq!(drafter.start(), Some(2.0 * 1.5 + 2.0));
        assert!(
            drafter.start().is_none() && drafter.submit(question(1, 9)),
            "it waits for the run under way"
        );
        let answered: Vec<usize> = drafter.finish().iter().map(|question| question.request).collect();
        assert_eq!(answered, [1]);
        assert_eq!(drafter.start(), Some(3.0 * 1.5 + 1.0));
        drafter.cancel(2, ActionId(1));
        assert!(drafter.finish().is_empty());
        drafter.leave(1);
        assert!(!drafter.has_work() && drafter.submit(question(3, 1)));
    }
}
