//! The live reasons not to leap that can be open or closed on their own.

use super::RideReason;

/// A gate: while it is closed, nothing leaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Gate {
    /// The engine is loaded.
    Load,
    /// The load signal is old.
    Stale,
    /// Too few drafted tokens are accepted.
    Acceptance,
    /// Leaping was measured slower than riding.
    Latency,
    /// Memory is short.
    Memory,
    /// The replica is not healthy.
    Health,
}

impl Gate {
    /// Every gate, in the order of the documentation.
    pub const ALL: [Self; 6] =
        [Self::Load, Self::Stale, Self::Acceptance, Self::Latency, Self::Memory, Self::Health];

    /// The name in metrics and the admin API.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Load => "load",
            Self::Stale => "stale",
            Self::Acceptance => "acceptance",
            Self::Latency => "latency",
            Self::Memory => "memory",
            Self::Health => "health",
        }
    }

    /// Its place in [`Self::ALL`].
    pub const fn place(self) -> usize {
        self as usize
    }

    /// The reason for riding while it is closed.
    pub const fn reason(self) -> RideReason {
        match self {
            Self::Load => RideReason::GateLoad,
            Self::Stale => RideReason::GateStale,
            Self::Acceptance => RideReason::GateAcceptance,
            Self::Latency => RideReason::GateLatency,
            Self::Memory => RideReason::GateMemory,
            Self::Health => RideReason::GateHealth,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gate_and_the_reason_that_it_gives_have_one_name() {
        for gate in Gate::ALL {
            assert_eq!(Gate::ALL[gate.place()], gate);
            assert_eq!(format!("gate_{}", gate.name()), gate.reason().name());
        }
    }
}
