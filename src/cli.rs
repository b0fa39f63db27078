//! The command line: one file per command, one meaning per exit code.
//!
//! Exit codes: 0 success, 1 could not start or could not reach a server, 2 a comparison fell short, 64 bad
//! configuration or usage.

pub mod access;
pub mod bench;
mod bench_drafters;
pub mod bench_relay;
pub mod check;
pub mod demo;
pub mod explain;
pub mod probe;
pub mod serve;
pub mod sim;
pub mod target;

use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::config::flags::Environment;
use crate::lab::Exit;

/// Exit code of success.
const OK: u8 = Exit::Done.code();
/// Exit code of bad configuration or usage.
const USAGE: u8 = Exit::Usage.code();

#[derive(Parser)]
#[command(name = "foretell", version, about = "A sidecar proxy that makes LLM servers answer sooner", long_about = None)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the proxy before a server
    Serve(serve::ServeArgs),
    /// Show the bundled models plain and speculated, side by side
    Demo(demo::DemoArgs),
    /// Serve an ONNX model over the OpenAI API
    Target(target::TargetArgs),
    /// Read the configuration and print every error
    Check(check::CheckArgs),
    /// Say what would happen to a request, and why
    Explain(explain::ExplainArgs),
    /// Measure a server directly and through Foretell, alternating
    Bench(Box<bench::BenchArgs>),
    /// Compare Foretell with nginx as plain reverse proxies
    #[command(hide = true)]
    BenchRelay(bench_relay::BenchRelayArgs),
    /// Find out what a server can verify, and what that would bring
    Probe(probe::ProbeArgs),
    /// Simulate a fleet in virtual time
    Sim(sim::SimArgs),
    /// Drain a running proxy (not built yet; POST /api/drain does it)
    #[command(disable_help_flag = true)]
    Drain(NotBuilt),
    /// Shell completions (not built yet)
    #[command(disable_help_flag = true)]
    Completions(NotBuilt),
    /// Manual page (not built yet)
    #[command(disable_help_flag = true)]
    Man(NotBuilt),
}

#[derive(clap::Args)]
struct NotBuilt {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    _rest: Vec<String>,
}

/// Parses the command line and runs the command.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return if error.use_stderr() { Exit::Usage.into() } else { Exit::Done.into() };
        }
    };
    let stdout = &mut std::io::stdout();
    match cli.command {
        Command::Serve(args) => serve::run(&args).into(),
        Command::Demo(args) => demo::main(&args).into(),
        Command::Target(args) => ExitCode::from(target::main(args)),
        Command::Check(args) => told(check::run(&args, &Environment, stdout)),
        Command::Explain(args) => told(explain::run(&args, &Environment, stdout)),
        Command::Bench(args) => on_runtime("bench", bench::run(&args, stdout)).into(),
        Command::BenchRelay(args) => bench_relay::run(&args, stdout).into(),
        Command::Probe(args) => probed(&args, stdout),
        Command::Sim(args) => sim::run(&args, stdout).into(),
        Command::Drain(_) => not_built("drain"),
        Command::Completions(_) => not_built("completions"),
        Command::Man(_) => not_built("man"),
    }
}

/// Exit code of a command that only prints; a failed write (such as a closed pipe) counts as success.
fn told(outcome: std::io::Result<u8>) -> ExitCode {
    outcome.map_or(ExitCode::SUCCESS, ExitCode::from)
}

/// Tokio runtime of a command; it has few threads, since models need the cores.
fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()
}

/// Prints a line to standard error; a failed write is ignored.
fn complain(what: &dyn std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "{what}");
}

fn on_runtime(command: &str, work: impl Future<Output = Exit>) -> Exit {
    match runtime() {
        Ok(runtime) => runtime.block_on(work),
        Err(error) => {
            complain(&format_args!("foretell {command}: {error}"));
            Exit::Unreachable
        }
    }
}

/// Runs a probe and gives its exit code.
fn probed(args: &probe::ProbeArgs, out: &mut dyn std::io::Write) -> ExitCode {
    match runtime() {
        Ok(runtime) => told(runtime.block_on(probe::run(args, out))),
        Err(error) => {
            complain(&format_args!("foretell probe: {error}"));
            Exit::Unreachable.into()
        }
    }
}

fn not_built(command: &str) -> ExitCode {
    complain(&format_args!("foretell {command}: not built yet in version {}", env!("CARGO_PKG_VERSION")));
    Exit::Usage.into()
}
