//! `foretell target`: serves an ONNX model.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};

use foretell_config::process::LogFormat;
use foretell_observe::log;
use foretell_onnx::open::DeviceChoice;
use foretell_onnx::pace::Pace;
use foretell_parsers::parse::{ReasoningFormat, ToolFormat};

/// Serves an ONNX model over the OpenAI API.
#[derive(Args, Clone, Debug)]
pub struct TargetArgs {
    /// Folder with model.onnx, config.json, tokenizer.json and the chat template.
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// Address to listen on; :PORT is every IPv4 address, localhost:PORT is 127.0.0.1, port 0 a
    /// free one.
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:8000", value_parser = super::address)]
    pub listen: SocketAddr,
    /// The model's id; default: the folder's name.
    #[arg(long)]
    pub name: Option<String>,
    /// Device to run on: auto is CUDA if it is available, else the CPU; cuda is CUDA, or an error
    /// that names the missing part.
    #[arg(long, default_value = "auto", value_parser = one_of(DeviceChoice::NAMES))]
    pub device: DeviceChoice,
    /// Maximum number of concurrent sequences.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub lanes: u16,
    /// Maximum tokens per sequence; default: the model's limit.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub context: Option<u32>,
    /// Threads of one step; default: one per core.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Emulate another machine: each run sleeps until it has taken as long as it would take there,
    /// such as profile=h100-8b (rooflines: l4-7b, l4-8b, h100-8b, h100-70b, b200-70b; measured:
    /// cpu, llama-server, onnx, onnx-inflated), or
    /// step=60ms,base=1.35,node=0.025,growth=0.02,prompt=0.1ms.
    /// A plain step takes `step`; a verify request of n drafted tokens step·(base + node·n); a run
    /// of k sequences 1 + growth·(k − 1) times as long; a prompt token that is not in the cache
    /// `prompt`. All but `step` are optional. slow=N: each run takes N times as long, for machines
    /// that cannot keep up. For measuring and testing only.
    #[arg(long, value_name = "COSTS")]
    pub pace: Option<Pace>,
    /// Format of tool calls, as of vLLM's --tool-call-parser; default: none, and tools are refused.
    #[arg(long, value_name = "NAME", value_parser = tool_format)]
    pub tool_parser: Option<ToolFormat>,
    /// Format of reasoning, as of vLLM's --reasoning-parser; default: none.
    #[arg(long, value_name = "NAME", value_parser = reasoning_format)]
    pub reasoning_parser: Option<ReasoningFormat>,
    /// Lowest level of log lines.
    #[arg(long, value_name = "LEVEL", env = "FORETELL_LOG_LEVEL", default_value = "info",
        value_parser = ["error", "warn", "info", "debug", "trace"])]
    pub log_level: String,
    /// Format of log lines; auto is text on a terminal and JSON elsewhere.
    #[arg(long, value_name = "FORMAT", env = "FORETELL_LOG_FORMAT", default_value = "auto",
        value_parser = one_of(LogFormat::NAMES))]
    pub log_format: LogFormat,
}

/// Serves until a signal and logs to standard error. Returns the exit code: 0, or 1 if the start
/// failed.
pub fn main(args: TargetArgs) -> u8 {
    log::init(args.log_format, &args.log_level);
    let exit = run(args);
    log::flush(Duration::from_secs(1));
    exit
}

/// Parses one of these names.
fn one_of<T: Copy + Send + Sync + 'static>(
    names: &'static [(&'static str, T)],
) -> impl TypedValueParser<Value = T> {
    let value = |name: String| names.iter().find(|(known, _)| *known == name).map(|(_, value)| *value);
    PossibleValuesParser::new(names.iter().map(|(name, _)| *name))
        .try_map(move |name| value(name).ok_or("unknown value"))
}

fn tool_format(name: &str) -> Result<ToolFormat, String> {
    let known = || ToolFormat::ALL.into_iter().flat_map(ToolFormat::names).copied().collect::<Vec<_>>();
    ToolFormat::from_name(name).ok_or_else(|| format!("allowed {}", known().join(", ")))
}

fn reasoning_format(name: &str) -> Result<ReasoningFormat, String> {
    let known =
        || ReasoningFormat::ALL.into_iter().flat_map(ReasoningFormat::names).copied().collect::<Vec<_>>();
    ReasoningFormat::from_name(name).ok_or_else(|| format!("allowed {}", known().join(", ")))
}

/// As [`main`], without starting the log.
pub fn run(args: TargetArgs) -> u8 {
    match serve::run(args) {
        Ok(()) => 0,
        Err(error) => {
            super::complain(&format_args!("foretell target: {error}"));
            1
        }
    }
}

mod serve {
    use std::io::Write;
    use std::time::Duration;

    use tokio::net::TcpListener;

    use super::TargetArgs;
    use crate::app::served;
    use crate::app::signals::Signals;
    use foretell_net::http::listen::Stop;
    use foretell_onnx::open::Options;
    use foretell_onnx::pace::Pace;
    use foretell_onnx::target::open::{Opened, open};
    use foretell_parsers::parse::Parsers;

    /// Time that open answers may continue after a signal.
    const GRACE: Duration = Duration::from_secs(30);

    type Failed = Box<dyn std::error::Error>;

    pub(super) fn run(args: TargetArgs) -> Result<(), Failed> {
        let options = Options {
            device: args.device,
            lanes: usize::from(args.lanes),
            context: args.context.map(|context| context as usize),
            threads: args.threads.map_or(0, usize::from),
            ..Options::default()
        };
        let mut opened = open(&args.model, args.name, &options, args.pace)?;
        let parsers = Parsers { tools: args.tool_parser, reasoning: args.reasoning_parser };
        let markers = |_| format!("the vocabulary lacks a marker of its parsers ({parsers})");
        opened.app = opened.app.with_parsers(parsers).map_err(markers)?;
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        runtime.block_on(listen(opened, args.listen, args.pace))
    }

    async fn listen(opened: Opened, address: std::net::SocketAddr, pace: Option<Pace>) -> Result<(), Failed> {
        if let Some(pace) = pace {
            tracing::warn!(%pace, "paced: every run takes as long as it would on another machine, not as long as here");
        }
        let listener = TcpListener::bind(address).await.map_err(|error| format!("{address}: {error}"))?;
        let address = listener.local_addr()?;
        let stop = Stop::default();
        tokio::spawn(stop_on_signal(Signals::catch()?, stop.clone()));
        // Scripts wait for this line. A closed standard output does not stop the server.
        let mut out = std::io::stdout();
        let paced = pace.map_or_else(String::new, |pace| format!("; paced {pace}"));
        let Opened { name, device, .. } = &opened;
        let _ = writeln!(out, "target {name} ready on http://{address} (device {device}{paced})");
        let _ = out.flush();
        let cut = served::serve(opened.app, listener, stop).await;
        if cut > 0 {
            tracing::warn!(cut, "connections were cut");
        }
        Ok(())
    }

    /// The first signal stops accepting; a later one, or the end of [`GRACE`], cuts the open
    /// connections.
    async fn stop_on_signal(mut signals: Signals, stop: Stop) {
        signals.stop().await;
        stop.accept.cancel();
        let _ = tokio::time::timeout(GRACE, signals.later_wish()).await;
        stop.cut.cancel();
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        target: TargetArgs,
    }

    #[test]
    fn flags_are_read_and_their_ranges_checked() {
        let line =
            "x --model m --listen 127.0.0.1:0 --device cpu --lanes 4 --context 512 --threads 2 --name n";
        let args = Cli::try_parse_from(line.split(' ')).unwrap().target;
        assert_eq!(
            (args.lanes, args.context, args.threads, args.device),
            (4, Some(512), Some(2), DeviceChoice::Cpu)
        );
        assert_eq!(args.pace, None, "nothing is paced by default");
        for wrong in [
            "x",
            "x --model m --lanes 0",
            "x --model m --device tpu",
            "x --model m --listen here",
            "x --model m --pace",
            "x --model m --pace 60ms",
        ] {
            assert!(Cli::try_parse_from(wrong.split(' ')).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_pace_is_read_and_an_invalid_one_refused_with_the_allowed_keys() {
        let read = |pace: &str| Cli::try_parse_from(["x", "--model", "m", "--pace", pace]);
        let pace = read("step=60ms,base=1.35,node=0.025").unwrap().target.pace;
        assert_eq!(pace.unwrap().to_string(), "step=60ms,base=1.35,node=0.025,growth=0,prompt=0ms");
        let refused = read("step=60ms,speed=2").err().unwrap().to_string();
        assert!(refused.contains("allowed profile, slow, step, base, node, growth, prompt"), "{refused}");
    }

    #[test]
    fn a_folder_without_a_model_fails_the_start() {
        let folder = tempfile::tempdir().unwrap();
        let line = ["x", "--model", folder.path().to_str().unwrap()];
        assert_eq!(run(Cli::try_parse_from(line).unwrap().target), 1);
    }
}
