//! Counters of requests to drafter models and of lost answers.

use prometheus::IntCounterVec;

use super::Maker;
use crate::make;
use foretell_metrics as metric;

/// Kind of a request to a drafter model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DraftKind {
    /// A draft that will be verified.
    Draft,
    /// A shadow draft: the tokens that it would have drafted while the request decodes plainly.
    Shadow,
}

impl DraftKind {
    const ALL: [Self; 2] = [Self::Draft, Self::Shadow];

    const fn name(self) -> &'static str {
        match self {
            Self::Draft => "draft",
            Self::Shadow => "shadow",
        }
    }
}

/// Cause of a lost answer of a drafter model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DraftLoss {
    /// It took longer than `timeouts.draft`, if that is set.
    Timeout,
    /// It took longer than the session waits.
    Patience,
    /// The drafter failed.
    Fault,
    /// Every session slot of the drafter is taken.
    NoSlot,
}

impl DraftLoss {
    const ALL: [Self; 4] = [Self::Timeout, Self::Patience, Self::Fault, Self::NoSlot];

    const fn name(self) -> &'static str {
        match self {
            Self::Timeout => "timeout",
            Self::Patience => "patience",
            Self::Fault => "fault",
            Self::NoSlot => "no_slot",
        }
    }
}

#[derive(Debug)]
pub(super) struct DraftCounts {
    requested: IntCounterVec,
    lost: IntCounterVec,
}

impl DraftCounts {
    /// Counters at zero for every kind and cause, registered.
    pub(super) fn new(new: &Maker) -> Result<Self, prometheus::Error> {
        let counts = Self {
            requested: new.register(make::counters(metric::DRAFTS))?,
            lost: new.register(make::counters(metric::DRAFTS_LOST))?,
        };
        for kind in DraftKind::ALL {
            counts.requested.with_label_values(&[kind.name()]);
            for cause in DraftLoss::ALL {
                counts.lost.with_label_values(&[kind.name(), cause.name()]);
            }
        }
        Ok(counts)
    }

    pub(super) fn requested(&self, kind: DraftKind) {
        self.requested.with_label_values(&[kind.name()]).inc();
    }

    pub(super) fn lost(&self, kind: DraftKind, cause: DraftLoss) {
        self.lost.with_label_values(&[kind.name(), cause.name()]).inc();
    }
}
