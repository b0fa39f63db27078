//! Reasons for relaying a request, or never speculating on it: a closed list, so that every relayed
//! request has a reason in headers, metrics and logs.

/// Reason for relaying a request unchanged, or never speculating on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RelayReason {
    /// The mode of the process or of the backend is `off`.
    Off,
    /// The client requested it (`x-foretell: off`).
    Client,
    /// The policy that matches has `mode: off`.
    Policy,
    /// No policy matches.
    NoPolicy,
    /// Not one of the two routes with speculation: another API for text, or no request for text.
    Route,
    /// Not a JSON object with a model and something to continue, or larger than the limit.
    Body,
    /// The body is compressed.
    Encoded,
    /// A known parameter with a value that is not carried exactly.
    Parameter,
    /// A parameter that Foretell does not know.
    UnknownParameter,
    /// The server's defaults for omitted fields are not known.
    DefaultsUnknown,
    /// Grammar, schema or other constrained output.
    Structured,
    /// Tools are offered or used, and the backend does not render the request, its parser is not
    /// known, or a call is forced.
    Tools,
    /// Reasoning is requested, and the backend does not render the request; or it is hidden.
    Reasoning,
    /// Images, audio, video or files.
    Multimodal,
    /// More than one choice or prompt.
    Choices,
    /// A client seed at temperature above zero, where the engine's noise is not a function of the
    /// position.
    Seed,
    /// No tokenizer that agrees with the backend's.
    Tokenizer,
    /// The backend cannot verify drafts.
    NoVerifyMethod,
    /// No replica answered.
    Unreachable,
    /// Several engines answer behind one address.
    Balanced,
    /// The replica's answers to first calls cannot be read.
    UnreadableAnswers,
    /// The backend bills the cost of a verify request.
    Billed,
    /// The limit of concurrent sessions is reached.
    Sessions,
    /// The limit of memory is reached.
    Memory,
    /// A fault of Foretell itself before the first request to the backend.
    Fault,
}

impl RelayReason {
    /// Every reason, in the order of the documentation.
    pub const ALL: [Self; 25] = [
        Self::Off,
        Self::Client,
        Self::Policy,
        Self::NoPolicy,
        Self::Route,
        Self::Body,
        Self::Encoded,
        Self::Parameter,
        Self::UnknownParameter,
        Self::DefaultsUnknown,
        Self::Structured,
        Self::Tools,
        Self::Reasoning,
        Self::Multimodal,
        Self::Choices,
        Self::Seed,
        Self::Tokenizer,
        Self::NoVerifyMethod,
        Self::Unreachable,
        Self::Balanced,
        Self::UnreadableAnswers,
        Self::Billed,
        Self::Sessions,
        Self::Memory,
        Self::Fault,
    ];

    /// The name in headers, metrics and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Client => "client",
            Self::Policy => "policy",
            Self::NoPolicy => "no_policy",
            Self::Route => "route",
            Self::Body => "body",
            Self::Encoded => "encoded",
            Self::Parameter => "parameter",
            Self::UnknownParameter => "unknown_parameter",
            Self::DefaultsUnknown => "defaults_unknown",
            Self::Structured => "structured",
            Self::Tools => "tools",
            Self::Reasoning => "reasoning",
            Self::Multimodal => "multimodal",
            Self::Choices => "choices",
            Self::Seed => "seed",
            Self::Tokenizer => "tokenizer",
            Self::NoVerifyMethod => "no_verify_method",
            Self::Unreachable => "unreachable",
            Self::Balanced => "balanced",
            Self::UnreadableAnswers => "unreadable_answers",
            Self::Billed => "billed",
            Self::Sessions => "sessions",
            Self::Memory => "memory",
            Self::Fault => "fault",
        }
    }

    /// The reason in plain words.
    pub const fn words(self) -> &'static str {
        match self {
            Self::Off => "the process is switched off",
            Self::Client => "the client asked for it",
            Self::Policy => "the policy that matches is switched off",
            Self::NoPolicy => "no policy matches",
            Self::Route => "only completions and chat completions are speculated on",
            Self::Body => "the body is not a request that can be understood",
            Self::Encoded => "the body is compressed",
            Self::Parameter => "a parameter has a value that is not carried exactly",
            Self::UnknownParameter => "a parameter is not known",
            Self::DefaultsUnknown => "the server's own sampling defaults are not known",
            Self::Structured => "constrained output restarts with every call",
            Self::Tools => {
                "the server parses tool calls, and no parser for them is configured here (docs/agents.md)"
            }
            Self::Reasoning => "reasoning is changed or parsed by the backend (docs/agents.md)",
            Self::Multimodal => "content other than text",
            Self::Choices => "more than one choice or prompt",
            Self::Seed => "the engine's seeded noise cannot be continued",
            Self::Tokenizer => "no tokenizer agrees with the backend's",
            Self::NoVerifyMethod => "the backend cannot verify drafts",
            Self::Unreachable => "no replica answered",
            Self::Balanced => "several engines answer behind one address",
            Self::UnreadableAnswers => "a gateway in front of the engine rewrites its answers",
            Self::Billed => "the backend bills what verifying would cost",
            Self::Sessions => "the limit of concurrent sessions is reached",
            Self::Memory => "the limit of memory is reached",
            Self::Fault => "a fault of Foretell itself",
        }
    }
}

/// Reason for relaying a request, and the parameter of its body that causes it, if a single one
/// does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused {
    pub reason: RelayReason,
    /// Name of the parameter, as the table of parameters spells it; `None` if no single one causes
    /// it.
    pub parameter: Option<&'static str>,
}

impl From<RelayReason> for Refused {
    fn from(reason: RelayReason) -> Self {
        Self { reason, parameter: None }
    }
}

impl Refused {
    /// Refused because of this parameter.
    pub const fn by(reason: RelayReason, parameter: &'static str) -> Self {
        Self { reason, parameter: Some(parameter) }
    }

    /// Refused because of the first of these parameters that applies; `None` if none does.
    pub fn by_first(reason: RelayReason, parameters: &[(bool, &'static str)]) -> Option<Self> {
        parameters.iter().find(|(applies, _)| *applies).map(|(_, name)| Self::by(reason, name))
    }
}
