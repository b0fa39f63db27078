//! What a request gets where the engine asks for drafts inside its steps.
//!
//! The engine carries every parameter itself, so only process, policy, client and control group
//! matter: none of the steps that ask what Foretell could verify.

use std::sync::Arc;

use super::facts::Groups;
use super::ruling::LiveGates;
use super::steps::{matching, settled};
use super::{Admitted, Drafter, Fact, Group, Policy, PolicyMode, PolicySet};
use foretell_core::draft::LookupSpec;
use foretell_core::session::Permission;
use foretell_core::words::{Mode, PassthroughReason, PlainReason, Reason};
use foretell_wire::openai::Control;

/// Decision on the rows of a request.
#[derive(Clone, Debug)]
pub struct Injection {
    /// The policy that applies; `None` if none does.
    pub policy: Option<Arc<Policy>>,
    /// The reason for which no draft is made; `None` if some are.
    pub plain: Option<Reason>,
    /// The lookups of the policy.
    pub lookups: Vec<LookupSpec>,
    /// Maximum draft tokens of a step.
    pub max_draft: usize,
    /// Draft tokens that are always sent (`gamma.fixed`).
    pub forced: Option<usize>,
    /// Gates that may close while the request runs.
    pub gates: Option<LiveGates>,
}

impl Injection {
    /// Nothing is drafted, for this reason.
    pub fn none(reason: impl Into<Reason>) -> Self {
        Self {
            policy: None,
            plain: Some(reason.into()),
            lookups: Vec::new(),
            max_draft: 0,
            forced: None,
            gates: None,
        }
    }
}

/// Decides what the rows of a request get. `temperature`: the effective one, if it is known.
pub fn inject(
    admitted: &Admitted<'_>,
    temperature: Fact<f64>,
    policies: &PolicySet,
    group: Groups<'_>,
) -> Injection {
    if admitted.mode == Mode::Off {
        return Injection::none(PassthroughReason::Off);
    }
    if admitted.control == Some(Control::Off) {
        return Injection::none(PassthroughReason::Client);
    }
    let subject = admitted.head.of(admitted.request, admitted.backend, temperature);
    let Ok(policy) = matching(Fact::Known(policies), &subject) else {
        return Injection::none(PassthroughReason::NoPolicy);
    };
    if policy.mode == PolicyMode::Off {
        return Injection { policy: Some(Arc::clone(policy)), ..Injection::none(PassthroughReason::Policy) };
    }
    let permission = settled(admitted.mode, policy.mode, admitted.control);
    let plain = permission.and_then(Permission::never).or_else(|| compared(policy, group(policy)));
    let limited = |tokens: u32| match admitted.control {
        Some(Control::Gamma(limit)) => tokens.min(u32::from(limit)) as usize,
        _ => tokens as usize,
    };
    let lookups = policy.drafters.iter().filter_map(|drafter| match drafter {
        Drafter::Lookup(spec) => Some(spec.clone()),
        Drafter::Model { .. } => None,
    });
    let lookups: Vec<LookupSpec> = lookups.collect();
    let plain = plain.or_else(|| lookups.is_empty().then_some(PlainReason::NoDraft));
    Injection {
        policy: Some(Arc::clone(policy)),
        plain: plain.map(Reason::Plain),
        lookups,
        max_draft: limited(policy.gamma.max),
        forced: policy.gamma.fixed.map(limited),
        gates: Some(LiveGates::of(policy)),
    }
}

/// The reason by the comparison with the control group.
fn compared(policy: &Policy, group: Group) -> Option<PlainReason> {
    match group {
        _ if policy.gamma.fixed.is_some() => None,
        Group { in_control: true, .. } => Some(PlainReason::ControlGroup),
        Group { is_slower: true, .. } => Some(PlainReason::GateControl),
        _ => None,
    }
}
