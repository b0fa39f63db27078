//! The model drafter of a fleet: one queue, one run at a time, all open questions in it.

use crate::session::ActionId;

/// What a drafter's work takes, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DrafterSpec {
    /// A drafted token, for one session.
    pub token: f64,
    /// A token of text that it has not read yet.
    pub read: f64,
    /// By how much a run gets longer for each further session in it.
    pub growth: f64,
    /// Most sessions that it keeps the text of; a session beyond them gets a fault.
    pub seats: usize,
    /// It computes on the engine's own processor: while one computes, the other waits.
    pub shared: bool,
}

impl DrafterSpec {
    /// The bundled drafter on two cores of its own.
    pub const BUNDLED: Self = Self { token: 0.5e-3, read: 0.02e-3, growth: 0.3, seats: 64, shared: false };
}

/// A question of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question {
    /// Whose it is: the number of the request.
    pub request: usize,
    /// The action that it answers.
    pub action: ActionId,
    /// Runs that it takes: one for each drafted token, one for a shadow pass.
    pub runs: usize,
    /// Tokens to be read before.
    pub unread: usize,
}

/// The drafter.
#[derive(Debug)]
pub struct Drafter {
    spec: DrafterSpec,
    open: Vec<Question>,
    /// Runs until the next of them is answered; `None` between runs.
    under_way: Option<usize>,
    /// Requests with a seat.
    seated: Vec<usize>,
}

impl Drafter {
    /// A drafter that has read nothing.
    pub fn new(spec: DrafterSpec) -> Self {
        Self { spec, open: Vec::new(), under_way: None, seated: Vec::new() }
    }

    /// Takes a question; false if there is no seat for its session.
    pub fn ask(&mut self, question: Question) -> bool {
        if !self.seated.contains(&question.request) {
            if self.seated.len() >= self.spec.seats {
                return false;
            }
            self.seated.push(question.request);
        }
        self.open.push(question);
        true
    }

    /// The question is not wanted any more.
    pub fn cancel(&mut self, request: usize, action: ActionId) {
        self.open.retain(|question| (question.request, question.action) != (request, action));
    }

    /// The session has ended.
    pub fn leave(&mut self, request: usize) {
        self.open.retain(|question| question.request != request);
        self.seated.retain(|&seated| seated != request);
    }

    /// Whether a run could begin.
    pub fn has_work(&self) -> bool {
        self.under_way.is_none() && !self.open.is_empty()
    }

    /// Whether a run is under way.
    pub fn is_running(&self) -> bool {
        self.under_way.is_some()
    }

    /// Whether it shares the engine's processor.
    pub fn is_shared(&self) -> bool {
        self.spec.shared
    }

    /// Begins to work on all open questions until the first of them is answered: the seconds that this takes.
    pub fn start(&mut self) -> Option<f64> {
        if !self.has_work() {
            return None;
        }
        let runs = self.open.iter().map(|question| question.runs.max(1)).min()?;
        let unread: usize = self.open.iter_mut().map(|question| std::mem::take(&mut question.unread)).sum();
        self.under_way = Some(runs);
        let crowd = 1.0 + self.spec.growth * (self.open.len() - 1) as f64;
        Some(runs as f64 * self.spec.token * crowd + unread as f64 * self.spec.read)
    }

    /// The work has come to its end: the questions that it has answered.
    pub fn finish(&mut self) -> Vec<Question> {
        let runs = self.under_way.take().unwrap_or(0);
        // What was asked meanwhile has its reading still before it, and was not in these runs.
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
    fn questions_are_worked_on_together_and_the_shortest_is_answered_first() {
        let spec = DrafterSpec { token: 1.0, read: 0.01, growth: 0.5, seats: 2, shared: false };
        let mut drafter = Drafter::new(spec);
        assert!(drafter.ask(question(1, 2)) && drafter.ask(question(2, 5)));
        assert!(!drafter.ask(question(3, 1)), "both seats are taken");
        assert_eq!(drafter.start(), Some(2.0 * 1.5 + 2.0));
        assert!(drafter.start().is_none() && drafter.ask(question(1, 9)), "it waits for the run under way");
        let answered: Vec<usize> = drafter.finish().iter().map(|question| question.request).collect();
        assert_eq!(answered, [1]);
        assert_eq!(drafter.start(), Some(3.0 * 1.5 + 1.0));
        drafter.cancel(2, ActionId(1));
        assert!(drafter.finish().is_empty());
        drafter.leave(1);
        assert!(!drafter.has_work() && drafter.ask(question(3, 1)));
    }
}
