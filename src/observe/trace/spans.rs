//! The spans of one finished request. Names follow OpenTelemetry's conventions for generative AI
//! where there are any; for speculation there are none, so its attributes begin with `foretell.`.

use std::borrow::Cow;
use std::time::{Duration, SystemTime};

use opentelemetry::trace::{Event, SpanContext, SpanId, SpanKind, Status, TraceFlags};
use opentelemetry::{InstrumentationScope, KeyValue, Value};
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanLinks};

use super::Trace;
use crate::{Finished, Round};
use foretell_core::words::{Ledger, Reason};
use foretell_wire::openai::{Api, Route};

#[derive(Default)]
struct Attributes(Vec<KeyValue>);

impl Attributes {
    fn set(&mut self, name: &'static str, value: impl Into<Value>) {
        self.0.push(KeyValue::new(name, value));
    }

    fn maybe(&mut self, name: &'static str, value: Option<impl Into<Value>>) {
        if let Some(value) = value {
            self.set(name, value);
        }
    }
}

/// The span of the request, and one for each of its rounds.
pub(crate) fn spans(finished: &Finished, trace: &Trace) -> Vec<SpanData> {
    let mut spans = vec![request(finished, trace)];
    spans.extend(
        finished
            .speculation
            .rounds
            .iter()
            .filter(|round| !round.is_injected())
            .map(|round| self::round(finished, round, trace)),
    );
    spans
}

const fn operation(api: Option<Api>) -> &'static str {
    match api {
        Some(Api::Completion(Route::Chat) | Api::Responses | Api::Messages) => "chat",
        Some(Api::Completion(Route::Completions)) => "text_completion",
        None => "passthrough",
    }
}

fn request(finished: &Finished, trace: &Trace) -> SpanData {
    let mut is = Attributes::default();
    let operation = operation(finished.route);
    is.set("gen_ai.operation.name", operation);
    is.maybe("gen_ai.request.model", finished.model.clone());
    is.set("http.response.status_code", i64::from(finished.status));
    if finished.usage.prompt_tokens > 0 {
        is.set("gen_ai.usage.input_tokens", i64::from(finished.usage.prompt_tokens));
    }
    if finished.usage.output_tokens > 0 {
        is.set("gen_ai.usage.output_tokens", i64::from(finished.usage.output_tokens));
    }
    is.set("foretell.request_id", finished.id.clone());
    is.set("foretell.backend", finished.upstream.backend.clone());
    is.set("foretell.path", finished.path.name());
    is.maybe("foretell.reason", finished.reason.map(Reason::name));
    is.maybe("foretell.parameter", finished.parameter.clone());
    is.maybe("foretell.policy", finished.policy.clone());
    is.maybe(
        "foretell.time_to_first_byte_seconds",
        finished.timing.first_byte.map(|first| first.as_secs_f64()),
    );
    if !finished.speculation.rounds.is_empty() {
        is.set("foretell.rounds", finished.speculation.rounds.len() as i64);
        is.set("foretell.drafted", i64::from(finished.drafted()));
        is.set("foretell.accepted", i64::from(finished.accepted()));
    }
    is.maybe("foretell.mean_acceptance_length", finished.mean_acceptance_length());
    if finished.speculation.drift != Ledger::default() {
        is.set("foretell.drift.charged", finished.speculation.drift.charged);
        is.set("foretell.drift.substitutions", i64::from(finished.speculation.drift.substitutions));
    }
    is.set("foretell.client_gone", finished.client_gone);
    let failed = finished.has_failed();
    if failed {
        is.set("error.type", finished.status.to_string());
    }
    let status = match &finished.error {
        Some(error) => Status::error(error.clone()),
        None if failed => Status::error(""),
        None => Status::Unset,
    };
    let name = match &finished.model {
        Some(model) => Cow::Owned(format!("{operation} {model}")),
        None => Cow::Borrowed(operation),
    };
    let mut events = SpanEvents::default();
    if let Some(first) = finished.timing.first_byte {
        events.events.push(Event::new("first byte", finished.time + first, Vec::new(), 0));
    }
    let times = (finished.time, finished.timing.duration);
    SpanData {
        parent_span_is_remote: trace.parent.is_some(),
        status,
        events,
        ..span(trace, trace.span, trace.parent.unwrap_or(SpanId::INVALID), SpanKind::Server, name, times, is)
    }
}

fn round(finished: &Finished, round: &Round, trace: &Trace) -> SpanData {
    let mut is = Attributes::default();
    is.set("foretell.round", i64::from(round.number));
    is.set("foretell.drafter", round.drafter);
    is.set("foretell.drafted", i64::from(round.drafted));
    is.set("foretell.accepted", i64::from(round.accepted));
    is.set("foretell.draft_seconds", round.draft.as_secs_f64());
    let times = (finished.time + round.at, round.verify);
    let name = Cow::Borrowed("foretell.round");
    span(trace, trace.of_round(round.number), trace.span, SpanKind::Client, name, times, is)
}

fn span(
    trace: &Trace,
    id: SpanId,
    parent: SpanId,
    kind: SpanKind,
    name: Cow<'static, str>,
    (begun, took): (SystemTime, Duration),
    Attributes(attributes): Attributes,
) -> SpanData {
    SpanData {
        span_context: SpanContext::new(trace.id, id, TraceFlags::SAMPLED, false, trace.state.clone()),
        parent_span_id: parent,
        parent_span_is_remote: false,
        span_kind: kind,
        name,
        start_time: begun,
        end_time: begun + took,
        attributes,
        dropped_attributes_count: 0,
        events: SpanEvents::default(),
        links: SpanLinks::default(),
        status: Status::Unset,
        instrumentation_scope: InstrumentationScope::builder("foretell")
            .with_version(env!("CARGO_PKG_VERSION"))
            .build(),
    }
}
