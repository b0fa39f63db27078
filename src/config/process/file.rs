//! Parses the config file.

use std::sync::LazyLock;

use serde_json::Value as Json;

use super::Process;
use crate::at::At;
use crate::named::Named;
use crate::problem::Problem;
use crate::problems::Problems;
use crate::variables::{self, Environment, Strings};
use crate::{check, schema, yaml};

/// Reads a config file.
///
/// # Errors
/// Every problem in the file, in the order of its lines.
pub fn parse(file: &str, source: &str) -> Result<Process, Vec<Problem>> {
    let Parsed { process, problems, .. } = parse_all(file, source, &Environment);
    if problems.is_empty() { Ok(process) } else { Err(problems) }
}

/// Result of reading a config file with or without errors.
#[derive(Clone, Debug, Default)]
pub struct Parsed {
    /// The settings; a setting with an error has its default.
    pub process: Process,
    /// Files and folders that the settings name; none has been opened.
    pub named: Vec<Named>,
    /// Settings that have no effect.
    pub warnings: Vec<String>,
    /// Every problem in the file, in the order of its lines.
    pub problems: Vec<Problem>,
}

/// As [`parse`], with the variables of this environment, and returns the readable settings besides
/// the problems.
pub fn parse_all(file: &str, source: &str, environment: &dyn Strings) -> Parsed {
    let mut root = match yaml::parse(file, source) {
        Ok(root) => root,
        Err(problems) => return Parsed { problems, ..Parsed::default() },
    };
    let problems = Problems::new(file);
    variables::substitute(&mut root, environment, &problems);
    let mut process: Process = check::read(settings(), &mut root, &problems);
    process.settle(&At::root(&root, &problems));
    let (named, warnings) = (problems.named(), problems.warnings());
    Parsed { process, named, warnings, problems: problems.into_vec() }
}

/// The JSON Schema of a config file, draft 2020-12.
///
/// Any value may be an environment variable (`${NAME}`). Conditions that a schema cannot express
/// (names and addresses used twice, an admin listener that is open to others, settings that exclude
/// each other) are left to `foretell check`.
pub fn schema() -> Json {
    schema::published(settings().clone(), true)
}

/// The schema by which the file is read.
pub(crate) fn settings() -> &'static Json {
    static SETTINGS: LazyLock<Json> = LazyLock::new(|| {
        schema::of::<Process>("Foretell", "The config file: listeners, limits, backends, drafters.")
    });
    &SETTINGS
}
