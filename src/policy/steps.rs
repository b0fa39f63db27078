//! The steps of a decision: a function of the facts each, with the words for its result.

use std::sync::Arc;

use super::decide::{Bypass, Outcome, Step, Verdict};
use super::facts::{Backend, Body, Fact, Facts, Server, ServerState, Wish};
use super::part::Part;
use super::{Policy, PolicyMode};
use crate::dialect::Engine;
use crate::openai::{Control, Request, Sampling, SamplingField, control_header};
use crate::session::Permission;
use crate::words::{BypassReason, Mode, Plan, Refused, RideReason};

/// Why a step ends the decision.
pub(super) enum Halt {
    Bypass(Bypass),
    /// A bypass with the server's own explanation.
    Told(BypassReason, String),
    NoBackend,
    Down(String),
    Unknown(&'static str),
}

impl From<BypassReason> for Halt {
    fn from(reason: BypassReason) -> Self {
        Self::Bypass(reason.into())
    }
}

pub(super) const NO_REQUEST: Halt = Halt::Unknown("the body was not read, or not understood");
pub(super) const NO_BACKEND: Halt = Halt::Unknown("the backend is not known");
pub(super) const NO_SERVER: Halt = Halt::Unknown("it depends on the server, which is not known");
pub(super) const NO_POLICY: Halt = Halt::Unknown("it depends on the policy, and none is known to match");

impl From<Refused> for Halt {
    fn from(Refused { reason, parameter }: Refused) -> Self {
        Self::Bypass(Bypass { parameter: parameter.map(str::to_owned), ..reason.into() })
    }
}

impl Halt {
    pub(super) fn ends(self, step: Step) -> Outcome {
        match self {
            Self::Bypass(bypass) => Outcome::Bypass(bypass),
            Self::Told(reason, _) => Outcome::Bypass(reason.into()),
            Self::NoBackend | Self::Down(_) => Outcome::Nobody,
            Self::Unknown(why) => Outcome::Undecided(step, why),
        }
    }

    pub(super) fn say(&self) -> (Verdict, String) {
        match self {
            Self::Bypass(Bypass { reason, parameter: None, .. }) => {
                (Verdict::Bypass(*reason), reason.words().to_owned())
            }
            Self::Bypass(Bypass { reason, parameter: Some(parameter), .. }) => {
                (Verdict::Bypass(*reason), format!("because of {parameter}: {}", reason.words()))
            }
            Self::Told(reason, words) => (Verdict::Bypass(*reason), words.clone()),
            Self::NoBackend => (Verdict::NoBackend, "there is no backend to send it to".to_owned()),
            Self::Down(why) => (Verdict::Down, format!("nobody answers there: {why}")),
            Self::Unknown(why) => (Verdict::Unknown, (*why).to_owned()),
        }
    }
}

pub(super) fn passed(words: impl Into<String>) -> (Verdict, String) {
    (Verdict::Passed, words.into())
}

pub(super) fn client(wish: Wish) -> Result<Option<Control>, Halt> {
    let client = |parameter: Option<&str>| {
        Halt::Bypass(Bypass { parameter: parameter.map(str::to_owned), ..BypassReason::Client.into() })
    };
    match wish {
        Wish::Unreadable => Err(client(Some(control_header::NAME))),
        Wish::Said(Some(Control::Off)) => Err(client(None)),
        Wish::Said(control) => Ok(control),
    }
}

pub(super) fn say_client(control: Option<Control>) -> (Verdict, String) {
    match control {
        Some(Control::Ride) => (Verdict::Rides(RideReason::Client), "the client asks for a ride".to_owned()),
        Some(Control::Gamma(most)) => {
            passed(format!("the client asks for at most {most} drafted tokens a round"))
        }
        Some(Control::Off) | None => passed("the client asks for nothing"),
    }
}

pub(super) fn mode(mode: Mode) -> Result<(), Halt> {
    match mode {
        Mode::Off => Err(BypassReason::Off.into()),
        Mode::Observe | Mode::Auto => Ok(()),
    }
}

pub(super) fn fleet(leaps: bool) -> Result<(), Halt> {
    if leaps { Ok(()) } else { Err(BypassReason::NoPlan.into()) }
}

pub(super) fn encoding(encoded: bool) -> Result<(), Halt> {
    if encoded { Err(BypassReason::Encoded.into()) } else { Ok(()) }
}

pub(super) fn body(body: Fact<Body<'_>>) -> Result<&Request, Halt> {
    match body {
        Fact::Unknown(why) => Err(Halt::Unknown(why)),
        Fact::Known(Body::TooLarge) => Err(BypassReason::Body.into()),
        Fact::Known(Body::Refused { reason, parameter, .. }) => {
            Err(Halt::Bypass(Bypass { parameter: parameter.map(str::to_owned), ..reason.into() }))
        }
        Fact::Known(Body::Eligible(request)) => Ok(request),
    }
}

pub(super) fn backend(
    backend: Fact<Option<Backend<'_>>>,
    control: Option<Control>,
) -> Result<Backend<'_>, Halt> {
    let backend = match backend {
        Fact::Unknown(why) => return Err(Halt::Unknown(why)),
        Fact::Known(None) => return Err(Halt::NoBackend),
        Fact::Known(Some(backend)) => backend,
    };
    match backend.mode {
        Mode::Off => Err(BypassReason::Off.into()),
        Mode::Auto if backend.predicts => {
            let reason = if backend.billed { BypassReason::Billed } else { BypassReason::NoPlan };
            let predict = control != Some(Control::Ride);
            Err(Halt::Bypass(Bypass { predict, ..reason.into() }))
        }
        Mode::Observe | Mode::Auto if backend.speculates => Ok(backend),
        Mode::Observe | Mode::Auto => Err(BypassReason::NoPlan.into()),
    }
}

pub(super) fn session(place: Fact<bool>) -> Result<(), Halt> {
    match place {
        Fact::Known(true) => Ok(()),
        Fact::Known(false) => Err(BypassReason::Sessions.into()),
        Fact::Unknown(why) => Err(Halt::Unknown(why)),
    }
}

pub(super) fn server(standing: Fact<ServerState<'_>>) -> Result<Server<'_>, Halt> {
    match standing {
        Fact::Unknown(why) => Err(Halt::Unknown(why)),
        Fact::Known(ServerState::Relayed(reason, why)) => Err(Halt::Told(reason, why.to_owned())),
        Fact::Known(ServerState::Down(why)) => Err(Halt::Down(why.to_owned())),
        Fact::Known(ServerState::Known(server)) => match server.single {
            Fact::Known(true) => Ok(server),
            Fact::Known(false) => Err(BypassReason::Balanced.into()),
            Fact::Unknown(why) => Err(Halt::Unknown(why)),
        },
    }
}

pub(super) fn say_server(server: &Server<'_>) -> (Verdict, String) {
    let Engine { dialect, version, model, .. } = server.engine;
    passed(format!("{} {version} serves {model}", dialect.name()))
}

/// The plans that are exact for this request on this server.
pub(super) fn exact(
    request: &Request,
    server: Server<'_>,
    sampling: &(Sampling, bool),
) -> Result<Vec<Plan>, Halt> {
    let (sampling, settled) = sampling;
    if let Some(refused) = server.engine.refuses(request, sampling) {
        return Err(refused.into());
    }
    let plans = server.engine.plans(request, sampling, *settled);
    if !plans.is_empty() {
        return Ok(plans);
    }
    match sampling.left_open().filter(|_| !settled) {
        Some(open) => Err(Refused::by(BypassReason::DefaultsUnknown, open.name()).into()),
        None => Err(BypassReason::NoPlan.into()),
    }
}

/// Effective temperature: the client's own, else the server's default; unknown if neither is.
pub(super) fn temperature(request: Option<&Request>, sampling: Option<&Sampling>) -> Fact<f64> {
    let own = request.filter(|request| request.sampling.said.has(SamplingField::Temperature));
    match sampling.or(own.map(|request| &request.sampling)) {
        Some(sampling) => Fact::Known(sampling.temperature),
        None => Fact::Unknown("it is left to the server's default"),
    }
}

pub(super) fn matching<'a>(
    facts: &Facts<'a>,
    request: &Request,
    backend: Backend<'_>,
    temperature: Fact<f64>,
) -> Result<&'a Arc<Policy>, Halt> {
    let policies = match facts.policies {
        Fact::Known(policies) => policies,
        Fact::Unknown(why) => return Err(Halt::Unknown(why)),
    };
    match policies.first_match(&facts.subject(request, backend.name, temperature)) {
        Fact::Known(Some(policy)) => Ok(policy),
        Fact::Known(None) => Err(BypassReason::NoPolicy.into()),
        Fact::Unknown(why) => Err(Halt::Unknown(why)),
    }
}

/// The strictest of what process, policy and client permit. Never a leap where the engine speculates itself, or where a
/// probe found that leaping gains nothing.
pub(super) fn permission(
    mode: Mode,
    policy: &Policy,
    control: Option<Control>,
    server: Option<Server<'_>>,
) -> Result<Permission, Halt> {
    match (mode, policy.mode, control) {
        (Mode::Off, _, _) => return Err(BypassReason::Off.into()),
        (_, _, Some(Control::Off)) => return Err(BypassReason::Client.into()),
        (_, PolicyMode::Off, _) => return Err(BypassReason::Policy.into()),
        (_, PolicyMode::Ride, _) => return Ok(Permission::Ride(RideReason::Policy)),
        (_, _, Some(Control::Ride)) => return Ok(Permission::Ride(RideReason::Client)),
        (Mode::Observe, _, _) => return Ok(Permission::Shadow(RideReason::Observe)),
        (Mode::Auto, PolicyMode::Shadow, _) => return Ok(Permission::Shadow(RideReason::Shadow)),
        (Mode::Auto, PolicyMode::Auto, _) => {}
    }
    let server = server.ok_or(NO_SERVER)?;
    if server.engine.speculates {
        return Ok(Permission::Ride(RideReason::BackendSpeculates));
    }
    if server.nothing_pays == Some(true) && policy.gamma.fixed.is_none() {
        return Ok(Permission::Ride(RideReason::NoGain));
    }
    Ok(Permission::Leap)
}

pub(super) fn say_permission(permission: Permission) -> (Verdict, String) {
    match permission {
        Permission::Leap => passed("it may leap"),
        Permission::Shadow(reason) => (
            Verdict::Rides(reason),
            format!("it rides, and drafts are scored in the shadow: {}", reason.words()),
        ),
        Permission::Ride(reason) => (Verdict::Rides(reason), format!("it rides: {}", reason.words())),
    }
}

/// The exact plans that the operator allows, in the order of `exact`.
pub(super) fn allowed(exact: &[Plan], server: Server<'_>) -> Vec<Plan> {
    exact.iter().copied().filter(|plan| server.terms.allow.contains(plan)).collect()
}

pub(super) fn say_plans(plans: &[Plan]) -> (Verdict, String) {
    if plans.is_empty() {
        return (Verdict::Rides(RideReason::NoDraft), "plans.allow has none of the exact ones".to_owned());
    }
    passed(names(plans))
}

pub(super) fn say_parts(parts: &[Part<'_>]) -> (Verdict, String) {
    let drafts = |part: &Part<'_>| matches!(part, Part::Inline(_) | Part::Asked(..));
    if parts.iter().any(drafts) {
        return passed("some drafter drafts");
    }
    match parts.iter().find_map(|part| if let Part::Unknown(why) = part { Some(*why) } else { None }) {
        Some(why) => (Verdict::Unknown, why.to_owned()),
        None => (Verdict::Rides(RideReason::NoDraft), "no drafter of the policy drafts".to_owned()),
    }
}

pub(super) fn names(plans: &[Plan]) -> String {
    plans.iter().map(|plan| plan.name()).collect::<Vec<_>>().join(", ")
}
