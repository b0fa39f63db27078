//! The record of a request, from accepting it to the last byte of its answer.
//!
//! It is owned by the part that answers the request: the passthrough, a tunnel or a session loop.
//! When a client disconnects, futures and bodies are dropped, so the record is written by its
//! `Drop` at the latest.

use std::sync::Arc;
use std::time::{Duration, Instant};

use http::{HeaderMap, StatusCode};
use tracing::Span;

use super::log::request_span;
use super::{Finished, InFlight, Observer, Round, Speculation, Timing, TokenUsage};
use foretell_core::session::{ActionId, Judging, Summary};
use foretell_core::words::{PassthroughReason, PlainReason, Reason, VerifyMethod};
use foretell_drafts::joins::Registered;
use foretell_net::fleet::Replica;
use foretell_net::http::headers::{REQUEST_ID, is_event_stream};
use foretell_net::http::memory::Reservation;
use foretell_wire::openai::{Api, OutputTokens, Path, Route};

/// Maximum length of a text of the client in a record, bytes. Nothing else limits the names of
/// models and parameters.
const MAX_TEXT_BYTES: usize = 200;

/// A verify request that has not returned.
#[derive(Debug)]
struct Open {
    call: ActionId,
    number: u32,
    drafter: &'static str,
    /// Nodes of its draft.
    nodes: u32,
    since: Instant,
    draft: Duration,
    /// Tokens that its engine computed for it; `None` if it does not report them, or has not
    /// answered.
    computed: Option<u32>,
}

/// Moments from which the time that Foretell adds to the first token is computed.
#[derive(Debug, Default)]
struct Moments {
    /// The request and its body were read.
    request_read: Option<Instant>,
    /// The first call was sent.
    called: Option<Instant>,
    /// The first part of its answer was read.
    received: Option<Instant>,
    /// The last part of its answer was sent.
    emitted: Option<Instant>,
}

/// Collects a [`Finished`] record and passes it to the observer when the request ends or is
/// dropped. Until then the request counts as in flight.
#[derive(Debug)]
pub struct Record {
    observer: Arc<Observer>,
    span: Span,
    started: Instant,
    /// Boxed: it is large, and the record is moved often.
    finished: Box<Finished>,
    written: bool,
    /// The parts of its answer are gathered, and sent as one.
    gathers: bool,
    /// Duration, and true if the client had disconnected, if the answer ends before the record.
    over: Option<(Duration, bool)>,
    /// The client's API, if the request is a translation.
    translated_from: Option<Api>,
    request: Option<InFlight>,
    stream: Option<InFlight>,
    /// Verify requests without a used result, in the order in which they were sent.
    open: Vec<Open>,
    /// Time spent drafting so far for the next round.
    drafting: Duration,
    moments: Moments,
    /// Ties it to the rows of an engine that asks for drafts.
    joined: Option<Registered>,
    /// Memory reserved for the request and its session, and the part of the request, bytes.
    memory: Option<(Reservation, u64)>,
}

impl Record {
    /// A request that has just been accepted; it counts as passed through until it turns out to be
    /// a completion. `headers` are the client's: they may continue a trace.
    pub fn begin(observer: &Arc<Observer>, id: String, headers: &HeaderMap) -> Self {
        let request = Some(observer.metrics().begin_request());
        let span = request_span(&id);
        let mut finished = Box::new(Finished::new(Path::Passthrough, ""));
        finished.id = id;
        finished.reason = Some(PassthroughReason::Route.into());
        let (line, trace) = observer.begin(headers);
        finished.unsampled = !line;
        finished.trace = trace;
        Self {
            observer: Arc::clone(observer),
            span,
            started: Instant::now(),
            finished,
            written: false,
            gathers: false,
            over: None,
            translated_from: None,
            request,
            stream: None,
            open: Vec::new(),
            drafting: Duration::ZERO,
            moments: Moments::default(),
            joined: None,
            memory: None,
        }
    }

    pub fn so_far(&self) -> &Finished {
        &self.finished
    }

    /// The tracing span for all work on the request.
    pub fn span(&self) -> &Span {
        &self.span
    }

    /// When the request was accepted.
    pub fn started(&self) -> Instant {
        self.started
    }

    /// The observer, for metrics that do not wait for the end of the request.
    pub fn observer(&self) -> &Observer {
        &self.observer
    }

    /// Records the API of a request for text. It is passed through, since that API is not
    /// speculated on.
    pub fn set_api(&mut self, api: Api) {
        self.finished.route = Some(api);
    }

    /// Records that it is a chat, and the translation of a request by this API.
    pub fn translates(&mut self, api: Api) {
        self.translated_from = Some(api);
        self.finished.route = Some(api);
    }

    /// The client's API, of a request on this route.
    pub fn api(&self, route: impl Into<Api>) -> Api {
        self.translated_from.unwrap_or_else(|| route.into())
    }

    /// True if it is the translation of a request by another API.
    pub fn is_translation(&self) -> bool {
        self.translated_from.is_some()
    }

    /// Records that it is a completion that is passed through.
    pub fn passthrough(
        &mut self,
        route: impl Into<Api>,
        reason: PassthroughReason,
        parameter: Option<String>,
    ) {
        self.finished.path = Path::Passthrough;
        self.finished.route = Some(self.api(route));
        self.finished.reason = Some(reason.into());
        self.finished.parameter = parameter.map(truncated);
        self.finished.policy = None;
        self.finished.in_control_group = false;
    }

    /// Records that its session was abandoned before anything was sent to the client; the request
    /// is passed through instead.
    pub fn declined(&mut self, reason: PassthroughReason, parameter: Option<String>) {
        if let Some(route) = self.finished.route {
            self.passthrough(route, reason, parameter);
        }
        let Finished { speculation, usage, timing, .. } = &mut *self.finished;
        *speculation = Speculation { calls: speculation.calls, ..Speculation::default() };
        *usage = TokenUsage { prompt_tokens: usage.prompt_tokens, ..TokenUsage::default() };
        *timing = Timing { duration: timing.duration, ..Timing::default() };
        self.moments.received = None;
        self.moments.emitted = None;
        self.gathers = false;
        self.set_session_bytes(0);
    }

    /// Records that it is an eligible completion, under this policy
    /// (`name@revision`).
    pub fn eligible(&mut self, route: Route, policy: &str) {
        self.finished.path = Path::Plain;
        self.finished.route = Some(self.api(route));
        self.finished.reason = None;
        self.finished.policy = Some(policy.to_owned());
    }

    /// Records the policy (`name@revision`) by which a request is passed through.
    pub fn decided_by(&mut self, policy: Option<String>) {
        self.finished.policy = policy;
    }

    /// Ties it to the rows of an engine that asks for drafts, which report its rounds.
    pub fn joins(&mut self, registered: Registered) {
        self.joined = Some(registered);
    }

    /// Records that another replica answers it than the one that it was sent to first.
    pub fn moved(&mut self) {
        if let Some(registered) = &self.joined {
            registered.moved();
        }
    }

    /// Records that its engine takes Foretell's drafts into its steps; `plain`: the reason for
    /// which it gets none.
    pub fn injected(&mut self, plain: Option<Reason>) {
        self.finished.reason = Some(plain.unwrap_or(PassthroughReason::Inject.into()));
        self.finished.in_control_group = plain == Some(PlainReason::ControlGroup.into());
    }

    pub fn model(&mut self, model: String) {
        self.finished.model = Some(truncated(model));
    }

    /// Records that no replica could be reached; a completion counts as passed through then.
    pub fn unreachable(&mut self, cause: String) {
        self.finished.path = Path::Passthrough;
        self.finished.reason = Some(PassthroughReason::Unreachable.into());
        self.finished.parameter = None;
        // No policy decided about a request that never reached an engine.
        self.finished.policy = None;
        self.finished.in_control_group = false;
        self.finished.error = Some(cause);
    }

    /// Records the plain reason, where no session reports it.
    pub fn set_plain_reason(&mut self, reason: PlainReason) {
        self.finished.reason = Some(reason.into());
    }

    /// Records the cause of an incomplete answer or of an internal error.
    pub fn failed(&mut self, cause: String) {
        self.finished.error = Some(cause);
    }

    /// Releases this memory at the end of the answer.
    pub fn reserve(&mut self, reservation: Reservation) {
        let request = reservation.bytes();
        self.memory = Some((reservation, request));
    }

    /// Adjusts the reserved memory to the request's part and `bytes` for its session.
    pub fn set_session_bytes(&mut self, bytes: u64) {
        if let Some((memory, request)) = &mut self.memory {
            memory.follow(*request + bytes);
        }
    }

    /// Records the replica that it is sent to.
    pub fn to(&mut self, replica: &Replica) {
        replica.backend().clone_into(&mut self.finished.upstream.backend);
        replica.label().clone_into(&mut self.finished.upstream.replica);
    }

    pub fn status(&mut self, status: StatusCode) {
        self.finished.status = status.as_u16();
    }

    /// Records the head of the answer sent to the client; an event stream counts as in flight until
    /// the end.
    pub fn answered(&mut self, status: StatusCode, headers: &HeaderMap) {
        self.status(status);
        if is_event_stream(headers) && !self.gathers {
            self.stream.get_or_insert_with(|| self.observer.metrics().begin_stream());
        }
        let theirs = headers.get(REQUEST_ID).and_then(|id| id.to_str().ok());
        self.finished.upstream.request_id =
            theirs.filter(|id| *id != self.finished.id).map(|id| truncated(id.to_owned()));
    }

    /// Records when the request and its body had been read.
    pub fn request_read(&mut self, at: Instant) {
        self.moments.request_read = Some(at);
    }

    /// Records that the first call for the request is sent now.
    pub fn called(&mut self) {
        self.moments.called.get_or_insert_with(Instant::now);
    }

    /// Records that a part of the answer was read; the first one counts.
    pub fn received(&mut self) {
        self.moments.received.get_or_insert_with(Instant::now);
    }

    /// Records that the parts of the backend's stream are gathered, for a client that does not
    /// stream: they are not sent until [`Self::sent_gathered`].
    pub fn gathers(&mut self) {
        self.gathers = true;
    }

    /// Records that the gathered answer is sent.
    pub fn sent_gathered(&mut self) {
        self.gathers = false;
        self.emitted();
    }

    /// Records that a part of the answer is sent, or gathered; the first one sets `first_token`,
    /// and the first one that is sent `first_byte`.
    pub fn emitted(&mut self) {
        let now = Instant::now();
        self.first(now);
        if self.gathers {
            return;
        }
        match self.moments.emitted.replace(now) {
            None => self.finished.timing.first_byte = Some(now.saturating_duration_since(self.started)),
            Some(last) if self.stream.is_some() && self.finished.is_completion() => {
                self.observer.metrics().gap(self.finished.path, now.saturating_duration_since(last));
            }
            Some(_) => {}
        }
    }

    fn first(&mut self, now: Instant) {
        if self.finished.timing.first_token.is_some() {
            return;
        }
        self.finished.timing.first_token = Some(now.saturating_duration_since(self.started));
        if let Moments { request_read: Some(read), called: Some(called), received: Some(received), .. } =
            self.moments
        {
            self.finished.timing.added =
                Some(called.saturating_duration_since(read) + now.saturating_duration_since(received));
        }
    }

    /// Records that it is in the control group.
    pub fn control_group(&mut self) {
        self.finished.in_control_group = true;
    }

    /// Records that its drafters read texts of other clients.
    pub fn reads_others(&mut self) {
        self.finished.reads_others = true;
    }

    pub fn prompt_tokens(&mut self, tokens: usize) {
        self.finished.usage.prompt_tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
    }

    /// Adds time spent drafting for the next round.
    pub fn drafted(&mut self, took: Duration) {
        self.drafting += took;
    }

    /// Records that a verify request is sent with a draft of `drafter`, which has `nodes` nodes.
    /// `number`: that of the call among those after the first.
    pub fn verifying(
        &mut self,
        call: ActionId,
        number: u32,
        drafter: &'static str,
        nodes: usize,
        method: VerifyMethod,
    ) {
        let draft = std::mem::take(&mut self.drafting);
        let nodes = u32::try_from(nodes).unwrap_or(u32::MAX);
        self.open.push(Open { call, number, drafter, nodes, since: Instant::now(), draft, computed: None });
        self.finished.speculation.calls.sent(method);
    }

    /// Records the number of tokens that the engine reports to have computed for a verify request.
    pub fn computed(&mut self, call: ActionId, tokens: Option<u32>) {
        if let Some(open) = self.open.iter_mut().find(|open| open.call == call) {
            open.computed = tokens;
        }
    }

    /// Removes a verify request that was cancelled; the tokens that its engine computed for it are
    /// estimated.
    pub fn dropped(&mut self, call: ActionId) {
        let calls = &mut self.finished.speculation.calls;
        self.open.retain(|open| {
            let is_other = open.call != call;
            if !is_other {
                calls.estimated += u64::from(open.nodes) + 1;
            }
            is_other
        });
    }

    /// Records the output tokens of an answer that was passed on.
    pub fn counted(&mut self, tokens: &OutputTokens) {
        self.finished.usage.output_tokens = u32::try_from(tokens.count()).unwrap_or(u32::MAX);
        self.set_estimated(tokens.is_estimate());
    }

    /// Records that the number of output tokens is an estimate, or that it is not.
    pub fn set_estimated(&mut self, estimated: bool) {
        self.finished.usage.is_estimate = estimated && self.finished.usage.output_tokens > 0;
    }

    /// Takes over the session's summary, and records the rounds that are new in it.
    pub fn summarise(&mut self, summary: &Summary) {
        let finished = &mut self.finished;
        finished.path = if summary.speculated { Path::Speculated } else { Path::Plain };
        finished.reason = summary.reason.map(Reason::from);
        finished.usage.output_tokens = summary.output_tokens;
        let Speculation { rounds, calls, drift, balance } = &mut finished.speculation;
        *drift = summary.drift;
        *balance = summary.balance;
        for round in summary.each.iter().skip(rounds.len()) {
            // Earlier requests decided nothing: they are a part of this round.
            let until = self.open.partition_point(|open| open.call <= round.call);
            let requests: Vec<Open> = self.open.drain(..until).collect();
            let Some(&Open { number, drafter, since, computed, .. }) = requests.last() else { return };
            let draft = requests.iter().map(|open| open.draft).sum();
            let Judging { drafted, accepted, depth, conditions, .. } = *round;
            match computed {
                Some(computed) => calls.reported += u64::from(computed.saturating_sub(accepted + 1)),
                None => calls.estimated += u64::from(drafted.saturating_sub(accepted)),
            }
            let verify = since.elapsed();
            let at = since.saturating_duration_since(self.started);
            rounds.push(Round { drafted, accepted, depth, number, at, drafter, draft, verify, conditions });
        }
    }

    /// Records that the answer is over: the time until [`Self::end`] does not count.
    pub fn over(&mut self, client_gone: bool) {
        self.over.get_or_insert((self.started.elapsed(), client_gone));
        self.stream = None;
        self.request = None;
    }

    /// Ends the request and passes on the record, once. `client_gone`: the client disconnected
    /// before the end.
    pub fn end(&mut self, client_gone: bool) {
        if !std::mem::replace(&mut self.written, true) {
            let nothing = Finished::new(self.finished.path, "");
            let mut finished = std::mem::replace(&mut *self.finished, nothing);
            let (duration, client_gone) = self.over.unwrap_or_else(|| (self.started.elapsed(), client_gone));
            finished.timing.duration = duration;
            finished.client_gone = client_gone;
            if let Some(registered) = self.joined.take() {
                take_rounds(&mut finished, &registered, self.stream.is_some());
            }
            self.span.in_scope(|| self.observer.finish(finished));
        }
        self.stream = None;
        self.request = None;
        self.memory = None;
    }
}

/// Takes what the rows of a request have done, and reports the pace of its answer, which only an
/// event stream shows.
fn take_rounds(finished: &mut Finished, registered: &Registered, streams: bool) {
    let joined = &registered.joined;
    for round in joined.take_rounds() {
        finished.speculation.rounds.push(Round::injected(round));
    }
    let first = if streams && !finished.client_gone { finished.timing.first_token } else { None };
    let rest = joined.tokens().and_then(|tokens| tokens.checked_sub(1)).filter(|rest| *rest > 0);
    if let (Some(first), Some(rest)) = (first, rest) {
        let seconds = finished.timing.duration.saturating_sub(first).as_secs_f64();
        (joined.terms.ended)(seconds / rest as f64);
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let panicked = std::thread::panicking() && !self.written;
        if panicked {
            self.finished.status = StatusCode::INTERNAL_SERVER_ERROR.as_u16();
        }
        self.end(!panicked);
    }
}

/// A client's text, cut to [`MAX_TEXT_BYTES`].
fn truncated(mut text: String) -> String {
    if text.len() > MAX_TEXT_BYTES {
        text.truncate(text.floor_char_boundary(MAX_TEXT_BYTES));
        text.push('…');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use foretell_core::words::Conditions;

    fn observer() -> Arc<Observer> {
        Arc::new(Observer::new().unwrap())
    }

    fn sessions(observer: &Observer) -> serde_json::Value {
        observer.recent().to_json()
    }

    #[test]
    fn a_dropped_record_says_that_the_client_has_left() {
        let observer = observer();
        let mut record = Record::begin(&observer, "r".to_owned(), &HeaderMap::new());
        record.control_group();
        record.passthrough(Route::Chat, PassthroughReason::Tools, None);
        assert!(!record.so_far().in_control_group, "a passthrough request is in no group");
        record.control_group();
        record.unreachable("nobody answers".to_owned());
        assert!(!record.so_far().in_control_group, "nor is one that reached nobody");
        drop(record);
        let session = &sessions(&observer)[0];
        assert_eq!((&session["id"], &session["client_gone"]), (&"r".into(), &true.into()));
        assert!(observer.metrics().text().contains("foretell_requests_in_flight 0"));
    }

    #[test]
    fn it_is_written_once_and_its_rounds_are_the_sessions() {
        let observer = observer();
        let mut record = Record::begin(&observer, "r".to_owned(), &HeaderMap::new());
        record.eligible(Route::Chat, "p@12345678");
        let mut summary = Summary { output_tokens: 5, ..Summary::default() };
        record.drafted(Duration::from_millis(2));
        record.verifying(ActionId(1), 1, "prompt_lookup", 4, VerifyMethod::Tree);
        record.computed(ActionId(1), Some(7));
        summary.round(Judging {
            call: ActionId(1),
            drafted: 4,
            accepted: 3,
            depth: 4,
            conditions: Conditions::default(),
        });
        record.summarise(&summary);
        // A verify request without a result is not a round, nor is one that was dropped.
        record.verifying(ActionId(2), 2, "prompt_lookup", 4, VerifyMethod::Tree);
        record.summarise(&summary);
        record.verifying(ActionId(3), 3, "model", 2, VerifyMethod::FanOut);
        record.verifying(ActionId(4), 4, "model", 5, VerifyMethod::FanOut);
        record.dropped(ActionId(4));
        summary.round(Judging {
            call: ActionId(3),
            drafted: 2,
            accepted: 0,
            depth: 2,
            conditions: Conditions::default(),
        });
        record.summarise(&summary);
        record.status(StatusCode::OK);
        let calls = record.so_far().speculation.calls;
        // Reported: 7 computed for 4 tokens of output. Estimated: 6 of the request that was
        // dropped, and the 2 rejected tokens.
        assert_eq!((calls.reported, calls.estimated), (3, 8));
        record.end(false);
        record.end(true);
        drop(record);
        let all = sessions(&observer);
        assert_eq!(all.as_array().unwrap().len(), 1);
        let rounds: Vec<_> = all[0]["rounds"].as_array().unwrap().iter().collect();
        let told = |round: &serde_json::Value| {
            (round["drafted"].as_u64().unwrap(), round["accepted"].as_u64().unwrap())
        };
        assert_eq!(rounds.iter().map(|round| told(round)).collect::<Vec<_>>(), [(4, 3), (2, 0)]);
        assert_eq!(all[0]["client_gone"], false);
    }

    #[test]
    fn a_clients_text_is_kept_within_bounds() {
        assert_eq!(truncated("short".to_owned()), "short");
        let long = truncated("é".repeat(500));
        assert!(long.len() <= MAX_TEXT_BYTES + '…'.len_utf8() && long.ends_with("é…"));
    }
}
