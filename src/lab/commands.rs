//! The commands of `foretell-lab`, with the exit codes of `foretell`.

pub mod drafters;
pub mod sim;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use foretell::cli::Exit;
use foretell::cli::{VERSION, complain};

#[derive(Parser)]
#[command(name = "foretell-lab", version = VERSION, about = "Simulations and comparisons for those who change Foretell")]
struct Lab {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Simulate a fleet in virtual time
    Sim(sim::SimArgs),
    /// Play recorded texts with each of some drafters
    Drafters(drafters::DraftersArgs),
}

/// Parses the command line and runs the command.
pub fn main() -> ExitCode {
    let stdout = &mut std::io::stdout();
    let lab = match Lab::try_parse() {
        Ok(lab) => lab,
        Err(error) => {
            let _ = error.print();
            return if error.use_stderr() { Exit::Usage.into() } else { Exit::Done.into() };
        }
    };
    match lab.command {
        Command::Sim(args) => sim::run(&args, stdout).into(),
        Command::Drafters(args) => drafters::run(&args, stdout).into(),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        super::Lab::command().debug_assert();
    }
}
