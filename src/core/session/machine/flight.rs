//! The set of actions in flight. Each is named by its id, and any of them may overlap.

use std::collections::VecDeque;

use crate::draft::{Draft, Tree};
use crate::session::controller::Turn;
use crate::session::{ActionId, Fault};
use crate::units::{Tick, TokenId};
use crate::words::VerifyResult;

/// The tokens that a plain request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asked {
    /// The client's own request; the backend's own text goes out.
    Whole,
    /// The first token of the client's own request.
    FirstToken,
    /// The rest of the output, by ids.
    Rest,
}

/// A plain request.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlainFlight {
    pub id: ActionId,
    pub asked: Asked,
    /// Maximum tokens requested (continued plain requests).
    pub most: u32,
    /// Tokens so far.
    pub brought: u32,
    pub since: Tick,
    /// Time of the last token.
    pub last: Option<Tick>,
    /// Follows a round, so the time of its first token shows the cost of the switch.
    pub after_rounds: bool,
}

/// A draft of the model drafter.
#[derive(Clone, Copy, Debug)]
pub(super) struct Drafting {
    pub id: ActionId,
    pub since: Tick,
    /// Maximum tokens requested.
    pub gamma: usize,
    /// Time at which it is too late for its round.
    pub until: Tick,
}

/// A shadow pass of the model drafter.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shadowing {
    pub id: ActionId,
    pub since: Tick,
    /// First output index requested.
    pub from: usize,
}

/// A draft of the model drafter for the round after the one in flight.
#[derive(Clone, Debug)]
pub(super) struct DraftingAhead {
    pub id: ActionId,
    /// Tokens that the round in flight is assumed to yield, except its last token, with which this
    /// draft begins.
    pub assumed: Vec<TokenId>,
    /// The answer, once it has arrived.
    pub chain: Option<Tree>,
}

impl DraftingAhead {
    /// The draft that follows the tokens of a round; `None` if these were not assumed, or no answer
    /// has arrived.
    pub fn behind(self, brought: &[TokenId]) -> Option<Tree> {
        let bonus = brought.strip_prefix(self.assumed.as_slice())?;
        let chain = self.chain?;
        let first = chain.nodes().first()?.token;
        (bonus == [first]).then(|| chain.below_first()).filter(|rest| !rest.is_empty())
    }
}

/// A verify request.
#[derive(Clone, Debug)]
pub(super) struct Verifying {
    pub id: ActionId,
    /// Its deadline, which counts from the moment at which it becomes the first in flight.
    pub until: Tick,
    /// Start of the round, for its cost.
    pub began: Tick,
    pub draft: Draft,
    /// Tokens that the model drafter computed for it; for a late draft, the tokens that the wait
    /// was worth.
    pub modelled: usize,
    /// The index of its method in the list of methods.
    pub position: usize,
    /// Tolerance of a lossy acceptance rule, by the load when it was sent: the result must not
    /// change it.
    pub tolerance: f64,
    /// The tokens, all of them, that the request before it has to yield for this one to count. Not
    /// used for the first one in flight, which continues the output as it is.
    pub assumed: Vec<TokenId>,
    /// A result that arrived before its turn. It is not read until then.
    pub early: Option<Result<VerifyResult, Fault>>,
    /// The situation in which it is timed.
    pub turn: Turn,
}

/// The kind of action that an id names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Plain,
    Draft,
    AheadDraft,
    Shadow,
    Verify,
}

/// The actions in flight: at most one of a kind, except verify requests.
#[derive(Debug, Default)]
pub(super) struct Flight {
    pub plain: Option<PlainFlight>,
    pub draft: Option<Drafting>,
    pub ahead_draft: Option<DraftingAhead>,
    pub shadow: Option<Shadowing>,
    /// In the order of the positions that they decide. The first continues the output, each of the
    /// others the tokens that the one before it is assumed to yield.
    pub calls: VecDeque<Verifying>,
}

impl Flight {
    /// Every action in flight, in the order in which they are cancelled at the end.
    fn all(&self) -> impl Iterator<Item = (ActionId, Kind)> {
        let plain = self.plain.as_ref().map(|plain| (plain.id, Kind::Plain));
        let draft = self.draft.as_ref().map(|draft| (draft.id, Kind::Draft));
        let ahead_draft = self.ahead_draft.as_ref().map(|ahead_draft| (ahead_draft.id, Kind::AheadDraft));
        let calls = self.calls.iter().map(|call| (call.id, Kind::Verify));
        let shadow = self.shadow.as_ref().map(|shadow| (shadow.id, Kind::Shadow));
        plain.into_iter().chain(draft).chain(ahead_draft).chain(calls).chain(shadow)
    }

    /// The kind of the action that `id` names, if it is in flight.
    pub fn kind(&self, id: ActionId) -> Option<Kind> {
        self.all().find(|action| action.0 == id).map(|action| action.1)
    }

    /// Empties the set and returns the ids.
    pub fn land(&mut self) -> Vec<ActionId> {
        let under_way = self.all().map(|action| action.0).collect();
        *self = Self::default();
        under_way
    }

    /// The next deadline of any of them.
    pub fn deadline(&self) -> Option<Tick> {
        let draft = self.draft.as_ref().map(|draft| draft.until);
        let call = self.calls.front().map(|call| call.until);
        draft.into_iter().chain(call).min()
    }

    /// Takes the first verify request if this id names it. For any other one the result is kept as
    /// an early one.
    pub fn answered(
        &mut self,
        id: ActionId,
        answer: Result<VerifyResult, Fault>,
    ) -> Option<(Verifying, Result<VerifyResult, Fault>)> {
        if self.calls.front().is_some_and(|first| first.id == id) {
            return self.calls.pop_front().map(|first| (first, answer));
        }
        if let Some(call) = self.calls.iter_mut().find(|call| call.id == id) {
            call.early = Some(answer);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draft::Tree;

    #[test]
    fn actions_overlap_and_the_earliest_deadline_counts() {
        let mut flight = Flight::default();
        assert_eq!((flight.deadline(), flight.kind(ActionId::WORLD)), (None, None));
        let since = Tick(5);
        flight.shadow = Some(Shadowing { id: ActionId(1), since, from: 0 });
        assert_eq!(flight.deadline(), None, "nobody waits for a shadow pass");
        let draft = Draft::Tree(Tree::default());
        let call = |id, until| Verifying {
            id: ActionId(id),
            until: Tick(until),
            began: since,
            draft: draft.clone(),
            modelled: 0,
            position: 0,
            tolerance: 0.0,
            assumed: Vec::new(),
            early: None,
            turn: Turn::Alone,
        };
        flight.calls.extend([call(3, 90), call(5, 60)]);
        assert_eq!(flight.deadline(), Some(Tick(90)), "the deadlines of the others count from their turn");
        flight.draft = Some(Drafting { id: ActionId(4), since, gamma: 4, until: Tick(70) });
        assert_eq!(flight.deadline(), Some(Tick(70)));
        let kinds = [1, 2, 3, 4, 5].map(|id| flight.kind(ActionId(id)));
        let verify = Some(Kind::Verify);
        assert_eq!(kinds, [Some(Kind::Shadow), None, verify, Some(Kind::Draft), verify]);
        assert!(flight.answered(ActionId(5), Err(Fault::Verify)).is_none(), "not its turn");
        assert_eq!(flight.calls[1].early, Some(Err(Fault::Verify)));
        assert!(
            flight
                .answered(ActionId(3), Err(Fault::Verify))
                .is_some_and(|(first, _)| first.id == ActionId(3))
        );
        assert_eq!(flight.land(), [ActionId(4), ActionId(5), ActionId(1)]);
        assert_eq!((flight.deadline(), flight.kind(ActionId(3))), (None, None));
    }
}
