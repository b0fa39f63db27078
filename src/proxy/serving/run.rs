//! One request, from its first call to its answer.

use std::sync::Arc;
use std::time::Duration;

use http::header::CONTENT_TYPE;
use http::response::Parts;
use http::{Response, StatusCode};
use tokio::sync::Semaphore;
use tracing::Instrument;

use super::calls::Calls;
use super::drafting::Drafting;
use super::exchange::Exchange;
use super::failure::Failure;
use super::head;
use super::parsing;
use super::passthrough::{fail, pass_unread};
use super::plain::{Form, PlainStream};
use super::plan::SessionPlan;
use super::resend;
use super::ruling;
use super::session_loop::{ClosedGate, Ended, LoopSetup, SessionLoop};
use super::sink::Sink;
use crate::learning::answer_traits::AnswerTraits;
use crate::learning::comparison::Drawn;
use crate::learning::corpus::CorpusAccess;
use foretell_core::control::{Control, Presence};
use foretell_core::draft::LookupSpec;
use foretell_core::session::{Action, Decode, Ending, Limit, Permission, PlainRequest, Session, Start};
use foretell_core::units::{Tick, TokenId};
use foretell_core::words::{Mode, PassthroughReason, PlainReason};
use foretell_engines::{FirstToken, MaxTokens};
use foretell_net::clock::Clock;
use foretell_net::fleet::{Answer, FirstCall, Fresh, SendError};
use foretell_net::http::body::{Body, full};
use foretell_net::http::headers;
use foretell_net::http::memory::Level;
use foretell_parsers::text::Stepwise;
use foretell_wire::openai::{Prompt, Request, Route, sse};

/// Maximum bytes used from the beginning of a client's prediction: some ten thousand tokens.
pub(super) const MAX_PREDICTED: usize = 32 << 10;
/// Maximum delay of the first token by a prediction that is still being encoded.
const PREDICTED_WITHIN: Duration = Duration::from_millis(5);

pub(super) enum AnswerBody {
    /// The beginning of a stream.
    Stream(Answer),
    /// A separate answer with the first token.
    FirstToken(FirstToken),
}

/// The answer to an altered first call, by its head.
enum FirstAnswer {
    /// An event stream, as requested.
    Readable,
    /// A success in another form than requested: the cause.
    Unreadable(String),
    /// An error for which the additional fields may be the cause.
    Refused,
    /// Another error of the backend.
    Failed,
}

impl FirstAnswer {
    fn of<B>(response: &Response<B>) -> Self {
        let (status, fields) = (response.status(), response.headers());
        if !status.is_success() {
            return if may_refuse_fields(status) { Self::Refused } else { Self::Failed };
        }
        if headers::is_encoded(fields) {
            return Self::Unreadable(
                "its streams are compressed, although `identity` was requested".to_owned(),
            );
        }
        if !headers::is_event_stream(fields) {
            let kind = fields.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or("none");
            return Self::Unreadable(format!("a stream was requested, and its content-type is {kind}"));
        }
        Self::Readable
    }
}

/// True for the statuses with which servers refuse a body for its size or its additional fields.
pub(super) fn may_refuse_fields(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::BAD_REQUEST
            | StatusCode::METHOD_NOT_ALLOWED
            | StatusCode::NOT_ACCEPTABLE
            | StatusCode::LENGTH_REQUIRED
            | StatusCode::PAYLOAD_TOO_LARGE
            | StatusCode::UNSUPPORTED_MEDIA_TYPE
            | StatusCode::UNPROCESSABLE_ENTITY
            | StatusCode::INTERNAL_SERVER_ERROR
            | StatusCode::NOT_IMPLEMENTED
    )
}

/// A request that is being served: its plan, and the parts around its session.
pub(super) struct Run {
    pub plan: Arc<SessionPlan>,
    /// The group of its policy that the request was drawn into.
    pub drawn: Drawn,
    pub control: Arc<Control>,
    pub drafting: Drafting,
    pub corpus: CorpusAccess,
    pub clock: Clock,
    /// Counts a request that is passed on unchanged among those that the engine computes.
    pub present: Option<Presence>,
    pub answer_traits: Arc<AnswerTraits>,
    /// Permits to score drafters on an answer that was passed on unchanged.
    pub scoring: Arc<Semaphore>,
    /// Its altered first call; `None` if the request is passed on unchanged.
    pub first_call: Option<FirstCall>,
}

impl Run {
    /// Sends the first call and answers with its result.
    pub async fn begin(mut self, mut exchange: Exchange) -> Response<Body> {
        let route = exchange.request.route;
        let record = &mut exchange.slot.record;
        record.eligible(route, &self.plan.ruling.name);
        record.to(&exchange.replica);
        if self.drawn.group().in_control {
            record.control_group();
        }
        if self.corpus.reads_others() {
            record.reads_others();
        }
        if let Some(reason) = self.plan.ruling.rules.permission.never() {
            return self.pass(exchange, reason).await;
        }
        if self.plan.identity.engine.reports_first_token(&exchange.request) {
            return Box::pin(self.begin_with_first_token(exchange)).await;
        }
        let calls = Calls::new(&self.plan, &self.answer_traits, &exchange);
        let prediction = self.prediction(&exchange.request);
        let call = calls.engine().first_request(&exchange.request, self.plan.seed);
        exchange.slot.record.called();
        let closed = self.gates(&exchange)();
        let sent = (Presence::reading(Arc::clone(&self.control)), self.clock.now());
        let (fleet, replica) = (Arc::clone(&exchange.shared.fleet), Arc::clone(&exchange.replica));
        let response = match calls.first(call, |error| fleet.resends_to_same(&replica, error)).await {
            Ok((response, true)) => response,
            Ok((response, false)) => {
                Arc::make_mut(&mut self.plan).without_process(closed);
                response
            }
            Err(error) => return unanswered(exchange, error).await,
        };
        match FirstAnswer::of(&response) {
            FirstAnswer::Readable => {}
            FirstAnswer::Unreadable(cause) => return self.declined_unread(exchange, &cause).await,
            FirstAnswer::Refused => return self.refused(exchange, response).await,
            FirstAnswer::Failed => return self.pass_on(exchange, response),
        }
        if !exchange.request.stream {
            exchange.slot.record.gathers();
        }
        exchange.slot.record.answered(response.status(), response.headers());
        let (head, body) = response.into_parts();
        Box::pin(self.answer(exchange, calls, head, AnswerBody::Stream(body), sent, prediction)).await
    }

    /// The answer is in another form than requested: nothing of it is passed on, and the client's
    /// request is sent unchanged.
    async fn declined_unread(&mut self, exchange: Exchange, cause: &str) -> Response<Body> {
        tracing::debug!(replica = exchange.replica.label(), cause, "the answer cannot be read");
        if let Some(call) = self.first_call.take() {
            call.unreadable(cause);
        }
        exchange.decline(PassthroughReason::UnreadableAnswers).await
    }

    /// The altered request was refused. The additional fields may be the cause, so a few of these
    /// requests are sent unchanged too, to compare the answers.
    pub(super) async fn refused(mut self, exchange: Exchange, response: Response<Answer>) -> Response<Body> {
        let Some(call) = self.first_call.take().filter(FirstCall::may_compare) else {
            return self.pass_on(exchange, response);
        };
        let status = response.status();
        drop(response);
        let reason = self.without_output();
        let served = self.pass(exchange, reason).await;
        if served.status().is_success() {
            call.unreadable(&format!("{status}: it refuses requests with Foretell's additional fields"));
        }
        served
    }

    /// Passes on an answer that is no stream, usually an error, unchanged.
    pub(super) fn pass_on(&self, mut exchange: Exchange, response: Response<Answer>) -> Response<Body> {
        exchange.slot.record.set_plain_reason(self.without_output());
        pass_unread(exchange.slot.into_record(), response)
    }

    /// The plain reason of an answer without an output to draft for.
    fn without_output(&self) -> PlainReason {
        match self.plan.ruling.rules.permission {
            Permission::Plain(reason) | Permission::Shadow(reason) => reason,
            Permission::Speculate => PlainReason::UpstreamError,
        }
    }

    /// The client's prediction in the target's tokens, encoded while the backend works on the
    /// first call; empty if none would be used.
    pub(super) fn prediction(&self, request: &Request) -> impl Future<Output = Arc<[TokenId]>> + use<> {
        let drafts = !matches!(self.plan.ruling.rules.permission, Permission::Plain(_));
        let wanted = drafts && self.plan.ruling.rules.lookups.iter().any(LookupSpec::reads_prediction);
        let text = if wanted { request.prediction.as_deref() } else { None };
        let text = text
            .map(|text| text.get(..text.floor_char_boundary(MAX_PREDICTED)).unwrap_or_default().to_owned());
        let tokenizer = Arc::clone(&self.plan.identity.tokenizer);
        let encoding = text.map(|text| {
            tokio::task::spawn_blocking(move || tokenizer.encode(&text, false).unwrap_or_default().into())
        });
        async move {
            match encoding {
                // It is encoded while the backend works, and dropped if it is not ready within
                // [`PREDICTED_WITHIN`] of the answer.
                Some(encoding) => {
                    let ready = tokio::time::timeout(PREDICTED_WITHIN, encoding).await;
                    ready.ok().and_then(Result::ok).unwrap_or_default()
                }
                None => Arc::default(),
            }
        }
    }

    pub(super) async fn answer(
        self,
        exchange: Exchange,
        calls: Calls,
        head: Parts,
        body: AnswerBody,
        sent: (Presence, Tick),
        prediction: impl Future<Output = Arc<[TokenId]>>,
    ) -> Response<Body> {
        let mut start = self.start(&exchange.request);
        if let AnswerBody::FirstToken(first) = &body {
            start.first_token_alone = true;
            start.decode = self.decoder(&first.prompt, &exchange.request);
            start.prompt = Some(first.prompt.clone());
        }
        start.sent = Some(sent);
        start.resources.shared.prediction = prediction.await;
        start.resources.shared.proposes = calls.engine().proposes > 0;
        let mut session = Session::new(start, Arc::clone(&self.control), self.clock.now());
        let Some((id, Action::Plain(PlainRequest::First))) = session.poll() else {
            return exchange.decline(PassthroughReason::Fault).await;
        };
        let (stream, trailers) = (exchange.request.stream, exchange.client.trailers);
        let engine = Arc::clone(&self.plan.identity.engine);
        let longest = sse::longest_event(exchange.body.len());
        let form = Form { buffered: !stream, parsed: self.plan.parses, longest };
        let plain_stream = match body {
            AnswerBody::Stream(body) => PlainStream::begun(id, engine, body, form, calls.renamed()),
            AnswerBody::FirstToken(first) => {
                PlainStream::first_token(id, engine, &first, !stream, calls.renamed())
            }
        };
        let policy = self.plan.ruling.name.clone();
        if stream {
            let answer_traits = Arc::clone(&self.answer_traits);
            let (mut sink, out) =
                Sink::stream(&exchange.request, &self.plan.identity.engine, answer_traits, trailers);
            if self.plan.parses {
                sink.write_parts(self.plan.identity.engine.parsing.parsers);
            }
            let session_loop = self.session_loop(exchange, calls, session, plain_stream, sink);
            tokio::spawn(streamed(session_loop).in_current_span());
            let mut response = Response::new(out);
            *response.headers_mut() = head::of_stream(head.headers, trailers);
            head::name_policy(response.headers_mut(), Some(&policy));
            head::name_eligible(response.headers_mut());
            return response;
        }
        let json_type = self.plan.identity.engine.quirks().answers.json_type;
        let mut sink =
            Sink::buffered(&exchange.request, &self.plan.identity.engine, Arc::clone(&self.answer_traits));
        if self.plan.parses {
            sink.write_parts(self.plan.identity.engine.parsing.parsers);
        }
        let ended = self.session_loop(exchange, calls, session, plain_stream, sink).run().await;
        match ended {
            Ok(ended) => buffered(ended, head.headers, json_type, &policy),
            Err(unanswered) => unanswered.decline().await,
        }
    }

    fn session_loop(
        self,
        exchange: Exchange,
        calls: Calls,
        session: Session,
        plain_stream: PlainStream,
        sink: Sink,
    ) -> SessionLoop {
        SessionLoop::new(LoopSetup {
            closed: self.gates(&exchange),
            plan: self.plan,
            exchange,
            calls,
            session,
            plain_stream,
            sink,
            drafting: self.drafting,
            corpus: self.corpus,
            drawn: self.drawn,
            first_call: self.first_call,
            answer_traits: self.answer_traits,
            clock: self.clock,
        })
    }

    /// Checks whether the session may speculate now: `None` if it may, else the reason, by the
    /// process, the mode and the replica.
    pub fn gates(&self, exchange: &Exchange) -> ClosedGate {
        let shared = &exchange.shared;
        let (life, modes, memory) =
            (Arc::clone(&shared.life), Arc::clone(&shared.modes), Arc::clone(&shared.memory));
        let replica = Arc::clone(&exchange.replica);
        let (gates, control) = (self.plan.ruling.gates, Arc::clone(&self.control));
        Box::new(move || match modes.of(replica.backend()) {
            // While the process drains, requests decode plainly to the end.
            _ if life.is_draining() => Some(PlainReason::Draining),
            // Every verify request carries the complete context.
            Mode::Auto if memory.level() != Level::Enough => Some(PlainReason::GateMemory),
            Mode::Auto => {
                let signal = replica.load().map(|load| load.signal());
                if let Some(signal) = &signal {
                    control.with(|learnt| learnt.set_signal(signal));
                }
                ruling::closed(&gates, &replica, signal.as_ref())
            }
            Mode::Off | Mode::Observe => Some(PlainReason::Observe),
        })
    }

    pub(super) fn start(&self, request: &Request) -> Start {
        let prompt: &[TokenId] = match &request.prompt {
            Prompt::Ids(ids) => ids,
            Prompt::Text(_) | Prompt::Messages(_) => &[],
        };
        let engine = &self.plan.identity.engine;
        let max_tokens = match engine.limit(request) {
            MaxTokens::Tokens(tokens) => Some(tokens),
            MaxTokens::Context | MaxTokens::Unknown => None,
        };
        let parser = self.plan.parses.then(|| parsing::maker(&self.plan.identity, request));
        Start {
            prompt: (!prompt.is_empty()).then(|| prompt.to_vec()),
            limit: Limit { max_tokens, context: engine.context.and_then(|size| u32::try_from(size).ok()) },
            ending: Ending {
                stop: request.stop.clone(),
                stop_order: engine.quirks().stops.order,
                stop_buffer: engine.quirks().stops.hold,
                include_stop: request.include_stop,
                stop_token_ids: request.stop_token_ids.clone(),
                eos: engine.tokens.eos.clone(),
                ignore_eos: request.sampling.ignore_eos,
                min_tokens: request.sampling.min_tokens,
            },
            temperature: self.plan.sampling.temperature,
            decode: self.decoder(prompt, request),
            marks: match request.route {
                Route::Chat if parser.is_none() && !engine.parsing.unparsed => {
                    self.answer_traits.hidden(self.plan.identity.tokenizer.added())
                }
                Route::Chat | Route::Completions => Arc::default(),
            },
            parser,
            unconfirmed: self.plan.grammar.may_bind(),
            rules: self.plan.ruling.rules.clone(),
            resources: self.plan.resources.clone(),
            sent: None,
            first_token_alone: false,
            seed: self.plan.seed,
            noise: foretell_net::random::fresh_seed(),
        }
    }

    fn decoder(&self, prompt: &[TokenId], request: &Request) -> Box<dyn Decode> {
        let skip_special = !(self.plan.parses && parsing::decodes_special(&self.plan.identity, request));
        let decoder = self.plan.identity.tokenizer.detokenizer(prompt, skip_special);
        // The parts of an output are compared with those of the server's stream.
        let step = parsing::step(&self.plan.identity, self.plan.parses);
        if self
            .plan
            .identity
            .engine
            .quirks()
            .answers
            .broken_end
            .is_omitted(request.stream || self.plan.parses)
        {
            Box::new(Stepwise::new(decoder, step))
        } else {
            Box::new(decoder)
        }
    }
}

/// The replica gave no answer: passes the request through to another replica, or to another engine
/// at its address, or answers with the error.
pub(super) async fn unanswered(mut exchange: Exchange, error: SendError) -> Response<Body> {
    // Nothing was sent; the engine that is there now gets the client's request unchanged.
    if matches!(error, SendError::Changed { .. }) {
        return exchange.decline(PassthroughReason::Fault).await;
    }
    if let Some(other) = exchange.shared.fleet.other_for_retry(&exchange.replica, &error) {
        exchange.replica = other;
        exchange.head.extensions.insert(Fresh);
        return exchange.decline(PassthroughReason::Fault).await;
    }
    fail(exchange.slot.into_record(), &Failure::from(error))
}

/// Runs a session whose client streams: its head is sent, so errors go into the stream.
async fn streamed(session_loop: SessionLoop) {
    match session_loop.run().await {
        Ok(Ended { mut slot, answer, .. }) => slot.record.end(answer.is_err()),
        Err(unanswered) => resend::stream(*unanswered).await,
    }
}

/// The answer to a client that does not stream.
fn buffered(ended: Ended, headers: http::HeaderMap, json_type: &'static str, policy: &str) -> Response<Body> {
    let Ended { mut slot, end, answer } = ended;
    let record = &mut slot.record;
    let gone = answer.is_err();
    let mut response = match answer.ok().flatten() {
        Some(answer) if end.is_complete() => {
            record.sent_gathered();
            let mut response = Response::new(full(answer));
            *response.headers_mut() = head::of_json(headers, json_type);
            response
        }
        _ => end.broken.response(),
    };
    record.status(response.status());
    head::name(response.headers_mut(), record.so_far());
    head::name_policy(response.headers_mut(), Some(policy));
    record.end(gone);
    response
}
