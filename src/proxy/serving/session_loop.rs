//! The loop of one session: carries out its actions, and feeds it events.
//!
//! It decides nothing. The loop owns the sockets, the drafter slot and the client's sink; the
//! session makes every decision.

mod aborted;
mod plain_event;
mod state;

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use http::Response;

use self::aborted::AbortedCall;
use self::plain_event::many_choices;
pub use self::state::ClosedGate;
use self::state::{Actions, FirstAnswer, Gates, PlainFailure, ReportedUsage};
use crate::learning::answer_traits::AnswerTraits;
use crate::learning::comparison::Drawn;
use crate::learning::corpus::CorpusAccess;
use crate::serving::calls::Calls;
use crate::serving::drafting::{Drafting, Reply};
use crate::serving::exchange::{Exchange, Shared, Slot, Unsent};
use crate::serving::failure::Failure;
use crate::serving::parsing::{BufferedParser, Parts};
use crate::serving::passthrough;
use crate::serving::plain::{PlainEvent, PlainStream};
use crate::serving::plan::SessionPlan;
use crate::serving::sink::{End, Gone, Sink};
use foretell_core::draft::Source;
use foretell_core::session::{
    Action, ActionId, Difference, Doubted, Event, Fault, PlainRequest, Session, Summary,
};
use foretell_core::units::Tick;
use foretell_core::words::{PassthroughReason, TokenContext};
use foretell_engines::PromptStep;
use foretell_net::clock::Clock;
use foretell_net::fleet::FirstCall;
use foretell_net::http::body::Body;
use foretell_observe::metrics::Stage;
use foretell_parsers::text::Tokenizer;
use foretell_wire::openai::usage::Usage;
use foretell_wire::openai::{self, Request, Route};

/// The id of events that answer no action.
const WORLD: ActionId = ActionId::WORLD;

/// Outcome of one wait of the loop.
enum Happened {
    PlainEvent(PlainEvent),
    /// The result of an action; `None` if it was cancelled.
    Done(ActionId, Option<Reply>),
    ClientGone,
    Deadline,
}

/// One session with its calls, drafter and client.
pub struct SessionLoop {
    session: Session,
    calls: Calls,
    drafting: Drafting,
    slot: Slot,
    first_answer: FirstAnswer,
    shared: Shared,
    clock: Clock,
    sink: Sink,
    /// Prompt and output of the session, in the form that calls and drafter share.
    context: TokenContext,
    /// The plain call in flight.
    plain_stream: Option<PlainStream>,
    usage: ReportedUsage,
    actions: Actions,
    gates: Gates,
    failure: PlainFailure,
    /// Number of calls after the first so far.
    round: u32,
    parsing: AnswerParsing,
    /// The group of its policy that the request was drawn into.
    drawn: Drawn,
    answer_traits: Arc<AnswerTraits>,
    corpus: CorpusAccess,
}

struct AnswerParsing {
    /// The session has an output parser.
    parses: bool,
    /// Finds the marks of a chat that no parser here reads, and of which no text is cut or
    /// withheld.
    marks: Option<Arc<Tokenizer>>,
    /// Parses the complete output; `None` for a stream, and without an output parser.
    buffered: Option<BufferedParser>,
}

/// Parts from which a [`SessionLoop`] is built.
pub struct LoopSetup {
    pub plan: Arc<SessionPlan>,
    pub exchange: Exchange,
    pub calls: Calls,
    pub session: Session,
    /// The first call, whose answer has begun.
    pub plain_stream: PlainStream,
    pub sink: Sink,
    pub drafting: Drafting,
    pub corpus: CorpusAccess,
    /// The group of its policy that the request was drawn into.
    pub drawn: Drawn,
    pub first_call: Option<FirstCall>,
    pub answer_traits: Arc<AnswerTraits>,
    pub clock: Clock,
    pub closed: ClosedGate,
}

/// The end of a session.
pub struct Ended {
    /// The request's record and session permit.
    pub slot: Slot,
    /// How the output ended.
    pub end: End,
    /// The bytes of a JSON answer; `None` for a stream, or if no answer could be built.
    pub answer: Result<Option<Vec<u8>>, Gone>,
}

/// A first call without a usable answer: the request may be resent.
pub struct Unanswered {
    pub why: PassthroughReason,
    /// The request, and the replica to send it to.
    pub unsent: Unsent,
    /// The fleet and the memory budget.
    pub shared: Shared,
    /// The request's record and session permit.
    pub slot: Slot,
    /// The client's sink, where a stream continues.
    pub sink: Sink,
}

impl Unanswered {
    /// Passes the request through instead.
    pub async fn decline(self) -> Response<Body> {
        passthrough::decline(self.unsent, self.slot, &self.shared.fleet, self.why.into()).await
    }
}

impl SessionLoop {
    /// A session loop whose first call has begun to answer.
    pub fn new(setup: LoopSetup) -> Self {
        let LoopSetup { plan, exchange, calls, plain_stream, sink, answer_traits, clock, .. } = setup;
        let quirks = calls.engine().quirks();
        let prompt_ids_call = match calls.engine().prompt_step(&exchange.request, None) {
            Ok(PromptStep::Call(call)) if !plan.grammar.is_known() => Some(call),
            _ => None,
        };
        let Exchange { head, body, request, replica, shared, slot, .. } = exchange;
        let is_read = request.route == Route::Chat
            && !plan.parses
            && request.stop.is_empty()
            && request.stop_token_ids.is_empty();
        let request: Arc<Request> = Arc::from(request);
        let parses_buffered = plan.parses && sink.is_buffered();
        let parsing = AnswerParsing {
            parses: plan.parses,
            marks: is_read.then(|| Arc::clone(&plan.identity.tokenizer)),
            buffered: parses_buffered.then(|| BufferedParser::new(&plan.identity, &request, &answer_traits)),
        };
        let prompt_unchecked = prompt_ids_call.is_some() || quirks.usage.runs;
        let mut actions = Actions::default();
        if let Some(call) = prompt_ids_call {
            // A separate call requests the prompt's ids if the first answer does not carry them.
            let event = calls.clone().prompt_and_grammar(plan.grammar.clone(), request, call);
            actions.start(plain_stream.id, event.map(Reply::event));
        }
        Self {
            session: setup.session,
            calls,
            drafting: setup.drafting,
            slot,
            first_answer: FirstAnswer::new(Unsent { head, body, replica }, setup.first_call),
            shared,
            clock,
            sink,
            context: TokenContext::default(),
            plain_stream: Some(plain_stream),
            usage: ReportedUsage { prompt_unchecked, ..ReportedUsage::default() },
            actions,
            gates: Gates::new(setup.closed),
            failure: PlainFailure::new(),
            round: 0,
            parsing,
            drawn: setup.drawn,
            answer_traits,
            corpus: setup.corpus,
        }
    }

    /// Runs the session to its end. Hands the request back if its first call had no usable answer
    /// and it may be resent.
    pub async fn run(mut self) -> Result<Ended, Box<Unanswered>> {
        let mut summary = loop {
            match self.settle().await {
                Ok(Some(summary)) => break summary,
                Ok(None) => {}
                Err(Gone) => self.session.handle(WORLD, Event::ClientGone, self.clock.now()),
            }
            self.slot.record.set_session_bytes(self.session.bytes());
            let happened = self.wait().await;
            if let Some((unsent, why)) = self.resend_if_unanswered(&happened) {
                return Err(self.unanswered(unsent, why));
            }
            self.dispatch(happened).await;
        };
        let has_finished = summary.finish.is_some();
        // The client waits for a buffered answer and has received nothing of it.
        if !has_finished
            && self.first_answer.is_unreadable
            && let Some(unsent) = self.first_answer.unsent.take()
        {
            return Err(self.unanswered(unsent, PassthroughReason::UnreadableAnswers));
        }
        match self.plain_stream.take() {
            Some(plain_stream) if has_finished => plain_stream.drain(),
            _ => {}
        }
        if has_finished {
            self.corpus.learn(self.session.prompt(), self.session.output());
        }
        let engine_count = self.engine_count(&summary);
        let reasoning_tokens = self.parse_buffered(&mut summary, engine_count).await;
        self.note_parsing(&summary);
        summary.output_tokens =
            engine_count.unwrap_or(summary.output_tokens).max(self.reported_tokens(&summary));
        let prompt_tokens = self.session.prompt().len();
        self.slot.record.prompt_tokens(prompt_tokens);
        let mut usage = self.backend_usage().unwrap_or_else(|| Usage::new(prompt_tokens as u64));
        let aborted_call = self.usage.aborted_call.take();
        if summary.finish.is_some()
            && let Some(aborted_call) = aborted_call
            && let Some(details) = aborted_call.await
        {
            usage = usage.with_prompt_details(details);
        }
        let streamed = if summary.speculated { self.session.reasoning_tokens() } else { None };
        if let Some(tokens) = reasoning_tokens.or(streamed) {
            usage = usage.with_reasoning_tokens(tokens);
        }
        let cause = self.failure.text();
        let end = End {
            finish: summary.finish,
            stopped: self.session.stopped().cloned(),
            usage,
            broken: self.failure.failure,
        };
        self.slot.record.summarise(&summary);
        if let Some(seconds) = summary.token_seconds {
            self.drawn.ended(seconds);
        }
        if let Some((gain, basis)) = summary.projected_speedup {
            self.drawn.note_projected(gain, basis);
        }
        let answer = self.sink.finish(&end, self.slot.record.so_far()).await;
        if summary.finish.is_none() && answer.is_ok() {
            self.slot.record.failed(cause);
        }
        Ok(Ended { slot: self.slot, end, answer })
    }

    /// The usage that the first call has reported. In running usage there are nulls; at the end of
    /// a stream there are none.
    fn backend_usage(&self) -> Option<Usage> {
        let usage = self.usage.value.as_ref()?.usage()?;
        let is_running = self.calls.engine().quirks().usage.runs;
        Some(if is_running { usage.without_nulls() } else { usage })
    }

    /// Parses a complete output for a client that does not stream. Returns the number of its tokens
    /// that the server counts as reasoning, where that is known. An output whose parts are not
    /// known has no end. `engine_count`: see [`Self::engine_count`].
    async fn parse_buffered(&mut self, summary: &mut Summary, engine_count: Option<u32>) -> Option<u64> {
        let parser = self.parsing.buffered.take()?;
        summary.finish?;
        let output = self.session.output();
        let is_complete = engine_count.is_none_or(|count| count as usize == output.len());
        let ended = usize::from(self.session.stopped().is_some());
        let parts = match output.get(..output.len().saturating_sub(ended)) {
            Some(text) if is_complete => parser.parts(&self.calls, self.session.prompt(), text).await,
            _ => Parts::default(),
        };
        if let Some(difference) = parts.difference {
            summary.doubted = Some(Doubted::Parser);
            summary.misparsed = Some(difference);
        }
        match parts.message {
            Some(message) => self.sink.set_message(message),
            // The parts in the server's stream are used, if that contained the complete output.
            None if self.first_answer.is_current && !summary.speculated => {}
            None => {
                summary.finish = None;
                self.failure.causes.push("the server gave no parts of the output".to_owned());
            }
        }
        parts.reasoning_tokens
    }

    /// Records the evidence of this answer about the server's ids and parsers.
    fn note_parsing(&self, summary: &Summary) {
        if let Some(parts) = summary.parsed {
            self.answer_traits.has_parsed_alike(parts);
        }
        if summary.doubted == Some(Doubted::Parser) && self.answer_traits.has_misparsed() {
            let Difference { part, local, backend, at } = summary.misparsed.unwrap_or_default();
            tracing::warn!(
                parsers = %self.calls.engine().parsing.parsers,
                part,
                local_bytes = local,
                server_bytes = backend,
                first_difference = at,
                "the server parses an answer differently: its chats stay plain until it restarts"
            );
        }
        if let Some(doubted) = summary.doubted {
            self.shared.observer.metrics().doubted(doubted);
        }
    }

    /// The request to resend, with its replica and the reason, if nothing has reached the client
    /// and its answer cannot be read, ended before it had begun, or may have come from two engines.
    /// `None` otherwise, and after a silence: the client has waited long enough.
    fn resend_if_unanswered(&mut self, happened: &Happened) -> Option<(Unsent, PassthroughReason)> {
        let (begun, first) = (self.first_answer.has_begun, self.first_answer.is_current);
        let unreadable = match happened {
            Happened::PlainEvent(PlainEvent::End) if !begun => Some("it ends without an answer"),
            Happened::PlainEvent(PlainEvent::Unreadable(cause)) if !begun => Some(cause.as_str()),
            Happened::PlainEvent(PlainEvent::Chunk(event, _)) if first => {
                if self.sink.is_buffered() && many_choices(event) {
                    Some("it holds several choices where one was requested")
                } else if !begun && self.is_of_another(event) {
                    Some("it names another engine than the one that is known")
                } else {
                    None
                }
            }
            _ => None,
        };
        if let Some(cause) = unreadable {
            let unsent = self.first_answer.unsent.take()?;
            self.first_answer.set_unreadable(cause);
            return Some((unsent, PassthroughReason::UnreadableAnswers));
        }
        let lost = match happened {
            Happened::PlainEvent(PlainEvent::Broken(Fault::Plain, _)) => !begun,
            Happened::PlainEvent(PlainEvent::Chunk(event, _)) => !first && self.is_of_another(event),
            Happened::PlainEvent(PlainEvent::Broken(Fault::Changed, _))
            | Happened::Done(_, Some(Reply { event: Event::Fault(Fault::Changed), .. })) => {
                self.calls.changed();
                true
            }
            Happened::PlainEvent(PlainEvent::Broken(Fault::Lost, _))
            | Happened::Done(_, Some(Reply { event: Event::Fault(Fault::Lost), .. })) => true,
            _ => false,
        };
        if !lost {
            return None;
        }
        let mut unsent = self.first_answer.unsent.take()?;
        unsent.replica = self.shared.fleet.replica_for_retry(&unsent.replica)?;
        Some((unsent, PassthroughReason::Fault))
    }

    fn unanswered(self, unsent: Unsent, why: PassthroughReason) -> Box<Unanswered> {
        Box::new(Unanswered { why, unsent, shared: self.shared, slot: self.slot, sink: self.sink })
    }

    /// Records the engine that an event names. True if it is another than the session's while
    /// nothing has reached the client: the new engine is then sent the client's request unchanged.
    fn is_of_another(&self, event: &openai::Event) -> bool {
        let other = self.first_answer.unsent.is_some() && !self.calls.join_origin(event);
        if other {
            self.calls.changed();
        }
        other
    }

    /// The engine's count of output tokens, if the first call had the complete output: the
    /// number that the client would get without Foretell.
    fn engine_count(&self, summary: &Summary) -> Option<u32> {
        let by_first = self.first_answer.is_current && !summary.speculated && summary.finish.is_some();
        if by_first && self.usage.is_complete { self.usage.completion_tokens() } else { None }
    }

    /// Output tokens that the first call has reported so far, some possibly without an event; 0 if
    /// not needed.
    fn reported_tokens(&self, summary: &Summary) -> u32 {
        if !self.first_answer.is_current || summary.speculated || self.engine_count(summary).is_some() {
            return 0;
        }
        self.usage.completion_tokens().max(self.usage.counted).unwrap_or(0)
    }

    /// Carries out all queued actions of the session. Returns the summary once the session is over.
    async fn settle(&mut self) -> Result<Option<Summary>, Gone> {
        while let Some((id, action)) = self.session.poll() {
            match action {
                Action::Plain(method) => self.start_plain(id, method),
                Action::Draft { gamma, min_survival } => self.start_draft(id, gamma, min_survival),
                Action::Shadow { from } => self.start_shadow(id, from),
                Action::Verify(draft, method) => {
                    self.round += 1;
                    let drafter = draft
                        .nodes()
                        .first()
                        .map_or("none", |node| Source::name(node.votes.first().drafter.source));
                    self.slot.record.verifying(id, self.round, drafter, draft.len(), method);
                    let context = self.context.for_call(self.session.prompt(), self.session.output());
                    let call = self.calls.clone().verify(context, draft, method, self.round);
                    self.actions.start(id, call.map(Reply::event));
                }
                Action::Cancel(target) => self.cancel(target),
                Action::Passed(delta) => {
                    self.slot.record.emitted();
                    self.sink.passed(delta).await?;
                }
                Action::Emit(delta) => {
                    self.slot.record.emitted();
                    self.sink.emit(delta).await?;
                    if let Some(took) = self.sink.took() {
                        self.shared.observer.metrics().overhead(Stage::Stream, took);
                    }
                }
                Action::Finish(summary) => return Ok(Some(summary)),
            }
        }
        self.actions.late = false;
        self.sink.release().await?;
        Ok(None)
    }

    /// Compares the number of the prompt's ids with the backend's count, once both are known. They
    /// differ if the backend prepends a token, which changes the prompt.
    fn count_prompt(&mut self, id: ActionId) {
        let known = self.session.prompt().len() as u64;
        if self.usage.prompt_unchecked
            && known > 0
            && let Some(reported) = self.usage.prompt_tokens()
        {
            self.usage.prompt_unchecked = false;
            if reported != known {
                self.session.handle(id, Event::Doubt, self.clock.now());
            }
        }
    }

    fn start_plain(&mut self, id: ActionId, request: PlainRequest) {
        let PlainRequest::Continue { max_tokens } = request else { return };
        self.round += 1;
        self.first_answer.is_current = false;
        self.failure.failure = Failure::BrokeOff;
        let context = self.context.for_call(self.session.prompt(), self.session.output());
        let opening = self.calls.clone().plain_request(context, max_tokens, self.round).boxed();
        self.plain_stream = Some(PlainStream::opening(id, Arc::clone(self.calls.engine()), opening));
    }

    fn start_draft(&mut self, id: ActionId, gamma: usize, min_survival: f64) {
        self.context.follow(self.session.prompt(), self.session.output());
        let reply = self.drafting.draft(id, self.context.clone(), gamma, min_survival);
        self.actions.start(id, reply);
    }

    fn start_shadow(&mut self, id: ActionId, from: usize) {
        self.context.follow(self.session.prompt(), self.session.output());
        let reply = self.drafting.shadow(id, self.context.clone(), from);
        self.actions.start(id, reply);
    }

    /// Dropping a call closes its connection; dropping a drafter request frees the drafter's
    /// thread.
    fn cancel(&mut self, target: ActionId) {
        self.drafting.given_up(target, self.actions.late);
        self.slot.record.dropped(target);
        if let Some(plain_stream) = self.plain_stream.take_if(|plain_stream| plain_stream.id == target) {
            self.abandon(plain_stream);
        }
        self.actions.abort(target);
    }

    /// Abandons a plain call. Dropping it closes its connection; the first one is aborted by a
    /// separate call if its last event may contain something for the client that is not known
    /// otherwise.
    fn abandon(&mut self, plain_stream: PlainStream) {
        let goes_on = self.first_answer.is_current && !self.session.is_over();
        if goes_on
            && plain_stream.has_sent_id()
            && self.answer_traits.may_end_with_news(self.sink.shows_usage())
        {
            let (route, calls) = (self.sink.route(), self.calls.clone());
            let traits = Arc::clone(&self.answer_traits);
            self.usage.aborted_call = Some(AbortedCall::abort(plain_stream, route, calls, traits));
        }
    }

    async fn wait(&mut self) -> Happened {
        let deadline = self.session.deadline().map(|deadline| self.clock.until(deadline));
        let plain_stream = async {
            match &mut self.plain_stream {
                Some(plain_stream) => plain_stream.next().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = self.sink.gone() => Happened::ClientGone,
            Some((id, reply)) = self.actions.next() => Happened::Done(id, reply),
            plain_event = plain_stream => Happened::PlainEvent(plain_event),
            () = sleep(deadline) => Happened::Deadline,
        }
    }

    async fn dispatch(&mut self, happened: Happened) {
        let now = self.clock.now();
        if self.gates.update() {
            self.session.handle(WORLD, Event::Mode(self.gates.reported), now);
        }
        match happened {
            Happened::PlainEvent(plain_event) => self.plain_event(plain_event).await,
            Happened::Done(id, reply) => {
                let Some(reply) = reply else { return };
                self.drafting.answered(id);
                if let Some(seconds) = reply.seconds {
                    self.slot.record.drafted(Duration::from_secs_f64(seconds));
                }
                if let Event::VerifyResult(result) = &reply.event {
                    self.slot.record.computed(id, result.computed);
                }
                if reply.event == Event::Fault(Fault::Changed) {
                    self.changed();
                }
                self.handle(id, reply.event, now);
                self.count_prompt(id);
                self.slot.record.summarise(self.session.summary());
            }
            Happened::ClientGone => self.session.handle(WORLD, Event::ClientGone, now),
            Happened::Deadline => {
                self.actions.late = true;
                self.session.handle(WORLD, Event::Timeout, now);
            }
        }
    }

    /// Passes an event to the session, and records the time that this takes as stage `draft`.
    fn handle(&mut self, id: ActionId, event: Event, now: Tick) {
        let begun = Instant::now();
        self.session.handle(id, event, now);
        self.shared.observer.metrics().overhead(Stage::Draft, begun.elapsed());
    }
}

async fn sleep(duration: Option<Duration>) {
    match duration {
        Some(duration) => tokio::time::sleep(duration).await,
        None => std::future::pending().await,
    }
}
