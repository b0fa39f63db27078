//! The policies in force. A reload replaces the whole set or nothing; a session keeps the set that
//! it started with.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arc_swap::ArcSwap;

use super::problem::Problem;
use foretell_policy::PolicySet;

/// The policies in force, and the success of the last reload.
#[derive(Debug)]
pub struct PolicyStore {
    current: ArcSwap<PolicySet>,
    synchronized: AtomicBool,
}

impl PolicyStore {
    /// A store with this first set in force.
    pub fn new(policies: PolicySet) -> Self {
        Self { current: ArcSwap::from_pointee(policies), synchronized: AtomicBool::new(true) }
    }

    /// The set in force. A session fetches it once and keeps its policy to the end.
    pub fn current(&self) -> Arc<PolicySet> {
        self.current.load_full()
    }

    /// True if the last reload succeeded, so that these policies are those of the files.
    pub fn synchronized(&self) -> bool {
        self.synchronized.load(Ordering::Relaxed)
    }

    /// Replaces the set: `parse` reads the new one, `build` loads and checks its models. If either
    /// fails, the old set stays in force.
    ///
    /// # Errors
    /// The problems that `parse` or `build` returned.
    pub fn reload(
        &self,
        parse: impl FnOnce() -> Result<PolicySet, Vec<Problem>>,
        build: impl FnOnce(&PolicySet) -> Result<(), Vec<Problem>>,
    ) -> Result<Arc<PolicySet>, Vec<Problem>> {
        let outcome = parse().and_then(|policies| build(&policies).map(|()| Arc::new(policies)));
        self.synchronized.store(outcome.is_ok(), Ordering::Relaxed);
        if let Ok(policies) = &outcome {
            self.current.store(Arc::clone(policies));
        }
        outcome
    }
}
