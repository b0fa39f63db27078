//! Gates: conditions that open and close over time, each with its reason for plain decoding.

use super::PlainReason;

/// A gate. While one is closed, no request is speculated on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Gate {
    /// More requests wait at the engine, or more of its KV memory is in use, than the policy
    /// allows.
    Load,
    /// The engine's last load report is older than the policy allows.
    Stale,
    /// The share of first draft tokens that are accepted is below the policy's minimum.
    Acceptance,
    /// Speculation was measured slower than plain decoding (control groups).
    Control,
    /// The regret budget of the replica is empty: recent speculation cost more than it saved.
    Regret,
    /// The draft tokens in flight delay first tokens by as much as the policy allows.
    FirstToken,
    /// Foretell's memory for bodies and sessions has reached `limits.memory`.
    Memory,
    /// The replica is down, disabled, or its breaker is open.
    Health,
}

impl Gate {
    /// Every gate, in the order of the documentation.
    pub const ALL: [Self; 8] = [
        Self::Load,
        Self::Stale,
        Self::Acceptance,
        Self::Control,
        Self::Regret,
        Self::FirstToken,
        Self::Memory,
        Self::Health,
    ];

    /// The name in metrics and the admin API.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Load => "load",
            Self::Stale => "stale",
            Self::Acceptance => "acceptance",
            Self::Control => "control",
            Self::Regret => "regret",
            Self::FirstToken => "first_token",
            Self::Memory => "memory",
            Self::Health => "health",
        }
    }

    pub const fn position(self) -> usize {
        self as usize
    }

    /// The reason for plain decoding while it is closed.
    pub const fn reason(self) -> PlainReason {
        match self {
            Self::Load => PlainReason::GateLoad,
            Self::Stale => PlainReason::GateStale,
            Self::Acceptance => PlainReason::GateAcceptance,
            Self::Control => PlainReason::GateControl,
            Self::Regret => PlainReason::GateRegret,
            Self::FirstToken => PlainReason::GateFirstToken,
            Self::Memory => PlainReason::GateMemory,
            Self::Health => PlainReason::GateHealth,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gate_and_its_reason_have_one_name() {
        for gate in Gate::ALL {
            assert_eq!(Gate::ALL[gate.position()], gate);
            assert_eq!(format!("gate_{}", gate.name()), gate.reason().name());
        }
    }
}
