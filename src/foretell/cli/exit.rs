//! Exit codes of the commands, here and in `foretell-lab`.

use std::process::ExitCode;

/// Result of a command, reported as its exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Everything was measured, and every requirement was met.
    Done,
    /// A server could not be reached, or gave no answer that can be measured.
    Unreachable,
    /// A required figure was not met, or too little was measured to know.
    RequirementNotMet,
    /// The command line or the configuration is wrong.
    Usage,
}

impl Exit {
    /// The exit code of the process.
    pub const fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Unreachable => 1,
            Self::RequirementNotMet => 2,
            Self::Usage => 64,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}
