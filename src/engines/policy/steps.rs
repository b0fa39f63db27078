//! The steps of a decision: each is a function of the facts, with the words for its result.

use std::sync::Arc;

use super::facts::{Backend, Body, Server, ServerState, Wish};
use super::outcome::{DecisionStep, Outcome, Relay, StepResult};
use super::part::DrafterPart;
use super::{Fact, Policy, PolicyMode, PolicySet, Subject};
use crate::dialect::Engine;
use crate::openai::{Control, Request, Sampling, SamplingField, control_header};
use foretell_core::session::Permission;
use foretell_core::words::{Mode, PlainReason, Refused, RelayReason, VerifyMethod};

/// Reason for ending the decision at a step.
pub(super) enum Halt {
    Relay(Relay),
    /// Relayed, with the server's explanation.
    RelayWithWords(RelayReason, String),
    NoBackend,
    Down(String),
    Unknown(&'static str),
}

impl From<RelayReason> for Halt {
    fn from(reason: RelayReason) -> Self {
        Self::Relay(reason.into())
    }
}

pub(super) const NO_REQUEST: Halt = Halt::Unknown("the body was not read, or not understood");
pub(super) const NO_BACKEND: Halt = Halt::Unknown("the backend is not known");
pub(super) const NO_SERVER: Halt = Halt::Unknown("it depends on the server, which is not known");
pub(super) const NO_POLICY: Halt = Halt::Unknown("it depends on the policy, and none is known to match");

impl From<Refused> for Halt {
    fn from(Refused { reason, parameter }: Refused) -> Self {
        Self::Relay(Relay { parameter: parameter.map(str::to_owned), ..reason.into() })
    }
}

impl Halt {
    pub(super) fn ends(&self, step: DecisionStep) -> Outcome {
        match self {
            Self::Relay(relay) => Outcome::Relay(relay.clone()),
            Self::RelayWithWords(reason, _) => Outcome::Relay((*reason).into()),
            Self::NoBackend | Self::Down(_) => Outcome::Nobody,
            Self::Unknown(why) => Outcome::Undecided(step, why),
        }
    }

    pub(super) fn say(&self) -> (StepResult, String) {
        match self {
            Self::Relay(Relay { reason, parameter: None, .. }) => {
                (StepResult::Relay(*reason), reason.words().to_owned())
            }
            Self::Relay(Relay { reason, parameter: Some(parameter), .. }) => {
                (StepResult::Relay(*reason), format!("because of {parameter}: {}", reason.words()))
            }
            Self::RelayWithWords(reason, words) => (StepResult::Relay(*reason), words.clone()),
            Self::NoBackend => (StepResult::NoBackend, "there is no backend to send it to".to_owned()),
            Self::Down(why) => (StepResult::Down, format!("nobody answers there: {why}")),
            Self::Unknown(why) => (StepResult::Unknown, (*why).to_owned()),
        }
    }
}

pub(super) fn passed(words: impl Into<String>) -> (StepResult, String) {
    (StepResult::Passed, words.into())
}

pub(super) fn client(wish: Wish) -> Result<Option<Control>, Halt> {
    let client = |parameter: Option<&str>| {
        Halt::Relay(Relay { parameter: parameter.map(str::to_owned), ..RelayReason::Client.into() })
    };
    match wish {
        Wish::Unreadable => Err(client(Some(control_header::NAME))),
        Wish::Said(Some(Control::Off)) => Err(client(None)),
        Wish::Said(control) => Ok(control),
    }
}

pub(super) fn say_client(control: Option<Control>) -> (StepResult, String) {
    match control {
        Some(Control::Plain) => {
            (StepResult::Plain(PlainReason::Client), "the client asks for plain decoding".to_owned())
        }
        Some(Control::Gamma(most)) => {
            passed(format!("the client asks for at most {most} drafted tokens a round"))
        }
        Some(Control::Off) | None => passed("the client asks for nothing"),
    }
}

pub(super) fn mode(mode: Mode) -> Result<(), Halt> {
    match mode {
        Mode::Off => Err(RelayReason::Off.into()),
        Mode::Observe | Mode::Auto => Ok(()),
    }
}

pub(super) fn fleet(speculates_anywhere: bool) -> Result<(), Halt> {
    if speculates_anywhere { Ok(()) } else { Err(RelayReason::NoVerifyMethod.into()) }
}

pub(super) fn encoding(encoded: bool) -> Result<(), Halt> {
    if encoded { Err(RelayReason::Encoded.into()) } else { Ok(()) }
}

pub(super) fn body(body: Fact<Body<'_>>) -> Result<&Request, Halt> {
    match body {
        Fact::Unknown(why) => Err(Halt::Unknown(why)),
        Fact::Known(Body::TooLarge) => Err(RelayReason::Body.into()),
        Fact::Known(Body::Refused { reason, parameter, .. }) => {
            Err(Halt::Relay(Relay { parameter: parameter.map(str::to_owned), ..reason.into() }))
        }
        Fact::Known(Body::Eligible(request)) => Ok(request),
    }
}

pub(super) fn backend(backend: Fact<Option<Backend<'_>>>) -> Result<Backend<'_>, Halt> {
    let backend = match backend {
        Fact::Unknown(why) => return Err(Halt::Unknown(why)),
        Fact::Known(None) => return Err(Halt::NoBackend),
        Fact::Known(Some(backend)) => backend,
    };
    match backend.mode {
        Mode::Off => Err(RelayReason::Off.into()),
        Mode::Observe | Mode::Auto if backend.speculates => Ok(backend),
        Mode::Observe | Mode::Auto => Err(RelayReason::NoVerifyMethod.into()),
    }
}

pub(super) fn session(free: Fact<bool>) -> Result<(), Halt> {
    match free {
        Fact::Known(true) => Ok(()),
        Fact::Known(false) => Err(RelayReason::Sessions.into()),
        Fact::Unknown(why) => Err(Halt::Unknown(why)),
    }
}

pub(super) fn server(state: Fact<ServerState<'_>>) -> Result<Server<'_>, Halt> {
    match state {
        Fact::Unknown(why) => Err(Halt::Unknown(why)),
        Fact::Known(ServerState::Relayed(reason, why)) => Err(Halt::RelayWithWords(reason, why.to_owned())),
        Fact::Known(ServerState::Down(why)) => Err(Halt::Down(why.to_owned())),
        Fact::Known(ServerState::Known(server)) => match server.single {
            Fact::Known(true) => Ok(server),
            Fact::Known(false) => Err(RelayReason::Balanced.into()),
            Fact::Unknown(why) => Err(Halt::Unknown(why)),
        },
    }
}

pub(super) fn say_server(server: &Server<'_>) -> (StepResult, String) {
    let Engine { dialect, version, model, .. } = server.engine;
    passed(format!("{} {version} serves {model}", dialect.name()))
}

/// The verification methods that are exact for this request on this server.
pub(super) fn exact(
    request: &Request,
    server: Server<'_>,
    sampling: &(Sampling, bool),
) -> Result<Vec<VerifyMethod>, Halt> {
    let (sampling, settled) = sampling;
    if let Some(refused) = server.engine.refuses(request, sampling) {
        return Err(refused.into());
    }
    let methods = server.engine.methods_for(request, sampling, *settled);
    if !methods.is_empty() {
        return Ok(methods);
    }
    match sampling.first_unset() {
        Some(open) if !settled => Err(Refused::by(RelayReason::DefaultsUnknown, open.name()).into()),
        _ => Err(RelayReason::NoVerifyMethod.into()),
    }
}

/// Effective temperature: that of the client, else the server's default; unknown if neither is.
pub(super) fn temperature(request: Option<&Request>, sampling: Option<&Sampling>) -> Fact<f64> {
    let setting = request.filter(|request| request.sampling.set_by_client.has(SamplingField::Temperature));
    match sampling.or(setting.map(|request| &request.sampling)) {
        Some(sampling) => Fact::Known(sampling.temperature),
        None => Fact::Unknown("it is left to the server's default"),
    }
}

pub(super) fn matching<'a>(
    policies: Fact<&'a PolicySet>,
    subject: &Subject<'_>,
) -> Result<&'a Arc<Policy>, Halt> {
    let policies = match policies {
        Fact::Known(policies) => policies,
        Fact::Unknown(why) => return Err(Halt::Unknown(why)),
    };
    match policies.first_match(subject) {
        Fact::Known(Some(policy)) => Ok(policy),
        Fact::Known(None) => Err(RelayReason::NoPolicy.into()),
        Fact::Unknown(why) => Err(Halt::Unknown(why)),
    }
}

/// The strictest of the permissions of process, policy and client. Never speculation where the
/// engine speculates itself, or where a probe found that speculation gains nothing.
pub(super) fn permission(
    mode: Mode,
    policy: &Policy,
    control: Option<Control>,
    server: Option<Server<'_>>,
) -> Result<Permission, Halt> {
    match (mode, policy.mode, control) {
        (Mode::Off, _, _) => return Err(RelayReason::Off.into()),
        (_, _, Some(Control::Off)) => return Err(RelayReason::Client.into()),
        (_, PolicyMode::Off, _) => return Err(RelayReason::Policy.into()),
        (_, PolicyMode::Plain, _) => return Ok(Permission::Plain(PlainReason::Policy)),
        (_, _, Some(Control::Plain)) => return Ok(Permission::Plain(PlainReason::Client)),
        (Mode::Observe, _, _) => return Ok(Permission::Shadow(PlainReason::Observe)),
        (Mode::Auto, PolicyMode::Shadow, _) => return Ok(Permission::Shadow(PlainReason::Shadow)),
        (Mode::Auto, PolicyMode::Auto, _) => {}
    }
    let server = server.ok_or(NO_SERVER)?;
    if server.engine.speculates {
        return Ok(Permission::Plain(PlainReason::BackendSpeculates));
    }
    if server.nothing_pays == Some(true) && policy.gamma.fixed.is_none() {
        return Ok(Permission::Plain(PlainReason::NoGain));
    }
    Ok(Permission::Speculate)
}

pub(super) fn say_permission(permission: Permission) -> (StepResult, String) {
    match permission {
        Permission::Speculate => passed("it may be speculated on"),
        Permission::Shadow(reason) => (
            StepResult::Plain(reason),
            format!("it is decoded plainly, and drafts are scored in the shadow: {}", reason.words()),
        ),
        Permission::Plain(reason) => {
            (StepResult::Plain(reason), format!("it is decoded plainly: {}", reason.words()))
        }
    }
}

/// The exact methods that the operator allows, in the order of `exact`.
pub(super) fn allowed(exact: &[VerifyMethod], server: Server<'_>) -> Vec<VerifyMethod> {
    exact.iter().copied().filter(|method| server.terms.allow.contains(method)).collect()
}

pub(super) fn say_methods(methods: &[VerifyMethod]) -> (StepResult, String) {
    if methods.is_empty() {
        return (
            StepResult::Plain(PlainReason::NoVerifyMethod),
            "verify.allow has none of the exact methods".to_owned(),
        );
    }
    passed(names(methods))
}

pub(super) fn say_parts(parts: &[DrafterPart<'_>]) -> (StepResult, String) {
    let drafts =
        |part: &DrafterPart<'_>| matches!(part, DrafterPart::Inline(_) | DrafterPart::ModelDrafter(..));
    if parts.iter().any(drafts) {
        return passed("some drafter drafts");
    }
    match parts.iter().find_map(|part| if let DrafterPart::Unknown(why) = part { Some(*why) } else { None }) {
        Some(why) => (StepResult::Unknown, why.to_owned()),
        None => (StepResult::Plain(PlainReason::NoDraft), "no drafter of the policy drafts".to_owned()),
    }
}

pub(super) fn names(methods: &[VerifyMethod]) -> String {
    methods.iter().map(|method| method.name()).collect::<Vec<_>>().join(", ")
}
