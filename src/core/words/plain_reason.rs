//! Reasons for decoding an eligible request plainly: a closed list, so that every plain request has
//! a reason in headers, metrics and logs.

/// Reason for not speculating on an eligible request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PlainReason {
    /// In the control group.
    ControlGroup,
    /// The mode of the process or of the backend is `observe`.
    Observe,
    /// Speculation is not expected to pay.
    NoGain,
    /// The cost of a plain token on the replica is not measured yet.
    NotMeasured,
    /// The replica's budget of rejected draft tokens is spent while requests of others are in
    /// flight.
    Budget,
    /// Beyond the verification method's limit of context or bytes.
    ContextTooLong,
    /// Even the shortest round takes longer than `gates.max_gap`.
    MaxGap,
    /// The token ids of the prompt or of the output are not certain; or the client requested
    /// log-probabilities, and it is not known that the server writes tokens as their ids say.
    UntrustedIds,
    /// More requests wait at the engine, or more of its KV memory is in use, than the policy
    /// allows.
    GateLoad,
    /// The engine's last load report is older than the policy allows.
    GateStale,
    /// The share of first draft tokens that are accepted is below the policy's minimum, and no gain
    /// is predicted.
    GateAcceptance,
    /// Speculation was measured slower than plain decoding.
    GateControl,
    /// The regret budget of the replica is empty: recent speculation cost more than it saved.
    GateRegret,
    /// The draft tokens in flight delay first tokens by as much as the policy allows.
    GateFirstToken,
    /// Foretell's memory for bodies and sessions has reached `limits.memory`.
    GateMemory,
    /// The replica is down, disabled, or its breaker is open.
    GateHealth,
    /// The backend speculates itself.
    BackendSpeculates,
    /// The client requested plain decoding.
    Client,
    /// The policy that matches has `mode: plain`.
    Policy,
    /// The policy that matches has `mode: shadow`: drafts are scored and never sent.
    Shadow,
    /// A parser of the server's takes reasoning or tool calls out of its chats.
    Parser,
    /// A grammar of the server binds the sampling, or the server has not reported that none does.
    Grammar,
    /// No drafter had a proposal.
    NoDraft,
    /// The backend withholds text that may become a stop text.
    WithheldText,
    /// `verify.allow` has none of the exact verification methods of the server.
    NoVerifyMethod,
    /// Every verification method that is allowed was tried, and none could decide the next token.
    Undecided,
    /// A drafter failed.
    DraftFault,
    /// A verify request failed.
    VerifyFault,
    /// The backend answered with an error or with no stream, or a plain answer broke off.
    UpstreamError,
    /// The backend requested a pause, or the process that answers cannot be identified at the
    /// moment.
    RetryAfter,
    /// The process is draining.
    Draining,
}

impl PlainReason {
    /// Every reason, in the order of the documentation.
    pub const ALL: [Self; 31] = [
        Self::ControlGroup,
        Self::Observe,
        Self::NoGain,
        Self::NotMeasured,
        Self::Budget,
        Self::ContextTooLong,
        Self::MaxGap,
        Self::UntrustedIds,
        Self::GateLoad,
        Self::GateStale,
        Self::GateAcceptance,
        Self::GateControl,
        Self::GateRegret,
        Self::GateFirstToken,
        Self::GateMemory,
        Self::GateHealth,
        Self::BackendSpeculates,
        Self::Client,
        Self::Policy,
        Self::Shadow,
        Self::Parser,
        Self::Grammar,
        Self::NoDraft,
        Self::WithheldText,
        Self::NoVerifyMethod,
        Self::Undecided,
        Self::DraftFault,
        Self::VerifyFault,
        Self::UpstreamError,
        Self::RetryAfter,
        Self::Draining,
    ];

    /// The name in headers, metrics and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ControlGroup => "control_group",
            Self::Observe => "observe",
            Self::NoGain => "no_gain",
            Self::NotMeasured => "not_measured",
            Self::Budget => "budget",
            Self::ContextTooLong => "context_too_long",
            Self::MaxGap => "max_gap",
            Self::UntrustedIds => "untrusted_ids",
            Self::GateLoad => "gate_load",
            Self::GateStale => "gate_stale",
            Self::GateAcceptance => "gate_acceptance",
            Self::GateControl => "gate_control",
            Self::GateRegret => "gate_regret",
            Self::GateFirstToken => "gate_first_token",
            Self::GateMemory => "gate_memory",
            Self::GateHealth => "gate_health",
            Self::BackendSpeculates => "backend_speculates",
            Self::Client => "client",
            Self::Policy => "policy",
            Self::Shadow => "shadow",
            Self::Parser => "parser",
            Self::Grammar => "grammar",
            Self::NoDraft => "no_draft",
            Self::WithheldText => "withheld_text",
            Self::NoVerifyMethod => "no_verify_method",
            Self::Undecided => "undecided",
            Self::DraftFault => "draft_fault",
            Self::VerifyFault => "verify_fault",
            Self::UpstreamError => "upstream_error",
            Self::RetryAfter => "retry_after",
            Self::Draining => "draining",
        }
    }

    /// True if it applies even with `gamma.fixed`.
    pub const fn applies_when_forced(self) -> bool {
        match self {
            Self::GateHealth
            | Self::GateMemory
            | Self::BackendSpeculates
            | Self::Parser
            | Self::Grammar
            | Self::ContextTooLong
            | Self::UntrustedIds
            | Self::WithheldText
            | Self::NoVerifyMethod
            | Self::UpstreamError
            | Self::DraftFault
            | Self::VerifyFault
            | Self::RetryAfter
            | Self::Observe
            | Self::Client
            | Self::Policy
            | Self::Draining => true,
            Self::ControlGroup
            | Self::NoGain
            | Self::NotMeasured
            | Self::MaxGap
            | Self::GateRegret
            | Self::GateFirstToken
            | Self::Budget
            | Self::GateLoad
            | Self::GateStale
            | Self::GateAcceptance
            | Self::GateControl
            | Self::Shadow
            | Self::NoDraft
            | Self::Undecided => false,
        }
    }

    pub const fn words(self) -> &'static str {
        match self {
            Self::ControlGroup => "the request is in the control group, which is decoded plainly",
            Self::Observe => "the mode of the process or of the backend is observe",
            Self::NoGain => "speculation is not expected to pay",
            Self::NotMeasured => "the cost of a plain token on this replica is not measured yet",
            Self::Budget => {
                "rejected draft tokens have taken 2 % of the replica's time while it serves other requests"
            }
            Self::ContextTooLong => "the context is longer than a verify request may be",
            Self::MaxGap => "even the shortest round takes longer than gates.max_gap",
            Self::UntrustedIds => "the token ids of the prompt or of the output are not certain",
            Self::GateLoad => "the engine is loaded beyond gates.waiting or gates.kv of the policy",
            Self::GateStale => "the engine's last load report is older than the policy allows",
            Self::GateAcceptance => "the share of accepted draft tokens is below the policy's minimum",
            Self::GateControl => "speculation was measured slower than plain decoding",
            Self::GateRegret => {
                "paused: recent speculation here cost more than it saved; it resumes after a while of plain decoding"
            }
            Self::GateFirstToken => {
                "more draft tokens in flight would delay first tokens by more than gates.first_token allows"
            }
            Self::GateMemory => "the memory of bodies and sessions has reached limits.memory",
            Self::GateHealth => "the replica is down or disabled, or its circuit breaker is open",
            Self::BackendSpeculates => "the engine speculates itself",
            Self::Client => "plain decoding was requested by the client",
            Self::Policy => "the policy has mode: plain",
            Self::Shadow => "the policy has mode: shadow",
            Self::Parser => "the server takes reasoning or tool calls out of the text of its chats",
            Self::Grammar => {
                "a grammar of the server binds the output, or the server has not reported yet that none does"
            }
            Self::NoDraft => "no drafter has a proposal",
            Self::WithheldText => "the server withholds text that may be part of a stop text",
            Self::NoVerifyMethod => "verify.allow lists none of the exact verification methods of the server",
            Self::Undecided => "no verification method could decide the next token",
            Self::DraftFault => "a drafter failed",
            Self::VerifyFault => "a verify request failed",
            Self::UpstreamError => "the backend answered with an error, or its answer broke off",
            Self::RetryAfter => {
                "the server requested a pause, or its process cannot be identified at the moment"
            }
            Self::Draining => "the process is draining",
        }
    }
}
