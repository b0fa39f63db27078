//! The decision: what may be done with a request, step by step in the order of the request's path.
//!
//! Each step is one function of the facts. One function, `walk`, goes through them: up to the first
//! that ends the decision while a request is being served, or through all of them for an
//! explanation.

use super::facts::{Fact, Facts};
use super::part::{Part, parts};
use super::ruling::{Allowed, Ruling};
use super::steps::{self, Halt, NO_BACKEND, NO_POLICY, NO_REQUEST, NO_SERVER, passed};
use crate::words::{PlainReason, RelayReason};

/// The steps of a decision, in the order in which they are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The client's request in `x-foretell`.
    Client,
    /// The mode of the process.
    Mode,
    /// Can any replica do more than relay?
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
    Dialect,
    /// The policy that applies.
    Policy,
    /// Do policy, process, client and probe permit speculation?
    Permission,
    /// The methods that may verify drafts.
    VerifyLimits,
    /// The drafters that can draft.
    Drafters,
}

impl Step {
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
            Self::Dialect => "dialect",
            Self::Policy => "policy",
            Self::Permission => "permission",
            Self::VerifyLimits => "verify",
            Self::Drafters => "drafters",
        }
    }
}

/// The decision to relay a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Relay {
    /// The reason.
    pub reason: RelayReason,
    /// Name of the parameter or header that causes it, if a single one does.
    pub parameter: Option<String>,
    /// A likely answer may be sent along as OpenAI's `prediction`.
    pub predict: bool,
}

impl From<RelayReason> for Relay {
    fn from(reason: RelayReason) -> Self {
        Self { reason, parameter: None, predict: false }
    }
}

/// Result of a decision.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// A session serves the request, as this ruling says.
    Serve(Box<Ruling>),
    /// The request is relayed.
    Relay(Relay),
    /// There is no backend for it, or no server answers.
    Nobody,
    /// The step needs an unknown fact; the text says why it is unknown.
    Undecided(Step, &'static str),
}

/// One step of an explanation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The step.
    pub step: Step,
    /// Its result.
    pub result: StepResult,
    /// Its result in words.
    pub words: String,
}

/// Result of one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepResult {
    /// The step does not prevent speculation.
    Passed,
    /// The session only decodes plainly, for this reason.
    Plain(PlainReason),
    /// The request is relayed, for this reason.
    Relay(RelayReason),
    /// There is no backend to send it to.
    NoBackend,
    /// No server answers at the replica's address.
    Down,
    /// It needs a fact that is not known.
    Unknown,
}

/// A decision with the steps that led to it.
#[derive(Clone, Debug)]
pub struct Decision {
    /// Its result.
    pub outcome: Outcome,
    /// Every step; empty unless an explanation was asked for.
    pub findings: Vec<Finding>,
    /// Effective sampling temperature.
    pub temperature: Fact<f64>,
}

/// Decides up to the first step that ends the decision or needs an unknown fact. Once that fact is
/// known, call it again.
pub fn decide(facts: &Facts<'_>) -> Outcome {
    walk(facts, Walk::default()).outcome
}

/// Decides and records every step, including those after the one that ends the decision.
pub fn decide_and_say_why(facts: &Facts<'_>) -> Decision {
    walk(facts, Walk { whole: true, ..Walk::default() })
}

#[derive(Default)]
struct Walk {
    whole: bool,
    findings: Vec<Finding>,
    halt: Option<(Step, Halt)>,
}

impl Walk {
    /// Takes a step and records it; skipped if the decision has ended and no explanation is wanted.
    fn step<T>(
        &mut self,
        step: Step,
        take: impl FnOnce() -> Result<T, Halt>,
        say: impl FnOnce(&T) -> (StepResult, String),
    ) -> Option<T> {
        if self.halt.is_some() && !self.whole {
            return None;
        }
        let taken = take();
        if self.whole {
            let (result, words) = match &taken {
                Ok(value) => say(value),
                Err(halt) => halt.say(),
            };
            self.findings.push(Finding { step, result, words });
        }
        taken.map_err(|halt| self.halt.get_or_insert((step, halt))).ok()
    }
}

fn walk(facts: &Facts<'_>, mut walk: Walk) -> Decision {
    let whole = walk.whole;
    let control = walk
        .step(Step::Client, || steps::client(facts.wish), |control| steps::say_client(*control))
        .flatten();
    walk.step(Step::Mode, || steps::mode(facts.mode), |()| passed(facts.mode.name()));
    walk.step(
        Step::Fleet,
        || steps::fleet(facts.speculates_anywhere),
        |()| passed("some server may be able to verify"),
    );
    walk.step(Step::Encoding, || steps::encoding(facts.encoded), |()| passed("the body is not compressed"));
    let request =
        walk.step(Step::Body, || steps::body(facts.body), |_| passed("its parameters do not prevent it"));
    let request = request.or_else(|| facts.body.known().filter(|_| whole)?.request());
    let backend = walk.step(Step::Backend, || steps::backend(facts.backend, control), |to| passed(to.name));
    let backend = backend.or_else(|| facts.backend.known().filter(|_| whole)?);
    walk.step(Step::Session, || steps::session(facts.session), |()| passed("a session slot is free"));
    let server = walk.step(Step::Server, || steps::server(facts.server), steps::say_server);
    let server = server.or_else(|| facts.server.known().filter(|_| whole)?.server());
    let sampling = request.zip(server).map(|(request, server)| server.engine.sampling(request));
    let exact = walk.step(
        Step::Dialect,
        || {
            steps::exact(
                request.ok_or(NO_REQUEST)?,
                server.ok_or(NO_SERVER)?,
                sampling.as_ref().ok_or(NO_SERVER)?,
            )
        },
        |methods| passed(format!("exact by {}", steps::names(methods))),
    );
    let temperature = steps::temperature(request, sampling.as_ref().map(|(sampling, _)| sampling));
    let policy = walk.step(
        Step::Policy,
        || steps::matching(facts, request.ok_or(NO_REQUEST)?, backend.ok_or(NO_BACKEND)?, temperature),
        |policy| passed(format!("{} matches", policy.label())),
    );
    let permission = walk.step(
        Step::Permission,
        || steps::permission(backend.ok_or(NO_BACKEND)?.mode, policy.ok_or(NO_POLICY)?, control, server),
        |permission| steps::say_permission(*permission),
    );
    let methods = walk.step(
        Step::VerifyLimits,
        || Ok(steps::allowed(&exact.ok_or(NO_SERVER)?, server.ok_or(NO_SERVER)?)),
        |methods| steps::say_methods(methods),
    );
    let parts = walk.step(
        Step::Drafters,
        || Ok(parts(&policy.ok_or(NO_POLICY)?.drafters, facts.models)),
        |parts: &Vec<Part<'_>>| steps::say_parts(parts),
    );
    let settled = || {
        let route = facts.route;
        let allowed = Allowed { permission: permission?, methods: methods?, parts: parts?, control, route };
        Some(Ruling::new(policy?, sampling?.0, &server?, allowed))
    };
    let outcome = match walk.halt {
        Some((step, halt)) => halt.ends(step),
        // Without a halt every step has returned its value.
        None => settled()
            .map_or(Outcome::Relay(RelayReason::Fault.into()), |ruling| Outcome::Serve(Box::new(ruling))),
    };
    Decision { outcome, findings: walk.findings, temperature }
}

#[cfg(test)]
mod tests;
