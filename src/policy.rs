//! The policies, and the one decision that is made with them: what may be done with a request?
//!
//! PURE. The proxy asks [`decide()`] while a request comes in, the driver when it knows who answers, and `foretell
//! explain` for a request that nobody has sent; so none of them can say something else than another. Reading policy
//! files is the work of `config`.

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
pub use settings::{Accept, Drafter, Gamma, Gates, Holdback, Rule, Scope, Tolerance, Vocabulary};
pub use values::{Glob, Revision};

/// What a policy lets its requests do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PolicyMode {
    /// Bypass.
    Off,
    /// Ride, and draft in the shadow.
    Shadow,
    /// Ride, and draft nothing.
    Ride,
    /// Leap where it pays.
    #[default]
    Auto,
}

impl PolicyMode {
    /// All, with their names in files.
    pub const NAMES: &'static [(&'static str, Self)] =
        &[("off", Self::Off), ("shadow", Self::Shadow), ("ride", Self::Ride), ("auto", Self::Auto)];

    /// The name in files and in the admin interface.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, mode)| *mode == self).map_or("", |(name, _)| name)
    }
}

/// A validated policy.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    /// Its name.
    pub name: String,
    /// The identity of the file it came from.
    pub revision: Revision,
    /// What its requests may do.
    pub mode: PolicyMode,
    /// Which requests are its own.
    pub matcher: Match,
    /// Who proposes, in the order of the file.
    pub drafters: Vec<Drafter>,
    /// How far to leap.
    pub gamma: Gamma,
    /// When a draft token is accepted.
    pub accept: Accept,
    /// Live reasons not to leap.
    pub gates: Gates,
    /// The control group.
    pub holdback: Holdback,
}

impl Policy {
    /// `name@revision`.
    pub fn label(&self) -> String {
        format!("{}@{}", self.name, self.revision)
    }

    /// Whether this request is the policy's own.
    pub fn matches(&self, subject: &Subject<'_>) -> Fact<bool> {
        self.matcher.holds(subject)
    }
}

/// All policies, in the order of their file names.
#[derive(Clone, Debug, Default)]
pub struct PolicySet {
    policies: Vec<Arc<Policy>>,
}

impl PolicySet {
    /// In this order.
    pub fn new(policies: Vec<Policy>) -> Self {
        Self { policies: policies.into_iter().map(Arc::new).collect() }
    }

    /// The first policy whose own this request is. Not known if a policy before it could be the first.
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

    /// All of them.
    pub fn policies(&self) -> &[Arc<Policy>] {
        &self.policies
    }

    /// The drafter models that some policy names.
    pub fn models(&self) -> impl Iterator<Item = &str> {
        self.policies.iter().flat_map(|policy| &policy.drafters).filter_map(|drafter| match drafter {
            Drafter::Model { model, .. } => Some(model.as_str()),
            _ => None,
        })
    }
}
