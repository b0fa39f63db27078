//! `foretell serve`: the proxy.

use std::io::Write;

use crate::app;
use crate::app::signals::Signals;
use crate::app::{Ended, Gateway, files};
use crate::config::flags::{Environment, Flags};
use crate::config::load::Loaded;
use crate::config::process::LogFormat;
use crate::lab::Exit;
use crate::observe::log;

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
                eprintln!("{problem}");
            }
            return Exit::Usage;
        }
    };
    let format = match loaded.process.observe.log {
        LogFormat::Json => log::Format::Json,
        LogFormat::Text => log::Format::Plain,
    };
    log::init(format, loaded.process.observe.level.name());
    loaded.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
    match super::runtime() {
        Ok(runtime) => runtime.block_on(serve(loaded)),
        Err(error) => {
            eprintln!("foretell serve: {error}");
            Exit::Unreachable
        }
    }
}

async fn serve(loaded: Loaded) -> Exit {
    // From here on a signal ends nothing by accident.
    let mut signals = match Signals::catch() {
        Ok(signals) => signals,
        Err(error) => {
            eprintln!("foretell serve: cannot catch signals: {error}");
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
            eprintln!("foretell serve: {error}");
            return Exit::Unreachable;
        }
    };
    announce(&running.gateway);
    for (backend, identity) in running.identities.all() {
        let known = identity.map_or_else(
            || "relayed: not known to verify (yet)".to_owned(),
            |identity| format!("{} serves {}", identity.engine.dialect.name(), identity.epoch.model),
        );
        eprintln!("backend {} at {}: {known}", backend.label(), backend.url());
    }
    match running.until(signals).await {
        Ended::Drained { cut: 0 } => {}
        Ended::Drained { cut } => tracing::warn!(cut, "connections were cut after the grace"),
        Ended::AtOnce => tracing::warn!("ended by a second signal"),
    }
    Exit::Done
}

/// The ready line, for people and for scripts that wait.
fn announce(gateway: &Gateway) {
    let mut out = std::io::stdout();
    for address in &gateway.addresses {
        let _ = writeln!(out, "foretell ready on http://{address}");
    }
    if let Some(admin) = gateway.admin {
        let _ = writeln!(out, "admin on http://{admin}");
    }
    let _ = out.flush();
}
