//! Whether the session may leap now. Whether it pays is decided by the pilot.

use super::Session;
use crate::draft::{Budget, Tree};
use crate::session::accept::Walk;
use crate::session::pilot::{Stand, Step};
use crate::session::start::Permission;
use crate::units::{Tick, TokenId};
use crate::words::RideReason;

impl<W: Walk> Session<W> {
    pub(super) fn step(&mut self, leaping: bool, now: Tick) -> Step {
        if let Some(reason) = self.forbidden(now) {
            return Step::Ride(reason);
        }
        let stand = self.stand(leaping);
        if stand.room.depth == 0 && self.rules.gamma_fixed.is_none() {
            // The last token is not worth a switch either way, and says nothing about why the ones before were ridden.
            let before = self.summary.reason.unwrap_or(RideReason::NoGain);
            return if leaping { Step::Verify(Tree::default()) } else { Step::Ride(before) };
        }
        self.pilot.choose(self.output.tokens(), stand, now)
    }

    pub(super) fn stand(&self, leaping: bool) -> Stand {
        let rest = self.output.rest();
        let depth = rest.map_or(usize::MAX, |rest| rest.saturating_sub(1));
        let room = Budget { nodes: self.rules.context_max.saturating_sub(self.context() + 1), depth };
        Stand { leaping, room, rest, done: self.output.tokens().len() }
    }

    pub(super) fn context(&self) -> usize {
        self.pilot.prompt().map_or(0, <[TokenId]>::len) + self.output.tokens().len()
    }

    /// Whether the ids are certain, so that going on by them is the same request.
    pub(super) fn trusted(&self) -> bool {
        self.doubt.is_none() && self.output.agrees() && self.pilot.prompt().is_some()
    }

    /// Why the session may not leap now, whatever a leap would bring.
    pub(super) fn forbidden(&self, now: Tick) -> Option<RideReason> {
        if let Permission::Ride(reason) | Permission::Shadow(reason) = self.rules.permission {
            return Some(reason);
        }
        let forced = self.rules.gamma_fixed.is_some();
        if let Some(reason) = self.closed.filter(|&reason| !forced || holds_when_forced(reason)) {
            return Some(reason);
        }
        if self.rules.holdback && !forced {
            return Some(RideReason::Holdback);
        }
        if self.rules.plans.is_empty() || !self.trusted() {
            return Some(RideReason::NoDraft);
        }
        if self.flight.ride.is_some_and(|ride| ride.first) && !self.output.level() {
            return Some(RideReason::NoDraft);
        }
        if self.pause.is_some_and(|until| now < until) {
            return Some(RideReason::RetryAfter);
        }
        if self.output.tokens().len() < self.fault_until {
            return Some(self.fault_reason);
        }
        if self.context() + 1 > self.rules.context_max {
            return Some(RideReason::ContextTooLong);
        }
        None
    }
}

/// Whether a gate is kept even with `gamma.fixed`.
fn holds_when_forced(gate: RideReason) -> bool {
    match gate {
        RideReason::GateHealth
        | RideReason::GateMemory
        | RideReason::BackendSpeculates
        | RideReason::Parser
        | RideReason::ContextTooLong
        | RideReason::VerifyFault
        | RideReason::RetryAfter
        | RideReason::Observe
        | RideReason::Client
        | RideReason::Policy
        | RideReason::Draining => true,
        RideReason::Holdback
        | RideReason::NoGain
        | RideReason::Budget
        | RideReason::GateLoad
        | RideReason::GateStale
        | RideReason::GateAcceptance
        | RideReason::GateLatency
        | RideReason::Shadow
        | RideReason::Switchback
        | RideReason::NoDraft => false,
    }
}
