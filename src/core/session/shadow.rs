//! Virtual rounds: the yield of speculation, measured during plain decoding and without a verify
//! request.
//!
//! The next virtual draft starts one past the accepted run of the last, as real rounds do: scoring
//! a draft at every position overstates the yield of speculation.

use crate::draft::Tree;
use crate::units::TokenId;

/// A draft that was not sent, and the number of its tokens that the plain tokens have followed.
#[derive(Debug)]
pub struct VirtualRound {
    draft: Tree,
    /// Nodes that would have been sent, the first ones; the draft may contain some more, which are
    /// scored too.
    pub planned: usize,
    /// True if every drafter was informed when the round began. A round without this counts for the
    /// acceptance of the informed drafters, but not for the yield of a round.
    pub all_informed: bool,
    position: Option<usize>,
    depth: usize,
    /// Tokens that the planned nodes have yielded.
    accepted: usize,
}

impl VirtualRound {
    /// A round that begins at the end of the context.
    pub fn new(draft: Tree, planned: usize, all_informed: bool) -> Self {
        Self { draft, planned, all_informed, position: None, depth: 0, accepted: 0 }
    }

    /// The position that the next token decides: draft, parent node and depth.
    pub fn position(&self) -> (&Tree, Option<usize>, usize) {
        (&self.draft, self.position, self.depth)
    }

    /// Follows `token`; when the round ends with it, the number of tokens that the planned round
    /// would have yielded, else `None`.
    pub fn follow(&mut self, token: TokenId) -> Option<usize> {
        if let Some(node) = self.draft.child(self.position, token) {
            self.position = Some(node);
            self.depth += 1;
            self.accepted += usize::from(node < self.planned);
            return None;
        }
        Some(self.accepted + 1)
    }
}

/// The schedule of shadow passes, in which the model drafter reports its choices.
///
/// One teacher-forced pass over the last [`ShadowSchedule::CHUNK`] tokens costs little, but not
/// nothing: passes are spaced so that they take at most [`ShadowSchedule::SHARE`] of the plain
/// time, and become rarer the longer they show that the model does not pay.
#[derive(Debug)]
pub struct ShadowSchedule {
    next: usize,
    interval: usize,
}

impl ShadowSchedule {
    /// Tokens per pass.
    pub const CHUNK: usize = 16;
    /// Share of the plain time that shadow passes may take.
    pub const SHARE: f64 = 0.01;
    /// Maximum distance between two passes, unless the share requires more.
    const FAR: usize = 512;

    /// A schedule whose first pass is due after [`Self::CHUNK`] output tokens.
    pub fn new() -> Self {
        Self { next: Self::CHUNK, interval: Self::CHUNK }
    }

    /// The first output index to request; `None` if no pass is due after `len` output tokens.
    pub fn due(&self, len: usize) -> Option<usize> {
        (len >= self.next).then(|| len - Self::CHUNK.min(len))
    }

    /// Postpones the next pass until `tokens` output tokens after `len`.
    pub fn wait(&mut self, len: usize, tokens: usize) {
        self.next = len + tokens;
    }

    /// Plain tokens required per pass: `pass` and `token` are the seconds of each, `None` if not
    /// measured.
    pub fn earned_by(pass: Option<f64>, token: Option<f64>) -> usize {
        let share = pass.zip(token).map(|(pass, token)| pass / (Self::SHARE * token.max(1e-7)));
        share.map_or(Self::CHUNK, |tokens| tokens.ceil().min(1e6) as usize)
    }

    /// Schedules the next pass after one at `len` output tokens: soon if the model is `promising`,
    /// else after twice the distance. `earned` is the result of [`Self::earned_by`].
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
        let mut round = VirtualRound::new(draft.clone(), 3, true);
        assert_eq!((round.follow(1), round.follow(9)), (None, Some(2)));
        let mut round = VirtualRound::new(draft, 2, true);
        assert_eq!([1, 2, 3, 4].map(|token| round.follow(token)), [None, None, None, Some(3)]);
        assert_eq!(VirtualRound::new(Tree::default(), 0, true).follow(5), Some(1));
    }

    #[test]
    fn passes_become_rarer_while_they_do_not_pay_and_never_exceed_their_share() {
        let mut schedule = ShadowSchedule::new();
        assert_eq!((schedule.due(15), schedule.due(20)), (None, Some(4)));
        schedule.passed(20, false, ShadowSchedule::earned_by(Some(0.001), Some(0.010)));
        assert_eq!((schedule.due(51), schedule.due(52)), (None, Some(36)));
        schedule.passed(52, true, ShadowSchedule::earned_by(Some(0.010), Some(0.010)));
        assert_eq!((schedule.due(151), schedule.due(152)), (None, Some(136)));
    }
}
