//! An eligible request that is not speculated on, whatever is measured: it is passed through.
//!
//! Drafters are scored afterwards, on ids that the local tokenizer makes of the text. Those need
//! not be the ids that the model sampled, so these statistics are separate from those that decide
//! on speculation.

use std::sync::Arc;

use http::Response;
use tokio::runtime::Handle;

use super::exchange::{Exchange, Slot};
use super::passthrough::{Passthrough, fail, pass_observed};
use super::run::Run;
use super::tap::{Ending, Listener, TappedText};
use foretell_core::session::{
    Action, ActionId, Ending as Ends, Event, Finish, Limit, Parsed, Permission, PlainRequest, Session, Start,
    Summary, Tail,
};
use foretell_core::units::{Tick, TokenId};
use foretell_core::words::{PlainReason, TokenContext};
use foretell_net::http::body::{Body, full};
use foretell_net::http::replay::Replay;
use foretell_parsers::text::{Piece, Tokenizer};
use foretell_wire::openai::{self, Prompt, messages};

/// Maximum bytes used from the end of a prompt for drafting.
const PROMPT: usize = 256 << 10;
/// Minimum number of tokens of a JSON answer from which seconds per token are measured.
const PACED: usize = 32;

impl Run {
    /// Passes the request and its answer on unchanged.
    pub(super) async fn pass(self, exchange: Exchange, reason: PlainReason) -> Response<Body> {
        let Exchange { head, body, request, replica, shared, client, mut slot, .. } = exchange;
        slot.record.set_plain_reason(reason);
        slot.record.called();
        let repeatable = Some(Replay::of(body.clone()));
        let mut passthrough = Passthrough { replica, fleet: shared.fleet, limit: None, repeatable };
        match passthrough.send(&mut slot.record, head, full(body)).await {
            Err(failure) => fail(slot.into_record(), &failure),
            Ok(response) => {
                let form = (self.clock, client.trailers);
                pass_observed(slot, response, form, |slot| TapListener::new(self, slot, request, reason))
            }
        }
    }
}

/// Processing of an answer once it has been passed on.
struct TapListener(Box<Work>);

struct Work {
    run: Run,
    slot: Slot,
    request: Box<openai::Request>,
    reason: PlainReason,
    /// The session in which drafters are scored, and the id of its first call; `None` if nothing is
    /// drafted.
    session: Option<(Session, ActionId)>,
    /// Time at which the request was accepted.
    began: Tick,
}

impl TapListener {
    fn new(mut run: Run, slot: Slot, request: Box<openai::Request>, reason: PlainReason) -> Self {
        let drafts = matches!(run.plan.ruling.rules.permission, Permission::Shadow(_));
        let began = run.clock.before(slot.record.started().elapsed());
        let session = if drafts { begun(&mut run, &request, began) } else { None };
        Self(Box::new(Work { run, slot, request, reason, session, began }))
    }
}

/// A session that has issued its first call, in which the request counts as one of the engine's.
fn begun(run: &mut Run, request: &openai::Request, began: Tick) -> Option<(Session, ActionId)> {
    // The ids are not certain, so no token is taken for a stop token: the server has ended the
    // output.
    let start = Start {
        ending: Ends::default(),
        limit: Limit::default(),
        marks: Arc::default(),
        sent: run.present.take().map(|present| (present, began)),
        ..run.start(request)
    };
    let mut session = Session::new(start, Arc::clone(&run.control), run.clock.now());
    match session.poll() {
        Some((id, Action::Plain(PlainRequest::First))) => Some((session, id)),
        _ => None,
    }
}

impl Listener for TapListener {
    type Content = TappedText;

    fn begun(&mut self) {
        self.0.slot.record.received();
        self.0.slot.record.emitted();
    }

    fn memory_used(&mut self, bytes: u64) {
        self.0.slot.record.set_session_bytes(bytes);
    }

    fn over(self, tapped: TappedText, end: Ending) {
        // Without a runtime the process is ending, and the record with it.
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(self.0.settle(tapped, end));
        }
    }
}

impl Work {
    /// Counts the output, scores the drafters on it, and ends the record.
    async fn settle(mut self: Box<Self>, tapped: TappedText, end: Ending) {
        self.run.present = None;
        let gone = end == Ending::Gone;
        self.slot.over(gone);
        let complete = end == Ending::Complete && tapped.ended;
        if let Ending::Broken(cause) = end {
            self.slot.record.failed(cause);
        }
        if tapped.other {
            self.run.answer_traits.has_parsed();
        }
        let scored = complete && !tapped.other && self.session.is_some();
        let permit = if scored { Arc::clone(&self.run.scoring).try_acquire_owned().ok() } else { None };
        let runtime = Handle::current();
        let done = tokio::task::spawn_blocking(move || {
            let pieces = self.run.plan.identity.tokenizer.pieces(&tapped.text).unwrap_or_default();
            let summary = permit.and_then(|_permit| self.score(&tapped, &pieces, &runtime));
            self.summarise(&tapped, pieces.len(), summary.as_ref());
            (self, summary)
        });
        // The record ends on drop if that panicked.
        let Ok((mut work, summary)) = done.await else { return };
        if let Some(summary) = summary {
            work.learn(&summary);
        }
        work.slot.record.end(gone);
    }

    fn summarise(&mut self, tapped: &TappedText, pieces: usize, summary: Option<&Summary>) {
        // Assumes the same number of tokens per byte for the text beyond the limit.
        let estimate =
            (pieces as u64).saturating_mul(tapped.bytes as u64) / (tapped.text.len() as u64).max(1);
        let (prompt, output) = tapped.usage.unzip();
        let output_tokens = u32::try_from(output.unwrap_or(estimate)).unwrap_or(u32::MAX);
        if self.reason == PlainReason::ControlGroup
            && let Some(seconds) = token_seconds(&tapped.marks, output_tokens)
        {
            self.run.drawn.ended(seconds);
        }
        let counted = self.session.as_ref().map_or(0, |(session, _)| session.prompt().len());
        let record = &mut self.slot.record;
        record.prompt_tokens(prompt.map_or(counted, |prompt| usize::try_from(prompt).unwrap_or(usize::MAX)));
        let summary = summary.cloned().unwrap_or_default();
        record.summarise(&Summary { reason: Some(self.reason), output_tokens, ..summary });
        record.set_estimated(output.is_none());
    }

    /// Replays the answer to the session, with the times at which it arrived.
    fn score(&mut self, tapped: &TappedText, pieces: &[Piece], runtime: &Handle) -> Option<Summary> {
        let (mut session, id) = self.session.take()?;
        let last = tapped.marks.last().map_or_else(|| self.run.clock.now(), |mark| mark.0);
        let prompt = prompt_ids(&self.run.plan.identity.tokenizer, &self.request.prompt);
        if let Some(prompt) = prompt {
            session.handle(id, Event::Prompt(prompt), last);
        }
        let mut pieces = pieces.iter().peekable();
        let mut context = TokenContext::default();
        for &(at, until) in &tapped.marks {
            let mut tokens = Vec::new();
            while let Some(piece) = pieces.next_if(|piece| piece.end <= until) {
                tokens.push(piece.token);
            }
            if !tokens.is_empty() {
                session.handle(id, Event::Token { tokens, parsed: Parsed::default(), tail: Tail::Open }, at);
                self.shadow(&mut session, &mut context, runtime);
            }
        }
        // A JSON answer shows only the time of all of it, prompt included.
        let tokens = session.output().len();
        if tapped.marks.len() == 1 && tokens >= PACED {
            let seconds = last.seconds_since(self.began);
            self.run.control.with(|learnt| learnt.note_plain(seconds, tokens, last));
        }
        let finish = if tapped.cut { Finish::Length } else { Finish::Stop };
        session.handle(id, Event::PlainEnded(finish), last);
        let summary = std::iter::from_fn(|| session.poll()).find_map(|(_, action)| match action {
            Action::Finish(summary) => Some(summary),
            _ => None,
        });
        self.session = Some((session, id));
        summary
    }

    /// Sends the session's shadow requests to the model drafter.
    fn shadow(&mut self, session: &mut Session, context: &mut TokenContext, runtime: &Handle) {
        while let Some((id, action)) = session.poll() {
            let Action::Shadow { from } = action else { continue };
            context.follow(session.prompt(), session.output());
            let request = self.run.drafting.shadow(id, context.clone(), from);
            let timeout = self.run.plan.limits.question;
            let reply = runtime.block_on(async { tokio::time::timeout(timeout, request).await });
            let Ok(reply) = reply else {
                self.run.drafting.given_up(id, true);
                continue;
            };
            self.run.drafting.answered(id);
            session.handle(id, reply.event, self.run.clock.now());
        }
    }

    /// Adds the text to the corpus and notes the projected speedup.
    fn learn(&mut self, summary: &Summary) {
        let Some((session, _)) = &self.session else { return };
        self.run.corpus.learn(session.prompt(), session.output());
        if let Some((gain, basis)) = summary.projected_speedup {
            self.run.drawn.note_projected(gain, basis);
        }
    }
}

/// Seconds per token after the first of a stream of so many tokens, by the times of its texts;
/// `None` if these show none.
fn token_seconds(texts: &[(Tick, usize)], tokens: u32) -> Option<f64> {
    let [first, .., last] = texts else { return None };
    (tokens > 1).then(|| last.0.seconds_since(first.0) / f64::from(tokens - 1))
}

/// Ids of the prompt, tokenized from the end of its text; `None` if the client has sent ids. A
/// chat's template is the server's, so its messages are joined with line breaks.
fn prompt_ids(tokenizer: &Tokenizer, prompt: &Prompt) -> Option<Vec<TokenId>> {
    let text = match prompt {
        Prompt::Ids(_) => return None,
        Prompt::Text(text) => text.clone(),
        Prompt::Messages(all) => {
            let contents = all.as_array().into_iter().flatten().filter_map(|message| message.get("content"));
            contents.filter_map(messages::plain_text).collect::<Vec<String>>().join("\n")
        }
    };
    let end = text.get(text.ceil_char_boundary(text.len().saturating_sub(PROMPT))..).unwrap_or_default();
    Some(tokenizer.encode(end, true).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pace_of_a_stream_leaves_out_its_first_token() {
        let texts = [(Tick(1_000_000), 3), (Tick(1_500_000), 7), (Tick(3_000_000), 9)];
        assert_eq!(token_seconds(&texts, 5), Some(0.5));
        assert_eq!((token_seconds(&texts, 1), token_seconds(&texts[..1], 5)), (None, None));
    }
}
