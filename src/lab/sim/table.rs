//! Workload tables: a setting with its expectations, as a YAML file.
//!
//! An unknown key, or a value out of range, is an error with its line; the first one is reported.
//!
//! ```yaml
//! version: 1
//! name: rewrite-h100
//! about: Rewriting by eight clients, drafted from the prompt
//! untuned: false                   # a profile that nothing was tuned on
//! for: 60s                         # no request begins later
//! seeds: 2                         # number of plays, each with another seed
//! interval: 1s                     # of the recorded course
//! engine: { profile: h100-8b, sequences: 256, kv: 400000, prefix_cache: true, cancel: 0ms,
//!   jitter: usual, front: { request: 1ms, event: 50us, row: 10us } }
//!     # or paced: { step: 20ms, base: 1.1, node: 0.005, growth: 0, prompt: 0.1ms }
//! network: { rtt: 500us, call: 300us }
//! signal: { every: 500ms, age: 0ms, until: 30s }            # or none
//! drafter: { token: 2ms, read: 10us, growth: 0.1, slots: 64, shared: false }     # or none
//! verify: [score, fan_out]
//! sidecars: 1
//! drafters: both                   # lookup|lookups|model|both, without a control group; or
//! policy: |                        # a policy file, whose drafter model is called draft
//!   version: 1
//!   name: mine
//! # of the backend; none by default
//! budget: { slots: 0.1 }
//! traffic:
//!   - { whose: ours, clients: { 0s: 1, 30s: 64 }, think: 0s, text: rewrite }
//!   - { whose: others, rate: 2.5, text: { prompt: 300, output: 128, vary: 0.5, copied: fresh,
//!       agreement: { even: 0.7 } } }
//! overload: { from: 20s, until: 40s }
//! sweep: { clients: [1, 4, 16], texts: [rewrite, rewrite-t0.7] }    # played with each of them too
//! expect:
//!   p50: { max: 1.01 }
//!   ratio: { min: 1.5, max: 4 }
//! ```
//!
//! A text is the name of a recording, `traces/NAME.jsonl` in the table's folder, or made from a
//! seed. Requests have the temperature at which their text was recorded.

mod keys;
mod read;

use std::path::Path;

use super::figures::Figure;
use super::permit;
use super::source::Scripts;
use super::world::Setup;

/// Variations with which a table is replayed.
#[derive(Clone, Debug, Default)]
pub struct Sweep {
    pub clients: Vec<usize>,
    pub texts: Vec<Scripts>,
}

/// A setting with its expectations.
#[derive(Clone, Debug)]
pub struct Table {
    pub name: String,
    /// Description, in one line.
    pub about: String,
    /// True if nothing was tuned on its engine.
    pub untuned: bool,
    /// The setting, with the controller's decisions.
    pub setup: Setup,
    /// Number of plays, each with another seed.
    pub seeds: u64,
    /// No request begins after this second.
    pub seconds: f64,
    /// The seconds between which the engine is overloaded.
    pub overload: Option<(f64, f64)>,
    /// Variations with which it is replayed, to show gamma over temperature and load.
    pub sweep: Sweep,
    /// Expectations, in the order of the file.
    pub expected: Vec<Expected>,
}

/// Expected range of a figure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Expected {
    pub figure: Figure,
    /// Minimum.
    pub min: Option<f64>,
    /// Maximum.
    pub max: Option<f64>,
}

impl Expected {
    /// True if a value is in the range; false for a value that could not be measured.
    pub fn is_met(&self, value: Option<f64>) -> bool {
        let above = |value: f64| self.min.is_none_or(|min| value >= min);
        let below = |value: f64| self.max.is_none_or(|max| value <= max);
        value.is_some_and(|value| above(value) && below(value))
    }
}

/// Reason for which a table cannot be played.
#[derive(Debug, thiserror::Error)]
pub enum Unusable {
    /// The file cannot be read.
    #[error("{path}: {source}")]
    File {
        path: std::path::PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A setting has an error.
    #[error("{file}:{line}: {message}")]
    Settings {
        file: String,
        /// Line in it, counted from 1.
        line: u64,
        /// The values that are allowed, and the one that was found.
        message: String,
    },
    /// Its policy has errors, or passes requests through.
    #[error("{0}")]
    Policy(#[from] permit::Refused),
}

impl Table {
    /// Reads a table and the recordings that it names.
    ///
    /// # Errors
    /// The first error of the file.
    pub fn read(path: &Path) -> Result<Self, Unusable> {
        let source = std::fs::read_to_string(path)
            .map_err(|source| Unusable::File { path: path.to_owned(), source })?;
        let folder = path.parent().unwrap_or(Path::new(""));
        Self::parse(&path.display().to_string(), &source, &folder.join("traces"))
    }

    /// As [`Table::read`], from a text; recordings are in the folder `traces`.
    ///
    /// # Errors
    /// The first error of the text.
    pub fn parse(file: &str, source: &str, traces: &Path) -> Result<Self, Unusable> {
        read::table(file, source, traces)
    }
}

#[cfg(test)]
mod tests;
