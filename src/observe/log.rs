//! The log: one stream of lines to standard error, never text of a prompt or an answer.
//!
//! No request ever waits for the log or fails because of it: a thread writes the lines (`writer`),
//! and lines that it cannot write are counted. A request's span carries its id, so every line
//! written while it is served has it.

mod json;
mod writer;

use std::any::Any;
use std::io::IsTerminal;
use std::time::Duration;

use tracing::Level;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use self::json::{JsonLines, Members};
pub use self::writer::{dropped, flush};
use super::trace::Trace;
use super::{Finished, Round};
use foretell_config::process::LogFormat;
use foretell_core::words::{Ledger, Reason};
use foretell_wire::openai::Api;

/// True if lines of this format are JSON.
fn is_json(format: LogFormat) -> bool {
    match format {
        LogFormat::Auto => !std::io::stderr().is_terminal(),
        LogFormat::Json => true,
        LogFormat::Text => false,
    }
}

/// Starts logging to standard error from `level` up (`error`, `warn`, `info`, `debug` or `trace`;
/// any other text means `info`). Libraries log at `info` at most: below it they spell out prompts,
/// character by character, in so many lines that others are dropped. Panics are logged too. A
/// second call changes nothing.
pub fn init(format: LogFormat, level: &str) {
    let level = level.parse().unwrap_or(LevelFilter::INFO);
    let shown = Targets::new().with_target("foretell", level).with_default(level.min(LevelFilter::INFO));
    let lines = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(writer::lines())
        // Otherwise they would be printed to standard error directly.
        .log_internal_errors(false);
    let started = if is_json(format) {
        lines.fmt_fields(Members).event_format(JsonLines).finish().with(shown).try_init()
    } else {
        lines.with_ansi(colours()).compact().finish().with(shown).try_init()
    };
    if started.is_ok() {
        std::panic::set_hook(Box::new(|panic| panicked(panic.payload(), panic.location())));
    } else {
        tracing::debug!("the log was already started");
    }
}

/// True if lines are coloured: on a terminal, unless `NO_COLOR` is set (no-color.org).
fn colours() -> bool {
    std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Logs a panic. Its message is shown only if it is a constant: a formatted one may quote a
/// client's text.
fn panicked(payload: &dyn Any, at: Option<&std::panic::Location<'_>>) {
    let message = payload.downcast_ref::<&'static str>().copied();
    let at = at.map(ToString::to_string);
    let thread = std::thread::current();
    tracing::error!(panic = message, at, thread = thread.name(), "a thread panicked");
    if thread.name() == Some("main") {
        // The process ends when `main` panics.
        flush(Duration::from_millis(200));
    }
}

/// The span of a request. It exists at every log level, so that every line has the id.
pub fn request_span(id: &str) -> tracing::Span {
    tracing::span!(Level::ERROR, "request", id)
}

/// A duration in milliseconds, with microseconds as decimals.
pub fn millis(time: Duration) -> f64 {
    time.as_micros() as f64 / 1e3
}

/// Milliseconds of all rounds together; `None` without a round.
fn spent(finished: &Finished, of: impl Fn(&Round) -> Duration) -> Option<f64> {
    (!finished.speculation.rounds.is_empty())
        .then(|| millis(finished.speculation.rounds.iter().map(of).sum()))
}

/// Logs a finished request: at `warn` if its answer broke off after a part of it was sent; else
/// requests for text at `info`, others at `debug`. To be called in the request's span, which has
/// its id.
pub(super) fn finished(finished: &Finished) {
    // Only a lossy rule causes drift.
    let drifted = Some(finished.speculation.drift).filter(|drift| *drift != Ledger::default());
    macro_rules! line {
        ($level:ident, $message:literal) => {
            tracing::$level!(
                backend = finished.upstream.backend,
                replica = Some(finished.upstream.replica.as_str()).filter(|replica| !replica.is_empty()),
                backend_request_id = finished.upstream.request_id,
                model = finished.model,
                route = finished.route.map(Api::name),
                path = finished.path.name(),
                reason = finished.reason.map(Reason::name),
                parameter = finished.parameter,
                policy = finished.policy,
                status = finished.status,
                rounds = finished.speculation.rounds.len(),
                drafted = finished.drafted(),
                accepted = finished.accepted(),
                mean_acceptance_length = finished.mean_acceptance_length(),
                drift = drifted.map(|drift| drift.charged),
                substitutions = drifted.map(|drift| drift.substitutions),
                prompt_tokens = Some(finished.usage.prompt_tokens).filter(|tokens| *tokens > 0),
                output_tokens = finished.usage.output_tokens,
                first_byte_ms = finished.timing.first_byte.map(millis),
                draft_ms = spent(finished, |round| round.draft),
                verify_ms = spent(finished, |round| round.verify),
                duration_ms = millis(finished.timing.duration),
                trace_id = finished.trace.as_ref().map(Trace::id),
                client_gone = finished.client_gone,
                error = finished.error,
                $message
            )
        };
    }
    if finished.broke_off() {
        line!(warn, "request");
    } else if finished.route.is_some() {
        line!(info, "request");
    } else {
        line!(debug, "request");
    }
}
