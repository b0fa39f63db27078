//! An answer in progress: the events of all its choices, in order of arrival.

use std::sync::Arc;
use std::task::Poll;
use std::time::{SystemTime, UNIX_EPOCH};

use futures_util::future::poll_fn;
use tokio::sync::mpsc::UnboundedReceiver;

use crate::target::job::{Event, Failure, PromptRow};
use crate::target::logprobs::{Listed, Logprobs};
use crate::target::output::{Finish, Output, OutputStep};
use crate::target::parts::Parsing;
use crate::target::reply::{Choice, Envelope, OutputDetails, Proposed, Speller, Usage, listed};
use crate::target::wire::{GenerateRequest, StreamUsage};
use foretell_core::session::parse::{Parse, Parsed};
use foretell_core::units::TokenId;
use foretell_wire::openai::Route;

const CALLS: &str = foretell_core::session::Finish::ToolCalls.name();

/// A token with what is listed at its position; `None` for the first one of a prompt.
type Scored = (TokenId, Option<Listed>);

/// A choice in progress. Dropping its receiver cancels it.
pub(super) struct Running {
    events: Option<UnboundedReceiver<Event>>,
    output: Output,
    seed: u64,
    logprobs: Logprobs,
    begun: bool,
    rows: Vec<PromptRow>,
    /// `None` if the output is text alone, and for an answer that is not streamed.
    parser: Option<Box<dyn Parse>>,
    /// A tool has been called.
    called: bool,
    /// Output tokens so far that are reasoning.
    reasoning: u64,
}

impl Running {
    pub(super) fn new(
        events: UnboundedReceiver<Event>,
        output: Output,
        seed: u64,
        parser: Option<Box<dyn Parse>>,
        logprobs: Logprobs,
    ) -> Self {
        let (events, rows) = (Some(events), Vec::new());
        Self { events, output, seed, logprobs, begun: false, rows, parser, called: false, reasoning: 0 }
    }

    /// The parts of a step, and with the last one those that were withheld; `None` without a
    /// parser.
    fn parse(&mut self, step: &OutputStep) -> Option<Parsed> {
        let parser = self.parser.as_mut()?;
        let mut parsed = parser.push(step.id, &step.text);
        if step.finish.is_some() {
            parsed.append(parser.finish());
        }
        self.called |= !parsed.calls.is_empty();
        self.reasoning = parser.reasoning_tokens();
        Some(parsed)
    }
}

/// An event of one choice.
pub(super) enum ChoiceEvent {
    /// Its prompt has been computed.
    Prompt,
    /// It has one more token.
    Step(OutputStep),
    /// It ended without a token: `max_tokens` was 0.
    Over,
    Failed(Failure),
}

/// An answer in progress.
pub(super) struct Answer {
    id: String,
    created: u64,
    model: String,
    /// Identifies the process, see `Engine::mark` of the engines.
    mark: Arc<str>,
    pub(super) request: GenerateRequest,
    /// Token ids of each prompt.
    prompts: Vec<Vec<TokenId>>,
    /// Choice `j` of prompt `i` has index `i · n + j`.
    choices: Vec<Running>,
    parsing: Parsing,
    /// Number of cached prompt tokens, counted once per prompt.
    cached: usize,
    /// Index of the choice to check first for an event, so that every choice gets its turn.
    next: usize,
}

impl Answer {
    pub(super) fn new(
        id: String,
        (model, mark): (String, Arc<str>),
        request: GenerateRequest,
        prompts: Vec<Vec<TokenId>>,
        choices: Vec<Running>,
        parsing: Parsing,
    ) -> Self {
        Self {
            id,
            created: unix_seconds(),
            model,
            mark,
            request,
            prompts,
            choices,
            parsing,
            cached: 0,
            next: 0,
        }
    }

    /// The parts of its text are sent as separate members.
    fn parses(&self) -> bool {
        self.request.route == Route::Chat && self.parsing.applies(&self.request.parse_options)
    }

    /// The next event of any choice, with the choice's index; `None` when all have ended.
    pub(super) async fn next(&mut self) -> Option<(usize, ChoiceEvent)> {
        let (index, event) = poll_fn(|context| {
            let count = self.choices.len();
            let mut open = false;
            for offset in 0..count {
                let index = (self.next + offset) % count;
                let Some(events) = self.choices.get_mut(index).and_then(|choice| choice.events.as_mut())
                else {
                    continue;
                };
                open = true;
                if let Poll::Ready(event) = events.poll_recv(context) {
                    self.next = index + 1;
                    return Poll::Ready(Some((index, event)));
                }
            }
            if open { Poll::Pending } else { Poll::Ready(None) }
        })
        .await?;
        Some((index, self.digest(index, event)))
    }

    fn digest(&mut self, index: usize, event: Option<Event>) -> ChoiceEvent {
        let first = index.is_multiple_of(self.request.choices);
        let empty = self.request.max_tokens == Some(0);
        let Some(choice) = self.choices.get_mut(index) else { return ChoiceEvent::Over };
        match event {
            Some(Event::Prompt { cached, rows }) => {
                self.cached += if first { cached } else { 0 };
                choice.rows = rows;
                ChoiceEvent::Prompt
            }
            Some(Event::Token(token)) => {
                let step = choice.output.take(token);
                if step.finish.is_some() {
                    choice.events = None;
                }
                ChoiceEvent::Step(step)
            }
            Some(Event::Failed(why)) => ChoiceEvent::Failed(why),
            None if empty => {
                choice.events = None;
                ChoiceEvent::Over
            }
            None => ChoiceEvent::Failed("the model's thread has ended".into()),
        }
    }

    /// Token counts so far.
    pub(super) fn usage(&self) -> Usage {
        let prompt = self.prompts.iter().map(Vec::len).sum();
        let output = self.choices.iter().map(|choice| choice.output.tokens).sum();
        let usage = Usage::new(prompt, self.cached, output);
        let counts = self.request.route == Route::Chat && self.parsing.parsers.reasoning.is_some();
        let reasoning_tokens = self.choices.iter().map(|choice| choice.reasoning).sum();
        Usage { completion_tokens_details: counts.then_some(OutputDetails { reasoning_tokens }), ..usage }
    }

    fn speller(&self) -> Speller<'_> {
        Speller { words: self.parsing.words.as_ref() }
    }

    fn prompt_of(&self, index: usize) -> &[TokenId] {
        self.prompts.get(index / self.request.choices.max(1)).map(Vec::as_slice).unwrap_or_default()
    }

    fn envelope(&self, choices: Vec<Choice>, usage: Option<Usage>) -> Envelope<'_> {
        let object = match (self.request.route, self.request.stream) {
            (Route::Completions, _) => "text_completion",
            (Route::Chat, false) => "chat.completion",
            (Route::Chat, true) => "chat.completion.chunk",
        };
        Envelope {
            id: &self.id,
            object,
            created: self.created,
            model: &self.model,
            system_fingerprint: &self.mark,
            choices,
            usage,
            prompt_token_ids: None,
            prompt_logprobs: None,
        }
    }

    /// Log-probabilities of tokens that follow, in the route's format; `None` if none are
    /// requested.
    fn logprobs(&mut self, index: usize, scored: &[Scored]) -> Option<serde_json::Value> {
        self.request.show.logprobs?;
        let words = &self.parsing.words;
        let choice = self.choices.get_mut(index)?;
        Some(choice.logprobs.write(scored, &|ids| words.decode(ids, true)))
    }

    /// The prompt's text and scores, if the request has `echo`; empty otherwise.
    fn echo(&self, index: usize) -> (String, Vec<Scored>) {
        if !self.request.show.echo {
            return (String::new(), Vec::new());
        }
        let prompt = self.prompt_of(index);
        let rows = self.choices.get(index).map(|choice| choice.rows.as_slice()).unwrap_or_default();
        let unscored = prompt.len().saturating_sub(rows.len());
        let scored = prompt.iter().enumerate().map(|(at, &id)| {
            let row = at.checked_sub(unscored).and_then(|at| rows.get(at));
            (id, row.map(|row| listed(id, row.logprob, &row.top)))
        });
        let scored = if self.request.show.logprobs.is_some() { scored.collect() } else { Vec::new() };
        (self.parsing.words.decode(prompt, true), scored)
    }

    /// The event for one token; the first one of a choice also has the fields that are sent once.
    /// `None` if it has nothing for the client.
    pub(super) fn chunk(&mut self, index: usize, step: OutputStep) -> Option<String> {
        let running = self.choices.get_mut(index)?;
        let first = !std::mem::replace(&mut running.begun, true);
        let parsed = running.parse(&step);
        let called = running.called;
        let hollow = parsed.as_ref().is_some_and(Parsed::is_empty) && step.finish.is_none();
        if hollow && !first && !self.request.show.token_ids && self.request.usage != StreamUsage::Every {
            return None;
        }
        let (mut text, mut scored) = if first { self.echo(index) } else { (String::new(), Vec::new()) };
        text.push_str(&step.text);
        if let Some(scores) = step.scores {
            scored.push((step.id, Some(listed(step.id, scores.logprob, &scores.top))));
        }
        let mut choice = Choice { index, logprobs: self.logprobs(index, &scored), ..Choice::default() };
        match parsed {
            Some(parsed) => choice.set_delta(first, &parsed, || self.parsing.call_id()),
            None => choice.set_text(self.request.route, true, first, text),
        }
        choice.token_ids = self.request.show.token_ids.then(|| vec![step.id]);
        choice.proposal = step.proposal.as_ref().map(Proposed::from);
        if let Some(finish) = &step.finish {
            choice.finish(finish);
            // As in vLLM's streams: by whatever the output stopped, but not at its limit.
            if called && *finish != Finish::Length {
                choice.finish_reason = Some(CALLS);
            }
        }
        if first {
            choice.seed = self.choices.get(index).map(|choice| choice.seed);
        }
        let ids = (first && self.request.show.token_ids).then(|| self.prompt_of(index).to_vec());
        let usage = (self.request.usage == StreamUsage::Every).then(|| self.usage());
        Some(match self.request.route {
            Route::Completions => {
                choice.prompt_token_ids = ids;
                frame(&self.envelope(vec![choice], usage))
            }
            Route::Chat => {
                let mut envelope = self.envelope(vec![choice], usage);
                envelope.prompt_token_ids = ids;
                frame(&envelope)
            }
        })
    }

    /// The end of a stream: usage if requested, and `[DONE]`.
    pub(super) fn last(&self) -> String {
        let mut last = match self.request.usage {
            StreamUsage::Never => String::new(),
            StreamUsage::Last | StreamUsage::Every => frame(&self.envelope(Vec::new(), Some(self.usage()))),
        };
        last.push_str("data: [DONE]\n\n");
        last
    }

    /// Waits for every choice to end and returns the answer as JSON.
    pub(super) async fn buffered(mut self) -> Result<Vec<u8>, Failure> {
        let mut done: Vec<Complete> = self.choices.iter().map(|_| Complete::default()).collect();
        while let Some((index, event)) = self.next().await {
            match event {
                ChoiceEvent::Step(step) => {
                    if let Some(complete) = done.get_mut(index) {
                        complete.take(step);
                    }
                }
                ChoiceEvent::Prompt | ChoiceEvent::Over => {}
                ChoiceEvent::Failed(why) => return Err(why),
            }
        }
        let mut choices = Vec::with_capacity(done.len());
        for (index, complete) in done.into_iter().enumerate() {
            choices.push(self.choice(index, complete));
        }
        let mut envelope = self.envelope(choices, Some(self.usage()));
        if self.request.route == Route::Chat {
            let first = envelope.choices.first_mut();
            (envelope.prompt_token_ids, envelope.prompt_logprobs) = first
                .map(|choice| (choice.prompt_token_ids.take(), choice.prompt_logprobs.take()))
                .unwrap_or_default();
            for choice in &mut envelope.choices {
                choice.prompt_token_ids = None;
                choice.prompt_logprobs = None;
            }
        }
        serde_json::to_vec(&envelope).map_err(|error| Failure::Run(error.to_string()))
    }

    fn choice(&mut self, index: usize, complete: Complete) -> Choice {
        let parts = self.parses().then(|| {
            let ended = matches!(complete.finish, Some(Finish::Eos | Finish::StopToken(_)));
            let text = complete.pieces.len() - usize::from(ended && !self.request.include_stop);
            let pieces = complete.pieces.get(..text).unwrap_or_default();
            self.parsing.buffered(&self.request.parse_options, self.prompt_of(index), pieces)
        });
        let (mut text, mut scored) = self.echo(index);
        text.push_str(&complete.text);
        scored.extend(complete.scored);
        let mut choice = Choice { index, logprobs: self.logprobs(index, &scored), ..Choice::default() };
        // Only with `max_tokens: 0` does a choice end without a finish reason.
        choice.finish(&complete.finish.unwrap_or(Finish::Length));
        match parts {
            Some(parts) => {
                choice.set_message(&parts, || self.parsing.call_id());
                if !parts.calls.is_empty() {
                    choice.finish_reason = Some(CALLS);
                }
                if let Some(running) = self.choices.get_mut(index) {
                    running.reasoning = parts.reasoning_tokens;
                }
            }
            None => choice.set_text(self.request.route, false, true, text),
        }
        let prompt = self.prompt_of(index);
        if let Some(running) = self.choices.get(index) {
            choice.seed = Some(running.seed);
            let shown = self.request.show.prompt_shown;
            choice.prompt_logprobs = shown.then(|| self.speller().prompt(prompt.len(), &running.rows));
        }
        if self.request.show.token_ids {
            choice.token_ids = Some(complete.pieces.into_iter().map(|(id, _)| id).collect());
            choice.prompt_token_ids = Some(prompt.to_vec());
        }
        choice
    }
}

/// A choice of an answer that is not streamed.
#[derive(Default)]
struct Complete {
    text: String,
    /// Its tokens, each with the text that became certain with it.
    pieces: Vec<(TokenId, String)>,
    scored: Vec<Scored>,
    finish: Option<Finish>,
}

impl Complete {
    fn take(&mut self, step: OutputStep) {
        if let Some(scores) = step.scores {
            self.scored.push((step.id, Some(listed(step.id, scores.logprob, &scores.top))));
        }
        self.text.push_str(&step.text);
        self.pieces.push((step.id, step.text));
        self.finish = step.finish;
    }
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// One server-sent event as text.
fn frame(envelope: &Envelope<'_>) -> String {
    match serde_json::to_string(envelope) {
        Ok(json) => format!("data: {json}\n\n"),
        Err(error) => format!("data: {}\n\n", serde_json::json!({"error": {"message": error.to_string()}})),
    }
}
