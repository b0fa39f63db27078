//! The drafters of a session, one slot each: identity, results of its rounds, and health.

use crate::control::Rounds;
use crate::draft::{DrafterId, Lookup};
use crate::session::shadow::ShadowSchedule;
use crate::session::start::{Resources, Rules};

/// Output tokens for which a drafter is not queried after its first failure, doubled with every
/// further one.
const RECOVERY: usize = 64;
/// Failures after which that does not grow any more.
const FAULTS_MAX: u32 = 5;

pub(super) struct SessionDrafter {
    /// The identity that its votes carry.
    pub id: DrafterId,
    pub kind: DrafterKind,
    /// The last rounds that are counted for it, real and virtual.
    pub rounds: Rounds,
    pub health: Health,
}

/// The way a drafter is queried.
pub(super) enum DrafterKind {
    /// It answers at once, inside the session.
    Inline(Box<dyn Lookup>),
    /// It is queried by an action, and answers by an event.
    ModelDrafter(ModelDrafter),
}

/// A drafter that is queried by an action.
pub(super) struct ModelDrafter {
    pub shadow: ShadowSchedule,
    /// It has answered a request of this session, so it has read the prompt.
    pub warm: bool,
    /// It is queried although earlier requests show that it does not pay.
    pub explored: bool,
}

/// The failures of a drafter, and the end of the pause after them.
#[derive(Debug, Default)]
pub(super) struct Health {
    faults: u32,
    not_before: usize,
}

impl Health {
    /// It failed after `done` output tokens: it is not queried for a while, longer with every
    /// failure.
    pub fn failed(&mut self, done: usize) {
        self.not_before = done + (RECOVERY << self.faults);
        self.faults = (self.faults + 1).min(FAULTS_MAX);
    }

    /// True if it may be queried after `done` output tokens.
    pub fn is_well(&self, done: usize) -> bool {
        done >= self.not_before
    }
}

impl SessionDrafter {
    fn new(id: DrafterId, kind: DrafterKind) -> Self {
        Self { id, kind, rounds: Rounds::remembering(super::MEMORY), health: Health::default() }
    }

    /// A slot for each drafter of `rules`, in the policy's order; those of one kind are numbered.
    pub fn all(rules: &Rules, resources: &Resources) -> Vec<Self> {
        let mut slots: Vec<Self> = Vec::new();
        for spec in &rules.lookups {
            let number = slots.iter().filter(|slot| slot.id.source == spec.source()).count();
            let id = DrafterId { source: spec.source(), number: number as u8 };
            if let Some(lookup) = spec.build(id, &resources.shared) {
                slots.push(Self::new(id, DrafterKind::Inline(lookup)));
            }
        }
        if let Some(number) = resources.model {
            let drafter = ModelDrafter { shadow: ShadowSchedule::new(), warm: false, explored: false };
            slots.push(Self::new(DrafterId::model(number), DrafterKind::ModelDrafter(drafter)));
        }
        slots
    }

    pub fn lookup(&self) -> Option<&dyn Lookup> {
        match &self.kind {
            DrafterKind::Inline(lookup) => Some(lookup.as_ref()),
            DrafterKind::ModelDrafter(_) => None,
        }
    }

    pub fn lookup_mut(&mut self) -> Option<&mut dyn Lookup> {
        match &mut self.kind {
            DrafterKind::Inline(lookup) => Some(lookup.as_mut()),
            DrafterKind::ModelDrafter(_) => None,
        }
    }

    pub fn model_drafter(&self) -> Option<&ModelDrafter> {
        match &self.kind {
            DrafterKind::ModelDrafter(drafter) => Some(drafter),
            DrafterKind::Inline(_) => None,
        }
    }

    pub fn model_drafter_mut(&mut self) -> Option<&mut ModelDrafter> {
        match &mut self.kind {
            DrafterKind::ModelDrafter(drafter) => Some(drafter),
            DrafterKind::Inline(_) => None,
        }
    }
}

/// The index of the slot that a round is counted for: the model drafter's if it computed tokens
/// for it, else the first of those that answer at once, whose drafts are merged and so win or lose
/// together.
pub(super) fn counted_for(slots: &[SessionDrafter], modelled: usize) -> Option<usize> {
    slots
        .iter()
        .position(|slot| if modelled > 0 { slot.model_drafter().is_some() } else { slot.lookup().is_some() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draft::{LookupSpec, Ngram, Source};

    #[test]
    fn drafters_of_one_kind_are_numbered_and_rounds_of_lookups_are_counted_together() {
        let ngram = |max| LookupSpec::PromptLookup(Ngram { min: 1, max });
        let rules = Rules { lookups: vec![ngram(2), ngram(8)], ..Rules::default() };
        let resources = Resources { model: Some(3), ..Resources::default() };
        let slots = SessionDrafter::all(&rules, &resources);
        let ids: Vec<_> = slots.iter().map(|slot| (slot.id.source, slot.id.number)).collect();
        assert_eq!(ids, [(Source::PromptLookup, 0), (Source::PromptLookup, 1), (Source::Model, 3)]);
        assert_eq!((counted_for(&slots, 0), counted_for(&slots, 3)), (Some(0), Some(2)));
        assert_eq!(counted_for(&slots[2..], 0), None);
    }

    #[test]
    fn a_failing_drafter_is_paused_longer_and_longer() {
        let mut health = Health::default();
        assert!(health.is_well(0));
        let pauses = [64, 128, 256, 512, 1024, 2048, 2048];
        for pause in pauses {
            health.failed(10);
            assert!(!health.is_well(10 + pause - 1) && health.is_well(10 + pause));
        }
    }
}
