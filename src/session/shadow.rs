//! Virtual rounds: what leaping would have brought, learnt while riding and without a verify call.
//!
//! The next virtual draft starts one past the accepted run of the last, as real rounds do: scoring a draft at
//! every position overstates what leaping brings.

use crate::draft::Tree;
use crate::units::TokenId;

/// A draft that was not sent, and how far the tokens that came anyway have followed it.
#[derive(Debug)]
pub struct VirtualRound {
    draft: Tree,
    /// Nodes that would have been sent; the draft may hold some more, to learn from.
    pub planned: usize,
    place: Option<usize>,
    depth: usize,
}

impl VirtualRound {
    /// A round that begins at the end of the past.
    pub fn new(draft: Tree, planned: usize) -> Self {
        Self { draft, planned, place: None, depth: 0 }
    }

    /// The place that the next token decides: draft, parent node and depth.
    pub fn place(&self) -> (&Tree, Option<usize>, usize) {
        (&self.draft, self.place, self.depth)
    }

    /// Follows `token`; when the round ends with it, the tokens that the planned round would have brought.
    pub fn follow(&mut self, token: TokenId) -> Option<usize> {
        if let Some(node) = self.draft.child(self.place, token) {
            self.place = Some(node);
            self.depth += 1;
            return None;
        }
        Some(self.depth.min(self.planned) + 1)
    }
}

/// When the model drafter is to be asked what it would have chosen.
///
/// One teacher-forced pass over the last [`ShadowPlan::CHUNK`] tokens costs little, but not nothing: passes
/// are spaced so that they take at most [`ShadowPlan::SHARE`] of the riding time, and rarer the longer they
/// show that the model does not pay.
#[derive(Debug)]
pub struct ShadowPlan {
    next: usize,
    interval: usize,
}

impl ShadowPlan {
    /// Tokens per pass.
    pub const CHUNK: usize = 16;
    /// Share of the riding time that shadow passes may take.
    pub const SHARE: f64 = 0.01;
    /// Longest distance between two passes, unless the share asks for more.
    const FAR: usize = 512;

    /// A plan whose first pass is due after [`Self::CHUNK`] output tokens.
    pub fn new() -> Self {
        Self { next: Self::CHUNK, interval: Self::CHUNK }
    }

    /// The first output index to ask for, if a pass is due after `len` output tokens.
    pub fn due(&self, len: usize) -> Option<usize> {
        (len >= self.next).then(|| len - Self::CHUNK.min(len))
    }

    /// Puts the next pass off until `tokens` output tokens after `len`.
    pub fn wait(&mut self, len: usize, tokens: usize) {
        self.next = len + tokens;
    }

    /// Tokens that must be ridden to earn a pass: `pass` and `token` are the seconds of each, `None` if not measured.
    pub fn earned_by(pass: Option<f64>, token: Option<f64>) -> usize {
        let share = pass.zip(token).map(|(pass, token)| pass / (Self::SHARE * token.max(1e-7)));
        share.map_or(Self::CHUNK, |tokens| tokens.ceil().min(1e6) as usize)
    }

    /// Plans the next pass after one at `len` output tokens; `earned` is the result of [`Self::earned_by`].
    pub fn passed(&mut self, len: usize, promising: bool, earned: usize) {
        self.interval = if promising { Self::CHUNK } else { (self.interval * 2).min(Self::FAR) };
        self.next = len + self.interval.max(earned);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draft::{Features, Source};

    #[test]
    fn a_round_ends_one_past_its_accepted_run() {
        let draft = Tree::chain(&[1, 2, 3], Source::PromptLookup, Features::default());
        let mut round = VirtualRound::new(draft.clone(), 3);
        assert_eq!((round.follow(1), round.follow(9)), (None, Some(2)));
        let mut round = VirtualRound::new(draft, 2);
        assert_eq!([1, 2, 3, 4].map(|token| round.follow(token)), [None, None, None, Some(3)]);
        assert_eq!(VirtualRound::new(Tree::default(), 0).follow(5), Some(1));
    }

    #[test]
    fn passes_get_rarer_while_they_do_not_pay_and_never_take_more_than_their_share() {
        let mut plan = ShadowPlan::new();
        assert_eq!((plan.due(15), plan.due(20)), (None, Some(4)));
        plan.passed(20, false, ShadowPlan::earned_by(Some(0.001), Some(0.010)));
        assert_eq!((plan.due(51), plan.due(52)), (None, Some(36)));
        plan.passed(52, true, ShadowPlan::earned_by(Some(0.010), Some(0.010)));
        assert_eq!((plan.due(151), plan.due(152)), (None, Some(136)));
    }
}
