//! Every metric of Foretell: its name, type, labels and help text, in one list.
//!
//! The list is part of the public interface: dashboards and alert rules use the names. A metric can
//! only be made from an entry of this list, so the reference ([`reference()`], printed by `foretell
//! check --metrics`) is complete, and a test compares every panel and rule with it.

mod catalogue;

use std::fmt::Write;

pub use catalogue::*;

use foretell_core::words::{Conditions, Gate, Mode, PassthroughReason, PlainReason, VerifyMethod};

/// The name, labels and help text of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric {
    /// Its name, as Prometheus scrapes it.
    pub name: &'static str,
    /// The names of its labels.
    pub labels: &'static [&'static str],
    /// Quantity that it counts or measures, with its unit.
    pub help: &'static str,
}

/// A metric that only rises.
#[derive(Clone, Copy, Debug)]
pub struct Counter(pub Metric);

/// A metric that rises and falls.
#[derive(Clone, Copy, Debug)]
pub struct Gauge(pub Metric);

/// A metric that counts observations by size.
#[derive(Clone, Copy, Debug)]
pub struct Histogram {
    /// Its name, labels and help text.
    pub metric: Metric,
    /// Upper bounds of its buckets, ascending, in the metric's unit.
    pub buckets: &'static [f64],
}

/// An entry of the list.
#[derive(Clone, Copy, Debug)]
pub enum MetricEntry {
    /// A metric that only rises.
    Counter(Counter),
    /// A metric that rises and falls.
    Gauge(Gauge),
    /// A metric that counts observations by size.
    Histogram(Histogram),
}

impl From<Counter> for MetricEntry {
    fn from(counter: Counter) -> Self {
        Self::Counter(counter)
    }
}

impl From<Gauge> for MetricEntry {
    fn from(gauge: Gauge) -> Self {
        Self::Gauge(gauge)
    }
}

impl From<Histogram> for MetricEntry {
    fn from(histogram: Histogram) -> Self {
        Self::Histogram(histogram)
    }
}

impl MetricEntry {
    /// Its name, labels and help text.
    pub const fn metric(&self) -> &Metric {
        match self {
            Self::Counter(Counter(metric)) | Self::Gauge(Gauge(metric)) => metric,
            Self::Histogram(histogram) => &histogram.metric,
        }
    }

    /// The type, as Prometheus names it.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Counter(_) => "counter",
            Self::Gauge(_) => "gauge",
            Self::Histogram(_) => "histogram",
        }
    }
}

/// A stage of the work in Foretell itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Parsing and judging a request body.
    Parse,
    /// Finding the policy of a request, and evaluating it.
    Decide,
    /// One event of a session: drafts of lookups, choice, acceptance, text.
    Draft,
    /// Writing one piece of output in the client's form.
    Stream,
}

impl Stage {
    /// Every stage, in the order of a request.
    pub const ALL: [Self; 4] = [Self::Parse, Self::Decide, Self::Draft, Self::Stream];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Parse => "parse",
            Self::Decide => "decide",
            Self::Draft => "draft",
            Self::Stream => "stream",
        }
    }
}

/// Metrics that answer one question.
#[derive(Clone, Copy, Debug)]
pub struct Section {
    /// The heading in the reference.
    pub title: &'static str,
    pub entries: fn() -> Vec<MetricEntry>,
}

/// A row of the reference's table of labels.
struct Label {
    name: &'static str,
    meaning: &'static str,
    values: Vec<&'static str>,
}

fn labels() -> Vec<Label> {
    let open = |name, meaning| Label { name, meaning, values: Vec::new() };
    let closed = |name, meaning, values: &[&'static str]| Label { name, meaning, values: values.to_vec() };
    let plain = PlainReason::ALL.iter().map(|reason| reason.name());
    let passthrough = PassthroughReason::ALL.iter().map(|reason| reason.name());
    let mut reasons: Vec<&str> = plain.chain(passthrough).collect();
    reasons.sort_unstable();
    reasons.dedup();
    let methods: Vec<&str> = VerifyMethod::ALL.iter().map(|method| method.name()).collect();
    let modes: Vec<&str> = Mode::ALL.iter().map(|mode| mode.name()).collect();
    vec![
        open("backend", "a backend of the config file"),
        closed("basis", "where the costs behind a projection come from", &["guess", "probe", "measured"]),
        closed("bound", "of an interval that is valid at any time", &["low", "middle", "high"]),
        closed(
            "cause",
            "why a model drafter's answer was lost",
            &["timeout", "patience", "fault", "no_slot"],
        ),
        open("code", "why a request was refused, as in the error that its client got"),
        closed("code_class", "class of the status that the client got", &["1xx", "2xx", "3xx", "4xx", "5xx"]),
        open(
            "drafter",
            "the kind of drafter whose token came first in the draft; of the model queue: its name",
        ),
        closed(
            "event",
            "what happened to a text of the corpus",
            &["learnt", "known", "evicted", "expired", "dropped"],
        ),
        closed("field", "the part of a request that is in doubt", &["prompt", "output", "parser"]),
        closed("gate", "a live reason for plain decoding", &Gate::ALL.map(Gate::name)),
        open(
            "kind",
            "of drafts and errors of the store: as their metric says; of a replica's errors: \
             `server_error`, or why no answer came; of model runs: `decode`, `verify`, `prefill`, \
             `draft` of the head",
        ),
        closed("mode", "of a backend or of the process", &modes),
        open(
            "model",
            "a model of the config file, or one that a backend has answered for; 100 at most, then `other`",
        ),
        closed("outcome", "how a position was judged", &["relaxed", "unknown", "limited"]),
        closed("path", "how a request was served", &["speculated", "plain", "passthrough"]),
        closed("method", "how a draft was verified", &methods),
        open("policy", "a policy, without its revision"),
        open("position", "position in a draft, from 0 to 31"),
        closed("prompt_bucket", "tokens of the prompt", &PROMPT_BUCKETS.map(|(name, _)| name)),
        closed(
            "reason",
            "why a request was passed through or decoded plainly, or plainly to its end; empty if it was not",
            &reasons,
        ),
        open("replica", "backend and address of a replica"),
        open("result", "how it ended, as its metric says"),
        closed(
            "route",
            "the API that a request came by; `other` asks for no text; of `foretell target`: the path",
            &["completions", "chat", "responses", "messages", "other"],
        ),
        closed(
            "temperature",
            "range of a request's temperature, of which the first is exactly 0",
            &Conditions::TEMPERATURES,
        ),
        closed("signal", "a figure of an engine's load", &["running", "waiting", "kv"]),
        closed("source", "where a number of tokens comes from", &["reported", "estimated"]),
        closed("stage", "a part of Foretell's work", &Stage::ALL.map(Stage::name)),
        open("status", "HTTP status of an answer of `foretell target`"),
        closed("load", "range of an engine's load, 0 idle to 1 full or waiting", &Conditions::LOADS),
        closed("to", "state after a change: of a gate, or of a breaker", &["open", "closed", "half_open"]),
        open("version", "of the program, or the hash of a configuration"),
    ]
}

/// Values of the label `prompt_bucket`, each with the number of tokens that it lies below.
const PROMPT_BUCKETS: [(&str, usize); 6] = [
    ("<512", 512),
    ("<2k", 2_048),
    ("<8k", 8_192),
    ("<32k", 32_768),
    ("<128k", 131_072),
    (LONGEST, usize::MAX),
];
const LONGEST: &str = ">=128k";

/// The value of the label `prompt_bucket` for a prompt of `tokens` tokens.
pub fn prompt_bucket(tokens: usize) -> &'static str {
    let bucket = PROMPT_BUCKETS.iter().find(|(_, below)| tokens < *below);
    bucket.map_or(LONGEST, |(name, _)| name)
}

pub fn all() -> impl Iterator<Item = MetricEntry> {
    SECTIONS.iter().flat_map(|section| (section.entries)())
}

/// The reference of all metrics, as Markdown.
pub fn reference() -> String {
    let mut text = String::from(HEAD);
    for section in SECTIONS {
        let _ = write!(
            text,
            "\n## {}\n\n| metric | type | labels | meaning |\n|---|---|---|---|\n",
            section.title
        );
        for entry in (section.entries)() {
            let Metric { name, labels, help } = *entry.metric();
            let labels: Vec<String> = labels.iter().map(|label| format!("`{label}`")).collect();
            let _ = writeln!(text, "| `{name}` | {} | {} | {help} |", entry.kind(), labels.join(" "));
        }
    }
    text.push_str("\n## Labels\n\nA set of values that is listed is closed. Other values are names that the operator has chosen, or a small set that the\nmeaning describes.\n\n| label | meaning | values |\n|---|---|---|\n");
    for Label { name, meaning, values } in labels() {
        let values: Vec<String> = values.iter().map(|value| format!("`{value}`")).collect();
        let _ = writeln!(text, "| `{name}` | {meaning} | {} |", values.join(" "));
    }
    text
}

const HEAD: &str = "\
# Metrics

Written by `foretell check --metrics`; a test compares this page with the program. `/metrics` is served on the admin
listener and, where `metrics.address` is set, on a listener that has nothing but metrics and health.

Every request ends in one record, and metrics, log line, `/api/sessions` and `usage.foretell` are made from it: their
numbers agree. Counters of speculation mean what vLLM's mean for its speculation, so the same queries work:

| vLLM | Foretell |
|---|---|
| `vllm:spec_decode_num_drafts_total` | `foretell_spec_decode_num_drafts_total` |
| `vllm:spec_decode_num_draft_tokens_total` | `foretell_spec_decode_num_draft_tokens_total` |
| `vllm:spec_decode_num_accepted_tokens_total` | `foretell_spec_decode_num_accepted_tokens_total` |
| `vllm:spec_decode_num_accepted_tokens_per_pos_total` | `foretell_spec_decode_num_accepted_tokens_per_pos_total` |

Acceptance rate = accepted ÷ draft tokens; mean acceptance length = 1 + accepted ÷ drafts.
";

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn names_are_unique_and_follow_the_conventions_of_prometheus() {
        let mut names = HashSet::new();
        for entry in all() {
            let Metric { name, labels, help } = *entry.metric();
            assert!(names.insert(name), "{name} twice");
            assert_eq!(name.ends_with("_total"), matches!(entry, MetricEntry::Counter(_)), "{name}");
            assert!(help.ends_with('.') && !help.contains('|'), "{name}: {help}");
            let known: HashSet<&str> =
                labels.iter().copied().filter(|label| !label.contains(char::is_uppercase)).collect();
            assert_eq!(known.len(), labels.len(), "{name}");
        }
    }

    #[test]
    fn every_label_is_described() {
        let described: HashSet<&str> = labels().iter().map(|label| label.name).collect();
        let used: HashSet<&str> = all().flat_map(|entry| entry.metric().labels.to_vec()).collect();
        assert_eq!(used, described);
    }

    #[test]
    fn buckets_rise() {
        for entry in all() {
            let MetricEntry::Histogram(histogram) = entry else { continue };
            assert!(histogram.buckets.is_sorted(), "{}", histogram.metric.name);
        }
    }

    #[test]
    fn prompts_fall_into_the_bucket_of_their_length() {
        assert_eq!(prompt_bucket(0), "<512");
        assert_eq!(prompt_bucket(512), "<2k");
        assert_eq!(prompt_bucket(usize::MAX), ">=128k");
    }
}
