//! The command line: one file per command, one meaning per exit code.
//!
//! Exit codes: 0 success, 1 could not start or could not reach a server, 2 a required figure
//! was not met, 64 bad configuration or usage.

pub mod access;
mod admin_port;
pub mod bench;
pub mod check;
pub mod corpus;
pub mod demo;
pub mod drain;
mod exit;
pub mod explain;
pub mod pages;
pub mod probe;
pub mod progress;
pub mod serve;
pub mod target;
pub mod train;

use std::io::Write;
use std::process::ExitCode;

pub use exit::Exit;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use foretell_config::forms;
use foretell_config::variables::Environment;

/// Exit code of success.
const OK: u8 = Exit::Done.code();
/// Exit code of bad configuration or usage.
const USAGE: u8 = Exit::Usage.code();

#[derive(Parser)]
#[command(name = "foretell", version = VERSION, about = "A sidecar proxy that makes LLM servers answer sooner")]
#[command(long_about = None)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the proxy in front of a server
    Serve(serve::ServeArgs),
    /// Show the bundled models plain and speculated, side by side
    Demo(demo::DemoArgs),
    /// Serve an ONNX model over the OpenAI API
    Target(target::TargetArgs),
    /// Read the configuration and print every error
    Check(check::CheckArgs),
    /// Show what would happen to a request, and why
    Explain(explain::ExplainArgs),
    /// Measure a server directly and through Foretell, alternating
    Bench(Box<bench::BenchArgs>),
    /// Measure which verification methods a server supports, and their projected speedup
    Probe(probe::ProbeArgs),
    /// Drain a running proxy, and wait until it is empty
    Drain(drain::DrainArgs),
    /// Show, print or purge what was recorded for training
    Corpus(corpus::CorpusArgs),
    /// Train a drafter on what was recorded
    Train(train::TrainArgs),
    /// Print the completions for a shell
    Completions(pages::CompletionsArgs),
    /// Print the manual page, or write one for each command
    Man(pages::ManArgs),
}

/// Version, with commit and date if the build knows them (see `build.rs`).
pub const VERSION: &str = match option_env!("FORETELL_VERSION") {
    Some(version) => version,
    None => env!("CARGO_PKG_VERSION"),
};

/// A section of help and manual pages: terms with their meanings.
type Terms = &'static [(&'static str, &'static str)];

/// The exit codes, on every page.
const EXITS: Terms = &[
    ("0", "Success"),
    ("1", "The command could not start, or a server gave no answer"),
    (
        "2",
        "A required figure was not met (bench --require), a demo text differed, or a probe measured too little",
    ),
    ("64", "The configuration or the command line is wrong"),
];

/// The environment, on the first page.
const ENVIRONMENT: Terms = &[
    (
        "FORETELL_CONFIG, FORETELL_LISTEN …",
        "Flags of serve, check, explain and drain; a flag takes precedence",
    ),
    ("FORETELL_MODELS", "Folder of the bundled models, for demo"),
    ("ORT_DYLIB_PATH", "ONNX Runtime's library, for target, demo and models in the proxy"),
    ("NO_COLOR", "No colours; they are only used on a terminal"),
    ("NOTIFY_SOCKET, WATCHDOG_USEC", "Set by a service manager, to which serve reports its state"),
];

/// A section of a help page.
fn section(heading: &str, terms: Terms) -> String {
    let width = terms.iter().map(|(term, _)| term.chars().count()).max().unwrap_or_default();
    let line = |(term, meaning): &(&str, &str)| format!("\n  {term:<width$}  {meaning}");
    format!("{heading}:{}", terms.iter().map(line).collect::<String>())
}

/// The command line, as it is parsed, completed and described.
pub(crate) fn command() -> clap::Command {
    let exits = section("Exit codes", EXITS);
    let environment = format!("{}\n\n{exits}", section("Environment", ENVIRONMENT));
    Cli::command().mut_subcommands(|command| command.after_help(exits.clone())).after_help(environment)
}

fn address(text: &str) -> Result<std::net::SocketAddr, String> {
    forms::parse::<forms::Address>(text).map_err(|refusal| format!("allowed {}", refusal.allowed))
}

/// Parses the command line and runs the command.
pub fn main() -> ExitCode {
    let parsed = command().try_get_matches().and_then(|matches| Cli::from_arg_matches(&matches));
    let cli = match parsed {
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
        Command::Check(args) => exit_code(check::run(&args, &Environment, stdout)),
        Command::Explain(args) => exit_code(explain::run(&args, &Environment, stdout)),
        Command::Bench(args) => on_runtime("bench", bench::run(&args, stdout)).into(),
        Command::Probe(args) => on_runtime("probe", probe::run(&args, stdout)).into(),
        Command::Drain(args) => on_runtime("drain", drain::run(&args, &Environment, stdout)).into(),
        Command::Corpus(args) => corpus::run(&args, stdout).into(),
        Command::Train(args) => train::run(&args, stdout).into(),
        Command::Completions(args) => exit_code(pages::completions(&args, stdout)),
        Command::Man(args) => pages::man(&args, stdout).into(),
    }
}

/// Exit code of a command that only prints; a failed write (such as a closed pipe) counts as
/// success.
fn exit_code(outcome: std::io::Result<u8>) -> ExitCode {
    outcome.map_or(ExitCode::SUCCESS, ExitCode::from)
}

/// Parses a duration of more than zero.
fn positive_duration(text: &str) -> Result<std::time::Duration, String> {
    match foretell_config::values::duration_or_why(text)? {
        std::time::Duration::ZERO => Err("it must be more than 0".to_owned()),
        duration => Ok(duration),
    }
}

/// Tokio runtime of a command; it has few threads, since models need the cores.
fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()
}

/// Prints a line to standard error; a failed write is ignored.
pub fn complain(what: &dyn std::fmt::Display) {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// The help page of a command; the first page without a name.
    fn help(name: Option<&str>) -> String {
        let mut whole = command();
        whole.build();
        let page = match name {
            Some(name) => whole.find_subcommand_mut(name).unwrap().render_long_help(),
            None => whole.render_long_help(),
        };
        page.to_string()
    }

    #[test]
    fn the_command_line_is_consistent() {
        command().debug_assert();
    }

    #[test]
    fn every_help_page_has_exit_codes_and_settings_with_variables_and_defaults() {
        let whole = command();
        for sub in whole.get_subcommands() {
            let page = help(Some(sub.get_name()));
            assert!(EXITS.iter().all(|(_, meaning)| page.contains(meaning)), "{page}");
        }
        let first = help(None);
        let mut said = EXITS.iter().chain(ENVIRONMENT).map(|(_, meaning)| meaning);
        assert!(said.all(|meaning| first.contains(meaning)) && first.contains("ORT_DYLIB_PATH"), "{first}");
        for name in ["serve", "check", "explain"] {
            let page = help(Some(name)).replace('\n', " ");
            let flags = [
                "config",
                "backend",
                "engine",
                "listen",
                "admin",
                "mode",
                "policies",
                "log-level",
                "log-format",
            ];
            for flag in flags {
                let variable = format!("[env: FORETELL_{}]", flag.replace('-', "_").to_uppercase());
                assert!(page.contains(&variable), "{name} {variable}");
            }
            for said in ["[default: 127.0.0.1:8080]", "[default: 127.0.0.1:9464]", "auto, onnx, vllm, sglang"]
            {
                assert!(page.contains(said), "{name}: {said}");
            }
        }
    }

    #[test]
    fn an_explanation_needs_a_request_or_the_traffic_and_not_both() {
        let told = |args: &[&str]| {
            let line = [&["foretell", "explain"], args].concat();
            command().try_get_matches_from(line).map_err(|error| error.to_string())
        };
        let neither = told(&[]).unwrap_err();
        assert!(neither.contains("--request <FILE>") && neither.contains("--traffic"), "{neither}");
        assert!(told(&["--request", "f", "--traffic"]).is_err());
        assert!(told(&["--request", "f"]).is_ok() && told(&["--traffic"]).is_ok());
    }

    #[test]
    fn defaults_in_the_help_are_those_of_an_empty_config_file() {
        let process = foretell_config::Process::default();
        assert_eq!(process.listen.first().unwrap().address.to_string(), "127.0.0.1:8080");
        assert_eq!(process.admin.address.to_string(), "127.0.0.1:9464");
        assert_eq!(process.policies.display().to_string(), "policies");
    }

    #[test]
    fn the_version_begins_with_that_of_the_package() {
        let rest = VERSION.strip_prefix(env!("CARGO_PKG_VERSION")).unwrap();
        let told = rest.strip_prefix(" (").and_then(|rest| rest.strip_suffix(')'));
        assert!(rest.is_empty() || told.is_some_and(|told| !told.is_empty()), "{VERSION}");
    }
}
