//! `foretell serve`: the proxy.
//!
//! Whatever it has to say once the configuration is read goes into the log, the addresses included.

use std::time::Duration;

use crate::app::signals::Signals;
use crate::app::{self, Ended, Gateway, Running, files};
use crate::config::flags::{Environment, Flags};
use crate::config::load::Loaded;
use crate::config::process::LogFormat;
use crate::lab::Exit;
use crate::observe::log;

/// How long the end of the process waits for the last lines of its log to be written.
const LAST_LINES: Duration = Duration::from_secs(1);

/// Run the proxy before a server. Flags win over `FORETELL_FLAG`, the file, and the defaults.
#[derive(Clone, Debug, clap::Args)]
pub struct ServeArgs {
    #[command(flatten)]
    flags: Flags,
}

/// Runs until a signal. Every problem of the configuration is told at once.
pub fn run(args: &ServeArgs) -> Exit {
    let loaded = match files::load(&args.flags, &Environment) {
        Ok(loaded) => loaded,
        Err(problems) => {
            for problem in &problems {
                super::complain(problem);
            }
            return Exit::Usage;
        }
    };
    if loaded.process.backends.is_empty() {
        super::complain(&"foretell serve: no backend: give --backend URL, or backends in the process file");
        return Exit::Usage;
    }
    log::init(format(loaded.process.observe.log), loaded.process.observe.level.name());
    loaded.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
    let exit = match super::runtime() {
        Ok(runtime) => runtime.block_on(serve(loaded)),
        Err(error) => {
            tracing::error!(%error, "cannot start");
            Exit::Unreachable
        }
    };
    log::flush(LAST_LINES);
    exit
}

/// How log lines are written, as configured.
pub(super) fn format(configured: LogFormat) -> log::Format {
    match configured {
        LogFormat::Auto => log::Format::Auto,
        LogFormat::Json => log::Format::Json,
        LogFormat::Text => log::Format::Text,
    }
}

async fn serve(loaded: Loaded) -> Exit {
    // From here on a signal ends nothing by accident.
    let mut signals = match Signals::catch() {
        Ok(signals) => signals,
        Err(error) => {
            tracing::error!(%error, "signals cannot be caught");
            return Exit::Unreachable;
        }
    };
    let started = tokio::select! {
        started = app::start(loaded.process, loaded.policies) => started,
        _ = signals.wish() => return Exit::Done,
    };
    let running = match started {
        Ok(running) => running,
        Err(error) => {
            tracing::error!(%error, "cannot start");
            return Exit::Unreachable;
        }
    };
    announce(&running.gateway);
    announce_unknown(&running);
    match running.until(signals).await {
        Ended::Drained { cut: 0 } => tracing::info!("drained"),
        Ended::Drained { cut } => tracing::warn!(cut, "connections were cut after the grace"),
        Ended::AtOnce => tracing::warn!("ended by a second signal"),
    }
    Exit::Done
}

/// Where it listens, for people and for scripts: one line each for clients, then one for the operator.
fn announce(gateway: &Gateway) {
    for address in &gateway.addresses {
        tracing::info!(%address, "listening");
    }
    if let Some(address) = gateway.admin {
        tracing::info!(%address, "admin");
    }
    if let Some(address) = gateway.metrics {
        tracing::info!(%address, "metrics");
    }
}

/// Those of which nothing is known yet. The others are in the log already.
fn announce_unknown(running: &Running) {
    for (replica, _) in running.identities.all().iter().filter(|(_, identity)| identity.is_none()) {
        tracing::info!(replica = replica.label(), url = replica.url(), "relayed: not known to verify yet");
    }
}
