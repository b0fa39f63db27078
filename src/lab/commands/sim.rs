//! `foretell-lab sim`: a fleet in virtual time.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use super::complain;
use crate::sim::report::TableReport;
use crate::sim::table::{self, Table};
use crate::sim::world::{Broken, Mode};
use crate::sim::{grid, html, permit, play, report, source, sweep, workloads};
use foretell::cli::Exit;
use foretell::cli::progress;

/// Simulate a fleet in virtual time.
#[derive(Clone, Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("what").required(true).args(["workload", "grid"]))]
pub struct SimArgs {
    /// Workload tables, one YAML file each; exits 2 if one does not meet its expectations.
    #[arg(long, value_name = "F", num_args = 1.., value_delimiter = ',')]
    pub workload: Vec<PathBuf>,
    /// Write the figures and the time series as JSON.
    #[arg(long, value_name = "F", conflicts_with = "grid")]
    pub json: Option<PathBuf>,
    /// Write a page with plots of gamma, load, ratio and regret over time, and of gamma over
    /// temperature and load.
    #[arg(long, value_name = "F", conflicts_with = "grid")]
    pub html: Option<PathBuf>,
    /// Seed of all random numbers: the same seed gives the same figures.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Play every table with fixed gammas as well, and compare them with the controller over all
    /// tables; exits 2 if one is faster.
    #[arg(long, conflicts_with = "grid")]
    pub fixed: bool,
    /// Compare the controller with fixed gammas on servers of known costs; exits 2 if a
    /// required figure was not met.
    #[arg(long)]
    pub grid: bool,
    /// Recorded texts for the grid, one file NAME.jsonl for each workload; a missing one of the
    /// bundled models is generated from a seed, one of the real model is omitted.
    #[arg(long, value_name = "DIR", default_value = "tests/control/traces", requires = "grid")]
    pub traces: PathBuf,
    /// Only cells of the grid whose line contains all of these words, such as rewrite,model.
    #[arg(long, value_name = "WORD,WORD", value_delimiter = ',', requires = "grid")]
    pub only: Vec<String>,
}

/// Reason that nothing was simulated, or that the simulation failed.
#[derive(Debug, thiserror::Error)]
enum Stopped {
    #[error("{0}")]
    Table(#[from] table::Unusable),
    #[error("{0}")]
    Texts(#[from] source::Unreadable),
    #[error("{0}")]
    Policy(#[from] permit::Refused),
    #[error("--only: no cell of the grid has all of {0}")]
    NoCell(String),
    #[error("--traces: no folder {0}")]
    NoFolder(PathBuf),
    #[error("{path}: {source}")]
    File { path: PathBuf, source: std::io::Error },
    #[error("{0}")]
    Broken(#[from] Broken),
}

impl Stopped {
    fn exit(&self) -> Exit {
        match self {
            Self::Table(_)
            | Self::Texts(_)
            | Self::Policy(_)
            | Self::NoCell(_)
            | Self::NoFolder(_)
            | Self::File { .. } => Exit::Usage,
            Self::Broken(_) => Exit::RequirementNotMet,
        }
    }
}

/// Runs the simulation; tables go to `out`, errors to standard error.
pub fn run(args: &SimArgs, out: &mut impl Write) -> Exit {
    let done = if args.grid { grid(args, out) } else { tables(args, out) };
    done.unwrap_or_else(|stopped| {
        complain(&format_args!("foretell-lab sim: {stopped}"));
        stopped.exit()
    })
}

fn grid(args: &SimArgs, out: &mut impl Write) -> Result<Exit, Stopped> {
    if !args.traces.is_dir() {
        return Err(Stopped::NoFolder(args.traces.clone()));
    }
    let workloads = workloads::all(&args.traces)?;
    let mut cells = grid::cells(&grid::servers(), &workloads)?;
    cells.retain(|cell| {
        let name = cell.name();
        args.only.iter().all(|word| name.split_whitespace().any(|part| part.trim_end_matches('*') == word))
    });
    if cells.is_empty() {
        return Err(Stopped::NoCell(args.only.join(", ")));
    }
    let outcomes = grid::play(&cells, grid::Size::USUAL, &progress::bar("cells"))?;
    // A closed pipe is not an error.
    let _ = out.write_all(grid::table(&outcomes).as_bytes());
    let short = outcomes.iter().filter(|outcome| outcome.falls_short()).count();
    if short == 0 {
        return Ok(Exit::Done);
    }
    complain(&format_args!("foretell-lab sim: cells slower than required, marked with <: {short}"));
    Ok(Exit::RequirementNotMet)
}

fn tables(args: &SimArgs, out: &mut impl Write) -> Result<Exit, Stopped> {
    let tables = args.workload.iter().map(|path| Table::read(path)).collect::<Result<Vec<_>, _>>()?;
    // They are opened first, so that a wrong path fails at once.
    let (json, page) = (create(args.json.as_deref())?, create(args.html.as_deref())?);
    let mut reports = Vec::with_capacity(tables.len());
    let played = progress::bar("tables");
    played.set_length(tables.len() as u64);
    for table in tables {
        played.set_message(table.name.clone());
        let gammas = if args.fixed { &play::GAMMAS } else { play::gammas(&table) };
        let outcome = play::play(&table, args.seed, Mode::Auto, gammas)?;
        let swept = sweep::play(&table, args.seed)?;
        let report = TableReport { table, outcome, swept };
        played.inc(1);
        played.suspend(|| drop(out.write_all(report.text().as_bytes())));
        reports.push(report);
    }
    played.finish_and_clear();
    write(json, || report::json(&reports))?;
    write(page, || html::page(&reports))?;
    let short = reports.iter().filter(|report| !report.shortfalls().is_empty()).count();
    if short > 0 {
        let _ = writeln!(out, "{short} of {} tables have a figure that was not met", reports.len());
    }
    let set = args.fixed.then(|| report::Set::of(&reports));
    let beaten = set.as_ref().is_some_and(report::Set::is_beaten);
    if let Some(set) = set {
        let _ = out.write_all(set.text().as_bytes());
    }
    Ok(if short > 0 || beaten { Exit::RequirementNotMet } else { Exit::Done })
}

fn create(path: Option<&Path>) -> Result<Option<(PathBuf, File)>, Stopped> {
    let create = |path: &Path| match File::create(path) {
        Ok(file) => Ok((path.to_owned(), file)),
        Err(source) => Err(Stopped::File { path: path.to_owned(), source }),
    };
    path.map(create).transpose()
}

fn write(to: Option<(PathBuf, File)>, text: impl FnOnce() -> String) -> Result<(), Stopped> {
    let Some((path, mut file)) = to else { return Ok(()) };
    file.write_all(text().as_bytes()).map_err(|source| Stopped::File { path, source })
}
