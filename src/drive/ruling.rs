//! What the driver knows for the decision about a request, and the draw of its control group.

use std::collections::HashMap;
use std::sync::Arc;

use crate::config::process::Plans;
use crate::config::store::PolicyStore;
use crate::control::gates::Signal;
use crate::draft::DrafterId;
use crate::drive::comparison::{Comparisons, Drawn};
use crate::drive::drafters::Drafters;
use crate::fleet::identity::{self, Identity};
use crate::fleet::{self, Replica};
use crate::openai::{Control, Request};
use crate::policy::part::ModelState;
use crate::policy::{
    Backend, Body, Bypass, Fact, Facts, LiveGates, Outcome, PolicySet, Ruling, Server, ServerState, Terms,
    Wish, decide,
};
use crate::session::Permission;
use crate::words::{BypassReason, Mode, RideReason};

/// The operator's `plans` settings of a backend.
pub fn terms(plans: &Plans) -> Terms {
    Terms {
        allow: plans.allow.iter().filter_map(|name| name.plan()).collect(),
        context_max: plans.context_max as usize,
        bytes_max: usize::try_from(plans.bytes_max).unwrap_or(usize::MAX),
    }
}

/// Who answers at a replica's address, as a fact of the decision.
pub fn standing<'a>(standing: &'a identity::Standing, terms: &'a Terms) -> ServerState<'a> {
    match standing {
        identity::Standing::Relayed(reason, why) => ServerState::Relayed(*reason, why),
        identity::Standing::Known(identity) => ServerState::Known(server(identity, terms)),
    }
}

/// A server that is known, as a fact of the decision.
pub fn server<'a>(identity: &'a Identity, terms: &'a Terms) -> Server<'a> {
    Server {
        engine: &identity.engine,
        single: Fact::Known(!identity.may_be_many()),
        nothing_pays: identity.probe.as_ref().map(|probe| probe.nothing_pays()),
        terms,
    }
}

/// Why leaping is not allowed on a replica now, by its health and its engine's load; `None` if it is.
pub fn closed(gates: &LiveGates, replica: &Replica, signal: Option<&Signal>) -> Option<RideReason> {
    gates.closed(is_healthy(replica), signal)
}

/// Whether verify calls may go to a replica.
pub fn is_healthy(replica: &Replica) -> bool {
    match replica.standing() {
        // A disabled replica serves only where no other can, and is spared verify calls.
        fleet::Standing::Down | fleet::Standing::Broken | fleet::Standing::Disabled => false,
        fleet::Standing::Ready => true,
    }
}

/// The drafters whose drafts a session with this ruling may verify, as they are learnt of in `learnt`.
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

/// The loaded policies, and what the operator allows on the backends.
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

    /// What the operator allows on a backend; `None` if it is not configured.
    pub fn terms(&self, backend: &str) -> Option<&Terms> {
        self.terms.get(backend)
    }

    /// What the first matching policy, the process, the client and the server allow this request.
    ///
    /// # Errors
    /// The reason for which the request is relayed.
    pub fn rule(
        &self,
        passed: &Passed<'_>,
        standing: Option<&identity::Standing>,
        drafters: &Drafters,
    ) -> Result<(Ruling, Drawn), Bypass> {
        let terms = self.terms(passed.backend).ok_or(BypassReason::NoPlan)?;
        let standing = standing.ok_or(BypassReason::NoPlan)?;
        let models = |name: &str| match standing {
            identity::Standing::Known(identity) => drafters.state(name, identity),
            identity::Standing::Relayed(..) => ModelState::NotLoaded,
        };
        let policies = self.policies.current();
        let server = Fact::Known(self::standing(standing, terms));
        match decide(&passed.facts(server, &policies, &models)) {
            Outcome::Drive(mut ruling) => {
                let timed = match standing {
                    identity::Standing::Known(identity) => identity.engine.dialect.quirks().ride_ids,
                    identity::Standing::Relayed(..) => false,
                };
                let drawn = self.comparisons.draw(&ruling.policy, passed.backend, timed);
                ruling.rules.holdback = drawn.held_back;
                let forced = ruling.rules.gamma_fixed.is_some();
                if drawn.closed && !forced && ruling.rules.permission == Permission::Leap {
                    ruling.rules.permission = Permission::Shadow(RideReason::GateLatency);
                }
                Ok((*ruling, drawn))
            }
            Outcome::Bypass(bypass) => Err(bypass),
            Outcome::Nobody | Outcome::Undecided(..) => Err(BypassReason::Fault.into()),
        }
    }
}

impl<'a> Passed<'a> {
    /// The facts of the decision. The gateway has let the request pass, so the checks before the server pass again.
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
            leaps: true,
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
