//! The log: one line per finished request, never text of a prompt or an answer.

use tracing_subscriber::EnvFilter;
use tracing_subscriber::util::SubscriberInitExt;

use super::Finished;
use crate::openai::Path;

/// How log lines are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// One JSON object per line.
    #[default]
    Json,
    /// For reading.
    Plain,
}

/// Starts logging to standard error at `level` (a `tracing` filter). A second call changes nothing.
pub fn init(format: Format, level: &str) {
    let filter = EnvFilter::try_new(level).unwrap_or_else(|_| EnvFilter::new("info"));
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let started = match format {
        Format::Json => lines.json().flatten_event(true).with_current_span(false).finish().try_init(),
        Format::Plain => lines.compact().finish().try_init(),
    };
    if started.is_err() {
        tracing::debug!("the log was already started");
    }
}

/// Writes the line of a finished request; what is not a completion only at level `debug`.
pub(super) fn finished(finished: &Finished) {
    macro_rules! line {
        ($level:ident) => {
            tracing::$level!(
                id = finished.id,
                backend = finished.backend,
                model = finished.model,
                route = finished.route.map(crate::openai::Route::name),
                path = finished.path.name(),
                reason = finished.reason,
                parameter = finished.parameter,
                policy = finished.policy,
                status = finished.status,
                rounds = finished.rounds.len(),
                drafted = finished.drafted(),
                accepted = finished.accepted(),
                output_tokens = finished.output_tokens,
                first_byte_ms = finished.first_byte.map(|time| time.as_secs_f64() * 1e3),
                duration_ms = finished.duration.as_secs_f64() * 1e3,
                client_gone = finished.client_gone,
                error = finished.error,
                "request"
            )
        };
    }
    match finished.path {
        Path::Relayed => line!(debug),
        Path::Speculated | Path::Ridden | Path::Bypassed => line!(info),
    }
}
