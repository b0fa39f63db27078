//! The plan of one session: everything that is decided about a request before its first call.
//!
//! It is made once, by [`SessionRunner`](super::SessionRunner), from what the policy permits
//! ([`foretell_policy::plan`]) and from the state at this moment: the control group, the
//! traits of the server's answers, the model drafter. Afterwards it changes once at most: where the
//! first call does not show which process answers, its permission narrows to plain decoding.

use std::sync::Arc;
use std::time::Duration;

use crate::serving::grammar::Grammar;
use foretell_core::draft::LookupSpec;
use foretell_core::session::{Permission, Resources};
use foretell_core::words::PlainReason;
use foretell_engines::Engine;
use foretell_net::fleet::identity::Identity;
use foretell_policy::Ruling;
use foretell_wire::openai::Sampling;

/// Limits of the calls of one round.
#[derive(Clone, Copy, Debug)]
pub struct CallLimits {
    /// Maximum total size of a round's requests, and maximum size of each answer, bytes.
    pub bytes_max: usize,
    /// Timeout of a call that no action of the session waits for: for the ids of a prompt, or of a
    /// text.
    pub question: Duration,
}

/// Everything that is decided about a request before its first call.
#[derive(Clone)]
pub struct SessionPlan {
    /// Engine and model at the replica's address.
    pub identity: Arc<Identity>,
    /// Permissions by policy, client, operator and server.
    pub ruling: Ruling,
    /// Data and limits that the session gets besides the rules of the ruling.
    pub resources: Resources,
    /// Sampling parameters of client and server; `seed` is the session's where the engine's noise
    /// can be reproduced.
    pub sampling: Sampling,
    /// The client's seed, else a fresh one.
    pub seed: u64,
    /// Limits of its verify requests.
    pub limits: CallLimits,
    /// Its answer is parsed here as by the server's output parsers.
    pub parses: bool,
    /// Knowledge about a grammar that may constrain its output.
    pub grammar: Grammar,
}

impl SessionPlan {
    /// The engine, which computes proposals of its head only if a drafter reads them: never for
    /// the control group, whose answers they would delay.
    pub fn engine(&self) -> Arc<Engine> {
        let (engine, rules) = (&self.identity.engine, &self.ruling.rules);
        let plain = rules.methods.is_empty() || (rules.control_group && rules.gamma_fixed.is_none());
        if engine.proposes == 0 || (!plain && rules.lookups.contains(&LookupSpec::Head)) {
            return Arc::clone(engine);
        }
        Arc::new(Engine { proposes: 0, ..Engine::clone(engine) })
    }

    /// Narrows the permission: it is not known which process answers.
    pub fn without_process(&mut self, closed: Option<PlainReason>) {
        let permission = &mut self.ruling.rules.permission;
        *permission = untied(*permission, closed);
    }
}

/// Permission of a session whose process is not known: plain decoding only. The reason is that of
/// the plan, else that of a gate found closed before the call, else `gate_health`.
fn untied(permission: Permission, closed: Option<PlainReason>) -> Permission {
    Permission::Plain(match permission {
        Permission::Plain(reason) | Permission::Shadow(reason) => reason,
        Permission::Speculate => closed.unwrap_or(PlainReason::GateHealth),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_two_plain_reasons_is_kept() {
        let stale = Some(PlainReason::GateStale);
        assert_eq!(untied(Permission::Speculate, None), Permission::Plain(PlainReason::GateHealth));
        assert_eq!(untied(Permission::Speculate, stale), Permission::Plain(PlainReason::GateStale));
        for ruled in [Permission::Shadow(PlainReason::Shadow), Permission::Plain(PlainReason::Shadow)] {
            assert_eq!(untied(ruled, stale), Permission::Plain(PlainReason::Shadow));
        }
    }
}
