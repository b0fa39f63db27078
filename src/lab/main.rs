//! `foretell-lab`: simulations and comparisons for those who change Foretell.

use std::process::ExitCode;

fn main() -> ExitCode {
    foretell_lab::commands::main()
}
