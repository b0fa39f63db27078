//! The decision: what may be done with a request, step by step in the order of the request's path.
//!
//! Each step is one function of the facts and is taken once. An [`Admission`] takes those up to the
//! session while the request comes in; [`plan`] takes the rest once its server is known. Both end
//! at the first step that does not pass. [`explain`] takes all of them, also after that step.

use super::facts::{Backend, Body, Facts, Groups, Head, Models, ServerState, Subjects};
use super::outcome::{DecisionStep, Outcome, Passthrough, StepResult};
use super::part::{DrafterPart, parts};
use super::ruling::{Allowed, Ruling};
use super::steps::{self, Halt, NO_BACKEND, NO_POLICY, NO_REQUEST, NO_SERVER, passed};
use super::{Fact, PolicySet};
use foretell_core::words::{Mode, PassthroughReason};
use foretell_wire::openai::{Control, Request};

/// One step of an explanation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The step.
    pub step: DecisionStep,
    /// Its result.
    pub result: StepResult,
    /// Its result in words.
    pub words: String,
}

/// A decision with the steps that led to it.
#[derive(Clone, Debug)]
pub struct Decision {
    /// Its result.
    pub outcome: Outcome,
    /// Every step; empty unless an explanation was requested.
    pub findings: Vec<Finding>,
    /// Effective sampling temperature.
    pub temperature: Fact<f64>,
}

#[derive(Default)]
struct Walk {
    records_all: bool,
    findings: Vec<Finding>,
    halt: Option<(DecisionStep, Halt)>,
}

impl Walk {
    /// Takes a step and records it; skipped if the decision has ended and no explanation is wanted.
    fn step<T>(
        &mut self,
        step: DecisionStep,
        take: impl FnOnce() -> Result<T, Halt>,
        say: impl FnOnce(&T) -> (StepResult, String),
    ) -> Option<T> {
        if self.halt.is_some() && !self.records_all {
            return None;
        }
        let taken = take();
        if self.records_all {
            let (result, words) = match &taken {
                Ok(value) => say(value),
                Err(halt) => halt.say(),
            };
            self.findings.push(Finding { step, result, words });
        }
        taken.map_err(|halt| self.halt.get_or_insert((step, halt))).ok()
    }
}

/// The decision whether a session may serve a request, taken step by step as its facts become
/// known.
pub struct Admission<'a> {
    head: Head<'a>,
    walk: Walk,
    control: Option<Control>,
    request: Option<&'a Request>,
    backend: Option<Backend<'a>>,
}

/// A request that a session may serve, and the backend that it goes to.
#[derive(Clone, Copy)]
pub struct Admitted<'a> {
    /// Its head.
    pub head: Subjects<'a>,
    /// Its body.
    pub request: &'a Request,
    /// The client's request in `x-foretell`; `None` without one.
    pub control: Option<Control>,
    /// The name of its backend.
    pub backend: &'a str,
    /// The stricter of the process's mode and the backend's.
    pub mode: Mode,
}

impl<'a> Admission<'a> {
    /// Takes the steps of the head.
    pub fn begin(head: Head<'a>) -> Self {
        Self::with(head, Walk::default())
    }

    fn with(head: Head<'a>, mut walk: Walk) -> Self {
        let control = walk
            .step(DecisionStep::Client, || steps::client(head.wish), |control| steps::say_client(*control))
            .flatten();
        walk.step(DecisionStep::Mode, || steps::mode(head.mode), |()| passed(head.mode.name()));
        walk.step(
            DecisionStep::Fleet,
            || steps::fleet(head.speculates_anywhere),
            |()| passed("some server may be able to verify"),
        );
        walk.step(
            DecisionStep::Encoding,
            || steps::encoding(head.encoded),
            |()| passed("the body is not compressed"),
        );
        Self { head, walk, control, request: None, backend: None }
    }

    /// Takes the steps of the body and of its backend.
    pub fn locate(&mut self, body: Fact<Body<'a>>, backend: Fact<Option<Backend<'a>>>) {
        let walk = &mut self.walk;
        let request =
            walk.step(DecisionStep::Body, || steps::body(body), |_| passed("every parameter can be carried"));
        let to = walk.step(DecisionStep::Backend, || steps::backend(backend), |to| passed(to.name));
        let records_all = self.walk.records_all;
        self.request = request.or_else(|| if records_all { body.known()?.request() } else { None });
        self.backend = to.or_else(|| if records_all { backend.known()? } else { None });
    }

    /// Takes the step of the session slot.
    pub fn session(&mut self, free: Fact<bool>) {
        self.walk.step(DecisionStep::Session, || steps::session(free), |()| passed("a session slot is free"));
    }

    /// True while no step has ended the decision.
    pub fn is_open(&self) -> bool {
        self.walk.halt.is_none()
    }

    /// The step that ended the decision; `None` while it is open.
    pub fn ended(&self) -> Option<Outcome> {
        self.walk.halt.as_ref().map(|(step, halt)| halt.ends(*step))
    }

    /// The mode that the request is served in; `None` unless every step has passed.
    pub fn mode(&self) -> Option<Mode> {
        if self.is_open() { self.backend.map(|backend| backend.mode) } else { None }
    }
}

/// Decides how a session serves an admitted request on this server.
///
/// # Errors
/// The reason for which the request is passed through.
pub fn plan(
    admitted: &Admitted<'_>,
    server: ServerState<'_>,
    policies: &PolicySet,
    models: Models<'_>,
    group: Groups<'_>,
) -> Result<Ruling, Passthrough> {
    let known = Planning {
        head: admitted.head,
        control: admitted.control,
        request: Some(admitted.request),
        backend: Some((admitted.backend, admitted.mode)),
        server: Fact::Known(server),
        policies: Fact::Known(policies),
        models,
        group,
    };
    let mut walk = Walk::default();
    let Steps { ruling, policy, .. } = known.steps(&mut walk);
    match (ruling, walk.halt) {
        (Some(ruling), None) => Ok(ruling),
        (_, Some((step, halt))) => match halt.ends(step) {
            Outcome::Passthrough(passthrough) => Err(Passthrough { policy, ..passthrough }),
            Outcome::Serve(_) | Outcome::Nobody | Outcome::Undecided(..) => {
                Err(PassthroughReason::Fault.into())
            }
        },
        // Without a halt every step has returned its value.
        (None, None) => Err(PassthroughReason::Fault.into()),
    }
}

/// Decides and records every step, including those after the one that ends the decision.
pub fn explain(facts: &Facts<'_>) -> Decision {
    walk(facts, Walk { records_all: true, ..Walk::default() })
}

fn walk(facts: &Facts<'_>, walk: Walk) -> Decision {
    let mut admission = Admission::with(facts.head.clone(), walk);
    admission.locate(facts.body, facts.backend);
    admission.session(facts.session);
    let Admission { head, mut walk, control, request, backend } = admission;
    let planning = Planning {
        head: head.subjects(),
        control,
        request,
        backend: backend.map(|backend| (backend.name, backend.mode)),
        server: facts.server,
        policies: facts.policies,
        models: facts.models,
        group: facts.group,
    };
    let Steps { ruling, temperature, .. } = planning.steps(&mut walk);
    let outcome = match (walk.halt, ruling) {
        (Some((step, halt)), _) => halt.ends(step),
        (None, Some(ruling)) => Outcome::Serve(Box::new(ruling)),
        // Without a halt every step has returned its value.
        (None, None) => Outcome::Passthrough(PassthroughReason::Fault.into()),
    };
    Decision { outcome, findings: walk.findings, temperature }
}

/// Facts for the steps from the server on; the parts of a request that is only explained may be
/// missing.
struct Planning<'a> {
    head: Subjects<'a>,
    control: Option<Control>,
    request: Option<&'a Request>,
    backend: Option<(&'a str, Mode)>,
    server: Fact<ServerState<'a>>,
    policies: Fact<&'a PolicySet>,
    models: Models<'a>,
    group: Groups<'a>,
}

/// Findings of the steps from the server on.
struct Steps {
    /// The ruling, if every step has passed.
    ruling: Option<Ruling>,
    /// `name@revision` of the policy that matches.
    policy: Option<String>,
    /// The effective temperature.
    temperature: Fact<f64>,
}

impl Planning<'_> {
    fn steps(&self, walk: &mut Walk) -> Steps {
        let Self { request, backend, control, .. } = *self;
        let server = walk.step(DecisionStep::Server, || steps::server(self.server), steps::say_server);
        let server = server.or_else(|| if walk.records_all { self.server.known()?.server() } else { None });
        let sampling = request.zip(server).map(|(request, server)| server.engine.sampling(request));
        let exact = walk.step(
            DecisionStep::Engine,
            || {
                let sampling = sampling.as_ref().ok_or(NO_SERVER)?;
                steps::exact(request.ok_or(NO_REQUEST)?, server.ok_or(NO_SERVER)?, sampling)
            },
            |methods| passed(format!("exact by {}", steps::names(methods))),
        );
        let temperature = steps::temperature(request, sampling.as_ref().map(|(sampling, _)| sampling));
        let policy = walk.step(
            DecisionStep::Policy,
            || {
                let (name, _) = backend.ok_or(NO_BACKEND)?;
                steps::matching(self.policies, &self.head.of(request.ok_or(NO_REQUEST)?, name, temperature))
            },
            |policy| passed(format!("{} matches", policy.label())),
        );
        let permission = walk.step(
            DecisionStep::Permission,
            || {
                let (mode, policy) = (backend.ok_or(NO_BACKEND)?.1, policy.ok_or(NO_POLICY)?);
                let prompt = request.map(Request::prompt_size);
                steps::permission(mode, policy, control, server, (prompt, self.group))
            },
            |(permission, _)| steps::say_permission(*permission),
        );
        let methods = walk.step(
            DecisionStep::VerifyLimits,
            || Ok(steps::allowed(&exact.ok_or(NO_SERVER)?, server.ok_or(NO_SERVER)?)),
            |methods| steps::say_methods(methods),
        );
        let parts = walk.step(
            DecisionStep::Drafters,
            || {
                let proposes = server.map(|server| server.engine.proposes > 0);
                Ok(parts(&policy.ok_or(NO_POLICY)?.drafters, proposes, self.models))
            },
            |parts: &Vec<DrafterPart<'_>>| steps::say_parts(parts),
        );
        let settled = || {
            let route = request?.route;
            let allowed =
                Allowed { permission: permission?, methods: methods?, parts: parts?, control, route };
            Some(Ruling::new(policy?, sampling?.0, &server?, allowed))
        };
        let ruling = if walk.halt.is_none() { settled() } else { None };
        Steps { ruling, policy: policy.map(|policy| policy.label()), temperature }
    }
}

#[cfg(test)]
mod tests;
