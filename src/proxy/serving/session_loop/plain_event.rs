//! Handles the events of a session's plain calls: tokens for the session, and the events of the
//! first call that are passed on unchanged.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use super::{SessionLoop, WORLD};
use crate::serving::failure::Failure;
use crate::serving::plain::{Passing, PlainEvent, PlainStream};
use crate::serving::sink::Gone;
use foretell_core::session::{self, ActionId, Fault, Finish, Parsed, Tail};
use foretell_core::units::TokenId;
use foretell_engines::Chunk;
use foretell_wire::openai::event::Object;
use foretell_wire::openai::{Event, UsageText};

/// Maximum wait for the events that follow the end of an output.
const LAST: Duration = Duration::from_secs(1);
/// Maximum wait for the confirmation that the output of a JSON answer has ended.
const UNCONFIRMED: Duration = Duration::from_secs(30);

/// The continuation behind the end that a first call has reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rest {
    /// No more output.
    Read,
    /// No more output so far; the stream is still open.
    Open,
    /// More output.
    GoesOn,
}

impl SessionLoop {
    /// Handles an event of the plain call in flight.
    pub(super) async fn plain_event(&mut self, plain_event: PlainEvent) {
        let Some(id) = self.plain_stream.as_ref().map(|plain_stream| plain_stream.id) else { return };
        let now = self.clock.now();
        match plain_event {
            PlainEvent::Nothing => {
                let events = self.passing();
                if self.sink.pass(events).await.is_err() {
                    self.session.handle(WORLD, session::Event::ClientGone, now);
                }
            }
            PlainEvent::Chunk(event, chunk) => {
                if !self.calls.join_origin(&event) {
                    if !self.first_answer.is_current {
                        self.changed();
                        return self.session.handle(id, session::Event::Fault(Fault::Changed), now);
                    }
                    self.session.handle(id, session::Event::Doubt, now);
                }
                if self.first_answer.is_current && many_choices(&event) {
                    self.first_answer.set_unreadable("it holds several choices where one was requested");
                    return self.verbatim(id).await;
                }
                self.chunk(id, event, chunk).await;
            }
            PlainEvent::End => self.ended_early(id).await,
            PlainEvent::Unreadable(cause) => self.cannot_read(id, cause).await,
            PlainEvent::Broken(fault, cause) => {
                let events = self.passing();
                self.sink.store_error(events);
                match fault {
                    Fault::Silence => self.failure.failure = Failure::WentSilent,
                    Fault::Changed => self.failure.failure = Failure::Changed,
                    _ => {}
                }
                self.failure.add_cause(cause);
                self.session.handle(id, session::Event::Fault(fault), now);
            }
        }
    }

    /// Handles an event with tokens, or with the end of the output.
    async fn chunk(&mut self, id: ActionId, event: Arc<Event>, mut chunk: Box<Chunk>) {
        let now = self.clock.now();
        self.slot.record.received();
        if event.choice().is_some() {
            self.first_answer.begin(self.sink.is_buffered());
        }
        if chunk.finish.is_some() {
            event
                .value()
                .pointer("/choices/0")
                .into_iter()
                .for_each(|choice| self.answer_traits.note_end(choice));
        }
        if self.first_answer.is_current {
            match self.passed_on(&event, &chunk).await {
                Ok(Rest::Read) => {}
                Ok(Rest::Open) => return self.verbatim(id).await,
                Ok(Rest::GoesOn) => return self.goes_on(id).await,
                Err(Gone) => return self.session.handle(WORLD, session::Event::ClientGone, now),
            }
        }
        self.first_only(id, &chunk);
        self.note_marks(&chunk);
        let parsed = self.parsed(id, &mut chunk);
        let ended = chunk.finish.as_deref().map(|reason| self.ended(reason));
        if ended.is_some() && self.read_usage(chunk.usage.is_some()).await == Rest::GoesOn {
            return self.goes_on(id).await;
        }
        if !chunk.tokens.is_empty() || !parsed.is_empty() {
            // No stop text ends an output that is parsed.
            let by_token = matches!(chunk.finish.as_deref(), Some("stop" | "tool_calls"));
            let tail = match (&ended, chunk.ends || (self.parsing.parses && by_token)) {
                (None, _) => Tail::Open,
                (Some(_), true) => Tail::Stop,
                (Some(_), false) => Tail::Last,
            };
            if let Some(proposal) = chunk.proposal {
                self.session.handle(id, session::Event::Proposal(proposal), now);
            }
            self.handle(id, session::Event::Token { tokens: chunk.tokens, parsed, tail }, now);
        }
        self.end_if(id, ended);
    }

    /// The stream has ended, and its output has not.
    async fn ended_early(&mut self, id: ActionId) {
        let cause = "the stream ended without an end of the answer";
        let exact = self.session.may_continue();
        let is_first = self.first_answer.is_current;
        if is_first && !(exact && self.session.is_complete()) {
            self.first_answer.set_unreadable(cause);
        }
        if is_first && !exact && !self.sink.is_buffered() {
            return self.verbatim(id).await;
        }
        self.failure.add_cause(cause.to_owned());
        self.session.handle(id, session::Event::Fault(Fault::Plain), self.clock.now());
    }

    /// The first call cannot be read on from here. A stream that continues is passed on as it
    /// comes; otherwise the text is continued from its tokens, where that is exact. The request of
    /// a JSON answer for which neither is possible is resent.
    async fn cannot_read(&mut self, id: ActionId, cause: String) {
        self.first_answer.set_unreadable(&cause);
        let events = self.passing();
        if !self.sink.is_buffered() && self.is_followed().await {
            return match self.sink.pass(events).await {
                Ok(()) => self.verbatim(id).await,
                Err(Gone) => self.session.handle(WORLD, session::Event::ClientGone, self.clock.now()),
            };
        }
        self.sink.store_error(events);
        self.failure.add_cause(cause);
        self.session.handle(id, session::Event::Fault(Fault::Plain), self.clock.now());
    }

    /// True if the plain call in flight brings another event than its end.
    async fn is_followed(&mut self) -> bool {
        let Some(plain_stream) = &mut self.plain_stream else { return false };
        let next = plain_stream.next_unless_over().await;
        !matches!(next, None | Some(PlainEvent::End | PlainEvent::Broken(..)))
    }

    /// Text follows the end that the first call has reported.
    async fn goes_on(&mut self, id: ActionId) {
        let cause = "text follows its finish reason";
        self.first_answer.set_unreadable(cause);
        self.failure.add_cause(cause.to_owned());
        if self.sink.is_buffered() {
            return self.session.handle(id, session::Event::ClientGone, self.clock.now());
        }
        self.verbatim(id).await;
    }

    /// Records the marks in an event of a chat that no parser here reads, and whether its text
    /// contains them.
    fn note_marks(&self, chunk: &Chunk) {
        let Some(tokenizer) = &self.parsing.marks else { return };
        if !self.first_answer.is_current {
            return;
        }
        let is_mark = |token: &&TokenId| tokenizer.added().binary_search(token).is_ok();
        for &mark in chunk.tokens.iter().filter(is_mark) {
            let is_text = |text: String| chunk.text.contains(&text);
            let shown = chunk.more.is_empty() && tokenizer.token(mark).is_some_and(is_text);
            self.answer_traits.note_mark(mark, shown);
        }
    }

    /// The parts of the output in an event. Parts that are not understood, or not expected, are
    /// reported as doubt.
    fn parsed(&mut self, id: ActionId, chunk: &mut Chunk) -> Parsed {
        if !chunk.more.is_empty() {
            if self.parsing.parses
                && let Some(parsed) = chunk.parsed()
            {
                return parsed;
            }
            self.session.handle(id, session::Event::Doubt, self.clock.now());
        }
        Parsed::content(std::mem::take(&mut chunk.text))
    }

    /// An answer has come from another engine than the one that began: nothing of it is used.
    pub(super) fn changed(&mut self) {
        self.failure.failure = Failure::Changed;
        self.failure.add_cause(Failure::Changed.to_string());
        self.calls.changed();
    }

    /// From here on the first call is passed on unchanged, to its end, even if it breaks off.
    async fn verbatim(&mut self, id: ActionId) {
        self.session.handle(id, session::Event::Doubt, self.clock.now());
        self.sink.verbatim();
        self.first_answer.has_begun = true;
        self.first_answer.unsent = None;
        let event = match self.pass_rest().await {
            Ok(None) => session::Event::PlainEnded(Finish::Stop),
            Ok(Some(fault)) => session::Event::Fault(fault),
            Err(Gone) => session::Event::ClientGone,
        };
        self.session.handle(id, event, self.clock.now());
    }

    /// Passes on all that follows. Returns the fault with which it broke off, if it did.
    async fn pass_rest(&mut self) -> Result<Option<Fault>, Gone> {
        let Some(plain_stream) = &mut self.plain_stream else { return Ok(None) };
        let hung_up = self.sink.hung_up();
        self.slot.record.emitted();
        let sink = &mut self.sink;
        let rest = async {
            loop {
                sink.pass(plain_stream.passing()).await?;
                match plain_stream.next_unless_over().await {
                    None => return Ok(None),
                    Some(PlainEvent::Broken(fault, _)) => return Ok(Some(fault)),
                    Some(_) => {}
                }
            }
        };
        tokio::select! {
            rest = rest => rest,
            () = hung_up => Err(Gone),
        }
    }

    /// The events read from the plain call in flight since the last call of this function.
    fn passing(&mut self) -> Vec<Passing> {
        self.plain_stream.as_mut().map(PlainStream::passing).unwrap_or_default()
    }

    /// Passes on an event of the first call: unchanged to a client that streams, with those that
    /// follow the end of the output; for a JSON answer, its members other than text and tokens.
    async fn passed_on(&mut self, event: &Arc<Event>, chunk: &Chunk) -> Result<Rest, Gone> {
        self.sink.first(event);
        if let Some(after) = &chunk.after {
            self.sink.read_end(after);
        }
        if !chunk.more.is_empty() {
            self.answer_traits.has_parsed();
            self.sink.other(&chunk.more);
        }
        if self.sink.is_buffered() {
            return Ok(Rest::Read);
        }
        let mut events = self.passing();
        let mut rest = Rest::Read;
        if chunk.finish.is_some() {
            rest = self.rest(chunk.usage.is_some()).await;
            events.extend(self.passing());
        }
        self.sink.pass(events).await?;
        Ok(rest)
    }

    /// Finish reason of the output. The first call is the client's request: its end is the
    /// answer's, for any reason.
    fn ended(&self, reason: &str) -> Result<Finish, Fault> {
        finish(reason).or(if self.first_answer.is_current { Ok(Finish::Stop) } else { Err(Fault::Plain) })
    }

    /// Reads the events that follow the end of the output; `confirmed`: it came with its usage.
    /// After an end that usage confirms, waits at most [`LAST`], so as not to delay the answer;
    /// another end is believed once the stream ends.
    async fn rest(&mut self, confirmed: bool) -> Rest {
        let buffered = self.sink.is_buffered();
        let (Some(plain_stream), sink) = (&mut self.plain_stream, &mut self.sink) else { return Rest::Read };
        let (begun, mut usage) = (Instant::now(), None);
        let rest = loop {
            let confirmed = confirmed || usage.is_some();
            let limit = if buffered && !confirmed { UNCONFIRMED } else { LAST };
            let Ok(next) = timeout_at(begun + limit, plain_stream.next_unless_over()).await else {
                break if confirmed || buffered { Rest::Read } else { Rest::Open };
            };
            match next {
                Some(PlainEvent::Chunk(event, chunk)) => {
                    if !chunk.tokens.is_empty() || !chunk.text.is_empty() || !chunk.more.is_empty() {
                        break Rest::GoesOn;
                    }
                    sink.read_end(&event);
                    usage = chunk.usage.or(usage);
                }
                Some(PlainEvent::Nothing) => {}
                Some(PlainEvent::Unreadable(_)) => break Rest::GoesOn,
                None | Some(PlainEvent::End | PlainEvent::Broken(..)) => break Rest::Read,
            }
        };
        if usage.is_some() {
            self.usage.value = usage;
            self.usage.is_complete = true;
        }
        rest
    }

    /// Reads the members that only the first call reports: ids of the prompt, usage, and whether
    /// ids can be trusted.
    fn first_only(&mut self, id: ActionId, chunk: &Chunk) {
        if !self.first_answer.is_current {
            return;
        }
        let now = self.clock.now();
        if let Some(prompt) = &chunk.prompt {
            self.session.handle(id, session::Event::Prompt(prompt.clone()), now);
        }
        let known = self.session.prompt().len();
        let by_usage = || chunk.usage.as_ref().and_then(UsageText::prompt_tokens);
        let reported = chunk.prompt_count.map(u64::from).or_else(by_usage);
        let other = reported.is_some_and(|reported| known > 0 && reported != known as u64);
        if chunk.doubtful || other {
            self.session.handle(id, session::Event::Doubt, now);
        }
        self.usage.counted = chunk.count.or(self.usage.counted);
        if chunk.usage.is_some() && !self.usage.is_complete {
            self.usage.value.clone_from(&chunk.usage);
            self.usage.is_complete = chunk.finish.is_some();
            self.count_prompt(id);
        }
        let counts_always = self.calls.engine().quirks().usage.runs;
        if counts_always && self.usage.prompt_unchecked && !chunk.tokens.is_empty() {
            // A count was requested in every event, and nothing else compares the prompt's ids with
            // what the engine has computed.
            self.session.handle(id, session::Event::Doubt, now);
        }
    }

    fn end_if(&mut self, id: ActionId, ended: Option<Result<Finish, Fault>>) {
        let now = self.clock.now();
        match ended {
            Some(Ok(finish)) => self.session.handle(id, session::Event::PlainEnded(finish), now),
            Some(Err(fault)) => self.session.handle(id, session::Event::Fault(fault), now),
            None => {}
        }
    }

    /// Reads what follows the end of the first call, for a JSON answer.
    async fn read_usage(&mut self, confirmed: bool) -> Rest {
        if self.first_answer.is_current && self.sink.is_buffered() {
            self.rest(confirmed).await
        } else {
            Rest::Read
        }
    }
}

/// True if an event has more choices than the one that was requested.
pub(super) fn many_choices(event: &Event) -> bool {
    let is_other = |choice: Object<'_>| choice.read::<u64>("index").is_some_and(|index| index > 0);
    event.choices().len() > 1 || event.choices().any(is_other)
}

fn finish(reason: &str) -> Result<Finish, Fault> {
    match reason {
        "stop" => Ok(Finish::Stop),
        "length" => Ok(Finish::Length),
        "tool_calls" => Ok(Finish::ToolCalls),
        _ => Err(Fault::Plain),
    }
}
