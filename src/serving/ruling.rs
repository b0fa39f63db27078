//! Facts of the session runner for the decision about a request, and the draw of its control group.

use std::collections::HashMap;
use std::sync::Arc;

use crate::config::process::VerifyLimits;
use crate::config::store::PolicyStore;
use crate::control::gates::Signal;
use crate::draft::DrafterId;
use crate::fleet::identity::{self, Identity};
use crate::fleet::{self, Replica};
use crate::openai::{Control, Request};
use crate::policy::part::ModelState;
use crate::policy::{
    Backend, Body, Fact, Facts, LiveGates, Outcome, PolicySet, Relay, Ruling, Server, ServerState, Terms,
    Wish, decide,
};
use crate::serving::comparison::{Comparisons, Drawn};
use crate::serving::drafters::Drafters;
use crate::session::Permission;
use crate::words::{Mode, PlainReason, RelayReason};

/// The operator's `verify` settings of a backend.
pub fn terms(methods: &VerifyLimits) -> Terms {
    Terms {
        allow: methods.allow.iter().filter_map(|name| name.method()).collect(),
        context_max: methods.context_max as usize,
        bytes_max: usize::try_from(methods.bytes_max).unwrap_or(usize::MAX),
    }
}

/// The server at a replica's address, as a fact of the decision.
pub fn knowledge<'a>(knowledge: &'a identity::ServerKnowledge, terms: &'a Terms) -> ServerState<'a> {
    match knowledge {
        identity::ServerKnowledge::Relayed(reason, why) => ServerState::Relayed(*reason, why),
        identity::ServerKnowledge::Known(identity) => ServerState::Known(server(identity, terms)),
    }
}

/// A known server, as a fact of the decision.
pub fn server<'a>(identity: &'a Identity, terms: &'a Terms) -> Server<'a> {
    Server {
        engine: &identity.engine,
        single: Fact::Known(!identity.may_be_many()),
        nothing_pays: identity.probe.as_ref().map(|probe| probe.nothing_pays()),
        terms,
    }
}

/// Reason for which speculation is not allowed on a replica now, by its health and its engine's
/// load; `None` if it is.
pub fn closed(gates: &LiveGates, replica: &Replica, signal: Option<&Signal>) -> Option<PlainReason> {
    gates.closed(is_healthy(replica), signal)
}

/// True if verify requests may go to a replica.
pub fn is_healthy(replica: &Replica) -> bool {
    match replica.health_state() {
        // A disabled replica serves only if no other can, and gets no verify requests.
        fleet::HealthState::Down | fleet::HealthState::Broken | fleet::HealthState::Disabled => false,
        fleet::HealthState::Ready => true,
    }
}

/// The drafters whose drafts a session with this ruling may verify, by their ids in `learnt`.
pub fn drafters(ruling: &Ruling, learnt: &crate::control::Control) -> Vec<DrafterId> {
    let lookups = ruling.rules.lookups.iter().map(|spec| DrafterId::from(spec.source()));
    let models = ruling.models.iter().map(|(name, _)| DrafterId::model(learnt.model(name)));
    let mut drafters: Vec<DrafterId> = lookups.chain(models).collect();
    drafters.sort_unstable();
    drafters.dedup();
    drafters
}

/// An eligible request, and the backend it goes to.
pub struct Passed<'a> {
    /// The request.
    pub request: &'a Request,
    /// Its header fields.
    pub headers: &'a http::HeaderMap,
    /// Its tenant; `None` if not known.
    pub tenant: Option<&'a str>,
    /// The client's `x-foretell`; `None` without it.
    pub control: Option<Control>,
    /// The name of its backend.
    pub backend: &'a str,
    /// The stricter of the process's mode and the backend's.
    pub mode: Mode,
}

/// The loaded policies, and the operator's limits by backend.
pub struct Rulebook {
    policies: Arc<PolicyStore>,
    terms: HashMap<String, Terms>,
    comparisons: Arc<Comparisons>,
}

impl Rulebook {
    /// `terms` are by backend name.
    pub fn new(
        policies: Arc<PolicyStore>,
        terms: HashMap<String, Terms>,
        comparisons: Arc<Comparisons>,
    ) -> Self {
        Self { policies, terms, comparisons }
    }

    /// The operator's limits for a backend; `None` if it is not configured.
    pub fn terms(&self, backend: &str) -> Option<&Terms> {
        self.terms.get(backend)
    }

    /// The ruling on this request by the first matching policy, the process, the client and the
    /// server.
    ///
    /// # Errors
    /// The reason for which the request is relayed.
    pub fn rule(
        &self,
        passed: &Passed<'_>,
        knowledge: Option<&identity::ServerKnowledge>,
        drafters: &Drafters,
    ) -> Result<(Ruling, Drawn), Relay> {
        let terms = self.terms(passed.backend).ok_or(RelayReason::NoVerifyMethod)?;
        let knowledge = knowledge.ok_or(RelayReason::NoVerifyMethod)?;
        let models = |name: &str| match knowledge {
            identity::ServerKnowledge::Known(identity) => drafters.state(name, identity),
            identity::ServerKnowledge::Relayed(..) => ModelState::NotLoaded,
        };
        let policies = self.policies.current();
        let server = Fact::Known(self::knowledge(knowledge, terms));
        match decide(&passed.facts(server, &policies, &models)) {
            Outcome::Serve(mut ruling) => {
                let timed = match knowledge {
                    identity::ServerKnowledge::Known(identity) => {
                        identity.engine.dialect.quirks().first_request_ids
                    }
                    identity::ServerKnowledge::Relayed(..) => false,
                };
                let drawn = self.comparisons.draw(&ruling.policy, passed.backend, timed);
                ruling.rules.holdback = drawn.held_back;
                let forced = ruling.rules.gamma_fixed.is_some();
                if drawn.closed && !forced && ruling.rules.permission == Permission::Speculate {
                    ruling.rules.permission = Permission::Shadow(PlainReason::GateControl);
                }
                Ok((*ruling, drawn))
            }
            Outcome::Relay(relay) => Err(relay),
            Outcome::Nobody | Outcome::Undecided(..) => Err(RelayReason::Fault.into()),
        }
    }
}

impl<'a> Passed<'a> {
    /// The facts of the decision. The gateway has let the request pass, so all checks that precede
    /// the server have succeeded.
    fn facts(
        &self,
        server: Fact<ServerState<'a>>,
        policies: &'a PolicySet,
        models: &'a (dyn Fn(&str) -> ModelState + Sync),
    ) -> Facts<'a> {
        let backend =
            Backend { name: self.backend, mode: self.mode, predicts: false, billed: false, speculates: true };
        Facts {
            route: self.request.route,
            headers: self.headers,
            tenant: self.tenant,
            wish: Wish::Said(self.control),
            mode: self.mode,
            speculates_anywhere: true,
            encoded: false,
            body: Fact::Known(Body::Eligible(self.request)),
            backend: Fact::Known(Some(backend)),
            session: Fact::Known(true),
            server,
            policies: Fact::Known(policies),
            models,
        }
    }
}
