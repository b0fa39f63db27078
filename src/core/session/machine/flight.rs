//! The set of actions in flight. Each is named by its id.

use crate::draft::Tree;
use crate::session::ActionId;
use crate::units::Tick;
use crate::words::Conditions;

/// The tokens that a plain request covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PlainScope {
    /// The client's request, whose text the backend writes.
    Client,
    /// The first token of the client's request.
    FirstToken,
    /// The rest of the output, by ids.
    Rest,
}

/// A plain request.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlainFlight {
    pub id: ActionId,
    pub scope: PlainScope,
    /// Maximum tokens requested (continued plain requests).
    pub most: u32,
    /// Tokens so far.
    pub received: u32,
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

/// A verify request.
#[derive(Clone, Debug)]
pub(super) struct Verifying {
    pub id: ActionId,
    /// Its deadline.
    pub until: Tick,
    /// Start of the round, for its cost.
    pub began: Tick,
    pub draft: Tree,
    /// Tokens that the model drafter computed for it; for a late draft, the tokens that the wait
    /// was worth.
    pub modelled: usize,
    /// The index of its method in the list of methods.
    pub position: usize,
    /// Load and tolerance when it was sent: the result must not change them.
    pub conditions: Conditions,
}

/// The kind of action that an id names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ActionKind {
    Plain,
    Draft,
    Shadow,
    Verify,
}

/// The actions in flight: at most one of a kind.
#[derive(Debug, Default)]
pub(super) struct Flight {
    pub plain: Option<PlainFlight>,
    pub draft: Option<Drafting>,
    pub shadow: Option<Shadowing>,
    pub call: Option<Verifying>,
}

impl Flight {
    /// Every action in flight, in the order in which they are cancelled at the end.
    fn all(&self) -> impl Iterator<Item = (ActionId, ActionKind)> {
        let plain = self.plain.as_ref().map(|plain| (plain.id, ActionKind::Plain));
        let draft = self.draft.as_ref().map(|draft| (draft.id, ActionKind::Draft));
        let call = self.call.as_ref().map(|call| (call.id, ActionKind::Verify));
        let shadow = self.shadow.as_ref().map(|shadow| (shadow.id, ActionKind::Shadow));
        plain.into_iter().chain(draft).chain(call).chain(shadow)
    }

    /// The kind of the action that `id` names, if it is in flight.
    pub fn kind(&self, id: ActionId) -> Option<ActionKind> {
        self.all().find(|action| action.0 == id).map(|action| action.1)
    }

    /// Empties the set and returns the ids.
    pub fn drain(&mut self) -> Vec<ActionId> {
        let under_way = self.all().map(|action| action.0).collect();
        *self = Self::default();
        under_way
    }

    /// The next deadline of any of them.
    pub fn deadline(&self) -> Option<Tick> {
        let draft = self.draft.as_ref().map(|draft| draft.until);
        let call = self.call.as_ref().map(|call| call.until);
        draft.into_iter().chain(call).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_earliest_deadline_counts() {
        let mut flight = Flight::default();
        assert_eq!((flight.deadline(), flight.kind(ActionId::WORLD)), (None, None));
        let since = Tick(5);
        flight.shadow = Some(Shadowing { id: ActionId(1), since, from: 0 });
        assert_eq!(flight.deadline(), None, "nobody waits for a shadow pass");
        flight.call = Some(Verifying {
            id: ActionId(3),
            until: Tick(90),
            began: since,
            draft: Tree::default(),
            modelled: 0,
            position: 0,
            conditions: Conditions::default(),
        });
        assert_eq!(flight.deadline(), Some(Tick(90)));
        flight.draft = Some(Drafting { id: ActionId(4), since, gamma: 4, until: Tick(70) });
        assert_eq!(flight.deadline(), Some(Tick(70)));
        let kinds = [1, 2, 3, 4].map(|id| flight.kind(ActionId(id)));
        assert_eq!(
            kinds,
            [Some(ActionKind::Shadow), None, Some(ActionKind::Verify), Some(ActionKind::Draft)]
        );
        assert_eq!(flight.drain(), [ActionId(4), ActionId(3), ActionId(1)]);
        assert_eq!((flight.deadline(), flight.kind(ActionId(3))), (None, None));
    }
}
