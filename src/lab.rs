//! Benchmarks and comparisons: a server asked directly against the same server asked through Foretell.
//!
//! What is measured is kept apart from what is concluded. `client` and `bench` touch the network and the
//! clock; everything they bring back is judged by pure functions (`alternate`, `stats`, `formula`,
//! `looping`, `tally`, `require`), so that every figure of a report can be tested without a server.

use std::process::ExitCode;

pub mod alternate;
pub mod bench;
pub mod canvas;
pub mod client;
pub mod counters;
pub mod demo;
pub mod formula;
pub mod html;
pub mod local;
pub mod looping;
pub mod probed;
pub mod relay;
pub mod report;
pub mod require;
pub mod stats;
pub mod stream;
pub mod tally;
pub mod workload;

/// How a comparison ended, as the process tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Everything was measured and nothing fell short.
    Done,
    /// A server could not be reached, or answered nothing that can be measured.
    Unreachable,
    /// A comparison fell short of what was required.
    FellShort,
    /// The command cannot be understood.
    Usage,
}

impl Exit {
    /// The exit status of the process.
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
