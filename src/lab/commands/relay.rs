//! `foretell-lab relay`: compares Foretell and nginx as plain reverse proxies.

use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use super::complain;
use crate::relay::load::Load;
use crate::relay::{self, Options};
use foretell::cli::Exit;

/// Compare Foretell with nginx as plain reverse proxies in front of the same server, turn by turn.
#[derive(Clone, Debug, clap::Args)]
pub struct RelayArgs {
    /// Pairs of turns
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub pairs: usize,
    /// Seconds of a turn
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub seconds: u64,
    /// Requests per second
    #[arg(long, value_name = "N", default_value_t = Load::default().requests)]
    pub requests: u32,
    /// Event streams, with 50 events per second each
    #[arg(long, value_name = "N", default_value_t = Load::default().streams)]
    pub streams: usize,
    /// The foretell program [default: the one beside this program]
    #[arg(long, value_name = "F")]
    pub foretell: Option<PathBuf>,
    /// The nginx program
    #[arg(long, value_name = "F", default_value = "nginx")]
    pub nginx: PathBuf,
    /// Its configuration
    #[arg(long, value_name = "F", default_value = "tests/relay/nginx.conf")]
    pub config: PathBuf,
    /// Serve as the bare hyper proxy that the comparison runs besides the two others
    #[arg(long, value_name = "ADDR", hide = true, requires = "before")]
    pub bare: Option<SocketAddr>,
    /// The server behind it
    #[arg(long, value_name = "ADDR", hide = true)]
    pub before: Option<SocketAddr>,
    /// Write the figures as JSON
    #[arg(long, value_name = "F")]
    pub json: Option<PathBuf>,
}

/// Runs the comparison: one line per turn to standard error, the result to `out`.
pub fn run(args: &RelayArgs, out: &mut dyn Write) -> Exit {
    if let (Some(listen), Some(backend)) = (args.bare, args.before) {
        return bare(listen, backend);
    }
    let defaults = Options::default();
    let options = Options {
        foretell: args.foretell.clone().unwrap_or(defaults.foretell),
        nginx: args.nginx.clone(),
        config: args.config.clone(),
        pairs: args.pairs,
        turn: Duration::from_secs(args.seconds),
        load: Load { requests: args.requests, streams: args.streams, ..Load::default() },
        ..Options::default()
    };
    let report = match relay::run(&options, |line| complain(&line)) {
        Ok(report) => report,
        Err(error) => {
            complain(&format_args!("foretell-lab relay: {error}"));
            return Exit::Unreachable;
        }
    };
    // A closed pipe is not an error: the exit code still reports the result.
    let _ = write!(out, "{}", report.to_text());
    let written =
        args.json.as_ref().map_or(Ok(()), |path| std::fs::write(path, report.to_json().to_string()));
    if let Err(error) = written {
        complain(&format_args!("foretell-lab relay: --json: {error}"));
        return Exit::Unreachable;
    }
    if report.holds() { Exit::Done } else { Exit::FellShort }
}

fn bare(listen: SocketAddr, backend: SocketAddr) -> Exit {
    let served = tokio::runtime::Builder::new_current_thread().enable_all().build().and_then(|runtime| {
        let backend = backend.to_string().parse().map_err(std::io::Error::other)?;
        runtime.block_on(relay::bare::serve(listen, backend))
    });
    let Err(error) = served;
    complain(&format_args!("foretell-lab relay: {error}"));
    Exit::Unreachable
}
