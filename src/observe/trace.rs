//! Traces: a span for each request and each of its rounds, in the trace of the client that has sent
//! it.
//!
//! Spans are made from the record of a finished request, like every other view. Only their ids
//! exist before: backends get them in `traceparent`, so that the spans of an engine are children of
//! the call that caused them. Without a collector, and for requests that are not sampled, the
//! client's trace context is passed on as it is.

mod export;
mod spans;

use http::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::propagation::TextMapPropagator;
use opentelemetry::trace::{SpanContext, SpanId, TraceContextExt, TraceId, TraceState};
use opentelemetry_http::HeaderExtractor;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{IdGenerator, RandomIdGenerator};

pub use self::export::{Collector, CollectorError, Spans};
pub(super) use self::spans::spans;
use foretell_net::random::SharedSplitMix64;

/// The field that carries the ids of trace and parent, by W3C Trace Context.
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// The ids of a request's spans.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    id: TraceId,
    span: SpanId,
    /// The client's span; `None` if the trace begins here.
    parent: Option<SpanId>,
    state: TraceState,
}

impl Trace {
    /// Continues the client's trace, or begins one.
    pub(super) fn continued(parent: &SpanContext) -> Self {
        let known = parent.is_valid();
        Self {
            id: if known { parent.trace_id() } else { RandomIdGenerator::default().new_trace_id() },
            span: RandomIdGenerator::default().new_span_id(),
            parent: known.then(|| parent.span_id()),
            state: parent.trace_state().clone(),
        }
    }

    /// The id of the trace, 32 hexadecimal digits.
    pub fn id(&self) -> String {
        self.id.to_string()
    }

    /// The span id of a call after the first, by its number: deterministic, so that every part of
    /// the program gets the same.
    fn of_round(&self, round: u32) -> SpanId {
        let span = u64::from_be_bytes(self.span.to_bytes());
        let mixed = span ^ u64::from(round).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        SpanId::from(mixed.max(1))
    }

    /// Sets a span as the parent of the backend's spans; `round`: the number of the call, `None`
    /// for the first.
    pub fn inject(&self, round: Option<u32>, headers: &mut HeaderMap) {
        let span = round.map_or(self.span, |round| self.of_round(round));
        if let Ok(field) = HeaderValue::try_from(format!("00-{}-{span}-01", self.id)) {
            headers.insert(TRACEPARENT, field);
        }
    }
}

/// Sampling of log lines and spans.
#[derive(Debug)]
pub struct Sampling {
    /// Share of the requests with a line in the log, and with spans if the client has not decided
    /// that; 0 to 1.
    share: f64,
    random: SharedSplitMix64,
}

impl Sampling {
    pub fn new(share: f64) -> Self {
        Self { share, random: SharedSplitMix64::default() }
    }

    /// True if the next request is sampled.
    fn draw(&self) -> bool {
        self.share >= 1.0 || self.random.fraction() < self.share
    }

    /// The sampling decision for a request with these header fields. If the client does not sample
    /// its trace, the request has no spans, and a line by the share; if it does, the request has
    /// both.
    pub(super) fn of(&self, headers: &HeaderMap) -> TraceSettings {
        let context = TraceContextPropagator::new().extract(&HeaderExtractor(headers));
        let parent = context.span().span_context().clone();
        let line = self.draw() || parent.is_sampled();
        let spans = if parent.is_valid() { parent.is_sampled() } else { line };
        TraceSettings { line, spans, parent }
    }
}

/// The sampling decision for a request.
#[derive(Debug)]
pub(super) struct TraceSettings {
    /// It has a line in the log, even if it succeeds.
    pub line: bool,
    pub spans: bool,
    /// The client's part of its trace.
    pub parent: SpanContext,
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0";

    fn headers(flag: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(TRACEPARENT, format!("{PARENT}{flag}").parse().unwrap());
        headers
    }

    #[test]
    fn the_client_s_trace_goes_on_and_its_choice_is_kept() {
        let never = Sampling::new(0.0);
        let told = never.of(&headers("1"));
        assert!(told.spans && told.line);
        let trace = Trace::continued(&told.parent);
        let mut out = headers("1");
        trace.inject(None, &mut out);
        let told = out[TRACEPARENT].to_str().unwrap();
        assert!(told.starts_with("00-0af7651916cd43dd8448eb211c80319c-") && told.ends_with("-01"), "{told}");
        assert_ne!(told, format!("{PARENT}1"), "the span is our own");
        let told = Sampling::new(1.0).of(&headers("0"));
        assert!(told.line && !told.spans, "a client that does not sample wants no spans, and loses no line");
        assert!(!never.of(&headers("0")).line);
    }

    #[test]
    fn without_a_client_s_trace_the_share_decides() {
        let share = |share: f64| {
            let sampling = Sampling::new(share);
            (0..4_000).filter(|_| sampling.of(&HeaderMap::new()).spans).count()
        };
        assert_eq!((share(0.0), share(1.0)), (0, 4_000));
        assert!((600..1_400).contains(&share(0.25)), "{}", share(0.25));
        let broken = HeaderMap::from_iter([(TRACEPARENT, HeaderValue::from_static("00-zz-1-01"))]);
        assert!(Sampling::new(1.0).of(&broken).spans);
    }

    #[test]
    fn every_round_has_a_span_of_its_own() {
        let trace = Trace::continued(&SpanContext::empty_context());
        let rounds: std::collections::HashSet<SpanId> = (0..100).map(|round| trace.of_round(round)).collect();
        assert_eq!(rounds.len(), 100);
        assert_eq!(trace.of_round(7), trace.of_round(7));
    }
}
