//! Handles the events of a session's plain calls: tokens for the session, and the events of the
//! first call that are passed on unchanged.

use std::time::Duration;

use serde_json::Value;

use super::{SessionLoop, WORLD};
use crate::serving::failure::Failure;
use crate::serving::plain::{PlainEvent, PlainStream};
use crate::serving::sink::Gone;
use foretell_core::session::{ActionId, Event, Fault, Finish, Parsed, Tail};
use foretell_core::units::TokenId;
use foretell_engines::dialect::Chunk;
use foretell_engines::openai::trim::{choices, finishes};

/// Maximum wait for the events that follow the end of an output.
const LAST: Duration = Duration::from_secs(1);

impl SessionLoop {
    /// Handles an event of the plain call in flight.
    pub(super) async fn plain_event(&mut self, plain_event: PlainEvent) {
        let Some(id) = self.plain_stream.as_ref().map(|plain_stream| plain_stream.id) else { return };
        let now = self.clock.now();
        match plain_event {
            PlainEvent::Nothing => {
                let events = self.passing();
                if self.sink.pass(events).await.is_err() {
                    self.session.handle(WORLD, Event::ClientGone, now);
                }
            }
            PlainEvent::Chunk(event, _) if !event.is_null() && !self.calls.join_origin(&event) => {
                self.changed();
                self.session.handle(id, Event::Fault(Fault::Changed), now);
            }
            PlainEvent::Chunk(event, _) if self.first && many_choices(&event) => self.many(id, event).await,
            PlainEvent::Chunk(event, mut chunk) => {
                self.slot.record.received();
                self.begun = true;
                if chunk.finish.is_some() {
                    choices(&event).iter().take(1).for_each(|choice| self.answer_traits.note_end(choice));
                }
                self.unsent.take_if(|_| !self.sink.is_whole());
                if self.first && self.passed_on(&event, &chunk).await.is_err() {
                    return self.session.handle(WORLD, Event::ClientGone, now);
                }
                let (later, output) = (!self.first, self.session.output());
                let lists = self.logprobs.as_ref().filter(|_| later);
                if lists.is_some_and(|logprobs| !logprobs.learn(output, &mut chunk)) {
                    self.cause("an event of the stream lacks log-probabilities".to_owned());
                    return self.session.handle(id, Event::Fault(Fault::Plain), now);
                }
                self.first_only(id, &chunk);
                self.pass_logprobs(id, &event, &chunk);
                self.note_marks(&chunk);
                let parsed = self.parsed(id, &mut chunk);
                if !chunk.tokens.is_empty() || !parsed.is_empty() {
                    let ended = chunk.finish.as_deref().map(|reason| self.ended(reason));
                    // No stop text ends an output that is parsed.
                    let by_token = matches!(chunk.finish.as_deref(), Some("stop" | "tool_calls"));
                    let tail = match (&ended, chunk.ends || (self.parses && by_token)) {
                        (None, _) => Tail::Open,
                        (Some(_), true) => Tail::Stop,
                        (Some(_), false) => Tail::Last,
                    };
                    if tail != Tail::Open {
                        self.read_usage().await;
                    }
                    if let Some(proposal) = chunk.proposal {
                        self.session.handle(id, Event::Proposal(proposal), now);
                    }
                    self.handle(id, Event::Token { tokens: chunk.tokens, parsed, tail }, now);
                    self.end_if(id, ended);
                } else if let Some(reason) = chunk.finish.as_deref() {
                    let ended = self.ended(reason);
                    self.read_usage().await;
                    self.end_if(id, Some(ended));
                }
            }
            PlainEvent::End => {
                self.cause("the stream ended without an end of the answer".to_owned());
                self.session.handle(id, Event::Fault(Fault::Plain), now);
            }
            PlainEvent::Broken(fault, cause) => {
                let events = self.passing();
                self.sink.keep_error(events);
                match fault {
                    Fault::Silence => self.broken = Failure::WentSilent,
                    Fault::Changed => self.broken = Failure::Changed,
                    _ => {}
                }
                self.cause(cause);
                self.session.handle(id, Event::Fault(fault), now);
            }
        }
    }

    /// Notes the marks in an event of a chat that no parser here reads, and if they are text in it.
    fn note_marks(&self, chunk: &Chunk) {
        let Some(tokenizer) = self.marks.as_ref().filter(|_| self.first) else { return };
        let is_mark = |token: &&TokenId| tokenizer.added().binary_search(token).is_ok();
        for &mark in chunk.tokens.iter().filter(is_mark) {
            let text = tokenizer.token(mark).filter(|_| chunk.more.is_empty());
            self.answer_traits.note_mark(mark, text.is_some_and(|text| chunk.text.contains(&text)));
        }
    }

    /// The parts of the output that an event holds. One that is not understood, or not expected, is
    /// doubt.
    fn parsed(&mut self, id: ActionId, chunk: &mut Chunk) -> Parsed {
        if !chunk.more.is_empty() {
            match chunk.parsed().filter(|_| self.parses) {
                Some(parsed) => return parsed,
                None => self.session.handle(id, Event::Doubt, self.clock.now()),
            }
        }
        Parsed::content(std::mem::take(&mut chunk.text))
    }

    /// An answer has come from another engine than the one that began: nothing of it is used.
    pub(super) fn changed(&mut self) {
        self.broken = Failure::Changed;
        self.cause(Failure::Changed.to_string());
        self.calls.changed();
    }

    /// Keeps the first and the last cause of broken plain calls.
    fn cause(&mut self, cause: String) {
        self.causes.truncate(1);
        self.causes.push(cause);
    }

    /// The first call holds several choices where one was requested, which no session can handle:
    /// from here on a stream is passed on unchanged, and a JSON answer fails with
    /// [`Failure::ManyChoices`].
    async fn many(&mut self, id: ActionId, event: Value) {
        self.session.handle(id, Event::Doubt, self.clock.now());
        if self.sink.is_whole() {
            self.broken = Failure::ManyChoices;
            return self.session.handle(id, Event::ClientGone, self.clock.now());
        }
        self.sink.verbatim();
        let passed = self.pass(&event).await;
        let event = match passed {
            Ok(true) => Event::PlainEnded(Finish::Stop),
            Ok(false) => Event::Fault(Fault::Plain),
            Err(Gone) => Event::ClientGone,
        };
        self.session.handle(id, event, self.clock.now());
    }

    /// Passes on `event` and all that follow. Returns true if the engine has sent a finish reason.
    async fn pass(&mut self, event: &Value) -> Result<bool, Gone> {
        self.unsent = None;
        let Some(plain_stream) = &mut self.plain_stream else { return Ok(false) };
        let hung_up = self.sink.hung_up();
        let mut ended = finishes(event);
        self.sink.pass(plain_stream.passing()).await?;
        self.slot.record.emitted();
        let rest = async {
            loop {
                match plain_stream.next().await {
                    PlainEvent::Chunk(event, _) => {
                        ended |= finishes(&event);
                        self.sink.pass(plain_stream.passing()).await?;
                    }
                    PlainEvent::Nothing => self.sink.pass(plain_stream.passing()).await?,
                    PlainEvent::End => {
                        self.sink.pass(plain_stream.passing()).await?;
                        return Ok(ended);
                    }
                    PlainEvent::Broken(..) => {
                        self.sink.keep_error(plain_stream.passing());
                        return Ok(false);
                    }
                }
            }
        };
        tokio::select! {
            rest = rest => rest,
            () = hung_up => Err(Gone),
        }
    }

    /// The events read from the plain call in flight since the last call of this function.
    fn passing(&mut self) -> Vec<(Vec<u8>, Value)> {
        self.plain_stream.as_mut().map(PlainStream::passing).unwrap_or_default()
    }

    /// Passes on an event of the first call: unchanged to a client that streams, with those that
    /// follow the end of the output; for a JSON answer, its members other than text and tokens.
    async fn passed_on(&mut self, event: &Value, chunk: &Chunk) -> Result<(), Gone> {
        self.sink.first(event);
        if let Some(after) = &chunk.after {
            self.sink.read_end(after);
        }
        if !chunk.more.is_empty() {
            self.answer_traits.has_parsed();
            self.sink.other(&chunk.more);
            self.sink.read_parts(&chunk.more);
        }
        if self.sink.is_whole() {
            return Ok(());
        }
        let mut events = self.passing();
        if chunk.finish.is_some() {
            events.extend(self.rest().await);
        }
        self.sink.pass(events).await
    }

    /// Finish reason of the output. The first call is the client's own request: its end is the
    /// answer's, for any reason.
    fn ended(&self, reason: &str) -> Result<Finish, Fault> {
        finish(reason).or(if self.first { Ok(Finish::Stop) } else { Err(Fault::Plain) })
    }

    /// The events that follow the end of the output in a stream, waited for up to a second.
    async fn rest(&mut self) -> Vec<(Vec<u8>, Value)> {
        let mut events = Vec::new();
        let (Some(plain_stream), sink) = (&mut self.plain_stream, &mut self.sink) else { return events };
        let mut usage = None;
        let rest = async {
            loop {
                let plain_event = plain_stream.next().await;
                events.extend(plain_stream.passing());
                match plain_event {
                    PlainEvent::Chunk(event, chunk) => {
                        sink.read_end(&event);
                        usage = chunk.usage.or(usage.take());
                    }
                    PlainEvent::Nothing => {}
                    PlainEvent::End | PlainEvent::Broken(..) => return,
                }
            }
        };
        // The tokens can be counted here too, so the end of the answer is not delayed for long.
        let _ = tokio::time::timeout(LAST, rest).await;
        if usage.is_some() {
            (self.usage, self.usage_whole) = (usage, true);
        }
        events
    }

    /// Reads what only the first call reports: ids of the prompt, usage, and whether ids can be
    /// trusted.
    fn first_only(&mut self, id: ActionId, chunk: &Chunk) {
        if !self.first {
            return;
        }
        let now = self.clock.now();
        if let Some(prompt) = &chunk.prompt {
            self.session.handle(id, Event::Prompt(prompt.clone()), now);
        }
        let known = self.session.prompt().len();
        let by_usage = || chunk.usage.as_ref().and_then(prompt_tokens);
        let told = chunk.prompt_count.map(u64::from).or_else(by_usage);
        let other = told.is_some_and(|told| known > 0 && told != known as u64);
        if chunk.doubtful || other {
            self.session.handle(id, Event::Doubt, now);
        }
        self.counted = chunk.count.or(self.counted);
        if chunk.usage.is_some() && !self.usage_whole {
            self.usage.clone_from(&chunk.usage);
            self.usage_whole = chunk.finish.is_some();
            self.count_prompt(id);
        }
        let tells = self.calls.engine().dialect.quirks().usage_runs;
        if tells && self.uncounted && !chunk.tokens.is_empty() {
            // A count was requested in every event, and nothing else compares the prompt's ids with
            // what the engine has computed.
            self.session.handle(id, Event::Doubt, now);
        }
        if let Some(recovery) = &mut self.recovery {
            recovery.push_text(&chunk.text);
        }
    }

    /// Takes the log-probabilities in an event of the first call. Where the server writes tokens
    /// otherwise than they are written here, the request stays plain.
    fn pass_logprobs(&mut self, id: ActionId, event: &Value, chunk: &Chunk) {
        let Some(logprobs) = self.logprobs.as_mut().filter(|_| self.first) else { return };
        if !chunk.tokens.is_empty() && !logprobs.pass(&chunk.tokens, event) {
            self.session.handle(id, Event::Doubt, self.clock.now());
        }
    }

    fn end_if(&mut self, id: ActionId, ended: Option<Result<Finish, Fault>>) {
        let now = self.clock.now();
        match ended {
            Some(Ok(finish)) => self.session.handle(id, Event::PlainEnded(finish), now),
            Some(Err(fault)) => self.session.handle(id, Event::Fault(fault), now),
            None => {}
        }
    }

    /// Waits up to a second for the usage that the first call sends after `finish_reason`, for a
    /// JSON answer.
    async fn read_usage(&mut self) {
        if !self.first || !self.sink.is_whole() {
            return;
        }
        let (Some(plain_stream), sink) = (&mut self.plain_stream, &mut self.sink) else { return };
        let rest = async {
            while let PlainEvent::Chunk(event, chunk) = plain_stream.next().await {
                sink.read_end(&event);
                if chunk.usage.is_some() {
                    return chunk.usage;
                }
            }
            None
        };
        // The tokens can be counted here too, so the end of the answer is not delayed for long.
        if let Ok(Some(usage)) = tokio::time::timeout(LAST, rest).await {
            self.usage = Some(usage);
            self.usage_whole = true;
        }
    }
}

pub(super) fn prompt_tokens(usage: &Value) -> Option<u64> {
    usage.get("prompt_tokens")?.as_u64()
}

/// True if an event holds more choices than the one that was requested.
pub(super) fn many_choices(event: &Value) -> bool {
    let others = |choice: &Value| choice.get("index").and_then(Value::as_u64).is_some_and(|index| index > 0);
    choices(event).len() > 1 || choices(event).iter().any(others)
}

fn finish(reason: &str) -> Result<Finish, Fault> {
    match reason {
        "stop" => Ok(Finish::Stop),
        "length" => Ok(Finish::Length),
        "tool_calls" => Ok(Finish::ToolCalls),
        _ => Err(Fault::Plain),
    }
}
