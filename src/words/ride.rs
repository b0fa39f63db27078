//! Why an eligible request rides: a closed list, so that every ride has a name in headers, metrics and logs.

/// Why an eligible request is not leaping (design section 2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RideReason {
    /// Held back as control group.
    Holdback,
    /// The process or policy only observes.
    Observe,
    /// Leaping is not expected to pay.
    NoGain,
    /// The replica's budget of extra tokens is spent.
    Budget,
    /// Beyond the plan's context or byte bound.
    ContextTooLong,
    /// The engine is loaded.
    GateLoad,
    /// The load signal is old.
    GateStale,
    /// Too few drafted tokens are accepted.
    GateAcceptance,
    /// Leaping was measured slower than riding.
    GateLatency,
    /// Memory is short.
    GateMemory,
    /// The replica is not healthy.
    GateHealth,
    /// The backend speculates itself.
    BackendSpeculates,
    /// The client asked for a ride.
    Client,
    /// The policy says ride.
    Policy,
    /// Riding while drafts are scored in the shadow.
    Shadow,
    /// A control window of the replica.
    Switchback,
    /// No drafter had a proposal.
    NoDraft,
    /// A drafter or verify call failed.
    VerifyFault,
    /// The backend asked for a pause.
    RetryAfter,
    /// The process is draining.
    Draining,
}

impl RideReason {
    /// Every reason, in the order of the documentation.
    pub const ALL: [Self; 20] = [
        Self::Holdback,
        Self::Observe,
        Self::NoGain,
        Self::Budget,
        Self::ContextTooLong,
        Self::GateLoad,
        Self::GateStale,
        Self::GateAcceptance,
        Self::GateLatency,
        Self::GateMemory,
        Self::GateHealth,
        Self::BackendSpeculates,
        Self::Client,
        Self::Policy,
        Self::Shadow,
        Self::Switchback,
        Self::NoDraft,
        Self::VerifyFault,
        Self::RetryAfter,
        Self::Draining,
    ];

    /// The name in headers, metrics and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Holdback => "holdback",
            Self::Observe => "observe",
            Self::NoGain => "no_gain",
            Self::Budget => "budget",
            Self::ContextTooLong => "context_too_long",
            Self::GateLoad => "gate_load",
            Self::GateStale => "gate_stale",
            Self::GateAcceptance => "gate_acceptance",
            Self::GateLatency => "gate_latency",
            Self::GateMemory => "gate_memory",
            Self::GateHealth => "gate_health",
            Self::BackendSpeculates => "backend_speculates",
            Self::Client => "client",
            Self::Policy => "policy",
            Self::Shadow => "shadow",
            Self::Switchback => "switchback",
            Self::NoDraft => "no_draft",
            Self::VerifyFault => "verify_fault",
            Self::RetryAfter => "retry_after",
            Self::Draining => "draining",
        }
    }
}
