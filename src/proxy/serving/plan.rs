//! The plan of one session: everything that is decided about a request before its first call.
//!
//! It is made once, by [`SessionRunner`](super::SessionRunner), from what the policy permits
//! ([`foretell_policy::plan`]) and from the state at this moment: the control group, the
//! traits of the server's answers, the model drafter. Afterwards it changes once at most: where the
//! first call does not show which process answers, its permission narrows to plain decoding.

use std::sync::Arc;
use std::time::Duration;

use crate::learning::comparison::Drawn;
use crate::serving::grammar::Grammar;
use foretell_core::draft::LookupSpec;
use foretell_core::session::{Permission, Rules};
use foretell_core::words::PlainReason;
use foretell_engines::Engine;
use foretell_net::fleet::identity::Identity;
use foretell_policy::Ruling;
use foretell_wire::openai::{PromptSize, Sampling};

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
    pub rules: Rules,
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
        let (engine, rules) = (&self.identity.engine, &self.rules);
        let plain = rules.methods.is_empty() || (rules.control_group && rules.gamma_fixed.is_none());
        if engine.proposes == 0 || (!plain && rules.lookups.contains(&LookupSpec::Head)) {
            return Arc::clone(engine);
        }
        Arc::new(Engine { proposes: 0, ..Engine::clone(engine) })
    }

    /// Narrows the permission: it is not known which process answers.
    pub fn without_process(&mut self, closed: Option<PlainReason>) {
        self.rules.permission = untied(self.rules.permission, closed);
    }
}

/// The permission, narrowed where the prompt is longer than verify requests may be: such a request
/// is never speculated on, and nothing is added to its first call.
pub fn fitting(permission: Permission, prompt: PromptSize, context_max: usize) -> Permission {
    match permission {
        Permission::Speculate if prompt.at_least() > context_max => {
            Permission::Plain(PlainReason::ContextTooLong)
        }
        permission => permission,
    }
}

/// The permission of a ruling, narrowed by the comparison of its policy's groups, and by the format
/// of this server's answers.
pub fn permission(
    ruling: &Ruling,
    drawn: &Drawn,
    by_format: impl FnOnce() -> Option<Permission>,
) -> Permission {
    let slower = drawn.closed && ruling.rules.gamma_fixed.is_none();
    narrowed(ruling.rules.permission, slower, by_format)
}

/// The format comes first: a request closed for its comparison is still served by a session, and
/// some answers no session can write.
fn narrowed(ruled: Permission, slower: bool, by_format: impl FnOnce() -> Option<Permission>) -> Permission {
    let compared = || slower.then_some(Permission::Shadow(PlainReason::GateControl));
    match ruled {
        Permission::Speculate => by_format().or_else(compared).unwrap_or(ruled),
        Permission::Shadow(_) | Permission::Plain(_) => ruled,
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
    fn an_answer_that_no_session_can_write_passes_unchanged_under_a_closed_gate() {
        let (plain, slower) = (PlainReason::Parser, Permission::Shadow(PlainReason::GateControl));
        for format in [Permission::Plain(plain), Permission::Shadow(plain)] {
            assert_eq!(narrowed(Permission::Speculate, true, || Some(format)), format);
            assert_eq!(narrowed(Permission::Speculate, false, || Some(format)), format);
            assert_eq!(
                narrowed(Permission::Plain(PlainReason::Shadow), true, || Some(format)).reason(),
                Some(PlainReason::Shadow)
            );
        }
        assert_eq!(narrowed(Permission::Speculate, true, || None), slower);
        assert_eq!(narrowed(Permission::Speculate, false, || None), Permission::Speculate);
    }

    #[test]
    fn only_a_prompt_that_is_certainly_too_long_is_passed_on_unchanged() {
        let fitted = |tokens, exact| fitting(Permission::Speculate, PromptSize { tokens, exact }, 100);
        assert_eq!(fitted(101, true), Permission::Plain(PlainReason::ContextTooLong));
        assert_eq!(fitted(100, true), Permission::Speculate);
        assert_eq!(fitted(201, false), Permission::Speculate);
        assert_eq!(fitted(202, false), Permission::Plain(PlainReason::ContextTooLong));
    }

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
