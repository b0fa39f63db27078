//! The permissions and rules of a session, once every step has passed.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use super::facts::{Group, Server};
use super::part::{DrafterPart, TranslationMode};
use super::{Accept, Gates, Policy};
use foretell_core::control::gates::{LoadGates, Signal};
use foretell_core::session::{Permission, Rules};
use foretell_core::words::{Gate, PlainReason, VerifyMethod};
use foretell_wire::openai::{Control, Route, Sampling};

/// Permissions and rules of a session.
#[derive(Clone, Debug)]
pub struct Ruling {
    /// `name@revision` of the policy that applies.
    pub name: String,
    /// The policy itself.
    pub policy: Arc<Policy>,
    /// Sampling settings of the target: the client's parameters completed by the server's defaults.
    pub sampling: Sampling,
    /// Rules of the session.
    pub rules: Rules,
    /// Name of the first of the policy's drafter models that can draft, and how its drafts are
    /// translated; `None` if no model can.
    pub model: Option<(String, TranslationMode)>,
    /// Maximum bytes of a round's request, and maximum bytes of its answer.
    pub bytes_max: usize,
    /// Gates that may close while the session runs.
    pub gates: LiveGates,
}

/// Results of the steps, from which a ruling is made.
pub(super) struct Allowed<'a> {
    pub(super) permission: (Permission, Group),
    pub(super) methods: Vec<VerifyMethod>,
    pub(super) parts: Vec<DrafterPart<'a>>,
    pub(super) control: Option<Control>,
    pub(super) route: Route,
}

impl Ruling {
    pub(super) fn new(
        policy: &Arc<Policy>,
        sampling: Sampling,
        server: &Server<'_>,
        allowed: Allowed<'_>,
    ) -> Self {
        let Allowed { permission: (permission, group), methods, parts, control, route } = allowed;
        let gamma = |gamma: u32| match control {
            Some(Control::Gamma(most)) => gamma.min(u32::from(most)) as usize,
            _ => gamma as usize,
        };
        let lookups = parts
            .iter()
            .filter_map(|part| if let DrafterPart::Inline(spec) = part { Some(spec.clone()) } else { None });
        // A seeded request asks for a reproducible text, which no rule may change; a rule that
        // takes a token for another does not know a grammar, nor its log-probability.
        let exact = sampling.seed.is_some() || sampling.grammar.is_some();
        let accept = if exact { Accept::default() } else { policy.accept.clone() };
        let rules = Rules {
            permission,
            accept,
            methods,
            gamma_max: gamma(policy.gamma.max),
            gamma_fixed: policy.gamma.fixed.map(gamma),
            margin: policy.gamma.margin,
            kind: kind(&policy.name, route),
            min_acceptance: policy.gates.acceptance,
            max_gap: Some(policy.gates.max_gap),
            first_token: policy.gates.first_token,
            lookups: lookups.collect(),
            context_max: server.context_max(),
            segment: server.engine.quirks().segment,
            control_group: group.in_control,
        };
        let model = parts.iter().find_map(|part| match part {
            DrafterPart::ModelDrafter(name, translation_mode) => {
                Some(((*name).to_owned(), *translation_mode))
            }
            _ => None,
        });
        Self {
            name: policy.label(),
            sampling,
            rules,
            model,
            bytes_max: server.terms.bytes_max,
            gates: LiveGates::of(policy),
            policy: Arc::clone(policy),
        }
    }
}

/// A number for the kind of a request (policy and route): its measurements apply to the next
/// request of the kind. An edited policy keeps its name, and with it the measurements.
fn kind(policy: &str, route: Route) -> u64 {
    let mut hasher = DefaultHasher::new();
    (policy, route.name()).hash(&mut hasher);
    hasher.finish()
}

/// Gates that the state of a replica may close while a session runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LiveGates {
    load: LoadGates,
    /// `gamma.fixed` is set: only ill health closes a gate, load does not.
    forced: bool,
}

impl LiveGates {
    /// The gates of a policy.
    pub fn of(policy: &Policy) -> Self {
        let Gates { waiting, kv, stale, .. } = policy.gates;
        Self { load: LoadGates { waiting, kv, stale }, forced: policy.gamma.fixed.is_some() }
    }

    /// The gates that are closed now, each evaluated independently. Arguments as in
    /// [`Self::closed`].
    pub fn all_closed(&self, healthy: bool, signal: Option<&Signal>) -> impl Iterator<Item = Gate> {
        let load =
            self.load.closed(if self.forced { None } else { signal }).and_then(|reason| match reason {
                PlainReason::GateStale => Some(Gate::Stale),
                PlainReason::GateLoad => Some(Gate::Load),
                _ => None,
            });
        (!healthy).then_some(Gate::Health).into_iter().chain(load)
    }

    /// Reason of the first gate that is closed now; `None` if all are open. `healthy`: true
    /// if the replica is. `signal`: the engine's last load report; `None` if it never sent one.
    pub fn closed(&self, healthy: bool, signal: Option<&Signal>) -> Option<PlainReason> {
        if !healthy {
            return Some(PlainReason::GateHealth);
        }
        self.load.closed(if self.forced { None } else { signal })
    }
}
