//! The steps of a decision: each is a function of the facts, with the words for its result.

use std::sync::Arc;

use super::facts::{Backend, Body, Group, Groups, Server, ServerState, Wish};
use super::outcome::{DecisionStep, Outcome, Passthrough, StepResult};
use super::part::DrafterPart;
use super::{Fact, Policy, PolicyMode, PolicySet, Subject};
use foretell_core::session::Permission;
use foretell_core::words::{Mode, PassthroughReason, PlainReason, Refused, VerifyMethod};
use foretell_engines::Engine;
use foretell_wire::openai::{Control, PromptSize, Request, Sampling, SamplingField, control_header};

/// Reason for ending the decision at a step.
pub(super) enum Halt {
    Passthrough(Passthrough),
    /// Passed through, with the server's explanation.
    PassthroughWithWords(PassthroughReason, String),
    NoBackend,
    Down(String),
    Unknown(&'static str),
}

impl From<PassthroughReason> for Halt {
    fn from(reason: PassthroughReason) -> Self {
        Self::Passthrough(reason.into())
    }
}

pub(super) const NO_REQUEST: Halt =
    Halt::Unknown("the body was not read, or is no request that Foretell understands");
pub(super) const NO_BACKEND: Halt = Halt::Unknown("the backend is not known");
pub(super) const NO_SERVER: Halt = Halt::Unknown("the answer depends on the server, which is not known");
pub(super) const NO_POLICY: Halt =
    Halt::Unknown("the answer depends on the policy, and none is known to match");

impl From<Refused> for Halt {
    fn from(Refused { reason, parameter }: Refused) -> Self {
        Self::Passthrough(Passthrough { parameter: parameter.map(str::to_owned), ..reason.into() })
    }
}

impl Halt {
    pub(super) fn ends(&self, step: DecisionStep) -> Outcome {
        match self {
            Self::Passthrough(passthrough) => Outcome::Passthrough(passthrough.clone()),
            Self::PassthroughWithWords(reason, _) => Outcome::Passthrough((*reason).into()),
            Self::NoBackend | Self::Down(_) => Outcome::Nobody,
            Self::Unknown(why) => Outcome::Undecided(step, why),
        }
    }

    pub(super) fn say(&self) -> (StepResult, String) {
        match self {
            Self::Passthrough(Passthrough { reason, parameter: None, .. }) => {
                (StepResult::Passthrough(*reason), reason.words().to_owned())
            }
            Self::Passthrough(Passthrough { reason, parameter: Some(parameter), .. }) => {
                (StepResult::Passthrough(*reason), format!("because of {parameter}: {}", reason.words()))
            }
            Self::PassthroughWithWords(reason, words) => (StepResult::Passthrough(*reason), words.clone()),
            Self::NoBackend => (StepResult::NoBackend, "no backend is configured for the request".to_owned()),
            Self::Down(why) => (StepResult::Down, format!("no replica answers: {why}")),
            Self::Unknown(why) => (StepResult::Unknown, (*why).to_owned()),
        }
    }
}

pub(super) fn passed(words: impl Into<String>) -> (StepResult, String) {
    (StepResult::Passed, words.into())
}

pub(super) fn client(wish: Wish) -> Result<Option<Control>, Halt> {
    let client = |parameter: Option<&str>| {
        Halt::Passthrough(Passthrough {
            parameter: parameter.map(str::to_owned),
            ..PassthroughReason::Client.into()
        })
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
            (StepResult::Plain(PlainReason::Client), "plain decoding was requested by the client".to_owned())
        }
        Some(Control::Gamma(most)) => passed(format!("the client limits drafts to {most} tokens a round")),
        Some(Control::Off) | None => passed("the request has no x-foretell header"),
    }
}

pub(super) fn mode(mode: Mode) -> Result<(), Halt> {
    match mode {
        Mode::Off => Err(PassthroughReason::Off.into()),
        Mode::Observe | Mode::Auto => Ok(()),
    }
}

pub(super) fn fleet(speculates_anywhere: bool) -> Result<(), Halt> {
    if speculates_anywhere { Ok(()) } else { Err(PassthroughReason::NoVerifyMethod.into()) }
}

pub(super) fn encoding(encoded: bool) -> Result<(), Halt> {
    if encoded { Err(PassthroughReason::Encoded.into()) } else { Ok(()) }
}

pub(super) fn body(body: Fact<Body<'_>>) -> Result<&Request, Halt> {
    match body {
        Fact::Unknown(why) => Err(Halt::Unknown(why)),
        Fact::Known(Body::TooLarge) => Err(PassthroughReason::Body.into()),
        Fact::Known(Body::Refused { reason, parameter, .. }) => {
            Err(Halt::Passthrough(Passthrough { parameter: parameter.map(str::to_owned), ..reason.into() }))
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
        Mode::Off => Err(PassthroughReason::Off.into()),
        Mode::Observe | Mode::Auto if backend.injected => Err(PassthroughReason::Inject.into()),
        Mode::Observe | Mode::Auto if backend.speculates => Ok(backend),
        Mode::Observe | Mode::Auto => Err(PassthroughReason::NoVerifyMethod.into()),
    }
}

pub(super) fn session(free: Fact<bool>) -> Result<(), Halt> {
    match free {
        Fact::Known(true) => Ok(()),
        Fact::Known(false) => Err(PassthroughReason::Sessions.into()),
        Fact::Unknown(why) => Err(Halt::Unknown(why)),
    }
}

pub(super) fn server(state: Fact<ServerState<'_>>) -> Result<Server<'_>, Halt> {
    match state {
        Fact::Unknown(why) => Err(Halt::Unknown(why)),
        Fact::Known(ServerState::Passthrough(reason, why)) => {
            Err(Halt::PassthroughWithWords(reason, why.to_owned()))
        }
        Fact::Known(ServerState::Down(why)) => Err(Halt::Down(why.to_owned())),
        Fact::Known(ServerState::Known(server)) => match server.single {
            Fact::Known(true) => Ok(server),
            Fact::Known(false) => Err(PassthroughReason::SeveralEngines.into()),
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
    let methods = server.engine.methods_for(request, sampling, *settled)?;
    if !methods.is_empty() {
        return Ok(methods);
    }
    match sampling.first_unset() {
        Some(open) if !settled => Err(Refused::by(PassthroughReason::DefaultsUnknown, open.name()).into()),
        _ => Err(PassthroughReason::NoVerifyMethod.into()),
    }
}

/// Effective temperature: that of the client, else the server's default; unknown if neither is.
pub(super) fn temperature(request: Option<&Request>, sampling: Option<&Sampling>) -> Fact<f64> {
    let setting = request.filter(|request| request.sampling.set_by_client.has(SamplingField::Temperature));
    match sampling.or(setting.map(|request| &request.sampling)) {
        Some(sampling) => Fact::Known(sampling.temperature),
        None => Fact::Unknown("the request leaves it to the server's default"),
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
        Fact::Known(None) => Err(PassthroughReason::NoPolicy.into()),
        Fact::Unknown(why) => Err(Halt::Unknown(why)),
    }
}

/// The strictest of the permissions of process, policy, client and server, and the group of the
/// request.
pub(super) fn permission(
    mode: Mode,
    policy: &Arc<Policy>,
    control: Option<Control>,
    server: Option<Server<'_>>,
    (prompt, group): (Option<PromptSize>, Groups<'_>),
) -> Result<(Permission, Group), Halt> {
    match (mode, policy.mode, control) {
        (Mode::Off, _, _) => return Err(PassthroughReason::Off.into()),
        (_, _, Some(Control::Off)) => return Err(PassthroughReason::Client.into()),
        (_, PolicyMode::Off, _) => return Err(PassthroughReason::Policy.into()),
        _ => {}
    }
    let group = group(policy);
    Ok((permitted(mode, policy, control, server, (prompt, group))?, group))
}

/// The format of the answers comes before the comparison: a request closed for its comparison is
/// still served by a session, and some answers no session can write.
fn permitted(
    mode: Mode,
    policy: &Policy,
    control: Option<Control>,
    server: Option<Server<'_>>,
    (prompt, group): (Option<PromptSize>, Group),
) -> Result<Permission, Halt> {
    if let Some(permission) = settled(mode, policy.mode, control) {
        return Ok(permission);
    }
    let server = server.ok_or(NO_SERVER)?;
    if server.engine.speculates {
        return Ok(Permission::Plain(PlainReason::BackendSpeculates));
    }
    if server.nothing_pays == Some(true) && policy.gamma.fixed.is_none() {
        return Ok(Permission::Plain(PlainReason::NoGain));
    }
    if let Some(permission) = server.by_format {
        return Ok(permission);
    }
    if group.is_slower && policy.gamma.fixed.is_none() {
        return Ok(Permission::Shadow(PlainReason::GateControl));
    }
    // Such a request is never speculated on, so nothing is added to its first call.
    if prompt.is_some_and(|prompt| prompt.at_least() > server.context_max()) {
        return Ok(Permission::Plain(PlainReason::ContextTooLong));
    }
    Ok(Permission::Speculate)
}

/// The permission that follows from process, policy and client alone; `None` if they allow drafts.
pub(super) fn settled(mode: Mode, policy: PolicyMode, control: Option<Control>) -> Option<Permission> {
    match (mode, policy, control) {
        (_, PolicyMode::Plain, _) => Some(Permission::Plain(PlainReason::Policy)),
        (_, _, Some(Control::Plain)) => Some(Permission::Plain(PlainReason::Client)),
        (Mode::Observe, _, _) => Some(Permission::Shadow(PlainReason::Observe)),
        (_, PolicyMode::Shadow, _) => Some(Permission::Shadow(PlainReason::Shadow)),
        _ => None,
    }
}

pub(super) fn say_permission(permission: Permission) -> (StepResult, String) {
    match permission {
        Permission::Speculate => passed("the request is eligible"),
        Permission::Shadow(reason) => (
            StepResult::Plain(reason),
            format!(
                "the request is decoded plainly, and drafts are scored in the shadow: {}",
                reason.words()
            ),
        ),
        Permission::Plain(reason) => {
            (StepResult::Plain(reason), format!("the request is decoded plainly: {}", reason.words()))
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
            "verify.allow lists none of the exact verification methods of the server".to_owned(),
        );
    }
    passed(names(methods))
}

pub(super) fn say_parts(parts: &[DrafterPart<'_>]) -> (StepResult, String) {
    let drafts =
        |part: &DrafterPart<'_>| matches!(part, DrafterPart::Inline(_) | DrafterPart::ModelDrafter(..));
    if parts.iter().any(drafts) {
        return passed("at least one drafter of the policy is available");
    }
    match parts.iter().find_map(|part| if let DrafterPart::Unknown(why) = part { Some(*why) } else { None }) {
        Some(why) => (StepResult::Unknown, why.to_owned()),
        None => (StepResult::Plain(PlainReason::NoDraft), "no drafter of the policy is available".to_owned()),
    }
}

pub(super) fn names(methods: &[VerifyMethod]) -> String {
    methods.iter().map(|method| method.name()).collect::<Vec<_>>().join(", ")
}
