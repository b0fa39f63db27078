//! The actions under way: a set. Each is named by its id, and any of them may overlap.

use std::collections::VecDeque;

use crate::draft::{Draft, Tree};
use crate::session::pilot::Turn;
use crate::session::{ActionId, Fault};
use crate::units::{Tick, TokenId};
use crate::words::Verdict;

/// A ride.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ride {
    pub id: ActionId,
    /// The client's own request; the backend's own text goes out.
    pub first: bool,
    /// Tokens asked for (continued rides).
    pub asked: u32,
    /// Tokens so far.
    pub brought: u32,
    pub since: Tick,
    /// When the last token came.
    pub last: Option<Tick>,
    /// Follows a leap, so the time of its first token shows what the switch cost.
    pub after_leap: bool,
}

/// A draft of the model drafter.
#[derive(Clone, Copy, Debug)]
pub(super) struct Drafting {
    pub id: ActionId,
    pub since: Tick,
    /// Most tokens asked for.
    pub gamma: usize,
    /// When it is too late for its round.
    pub until: Tick,
}

/// A shadow pass of the model drafter.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shadowing {
    pub id: ActionId,
    pub since: Tick,
    /// First output index asked for.
    pub from: usize,
}

/// A draft of the model drafter for the round after the one under way.
#[derive(Clone, Debug)]
pub(super) struct Sketching {
    pub id: ActionId,
    /// What the round under way is assumed to bring, but for its last token, which the sketch begins with.
    pub assumed: Vec<TokenId>,
    /// The answer, once it is there.
    pub chain: Option<Tree>,
}

impl Sketching {
    /// The draft that follows what a round has brought; `None` if that is not what was assumed, or no answer is there.
    pub fn behind(self, brought: &[TokenId]) -> Option<Tree> {
        let bonus = brought.strip_prefix(self.assumed.as_slice())?;
        let chain = self.chain?;
        let first = chain.nodes().first()?.token;
        (bonus == [first]).then(|| chain.below_first()).filter(|rest| !rest.is_empty())
    }
}

/// A verify call.
#[derive(Clone, Debug)]
pub(super) struct Verifying {
    pub id: ActionId,
    /// Its deadline, which counts from the moment on at which it is the first of those under way.
    pub until: Tick,
    /// When the round began, for its cost.
    pub began: Tick,
    pub draft: Draft,
    /// Tokens that the model drafter computed for it; for a late draft, those that the wait was worth.
    pub modelled: usize,
    /// The index of its plan in the list of plans.
    pub place: usize,
    /// Tolerance of a lossy accept rule, by the load when it was sent: nothing that the answer says may change it.
    pub tolerance: f64,
    /// The tokens that the call before it has to bring, all of them, for this one to count. Of no meaning for the first call
    /// under way, which continues the output as it is.
    pub assumed: Vec<TokenId>,
    /// What came before its turn. Nobody looks at it until then.
    pub early: Option<Result<Verdict, Fault>>,
    /// What its time says of the costs.
    pub turn: Turn,
}

/// What kind of action an id names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Ride,
    Draft,
    Sketch,
    Shadow,
    Verify,
}

/// The actions under way: at most one of a kind, but for verify calls.
#[derive(Debug, Default)]
pub(super) struct Flight {
    pub ride: Option<Ride>,
    pub draft: Option<Drafting>,
    pub sketch: Option<Sketching>,
    pub shadow: Option<Shadowing>,
    /// In the order of the places that they decide. The first continues the output, each of the others what the one before
    /// it is assumed to bring.
    pub calls: VecDeque<Verifying>,
}

impl Flight {
    /// Every action under way, in the order in which they are cancelled at the end.
    fn all(&self) -> impl Iterator<Item = (ActionId, Kind)> {
        let ride = self.ride.as_ref().map(|ride| (ride.id, Kind::Ride));
        let draft = self.draft.as_ref().map(|draft| (draft.id, Kind::Draft));
        let sketch = self.sketch.as_ref().map(|sketch| (sketch.id, Kind::Sketch));
        let calls = self.calls.iter().map(|call| (call.id, Kind::Verify));
        let shadow = self.shadow.as_ref().map(|shadow| (shadow.id, Kind::Shadow));
        ride.into_iter().chain(draft).chain(sketch).chain(calls).chain(shadow)
    }

    /// The kind of the action that `id` names, if it is under way.
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

    /// Takes the first call if this id names it. To any other call it is handed as what came early.
    pub fn answered(
        &mut self,
        id: ActionId,
        answer: Result<Verdict, Fault>,
    ) -> Option<(Verifying, Result<Verdict, Fault>)> {
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
            place: 0,
            tolerance: 0.0,
            assumed: Vec::new(),
            early: None,
            turn: Turn::Alone,
        };
        flight.calls.extend([call(3, 90), call(5, 60)]);
        assert_eq!(flight.deadline(), Some(Tick(90)), "the others are waited for when it is their turn");
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
