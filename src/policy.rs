//! The policies, and the one decision that is made with them: what may be done with a request?
//!
//! PURE. The proxy asks [`decide()`] while a request comes in, the driver once the server is known, and `foretell
//! explain` for a request that nobody has sent; so all three give the same answer. Reading policy files is the work of
//! `config`.

pub mod decide;
pub mod explain;
pub mod facts;
pub mod matching;
pub mod part;
pub mod ruling;
pub mod settings;
mod steps;
mod values;

use std::sync::Arc;

pub use decide::{Bypass, Decision, Outcome, Step, decide};
pub use explain::Explanation;
pub use facts::{Backend, Body, Fact, Facts, Server, ServerState, Terms, Wish};
pub use matching::{Bounds, Match, Mismatch, Subject};
pub use ruling::{LiveGates, Ruling};
pub use settings::{AHEAD_MAX, Drafter, Gamma, Gates, Holdback, Scope, Vocabulary};

pub use crate::control::Tolerance;
pub use crate::session::accept::{Accept, Rule};
pub use values::{Glob, Revision};

/// What requests of a policy may do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PolicyMode {
    /// They are bypassed (relayed).
    Off,
    /// They ride; drafts are made in the background and only scored.
    Shadow,
    /// They ride; nothing is drafted.
    Ride,
    /// They ride or leap, whichever the controller expects to be faster.
    #[default]
    Auto,
}

impl PolicyMode {
    /// Every value with its name in files.
    pub const NAMES: &'static [(&'static str, Self)] =
        &[("off", Self::Off), ("shadow", Self::Shadow), ("ride", Self::Ride), ("auto", Self::Auto)];

    /// Name in files and in the admin interface.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, mode)| *mode == self).map_or("", |(name, _)| name)
    }
}

/// A validated policy.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    /// Name, unique among the policies.
    pub name: String,
    /// Identifies the content of the file it came from.
    pub revision: Revision,
    /// What its requests may do.
    pub mode: PolicyMode,
    /// Conditions a request must meet for this policy to apply.
    pub matcher: Match,
    /// Drafters, in the order of the file.
    pub drafters: Vec<Drafter>,
    /// Draft lengths and the gain required for leaping.
    pub gamma: Gamma,
    /// Rule by which draft tokens are accepted.
    pub accept: Accept,
    /// Limits beyond which sessions ride for a while.
    pub gates: Gates,
    /// Share of requests that only ride, for comparison.
    pub holdback: Holdback,
}

impl Policy {
    /// `name@revision`, as logs and metrics show it.
    pub fn label(&self) -> String {
        format!("{}@{}", self.name, self.revision)
    }

    /// Whether the policy applies to this request; unknown if that depends on an unknown fact.
    pub fn matches(&self, subject: &Subject<'_>) -> Fact<bool> {
        self.matcher.holds(subject)
    }
}

/// All policies, in match order.
#[derive(Clone, Debug, Default)]
pub struct PolicySet {
    policies: Vec<Arc<Policy>>,
}

impl PolicySet {
    /// A set with this match order.
    pub fn new(policies: Vec<Policy>) -> Self {
        Self { policies: policies.into_iter().map(Arc::new).collect() }
    }

    /// The first policy that applies; unknown if an earlier policy may or may not apply.
    pub fn first_match(&self, subject: &Subject<'_>) -> Fact<Option<&Arc<Policy>>> {
        for policy in &self.policies {
            match policy.matches(subject) {
                Fact::Known(true) => return Fact::Known(Some(policy)),
                Fact::Known(false) => {}
                Fact::Unknown(why) => return Fact::Unknown(why),
            }
        }
        Fact::Known(None)
    }

    /// All policies, in match order.
    pub fn policies(&self) -> &[Arc<Policy>] {
        &self.policies
    }

    /// Names of the drafter models that any policy uses; a name may occur more than once.
    pub fn models(&self) -> impl Iterator<Item = &str> {
        self.policies.iter().flat_map(|policy| &policy.drafters).filter_map(|drafter| match drafter {
            Drafter::Model { model, .. } => Some(model.as_str()),
            _ => None,
        })
    }
}
