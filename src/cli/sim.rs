//! `foretell sim`: a fleet in virtual time.

use std::io::Write;
use std::path::PathBuf;

use crate::lab::Exit;
use crate::lab::sim::{grid, workloads};

/// Simulate a fleet in virtual time.
#[derive(Clone, Debug, clap::Args)]
pub struct SimArgs {
    /// Compare the controller with fixed gammas on servers of known costs
    #[arg(long)]
    pub grid: bool,
    /// Recorded texts, one file NAME.jsonl for each workload; one that is missing is made from a seed.
    #[arg(long, value_name = "DIR", default_value = "tests/control/traces")]
    pub traces: PathBuf,
    /// Only cells whose line contains all of these words, such as rewrite,model.
    #[arg(long, value_name = "WORD,WORD", value_delimiter = ',')]
    pub only: Vec<String>,
}

/// Runs the simulation; tables go to `out`, errors to standard error.
pub fn run(args: &SimArgs, out: &mut impl Write) -> Exit {
    let workloads = match workloads::all(&args.traces) {
        Ok(workloads) => workloads,
        Err(error) => {
            super::complain(&format_args!("foretell sim: {error}"));
            return Exit::Usage;
        }
    };
    let mut cells = match grid::cells(&grid::servers(), &workloads) {
        Ok(cells) => cells,
        Err(error) => {
            super::complain(&format_args!("foretell sim: {error}"));
            return Exit::Usage;
        }
    };
    cells.retain(|cell| {
        let name = cell.name();
        args.only.iter().all(|word| name.split_whitespace().any(|part| part.trim_end_matches('*') == word))
    });
    match grid::play(&cells, grid::Size::USUAL) {
        Ok(outcomes) => {
            // A closed pipe is not an error.
            let _ = out.write_all(grid::table(&outcomes).as_bytes());
            Exit::Done
        }
        Err(broken) => {
            super::complain(&format_args!("foretell sim: {broken}"));
            Exit::FellShort
        }
    }
}
