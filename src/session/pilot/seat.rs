//! The drafters of a session, one seat each: who it is, how its rounds went, and whether it is well.

use crate::control::Rounds;
use crate::draft::{DrafterId, Lookup, Tree};
use crate::session::shadow::{ShadowPlan, VirtualRound};
use crate::session::start::Rules;

/// Output tokens that a drafter is left alone for after its first failure, doubled with every further one.
const RECOVERY: usize = 64;
/// Failures after which that does not grow any more.
const FAULTS_MAX: u32 = 5;

/// A drafter of this session.
pub(super) struct Seat {
    /// The identity that its votes carry.
    pub id: DrafterId,
    pub kind: Kind,
    /// Its last rounds, real and virtual.
    pub rounds: Rounds,
    pub health: Health,
}

/// How a drafter is asked.
pub(super) enum Kind {
    /// It answers at once, inside the session.
    Inline(Inline),
    /// It is asked by an action, and answers by an event.
    Asked(Asked),
}

/// A drafter that answers at once.
pub(super) struct Inline {
    pub lookup: Box<dyn Lookup>,
    /// Its draft that the ridden tokens are compared with; `None` between two rounds.
    pub virtual_round: Option<VirtualRound>,
}

/// A drafter that is asked by an action.
pub(super) struct Asked {
    /// When it is to be asked what it would have chosen.
    pub shadow: ShadowPlan,
    /// It has answered a question of this request, so it has read the prompt.
    pub warm: bool,
    /// It is asked although earlier requests show that it does not pay.
    pub explored: bool,
}

/// The failures of a drafter, and until when it is left alone for them.
#[derive(Debug, Default)]
pub(super) struct Health {
    faults: u32,
    not_before: usize,
}

impl Health {
    /// It failed after `done` output tokens: it is not asked for a while, longer with every failure.
    pub fn failed(&mut self, done: usize) {
        self.not_before = done + (RECOVERY << self.faults);
        self.faults = (self.faults + 1).min(FAULTS_MAX);
    }

    /// Whether it may be asked after `done` output tokens.
    pub fn is_well(&self, done: usize) -> bool {
        done >= self.not_before
    }
}

impl Seat {
    fn new(id: DrafterId, kind: Kind) -> Self {
        Self { id, kind, rounds: Rounds::remembering(super::MEMORY), health: Health::default() }
    }

    /// A seat for each drafter of `rules`, in the policy's order; those of one kind are numbered.
    pub fn all(rules: &Rules) -> Vec<Self> {
        let mut seats: Vec<Self> = Vec::new();
        for spec in &rules.lookups {
            let number = seats.iter().filter(|seat| seat.id.source == spec.source()).count();
            let id = DrafterId { source: spec.source(), number: number as u8 };
            if let Some(lookup) = spec.build(id, &rules.shared) {
                seats.push(Self::new(id, Kind::Inline(Inline { lookup, virtual_round: None })));
            }
        }
        if let Some(number) = rules.model {
            let asked = Asked { shadow: ShadowPlan::new(), warm: false, explored: false };
            seats.push(Self::new(DrafterId::model(number), Kind::Asked(asked)));
        }
        seats
    }

    pub fn inline(&self) -> Option<&Inline> {
        match &self.kind {
            Kind::Inline(inline) => Some(inline),
            Kind::Asked(_) => None,
        }
    }

    pub fn inline_mut(&mut self) -> Option<&mut Inline> {
        match &mut self.kind {
            Kind::Inline(inline) => Some(inline),
            Kind::Asked(_) => None,
        }
    }

    pub fn asked(&self) -> Option<&Asked> {
        match &self.kind {
            Kind::Asked(asked) => Some(asked),
            Kind::Inline(_) => None,
        }
    }

    pub fn asked_mut(&mut self) -> Option<&mut Asked> {
        match &mut self.kind {
            Kind::Asked(asked) => Some(asked),
            Kind::Inline(_) => None,
        }
    }
}

/// The place of the seat that a round is counted for: the asked one if it drafted for it, else the one that proposed
/// the first node, else the first of those that answer at once.
pub(super) fn leading(seats: &[Seat], draft: &Tree, modelled: usize) -> Option<usize> {
    let proposer = draft.nodes().first().map(|node| node.votes.first().drafter);
    let place = |is: &dyn Fn(&Seat) -> bool| seats.iter().position(is);
    if modelled > 0 {
        return place(&|seat| seat.asked().is_some());
    }
    place(&|seat| Some(seat.id) == proposer).or_else(|| place(&|seat| seat.inline().is_some()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draft::{Features, LookupSpec, Ngram, Source};

    #[test]
    fn drafters_of_one_kind_are_numbered_and_a_round_is_counted_for_who_led_it() {
        let ngram = |max| LookupSpec::PromptLookup(Ngram { min: 1, max });
        let rules = Rules { lookups: vec![ngram(2), ngram(8)], model: Some(3), ..Rules::default() };
        let seats = Seat::all(&rules);
        let ids: Vec<_> = seats.iter().map(|seat| (seat.id.source, seat.id.number)).collect();
        assert_eq!(ids, [(Source::PromptLookup, 0), (Source::PromptLookup, 1), (Source::Model, 3)]);
        let by = |seat: usize| Tree::chain(&[1], seats[seat].id, Features::default());
        assert_eq!([0, 1, 2].map(|seat| leading(&seats, &by(seat), 0)), [Some(0), Some(1), Some(2)]);
        assert_eq!(leading(&seats, &by(1), 3), Some(2), "the model drafted for it, too");
        assert_eq!(leading(&seats, &Tree::default(), 0), Some(0));
        assert_eq!(leading(&seats[2..], &Tree::default(), 0), None);
    }

    #[test]
    fn a_drafter_that_fails_is_left_alone_longer_and_longer() {
        let mut health = Health::default();
        assert!(health.is_well(0));
        let pauses = [64, 128, 256, 512, 1024, 2048, 2048];
        for pause in pauses {
            health.failed(10);
            assert!(!health.is_well(10 + pause - 1) && health.is_well(10 + pause));
        }
    }
}
