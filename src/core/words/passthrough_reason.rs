//! Reasons for passing a request through, or never speculating on it: a closed list, so that every
//! passthrough request has a reason in headers, metrics and logs.

/// Reason for passing a request through unchanged, or never speculating on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PassthroughReason {
    /// The mode of the process or of the backend is `off`.
    Off,
    /// Requested by the client (`x-foretell: off`).
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
    /// Several engines answer at one address.
    SeveralEngines,
    /// The replica's answers to first calls cannot be read.
    UnreadableAnswers,
    /// The backend bills the cost of a verify request.
    Billed,
    /// The engine verifies drafts of Foretell inside its steps.
    Inject,
    /// The limit of concurrent sessions is reached.
    Sessions,
    /// The limit of memory is reached.
    Memory,
    /// A fault of Foretell itself before the first request to the backend.
    Fault,
}

impl PassthroughReason {
    /// Every reason, in the order of the documentation.
    pub const ALL: [Self; 26] = [
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
        Self::SeveralEngines,
        Self::UnreadableAnswers,
        Self::Billed,
        Self::Inject,
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
            Self::SeveralEngines => "several_engines",
            Self::UnreadableAnswers => "unreadable_answers",
            Self::Billed => "billed",
            Self::Inject => "inject",
            Self::Sessions => "sessions",
            Self::Memory => "memory",
            Self::Fault => "fault",
        }
    }

    /// The reason in plain words.
    pub const fn words(self) -> &'static str {
        match self {
            Self::Off => "the mode of the process or of the backend is off",
            Self::Client => "requested by the client (header x-foretell)",
            Self::Policy => "the policy that matches has mode: off",
            Self::NoPolicy => "no policy matches the request",
            Self::Route => "only completions and chat completions are speculated on",
            Self::Body => {
                "the body is no JSON request with a model and a prompt, or is larger than limits.speculate_body"
            }
            Self::Encoded => "the body is compressed",
            Self::Parameter => "a parameter has a value that cannot be carried exactly",
            Self::UnknownParameter => "the parameter is not known to Foretell",
            Self::DefaultsUnknown => "the server's sampling defaults are not known",
            Self::Structured => {
                "the engine restarts its grammar with every request, so constrained output cannot be continued"
            }
            Self::Tools => {
                "the server parses tool calls, and no parser for them is configured here (docs/agents.md)"
            }
            Self::Reasoning => "the backend changes or parses the reasoning (docs/agents.md)",
            Self::Multimodal => "the request has content other than text",
            Self::Choices => "the request has more than one choice or prompt",
            Self::Seed => "the engine's seeded noise cannot be continued",
            Self::Tokenizer => "no configured tokenizer agrees with the server's",
            Self::NoVerifyMethod => "the backend cannot verify drafts",
            Self::Unreachable => "no replica answered",
            Self::SeveralEngines => "several engines answer at one address",
            Self::UnreadableAnswers => "a gateway in front of the engine rewrites its answers",
            Self::Billed => "the backend bills per token, so verify requests would cost money",
            Self::Inject => "the engine takes Foretell's drafts into its steps and verifies them there",
            Self::Sessions => "the number of concurrent sessions has reached limits.sessions",
            Self::Memory => "the memory of bodies and sessions has reached limits.memory",
            Self::Fault => "Foretell failed before it sent the request; see its log",
        }
    }
}

/// Reason for passing a request through, and the parameter of its body that causes it, if a single
/// one does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused {
    pub reason: PassthroughReason,
    /// Name of the parameter, as the table of parameters spells it; `None` if no single one causes
    /// it.
    pub parameter: Option<&'static str>,
}

impl From<PassthroughReason> for Refused {
    fn from(reason: PassthroughReason) -> Self {
        Self { reason, parameter: None }
    }
}

impl Refused {
    /// Refused because of this parameter.
    pub const fn by(reason: PassthroughReason, parameter: &'static str) -> Self {
        Self { reason, parameter: Some(parameter) }
    }

    /// Refused because of the first of these parameters that applies; `None` if none does.
    pub fn by_first(reason: PassthroughReason, parameters: &[(bool, &'static str)]) -> Option<Self> {
        parameters.iter().find(|(applies, _)| *applies).map(|(_, name)| Self::by(reason, name))
    }
}
