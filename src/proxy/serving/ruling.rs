//! Facts of the session runner for the decision about a request, and the draw of its control group.

use std::cell::OnceCell;
use std::collections::HashMap;
use std::sync::Arc;

use crate::learning::comparison::{Comparisons, Drawn};
use crate::serving::drafters::Drafters;
use foretell_config::process::VerifyLimits;
use foretell_config::store::PolicyStore;
use foretell_core::control::gates::Signal;
use foretell_core::draft::DrafterId;
use foretell_core::session::Permission;
use foretell_core::words::{PassthroughReason, PlainReason};
use foretell_net::fleet::identity::{self, Identity};
use foretell_net::fleet::{self, Replica};
use foretell_policy::part::ModelState;
use foretell_policy::{
    Admitted, Fact, LiveGates, Passthrough, Policy, PolicySet, Ruling, Server, ServerState, Terms, plan,
};

/// The operator's `verify` settings of a backend.
pub fn terms(methods: &VerifyLimits) -> Terms {
    Terms {
        allow: methods.allow.clone(),
        context_max: methods.context_max as usize,
        bytes_max: usize::try_from(methods.bytes_max).unwrap_or(usize::MAX),
    }
}

/// The server at a replica's address, as a fact of the decision. `by_format`: as in [`Server`].
pub fn knowledge<'a>(
    knowledge: &'a identity::ServerKnowledge,
    terms: &'a Terms,
    by_format: Option<Permission>,
) -> ServerState<'a> {
    match knowledge {
        identity::ServerKnowledge::Passthrough(reason, why) => ServerState::Passthrough(*reason, why),
        identity::ServerKnowledge::Known(identity) => {
            ServerState::Known(Server { by_format, ..server(identity, terms) })
        }
    }
}

/// A known server whose answers do not matter, as a fact of the decision.
pub fn server<'a>(identity: &'a Identity, terms: &'a Terms) -> Server<'a> {
    Server {
        engine: &identity.engine,
        single: Fact::Known(!identity.may_be_many()),
        nothing_pays: identity.probe.as_ref().map(|probe| probe.nothing_pays()),
        by_format: None,
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
        fleet::HealthState::Silent
        | fleet::HealthState::Down
        | fleet::HealthState::Broken
        | fleet::HealthState::Disabled => false,
        fleet::HealthState::Ready => true,
    }
}

/// The drafters whose drafts a session with this ruling may verify, by their ids in `learnt`.
pub fn drafters(ruling: &Ruling, learnt: &foretell_core::control::Control) -> Vec<DrafterId> {
    let lookups = ruling.rules.lookups.iter().map(|spec| DrafterId::from(spec.source()));
    let models = ruling.model.iter().map(|(name, _)| DrafterId::model(learnt.model(name)));
    let mut drafters: Vec<DrafterId> = lookups.chain(models).collect();
    drafters.sort_unstable();
    drafters.dedup();
    drafters
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

    /// The policies in force.
    pub fn policies(&self) -> Arc<PolicySet> {
        self.policies.current()
    }

    /// Draws the group of a request that this policy applies to.
    pub fn draw(&self, policy: &Arc<Policy>, backend: &str) -> Drawn {
        self.comparisons.draw(policy, backend, true)
    }

    /// The ruling on this request by the first matching policy, the process, the client and the
    /// server, with the draw of its control group. `by_format`: as in [`Server`].
    ///
    /// # Errors
    /// The reason for which the request is passed through.
    pub fn rule(
        &self,
        admitted: &Admitted<'_>,
        knowledge: Option<&identity::ServerKnowledge>,
        by_format: Option<Permission>,
        drafters: &Drafters,
    ) -> Result<(Ruling, Drawn), Passthrough> {
        let terms = self.terms(admitted.backend).ok_or(PassthroughReason::NoVerifyMethod)?;
        let knowledge = knowledge.ok_or(PassthroughReason::NoVerifyMethod)?;
        let timed = matches!(knowledge, identity::ServerKnowledge::Known(_));
        let models = |name: &str| match knowledge {
            identity::ServerKnowledge::Known(identity) => drafters.state(name, identity),
            identity::ServerKnowledge::Passthrough(..) => ModelState::NotLoaded,
        };
        let draw = |policy: &Arc<Policy>| self.comparisons.draw(policy, admitted.backend, timed);
        let drawn = OnceCell::new();
        let group = |policy: &Arc<Policy>| drawn.get_or_init(|| draw(policy)).group();
        let policies = self.policies.current();
        let server = self::knowledge(knowledge, terms, by_format);
        let ruling = plan(admitted, server, &policies, &models, &group)?;
        let drawn = drawn.into_inner().unwrap_or_else(|| draw(&ruling.policy));
        Ok((ruling, drawn))
    }
}
