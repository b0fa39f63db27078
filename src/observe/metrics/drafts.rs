//! Counters of requests to drafter models and of lost answers.

use prometheus::IntCounterVec;

use super::Maker;
use crate::observe::make;
use crate::words::metric;

/// What a drafter model is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DraftKind {
    /// A draft that will be verified.
    Draft,
    /// The same, drawn from laws that the target verifies it by.
    Sampled,
    /// A shadow draft: what it would have drafted while the request rides.
    Shadow,
}

impl DraftKind {
    const ALL: [Self; 3] = [Self::Draft, Self::Sampled, Self::Shadow];

    const fn name(self) -> &'static str {
        match self {
            Self::Draft => "draft",
            Self::Sampled => "sampled",
            Self::Shadow => "shadow",
        }
    }
}

/// Why the answer of a drafter model was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DraftLoss {
    /// It took longer than `timeouts.draft`, if that is set.
    Timeout,
    /// It took longer than the session's own limit.
    Patience,
    /// The drafter failed.
    Fault,
    /// Every session slot of the drafter is taken.
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

/// How a hearing of all models of a policy on one passage ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HearingEnd {
    /// All were heard.
    Heard,
    /// One of them had no seat to spare.
    NoSeat,
    /// One of them failed.
    Fault,
    /// One of them took too long.
    Late,
}

impl HearingEnd {
    const ALL: [Self; 4] = [Self::Heard, Self::NoSeat, Self::Fault, Self::Late];

    const fn name(self) -> &'static str {
        match self {
            Self::Heard => "heard",
            Self::NoSeat => "no_seat",
            Self::Fault => "fault",
            Self::Late => "late",
        }
    }
}

impl From<DraftLoss> for HearingEnd {
    fn from(loss: DraftLoss) -> Self {
        match loss {
            DraftLoss::NoSeat => Self::NoSeat,
            DraftLoss::Fault => Self::Fault,
            DraftLoss::Timeout | DraftLoss::Patience => Self::Late,
        }
    }
}

#[derive(Debug)]
pub(super) struct DraftCounts {
    asked: IntCounterVec,
    lost: IntCounterVec,
    hearings: IntCounterVec,
    drawn: IntCounterVec,
}

impl DraftCounts {
    /// Counters at zero for every kind and cause, registered.
    pub(super) fn new(new: &Maker) -> Result<Self, prometheus::Error> {
        let counts = Self {
            asked: new.kept(make::counters(metric::DRAFTS))?,
            lost: new.kept(make::counters(metric::DRAFTS_LOST))?,
            hearings: new.kept(make::counters(metric::HEARINGS))?,
            drawn: new.kept(make::counters(metric::DRAFTERS_DRAWN))?,
        };
        for end in HearingEnd::ALL {
            counts.hearings.with_label_values(&[end.name()]);
        }
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

    pub(super) fn heard(&self, end: HearingEnd) {
        self.hearings.with_label_values(&[end.name()]).inc();
    }

    pub(super) fn drawn(&self, policy: &str, drafter: &str) {
        self.drawn.with_label_values(&[policy, drafter]).inc();
    }
}
