//! The actions under way: a set. Each is named by its id, and any of them may overlap.

use crate::draft::Draft;
use crate::session::ActionId;
use crate::units::Tick;

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

/// A verify call.
#[derive(Clone, Debug)]
pub(super) struct Verifying {
    pub id: ActionId,
    /// Its deadline.
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
}

/// What kind of action an id names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Ride,
    Draft,
    Shadow,
    Verify,
}

/// The actions under way, at most one of a kind.
#[derive(Debug, Default)]
pub(super) struct Flight {
    pub ride: Option<Ride>,
    pub draft: Option<Drafting>,
    pub shadow: Option<Shadowing>,
    pub verify: Option<Verifying>,
}

impl Flight {
    /// Every action under way, in the order in which they are cancelled at the end.
    fn all(&self) -> impl Iterator<Item = (ActionId, Kind)> {
        let ride = self.ride.as_ref().map(|ride| (ride.id, Kind::Ride));
        let draft = self.draft.as_ref().map(|draft| (draft.id, Kind::Draft));
        let verify = self.verify.as_ref().map(|verify| (verify.id, Kind::Verify));
        let shadow = self.shadow.as_ref().map(|shadow| (shadow.id, Kind::Shadow));
        [ride, draft, verify, shadow].into_iter().flatten()
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
        let verify = self.verify.as_ref().map(|verify| verify.until);
        draft.into_iter().chain(verify).min()
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
        let call = Verifying {
            id: ActionId(3),
            until: Tick(90),
            began: since,
            draft,
            modelled: 0,
            place: 0,
            tolerance: 0.0,
        };
        flight.verify = Some(call);
        assert_eq!(flight.deadline(), Some(Tick(90)));
        flight.draft = Some(Drafting { id: ActionId(4), since, gamma: 4, until: Tick(70) });
        assert_eq!(flight.deadline(), Some(Tick(70)));
        let kinds = [1, 2, 3, 4].map(|id| flight.kind(ActionId(id)));
        assert_eq!(kinds, [Some(Kind::Shadow), None, Some(Kind::Verify), Some(Kind::Draft)]);
        assert_eq!(flight.land(), [ActionId(4), ActionId(3), ActionId(1)]);
        assert_eq!((flight.deadline(), flight.kind(ActionId(3))), (None, None));
    }
}
