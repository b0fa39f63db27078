//! `foretell serve`: runs the proxy.
//!
//! Once the configuration is read, all output goes to the log, including the addresses that it
//! listens on.

use std::time::Duration;

use super::Exit;
use crate::app::manager::Manager;
use crate::app::signals::Signals;
use crate::app::{self, Ended, Gateway, Running, files};
use foretell_config::flags::Flags;
use foretell_config::load::Loaded;
use foretell_config::variables::Environment;
use foretell_observe::log;

/// Time that the exit waits for the last log lines to be written.
const LAST_LINES: Duration = Duration::from_secs(1);
/// Time that the exit waits for blocking tasks.
const LAST_TASKS: Duration = Duration::from_secs(1);

/// Run the proxy in front of a server. Flags take precedence over `FORETELL_FLAG`, the file, and
/// the defaults.
#[derive(Clone, Debug, clap::Args)]
pub struct ServeArgs {
    #[command(flatten)]
    flags: Flags,
}

/// Runs until a signal. Every problem of the configuration is printed before it exits.
pub fn run(args: &ServeArgs) -> Exit {
    let loaded = match files::load(&args.flags, &Environment) {
        Ok(loaded) => loaded,
        Err(problems) => {
            for problem in &problems {
                super::complain(problem);
            }
            let wanted = super::check::wanted(&problems);
            if !wanted.is_empty() {
                super::complain(&wanted.trim_end());
            }
            return Exit::Usage;
        }
    };
    if loaded.process.backends.is_empty() {
        super::complain(
            &"foretell serve: no backend configured: pass --backend URL, or add one under `backends` of the config file",
        );
        return Exit::Usage;
    }
    log::init(loaded.process.observe.log, loaded.process.observe.level.name());
    loaded.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
    let exit = match super::runtime() {
        Ok(runtime) => {
            let exit = runtime.block_on(serve(loaded));
            // A name lookup under way cannot be interrupted, and its result is no longer needed.
            runtime.shutdown_timeout(LAST_TASKS);
            exit
        }
        Err(error) => {
            tracing::error!(%error, "cannot start");
            Exit::Unreachable
        }
    };
    log::flush(LAST_LINES);
    exit
}

async fn serve(loaded: Loaded) -> Exit {
    // From here on a signal stops the process in an orderly way.
    let mut signals = match Signals::catch() {
        Ok(signals) => signals,
        Err(error) => {
            tracing::error!(%error, "signals cannot be caught");
            return Exit::Unreachable;
        }
    };
    let manager = Manager::watching();
    let started = tokio::select! {
        started = app::start(loaded.process, loaded.policies) => started,
        _ = signals.stop() => {
            tracing::info!("ended by a signal before it had started");
            return Exit::Done;
        }
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
    manager.ready(&serving(&running.gateway));
    match running.until(signals, manager).await {
        Ended::Drained { cut: 0 } => tracing::info!("drained"),
        Ended::Drained { cut } => tracing::warn!(cut, "connections were cut after the grace"),
        Ended::AtOnce => tracing::warn!("ended by a second signal"),
    }
    Exit::Done
}

/// Logs the addresses: one line per listener for clients, then admin and metrics. Scripts wait for
/// these lines.
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

/// The addresses in a line.
fn serving(gateway: &Gateway) -> String {
    let addresses: Vec<String> = gateway.addresses.iter().map(ToString::to_string).collect();
    let admin = gateway.admin.map(|admin| format!(", admin on {admin}")).unwrap_or_default();
    format!("serving on {}{admin}", addresses.join(", "))
}

/// Logs the replicas that have not answered yet; those that have are logged already.
fn announce_unknown(running: &Running) {
    for replica in running.identities.silent() {
        tracing::info!(
            replica = replica.label(),
            url = replica.url(),
            "server type not identified yet; passing requests through until it is"
        );
    }
}
