//! Parses policy files into validated policies.

mod file;

use std::path::Path;

use super::problem::Problem;
use foretell_policy::PolicySet;

pub(super) use file::settings;
pub use file::{ParsedPolicy, parse, schema};

/// Text of the built-in policy, used if there is no policy file.
pub const DEFAULT: &str = include_str!("../../policies/default.yaml");

/// The built-in policy, used if there is no policy file.
///
/// # Errors
/// Never: a test parses it. The type is that of the other policy files.
pub fn built_in() -> Result<PolicySet, Vec<Problem>> {
    parse("default.yaml", DEFAULT).map(|placed| PolicySet::new(vec![placed.policy]))
}

/// True if a directory entry is a policy file: it ends in `.yaml` or `.yml`, and does not begin
/// with a dot, as the files of an editor do. One that is not a regular file is an error when it is
/// read, and never ignored.
pub fn is_policy_file(path: &Path) -> bool {
    let hidden = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
    !hidden && path.extension().is_some_and(|extension| extension == "yaml" || extension == "yml")
}
