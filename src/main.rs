//! The binary: exit codes, nothing else.

use std::process::ExitCode;

fn main() -> ExitCode {
    foretell::cli::main()
}
