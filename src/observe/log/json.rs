//! Log lines as JSON: time, level, fields of the enclosing spans, fields of the event, target.
//!
//! All are members of one object, so that `id` finds every line of a request. The fields of a span
//! are formatted once, when it begins, and copied into its lines.

use std::fmt::{self, Debug};

use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_log::NormalizeEvent;
use tracing_subscriber::field::RecordFields;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, FormattedFields};
use tracing_subscriber::registry::{LookupSpan, Scope};

/// Prefix of the targets of Foretell's crates.
const CRATE_PREFIX: &str = "foretell";

/// Formats an event as one JSON object per line.
pub(super) struct JsonLines;

impl<S, N> FormatEvent<S, N> for JsonLines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut line: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        // Crates that use `log` carry their level and target in fields.
        let normalized = event.normalized_metadata();
        let about = normalized.as_ref().unwrap_or_else(|| event.metadata());
        line.write_str("{\"timestamp\":\"")?;
        SystemTime.format_time(&mut line)?;
        write!(line, "\",\"level\":\"{}\"", about.level())?;
        let spans = context.event_scope().into_iter().flat_map(Scope::from_root);
        // Spans of other crates are omitted: their fields may have the same names with other
        // meanings.
        for span in spans.filter(|span| span.metadata().target().starts_with(CRATE_PREFIX)) {
            if let Some(fields) = span.extensions().get::<FormattedFields<N>>() {
                line.write_str(&fields.fields)?;
            }
        }
        context.format_fields(line.by_ref(), event)?;
        line.write_str(",\"target\":")?;
        string(&mut line, about.target())?;
        line.write_str("}\n")
    }
}

/// Formats fields as members of an object, each preceded by a comma.
pub(super) struct Members;

impl<'a> FormatFields<'a> for Members {
    fn format_fields<R: RecordFields>(&self, writer: Writer<'a>, fields: R) -> fmt::Result {
        let mut members = Written { to: writer, result: Ok(()) };
        fields.record(&mut members);
        members.result
    }
}

struct Written<'a> {
    to: Writer<'a>,
    result: fmt::Result,
}

impl Written<'_> {
    fn member(&mut self, field: &Field, value: impl FnOnce(&mut Writer<'_>) -> fmt::Result) {
        // The fields that `log` adds repeat the target.
        if self.result.is_err() || field.name().starts_with("log.") {
            return;
        }
        let name = field.name();
        let name = name.strip_prefix("r#").unwrap_or(name);
        self.result = write!(self.to, ",\"{name}\":").and_then(|()| value(&mut self.to));
    }
}

impl Visit for Written<'_> {
    fn record_f64(&mut self, field: &Field, value: f64) {
        // JSON has no infinity or NaN.
        self.member(field, |to| if value.is_finite() { write!(to, "{value}") } else { to.write_str("null") });
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.member(field, |to| write!(to, "{value}"));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.member(field, |to| write!(to, "{value}"));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.member(field, |to| write!(to, "{value}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.member(field, |to| string(to, value));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.member(field, |to| string(to, &format!("{value:?}")));
    }
}

fn string(to: &mut Writer<'_>, text: &str) -> fmt::Result {
    let quoted = serde_json::to_string(text).map_err(|_| fmt::Error)?;
    to.write_str(&quoted)
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;

    use parking_lot::Mutex;
    use serde_json::{Value, json};

    use super::*;

    #[derive(Clone, Default)]
    struct Kept(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Kept {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// The lines written while `log` runs.
    fn written(log: impl FnOnce()) -> Vec<Value> {
        let kept = Kept::default();
        let to = kept.clone();
        let lines = tracing_subscriber::fmt().with_writer(move || to.clone());
        let lines = lines.fmt_fields(Members).event_format(JsonLines).finish();
        tracing::subscriber::with_default(lines, log);
        let text = String::from_utf8(kept.0.lock().clone()).unwrap();
        text.lines().map(|line| serde_json::from_str(line).expect(line)).collect()
    }

    #[test]
    fn a_line_has_the_fields_of_its_spans_and_its_own_as_members() {
        let lines = written(|| {
            let span = super::super::request_span("r\"7");
            let inner = tracing::info_span!(parent: &span, "call", round = 3);
            let foreign = tracing::info_span!(target: "h2", parent: &inner, "stream", id = 7);
            let _entered = foreign.enter();
            let error = io::Error::other("a \"quoted\"\n\u{1b}[31mline");
            tracing::warn!(%error, ms = 65.692, none = None::<u32>, nan = f64::NAN, "was {}", "here");
        });
        let [line] = lines.as_slice() else { panic!("{lines:?}") };
        let names: Vec<&String> = line.as_object().unwrap().keys().collect();
        assert_eq!(names, ["timestamp", "level", "id", "round", "message", "error", "ms", "nan", "target"]);
        assert_eq!(
            (&line["level"], &line["id"], &line["round"]),
            (&json!("WARN"), &json!("r\"7"), &json!(3))
        );
        assert_eq!(
            (&line["message"], &line["ms"], &line["nan"]),
            (&json!("was here"), &json!(65.692), &Value::Null)
        );
        assert_eq!(line["error"], "a \"quoted\"\n\u{1b}[31mline");
    }

    #[test]
    fn outside_of_a_request_there_is_no_id() {
        let lines = written(|| tracing::info!("alone"));
        assert_eq!(lines[0].get("id"), None);
    }
}
