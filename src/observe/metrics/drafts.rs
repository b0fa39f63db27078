//! Questions to the model drafters, and those that were lost.

use prometheus::{IntCounterVec, Opts, Registry};

/// What was asked of a model drafter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DraftKind {
    /// A draft to be verified.
    Draft,
    /// What it would have chosen, while the request rides.
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

/// Why an answer of a model drafter was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DraftLoss {
    /// It took longer than `timeouts.draft`, which the operator has set.
    Timeout,
    /// It took longer than the session waits on its own account.
    Patience,
    /// The drafter failed.
    Fault,
    /// All seats of the drafter are taken.
    NoSeat,
}

impl DraftLoss {
    const ALL: [Self; 4] = [Self::Timeout, Self::Patience, Self::Fault, Self::NoSeat];

    const fn name(self) -> &'static str {
        match self {
            Self::Timeout => "timeout",
            Self::Patience => "patience",
            Self::Fault => "fault",
            Self::NoSeat => "no_seat",
        }
    }
}

#[derive(Debug)]
pub(super) struct DraftCounts {
    asked: IntCounterVec,
    lost: IntCounterVec,
}

impl DraftCounts {
    /// Counters at zero for every kind and cause.
    pub(super) fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let asked = Opts::new("foretell_drafts_total", "Questions to model drafters.");
        let lost = Opts::new(
            "foretell_drafts_lost_total",
            "Questions to model drafters without an answer, or with one that came too late.",
        );
        let counts = Self {
            asked: IntCounterVec::new(asked, &["kind"])?,
            lost: IntCounterVec::new(lost, &["kind", "cause"])?,
        };
        registry.register(Box::new(counts.asked.clone()))?;
        registry.register(Box::new(counts.lost.clone()))?;
        for kind in DraftKind::ALL {
            counts.asked.with_label_values(&[kind.name()]);
            for cause in DraftLoss::ALL {
                counts.lost.with_label_values(&[kind.name(), cause.name()]);
            }
        }
        Ok(counts)
    }

    pub(super) fn asked(&self, kind: DraftKind) {
        self.asked.with_label_values(&[kind.name()]).inc();
    }

    pub(super) fn lost(&self, kind: DraftKind, cause: DraftLoss) {
        self.lost.with_label_values(&[kind.name(), cause.name()]).inc();
    }
}
