//! `foretell check`: reports every error that would prevent `serve` from starting with these
//! settings.

use std::collections::BTreeSet;
use std::io::{self, Write};

use super::{OK, USAGE};
use crate::app::files;
use foretell_config::load::UNDECLARED;
use foretell_config::{Flags, Loaded, Problem, Strings};
use foretell_config::{reference, schema};

/// The arguments of `foretell check`.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct CheckArgs {
    /// The settings, as `serve` takes them.
    #[command(flatten)]
    pub flags: Flags,
    /// Print the JSON Schema of policy files, or of the config file, for editors, and check
    /// nothing
    #[arg(long, value_name = "KIND", num_args = 0..=1, require_equals = true, default_missing_value = "policy")]
    pub schema: Option<SchemaOf>,
    /// Print the reference of all metrics (docs/metrics.md), and check nothing
    #[arg(long, conflicts_with = "schema")]
    pub metrics: bool,
    /// Print which requests are speculated on, by engine and parameter (docs/guarantees.md), and
    /// check nothing
    #[arg(long, conflicts_with_all = ["schema", "metrics"])]
    pub guarantees: bool,
    /// Print the reference of policy files (docs/policy-reference.md), and check nothing
    #[arg(long, conflicts_with_all = ["schema", "metrics", "guarantees"])]
    pub policy_reference: bool,
    /// Print the reference of the settings of the config file as Markdown, and nothing else
    #[arg(long, conflicts_with_all = ["schema", "metrics", "guarantees", "policy_reference"])]
    pub config_reference: bool,
}

/// Kind of file that a schema describes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum SchemaOf {
    /// A policy file
    Policy,
    /// The config file
    Config,
}

impl SchemaOf {
    fn text(self) -> String {
        match self {
            Self::Policy => schema::text(&foretell_config::policy::schema()),
            Self::Config => schema::text(&foretell_config::process::schema()),
        }
    }
}

/// Reads all settings, opens all files they name and prints every problem. Returns the exit code.
///
/// # Errors
/// `out` cannot be written.
pub fn run(args: &CheckArgs, environment: &dyn Strings, out: &mut dyn Write) -> io::Result<u8> {
    if let Some(of) = args.schema {
        return write!(out, "{}", of.text()).map(|()| OK);
    }
    if args.metrics {
        return write!(out, "{}", foretell_metrics::reference()).map(|()| OK);
    }
    if args.guarantees {
        return write!(out, "{}", foretell_engines::guarantees::reference()).map(|()| OK);
    }
    if args.policy_reference {
        return write!(out, "{}", reference::policy()).map(|()| OK);
    }
    if args.config_reference {
        return write!(out, "{}", reference::process()).map(|()| OK);
    }
    match files::load(&args.flags, environment) {
        Ok(loaded) => good(&loaded, out).map(|()| OK),
        Err(problems) => {
            for problem in &problems {
                writeln!(out, "{problem}")?;
            }
            let count = problems.len();
            writeln!(out, "{count} error{}", if count == 1 { "" } else { "s" })?;
            write!(out, "{}", wanted(&problems))?;
            Ok(USAGE)
        }
    }
}

/// The stanza of the config file that declares the missing drafters of the policies; empty if there
/// are none.
pub(super) fn wanted(problems: &[Problem]) -> String {
    let undeclared = |problem: &&Problem| problem.message == UNDECLARED && problem.suggestion.is_none();
    let names: BTreeSet<&str> =
        problems.iter().filter(undeclared).map(|problem| problem.got.trim_matches('"')).collect();
    if names.is_empty() {
        return String::new();
    }
    let line = |name: &&str| format!("  {name}: {{ path: onnx/models/{name} }}\n");
    let lines: String = names.iter().map(line).collect();
    format!("add to the config file, with the folder of each model:\ndrafters:\n{lines}")
}

fn good(loaded: &Loaded, out: &mut dyn Write) -> io::Result<()> {
    for file in &loaded.files {
        writeln!(out, "{}: ok", file.display())?;
    }
    for warning in &loaded.warnings {
        writeln!(out, "warning: {warning}")?;
    }
    let policies: Vec<String> = loaded.policies.policies().iter().map(|policy| policy.label()).collect();
    let backends: Vec<&str> = loaded.process.backends.iter().map(|backend| backend.name.as_str()).collect();
    writeln!(out, "backends: {}", listed(&backends))?;
    writeln!(out, "policies: {}", listed(&policies))
}

fn listed<T: AsRef<str>>(names: &[T]) -> String {
    if names.is_empty() {
        return "none".to_owned();
    }
    names.iter().map(AsRef::as_ref).collect::<Vec<_>>().join(", ")
}
