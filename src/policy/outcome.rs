//! The steps of a decision, and its result.

use super::Ruling;
use foretell_core::words::{PassthroughReason, PlainReason};

/// The steps of a decision, in the order in which they are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecisionStep {
    /// The client's request in `x-foretell`.
    Client,
    /// The mode of the process.
    Mode,
    /// Can any replica do more than pass requests through?
    Fleet,
    /// Is the body uncompressed?
    Encoding,
    /// Can every parameter of the body be carried exactly?
    Body,
    /// The backend that the request goes to, and its mode.
    Backend,
    /// Is a session slot free?
    Session,
    /// The engine that answers at the replica's address.
    Server,
    /// Can this engine serve the request exactly?
    Engine,
    /// The policy that applies.
    Policy,
    /// Do policy, process, client and probe permit speculation?
    Permission,
    /// The methods that may verify drafts.
    VerifyLimits,
    /// The drafters that can draft.
    Drafters,
}

impl DecisionStep {
    /// Name in explanations.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Mode => "mode",
            Self::Fleet => "fleet",
            Self::Encoding => "encoding",
            Self::Body => "body",
            Self::Backend => "backend",
            Self::Session => "session",
            Self::Server => "server",
            Self::Engine => "engine",
            Self::Policy => "policy",
            Self::Permission => "permission",
            Self::VerifyLimits => "verify",
            Self::Drafters => "drafters",
        }
    }
}

/// The decision to pass a request through.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Passthrough {
    /// The reason.
    pub reason: PassthroughReason,
    /// Name of the parameter or header that causes it, if a single one does.
    pub parameter: Option<String>,
    /// `name@revision` of the policy that matched the request, if one was looked for.
    pub policy: Option<String>,
}

impl From<PassthroughReason> for Passthrough {
    fn from(reason: PassthroughReason) -> Self {
        Self { reason, parameter: None, policy: None }
    }
}

/// Result of a decision.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// A session serves the request, as this ruling says.
    Serve(Box<Ruling>),
    /// The request is passed through.
    Passthrough(Passthrough),
    /// There is no backend for it, or no server answers.
    Nobody,
    /// The step needs an unknown fact; the text says why it is unknown.
    Undecided(DecisionStep, &'static str),
}

/// Result of one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepResult {
    /// The step does not prevent speculation.
    Passed,
    /// The session only decodes plainly, for this reason.
    Plain(PlainReason),
    /// The request is passed through, for this reason.
    Passthrough(PassthroughReason),
    /// There is no backend to send it to.
    NoBackend,
    /// No server answers at the replica's address.
    Down,
    /// It needs a fact that is not known.
    Unknown,
}
