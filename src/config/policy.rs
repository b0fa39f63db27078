//! Policy files: their text to validated policies.

mod file;

use std::path::Path;

use super::problem::Problem;
use crate::policy::PolicySet;

pub use file::{Placed, parse};

/// The policy that is there when no file is.
pub const DEFAULT: &str = include_str!("../../policies/default.yaml");

/// The one policy that is there when no file is.
///
/// # Errors
/// Never, as a test shows; the type is that of every other policy file.
pub fn built_in() -> Result<PolicySet, Vec<Problem>> {
    parse("default.yaml", DEFAULT).map(|placed| PolicySet::new(vec![placed.policy]))
}

/// Whether a folder entry is a policy file.
pub fn is_policy_file(path: &Path) -> bool {
    path.is_file() && path.extension().is_some_and(|extension| extension == "yaml" || extension == "yml")
}
