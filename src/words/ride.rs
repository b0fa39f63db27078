//! Why an eligible request rides: a closed list, so that every ride has a name in headers, metrics and logs.

/// Why an eligible request is not leaping.
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
    /// A control window: a few tokens are ridden so that the pace of riding is measured again.
    Switchback,
    /// A parser of the server's takes reasoning or tool calls out of its chats.
    Parser,
    /// No drafter had a proposal.
    NoDraft,
    /// A drafter or verify call failed.
    VerifyFault,
    /// The backend asked for a pause, or does not show now which process answers.
    RetryAfter,
    /// The process is draining.
    Draining,
}

impl RideReason {
    /// Every reason, in the order of the documentation.
    pub const ALL: [Self; 21] = [
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
        Self::Parser,
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
            Self::Parser => "parser",
            Self::NoDraft => "no_draft",
            Self::VerifyFault => "verify_fault",
            Self::RetryAfter => "retry_after",
            Self::Draining => "draining",
        }
    }

    /// The reason in plain words, for people who ask why.
    pub const fn words(self) -> &'static str {
        match self {
            Self::Holdback => "it is held back as control group",
            Self::Observe => "the process observes",
            Self::NoGain => "leaping is not expected to pay",
            Self::Budget => "the replica's budget of extra tokens is spent",
            Self::ContextTooLong => "the context is longer than a verify call may be",
            Self::GateLoad => "the server is loaded",
            Self::GateStale => "what the server last said about its load is too old",
            Self::GateAcceptance => "too few drafted tokens are accepted",
            Self::GateLatency => "leaping was measured slower than riding",
            Self::GateMemory => "memory is short",
            Self::GateHealth => "the replica is not healthy",
            Self::BackendSpeculates => "the server speculates by itself",
            Self::Client => "the client asks for a ride",
            Self::Policy => "the policy says ride",
            Self::Shadow => "the policy says shadow",
            Self::Switchback => "the replica is in a control window",
            Self::Parser => "the server parses its chats: it takes reasoning or tool calls out of their text",
            Self::NoDraft => "no drafter has a proposal",
            Self::VerifyFault => "a drafter or a verify call failed",
            Self::RetryAfter => "the server asked for a pause, or does not show now which process it is",
            Self::Draining => "the process is draining",
        }
    }
}
