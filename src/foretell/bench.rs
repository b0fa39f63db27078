//! Benchmarks and comparisons: a server called directly against the same server called through
//! Foretell.
//!
//! Measuring and evaluating are kept apart. `client` and `run` use the network and the clock;
//! pure functions (`alternate`, `stats`, `formula`, `tally`, `require`) evaluate their results, so
//! every figure of a report can be tested without a server.

use std::process::ExitCode;

pub mod about;
pub mod alternate;
pub mod canvas;
pub mod client;
pub mod counters;
pub mod demo;
pub mod formula;
pub mod html;
pub mod judge;
pub mod local;
pub mod probed;
pub mod report;
pub mod require;
pub mod run;
pub mod stats;
pub mod stream;
pub mod tally;
pub mod workload;

/// Result of a command, reported as its exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Everything was measured, and every requirement was met.
    Done,
    /// A server could not be reached, or gave no answer that can be measured.
    Unreachable,
    /// A requirement was not met.
    FellShort,
    /// The command line or the configuration is wrong.
    Usage,
}

impl Exit {
    /// The exit code of the process.
    pub const fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Unreachable => 1,
            Self::FellShort => 2,
            Self::Usage => 64,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}
