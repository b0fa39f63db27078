//! The policies in force. A new set is swapped in whole or not at all; who holds the old one keeps it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arc_swap::ArcSwap;

use super::problem::Problem;
use crate::policy::PolicySet;

/// The policies in force, and whether they are those of the files.
#[derive(Debug)]
pub struct PolicyStore {
    current: ArcSwap<PolicySet>,
    synchronized: AtomicBool,
}

impl PolicyStore {
    /// With a first good set.
    pub fn new(policies: PolicySet) -> Self {
        Self { current: ArcSwap::from_pointee(policies), synchronized: AtomicBool::new(true) }
    }

    /// The set in force. A session takes its policy from here once and keeps it.
    pub fn current(&self) -> Arc<PolicySet> {
        self.current.load_full()
    }

    /// Whether the last reload was taken (`foretell_config_synchronized`).
    pub fn synchronized(&self) -> bool {
        self.synchronized.load(Ordering::Relaxed)
    }

    /// Parses, builds, swaps: `parse` reads the new set, `build` loads and checks what it needs (models). If
    /// either fails, the last good set stays.
    ///
    /// # Errors
    /// What `parse` or `build` found.
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
