//! The loop of one session: carries out its actions, and feeds it events.
//!
//! It decides nothing. The loop owns the sockets, the drafter slot and the client's sink; the
//! session makes every decision.

mod left;
mod plain_event;

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use futures_util::future::{AbortHandle, Abortable};
use futures_util::stream::{FuturesUnordered, StreamExt};
use futures_util::{Future, FutureExt};
use serde_json::Value;

use self::left::LeftDetails;
use self::plain_event::{many_choices, prompt_tokens};
use crate::clock::Clock;
use crate::fleet::FirstCall;
use crate::learning::answer_traits::AnswerTraits;
use crate::learning::comparison::Drawn;
use crate::learning::corpus::CorpusAccess;
use crate::observe::metrics::Stage;
use crate::serving::calls::Calls;
use crate::serving::drafting::{Drafting, Reply};
use crate::serving::exchange::{Declined, Exchange, Shared, Slot, Unsent};
use crate::serving::failure::Failure;
use crate::serving::parsing::{Parts, WholeParser};
use crate::serving::plain::{PlainEvent, PlainStream};
use crate::serving::run::Run;
use crate::serving::sink::{End, Gone, Sink};
use foretell_core::draft::Source;
use foretell_core::session::{
    Action, ActionId, Difference, Doubted, Event, Fault, PlainRequest, Session, Summary,
};
use foretell_core::units::Tick;
use foretell_core::words::{PassthroughReason, PlainReason, TokenContext};
use foretell_engines::openai::usage::Usage;
use foretell_engines::openai::{Request, Route};
use foretell_engines::text::Tokenizer;

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

type Pending = FuturesUnordered<BoxFuture<'static, (ActionId, Option<Reply>)>>;

/// One session with its calls, drafter and client.
pub struct SessionLoop {
    session: Session,
    calls: Calls,
    drafting: Drafting,
    slot: Slot,
    /// The request, which may be sent once more while the client has received nothing: for a stream
    /// until the first event is read, for a JSON answer until its end.
    unsent: Option<Unsent>,
    /// Its first call, until its answer turns out to be unreadable.
    first_call: Option<FirstCall>,
    /// The first call could not be read to its end.
    unreadable: bool,
    /// An event of the answer has been read.
    begun: bool,
    shared: Shared,
    clock: Clock,
    sink: Sink,
    /// Prompt and output of the session, in the form that calls and drafter share.
    context: TokenContext,
    /// A deadline of the session has just passed: actions cancelled now are counted as late.
    late: bool,
    /// The plain call in flight.
    plain_stream: Option<PlainStream>,
    /// No plain call after the first has been started.
    first: bool,
    /// The backend's usage, as last reported by the first call.
    usage: Option<Value>,
    /// Request for the cached tokens of the prompt, made once the session has left its first call;
    /// `None` if not needed.
    left: Option<LeftDetails>,
    /// `usage` covers the whole first call.
    usage_whole: bool,
    /// Output tokens of the first call as counted by the engine; `None` if it does not count.
    counted: Option<u32>,
    pending: Pending,
    aborts: Vec<(ActionId, AbortHandle)>,
    /// Reason for which speculation is not allowed now; `None` if it is.
    closed: Box<dyn Fn() -> Option<PlainReason> + Send + Sync>,
    /// The gate state that the session was last informed of.
    reported_gate: Option<PlainReason>,
    /// The error for the client if the output has no end.
    broken: Failure,
    /// Causes of broken plain calls, as text for the operator.
    causes: Vec<String>,
    /// Number of calls after the first so far.
    round: u32,
    /// The session has an output parser.
    parses: bool,
    /// Knows the marks of a chat that no parser here reads, and of which no text is left out or
    /// withheld.
    marks: Option<Arc<Tokenizer>>,
    /// Parses the complete output; `None` for a stream, and without an output parser.
    whole: Option<WholeParser>,
    /// The prompt's ids came from a separate call and have not been compared with the backend's own
    /// count.
    uncounted: bool,
    /// The group of its policy that the request was drawn into.
    drawn: Drawn,
    answer_traits: Arc<AnswerTraits>,
    remembering: CorpusAccess,
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

/// A first call without a usable answer: the request may be sent once more.
pub struct Unanswered {
    /// The reason.
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
    /// Hands the request back.
    pub fn decline(self) -> Box<Declined> {
        Box::new(Declined { unsent: self.unsent, slot: self.slot, why: self.why.into() })
    }
}

impl SessionLoop {
    /// A session loop whose first call has begun to answer.
    pub fn new(
        run: Run,
        exchange: Exchange,
        calls: Calls,
        session: Session,
        plain_stream: PlainStream,
        sink: Sink,
    ) -> Self {
        let closed = run.gates(&exchange);
        let quirks = calls.engine().dialect.quirks();
        let grammar = run.plan.grammar.clone();
        let prompt_ids_call =
            calls.engine().prompt_ids_call(&exchange.request).filter(|_| !grammar.is_told());
        let Exchange { head, body, request, replica, shared, slot, .. } = exchange;
        let whole = run.plan.parses && sink.is_whole();
        let is_read = request.route == Route::Chat
            && !run.plan.parses
            && request.stop.is_empty()
            && request.stop_token_ids.is_empty();
        let request: Arc<Request> = Arc::from(request);
        let mut session_loop = Self {
            session,
            parses: run.plan.parses,
            marks: is_read.then(|| Arc::clone(&run.plan.identity.tokenizer)),
            whole: whole.then(|| WholeParser::new(&run.plan.identity, &request, &run.answer_traits)),
            uncounted: prompt_ids_call.is_some() || quirks.usage.runs,
            drafting: run.drafting,
            answer_traits: run.answer_traits,
            remembering: run.remembering,
            drawn: run.drawn,
            slot,
            unsent: Some(Unsent { head, body, replica }),
            first_call: run.first_call,
            unreadable: false,
            begun: false,
            shared,
            clock: run.clock,
            sink,
            context: TokenContext::default(),
            late: false,
            first: true,
            usage: None,
            left: None,
            usage_whole: false,
            counted: None,
            pending: FuturesUnordered::new(),
            aborts: Vec::new(),
            closed,
            reported_gate: None,
            broken: Failure::BrokeOff,
            causes: Vec::new(),
            round: 0,
            calls,
            plain_stream: None,
        };
        if let Some(call) = prompt_ids_call {
            // A separate call requests the prompt's ids if the first answer does not carry them.
            let (calls, traits) = (session_loop.calls.clone(), Arc::clone(&session_loop.answer_traits));
            let asked = grammar.ask(calls, request, call, traits, session_loop.clock);
            session_loop.pend(plain_stream.id, asked.map(Reply::event));
        }
        session_loop.plain_stream = Some(plain_stream);
        session_loop
    }

    /// Runs the session to its end. Hands the request back if its first call brought nothing and it
    /// may be sent once more.
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
        // The client waits for a whole answer and has got nothing of it.
        if summary.finish.is_none()
            && self.unreadable
            && let Some(unsent) = self.unsent.take()
        {
            return Err(self.unanswered(unsent, PassthroughReason::UnreadableAnswers));
        }
        if let Some(plain_stream) = self.plain_stream.take().filter(|_| summary.finish.is_some()) {
            plain_stream.leave();
        }
        if summary.finish.is_some() {
            let session = &self.session;
            self.remembering.learn(session.prompt(), session.output());
        }
        let own = self.own_count(&summary);
        let counted = self.parse_whole(&mut summary, own).await;
        self.note_parsing(&summary);
        summary.output_tokens = own.unwrap_or(summary.output_tokens).max(self.reported_tokens(&summary));
        let prompt_tokens = self.session.prompt().len() as u64;
        self.slot.record.prompt_tokens(self.session.prompt().len());
        let usage = self.usage.as_ref().and_then(Usage::from_backend);
        let mut usage = usage.unwrap_or_else(|| Usage::new(prompt_tokens));
        if let Some(left) = self.left.take().filter(|_| summary.finish.is_some())
            && let Some(details) = left.await
        {
            usage = usage.with_prompt_details(details);
        }
        let streamed = || self.session.reasoning_tokens().filter(|_| summary.speculated);
        if let Some(tokens) = counted.or_else(streamed) {
            usage = usage.with_reasoning_tokens(tokens);
        }
        let end = End {
            finish: summary.finish,
            stopped: self.session.stopped().cloned(),
            usage,
            broken: self.broken,
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
            let cause =
                if self.causes.is_empty() { end.broken.to_string() } else { self.causes.join("; then ") };
            self.slot.record.failed(cause);
        }
        Ok(Ended { slot: self.slot, end, answer })
    }

    /// Parses a complete output for a client that does not stream. Returns the number of its tokens
    /// that the server counts as reasoning, where that is known. An output whose parts cannot be
    /// told has no end.
    async fn parse_whole(&mut self, summary: &mut Summary, own: Option<u32>) -> Option<u64> {
        let parser = self.whole.take().filter(|_| summary.finish.is_some())?;
        let output = self.session.output();
        let complete = own.is_none_or(|own| own as usize == output.len());
        let ended = usize::from(self.session.stopped().is_some());
        let text = output.get(..output.len().saturating_sub(ended));
        let parts = match text.filter(|_| complete) {
            Some(text) => parser.parts(&self.calls, self.session.prompt(), text).await,
            None => Parts::default(),
        };
        if let Some(difference) = parts.difference {
            summary.doubted = Some(Doubted::Parser);
            summary.misparsed = Some(difference);
        }
        match parts.whole {
            Some(whole) => self.sink.set_parts(whole),
            // The parts of the server's stream stand for them, where it has brought all of it.
            None if self.first && !summary.speculated => {}
            None => {
                summary.finish = None;
                self.causes.push("the server gave no parts of the output".to_owned());
            }
        }
        parts.reasoning_tokens
    }

    /// Notes what the answer has shown of the server's ids and parsers.
    fn note_parsing(&self, summary: &Summary) {
        if let Some(parts) = summary.parsed {
            self.answer_traits.has_parsed_alike(parts);
        }
        if summary.doubted == Some(Doubted::Parser) && self.answer_traits.has_misparsed() {
            let Difference { part, local: own, backend, at } = summary.misparsed.unwrap_or_default();
            tracing::warn!(
                parsers = %self.calls.engine().parsers,
                part,
                own_bytes = own,
                server_bytes = backend,
                first_difference = at,
                "the server parses an answer differently: its chats stay plain until it restarts"
            );
        }
        if let Some(doubted) = summary.doubted {
            self.shared.observer.metrics().doubted(doubted);
        }
    }

    /// The request to send once more, with its replica and the reason, if nothing has reached the
    /// client and its answer cannot be read, ended before it had begun, or may have come from two
    /// engines. `None` otherwise, and after a silence: the client has waited long enough.
    fn resend_if_unanswered(&mut self, happened: &Happened) -> Option<(Unsent, PassthroughReason)> {
        let unreadable = match happened {
            Happened::PlainEvent(PlainEvent::End) if !self.begun => Some("it ends without an answer"),
            Happened::PlainEvent(PlainEvent::Unreadable(cause)) if !self.begun => Some(cause.as_str()),
            Happened::PlainEvent(PlainEvent::Chunk(event, _)) if self.first && !event.is_null() => {
                if self.sink.is_whole() && many_choices(event) {
                    Some("it holds several choices where one was asked for")
                } else if !self.begun && self.is_of_another(event) {
                    Some("it names another engine than the one that is known")
                } else {
                    None
                }
            }
            _ => None,
        };
        if let Some(cause) = unreadable {
            let unsent = self.unsent.take()?;
            self.unreadable(cause);
            return Some((unsent, PassthroughReason::UnreadableAnswers));
        }
        let lost = match happened {
            Happened::PlainEvent(PlainEvent::Broken(Fault::Plain, _)) => !self.begun,
            Happened::PlainEvent(PlainEvent::Chunk(event, _)) => !self.first && self.is_of_another(event),
            Happened::PlainEvent(PlainEvent::Broken(Fault::Changed, _))
            | Happened::Done(_, Some(Reply { event: Event::Fault(Fault::Changed), .. })) => {
                self.calls.changed();
                true
            }
            Happened::PlainEvent(PlainEvent::Broken(Fault::Lost, _))
            | Happened::Done(_, Some(Reply { event: Event::Fault(Fault::Lost), .. })) => true,
            _ => false,
        };
        let mut unsent = if lost { self.unsent.take()? } else { return None };
        unsent.replica = self.shared.fleet.once_more(&unsent.replica)?;
        Some((unsent, PassthroughReason::Fault))
    }

    /// Notes that the first call's answer cannot be read, for the requests that follow.
    fn unreadable(&mut self, cause: &str) {
        self.unreadable = true;
        if let Some(call) = self.first_call.take() {
            call.unreadable(cause);
        }
    }

    fn unanswered(self, unsent: Unsent, why: PassthroughReason) -> Box<Unanswered> {
        Box::new(Unanswered { why, unsent, shared: self.shared, slot: self.slot, sink: self.sink })
    }

    /// Records the engine that an event names. True if it is another than the session's while
    /// nothing has reached the client: the new engine is then sent the client's own request only.
    fn is_of_another(&self, event: &Value) -> bool {
        let other = self.unsent.is_some() && !self.calls.join_origin(event);
        if other {
            self.calls.changed();
        }
        other
    }

    /// The engine's own count of output tokens, if one complete plain call brought the whole
    /// output: the number that the client would get without Foretell.
    fn own_count(&self, summary: &Summary) -> Option<u32> {
        let whole = self.first && !summary.speculated && self.usage_whole && summary.finish.is_some();
        self.usage.as_ref().filter(|_| whole).and_then(completion_tokens)
    }

    /// Output tokens that the first call has reported so far, some possibly without an event; 0 if
    /// not needed.
    fn reported_tokens(&self, summary: &Summary) -> u32 {
        if !self.first || summary.speculated || self.own_count(summary).is_some() {
            return 0;
        }
        let reported = self.usage.as_ref().and_then(completion_tokens);
        reported.max(self.counted).unwrap_or(0)
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
                    self.pend(id, call.map(Reply::event));
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
        self.late = false;
        self.sink.release().await?;
        Ok(None)
    }

    /// Compares the number of the prompt's ids with the backend's own count, once both are known.
    /// They differ if the backend prepends a token, which changes the prompt.
    fn count_prompt(&mut self, id: ActionId) {
        let reported = self.usage.as_ref().and_then(prompt_tokens);
        let known = self.session.prompt().len() as u64;
        if let (true, Some(reported), 1..) = (self.uncounted, reported, known) {
            self.uncounted = false;
            if reported != known {
                self.session.handle(id, Event::Doubt, self.clock.now());
            }
        }
    }

    fn start_plain(&mut self, id: ActionId, request: PlainRequest) {
        let PlainRequest::Continue { max_tokens } = request else { return };
        self.round += 1;
        self.first = false;
        self.broken = Failure::BrokeOff;
        let context = self.context.for_call(self.session.prompt(), self.session.output());
        let opening = self.calls.clone().plain_request(context, max_tokens, self.round).boxed();
        self.plain_stream = Some(PlainStream::opening(id, Arc::clone(self.calls.engine()), opening));
    }

    fn start_draft(&mut self, id: ActionId, gamma: usize, min_survival: f64) {
        self.context.follow(self.session.prompt(), self.session.output());
        let reply = self.drafting.draft(id, self.context.clone(), gamma, min_survival);
        self.pend(id, reply);
    }

    fn start_shadow(&mut self, id: ActionId, from: usize) {
        self.context.follow(self.session.prompt(), self.session.output());
        let reply = self.drafting.shadow(id, self.context.clone(), from);
        self.pend(id, reply);
    }

    fn pend(&mut self, id: ActionId, reply: impl Future<Output = Reply> + Send + 'static) {
        let (handle, registration) = AbortHandle::new_pair();
        self.aborts.push((id, handle));
        let reply = Abortable::new(reply, registration).map(move |reply| (id, reply.ok()));
        self.pending.push(reply.boxed());
    }

    /// Dropping a call closes its connection; dropping a drafter request frees the drafter's
    /// thread.
    fn cancel(&mut self, target: ActionId) {
        self.drafting.given_up(target, self.late);
        self.slot.record.dropped(target);
        if let Some(plain_stream) = self.plain_stream.take_if(|plain_stream| plain_stream.id == target) {
            self.leave(plain_stream);
        }
        for (_, handle) in self.aborts.iter().filter(|(id, _)| *id == target) {
            handle.abort();
        }
    }

    /// Leaves a plain call. Dropping it closes its connection; the first one is aborted by a
    /// separate call if its last event may hold something for the client that is not known
    /// otherwise.
    fn leave(&mut self, plain_stream: PlainStream) {
        let goes_on = self.first && !self.session.is_over();
        if goes_on && plain_stream.is_ours() && self.answer_traits.may_end_with_news(self.sink.shows_usage())
        {
            let (route, calls) = (self.sink.route(), self.calls.clone());
            self.left = Some(LeftDetails::ask(plain_stream, route, calls, Arc::clone(&self.answer_traits)));
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
            Some((id, reply)) = self.pending.next() => Happened::Done(id, reply),
            plain_event = plain_stream => Happened::PlainEvent(plain_event),
            () = sleep(deadline) => Happened::Deadline,
        }
    }

    async fn dispatch(&mut self, happened: Happened) {
        let now = self.clock.now();
        let closed = (self.closed)();
        if closed != self.reported_gate {
            self.reported_gate = closed;
            self.session.handle(WORLD, Event::Mode(closed), now);
        }
        match happened {
            Happened::PlainEvent(plain_event) => self.plain_event(plain_event).await,
            Happened::Done(id, reply) => {
                self.aborts.retain(|(pending, _)| *pending != id);
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
                self.late = true;
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

fn completion_tokens(usage: &Value) -> Option<u32> {
    usage.get("completion_tokens")?.as_u64().and_then(|count| u32::try_from(count).ok())
}

async fn sleep(duration: Option<Duration>) {
    match duration {
        Some(duration) => tokio::time::sleep(duration).await,
        None => std::future::pending().await,
    }
}
