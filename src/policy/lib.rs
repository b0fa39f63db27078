//! Policies, and the decision made from them: what may be done with a request.
//!
//! PURE. The proxy takes the steps of an [`Admission`] while a request comes in, the session runner
//! those of [`plan`] once the server is known, and `foretell explain` all of them for a
//! hypothetical request, so all three give the same answer. `foretell` reads the policy files.

pub mod decide;
pub mod explain;
mod fact;
pub mod facts;
pub mod form;
mod inject;
pub mod matching;
mod outcome;
pub mod part;
pub mod ruling;
pub mod settings;
mod steps;
mod values;

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use decide::{Admission, Admitted, Decision, plan};
pub use explain::Explanation;
pub use fact::Fact;
pub use facts::{
    Backend, Body, Facts, Group, Groups, Head, Models, Server, ServerState, Subjects, Terms, Understood, Wish,
};
pub use inject::{Injection, inject};
pub use matching::{Bounds, Match, Mismatch, Subject};
pub use outcome::{DecisionStep, Outcome, Passthrough, StepResult};
pub use ruling::{LiveGates, Ruling};
pub use settings::{Drafter, Gamma, Gates, Holdback, Scope, Vocabulary};

pub use foretell_core::control::Tolerance;
pub use foretell_core::session::accept::{Accept, Rule};
pub use values::{Glob, Revision};

/// Limit that a policy sets for its requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PolicyMode {
    /// They are passed through.
    Off,
    /// They are decoded plainly; drafts are made in the background and only scored.
    Shadow,
    /// They are decoded plainly; nothing is drafted.
    Plain,
    /// They are decoded plainly or speculated on, whichever the controller expects to be faster.
    #[default]
    Auto,
}

impl PolicyMode {
    /// Every value with its name in files.
    pub const NAMES: &'static [(&'static str, Self)] =
        &[("off", Self::Off), ("shadow", Self::Shadow), ("plain", Self::Plain), ("auto", Self::Auto)];

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
    /// Identifies the content of the policy's file.
    pub revision: Revision,
    /// Limit on what may be done with its requests.
    pub mode: PolicyMode,
    /// Conditions a request must meet for this policy to apply.
    pub matcher: Match,
    /// Drafters, in the order of the file.
    pub drafters: Vec<Drafter>,
    /// Draft lengths and the gain required for speculation.
    pub gamma: Gamma,
    /// Rule by which draft tokens are accepted.
    pub accept: Accept,
    /// Limits beyond which sessions decode plainly for a while.
    pub gates: Gates,
    /// Share of requests that are only decoded plainly, for comparison.
    pub holdback: Holdback,
    /// Uses of the texts of its requests.
    pub corpus: Corpus,
}

impl Policy {
    /// `name@revision`, as logs and metrics show it.
    pub fn label(&self) -> String {
        format!("{}@{}", self.name, self.revision)
    }

    /// True if the policy applies to this request; unknown if that depends on an unknown fact.
    pub fn matches(&self, subject: &Subject<'_>) -> Fact<bool> {
        self.matcher.matches(subject)
    }
}

/// Uses of the texts of a policy's requests, where the config file names a folder for them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Corpus {
    /// Record the tokens of eligible requests for `foretell train`; needs
    /// `corpus.record` of the config file.
    pub record: bool,
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

    /// The first policy that applies, `None` if none does; unknown if an earlier policy may or may
    /// not apply.
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
            Drafter::Lookup(_) => None,
        })
    }
}
