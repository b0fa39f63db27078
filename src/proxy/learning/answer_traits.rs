//! Traits of a server's answers, as observed in them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::Value;

use crate::learning::grammars::Grammars;
use foretell_core::session::PartsSeen;
use foretell_core::units::TokenId;

/// Traits observed in the answers of one engine start, shared by its requests.
#[derive(Debug, Default)]
pub struct AnswerTraits {
    /// Requests to which the server applies a grammar.
    pub grammars: Grammars,
    fingerprint: Mutex<Option<Value>>,
    parses: AtomicBool,
    misparsed: AtomicBool,
    alike: Mutex<ParsedAlike>,
    buffered_alike: Mutex<ParsedAlike>,
    uncached: AtomicBool,
    nameless: AtomicBool,
    unended: AtomicU32,
    /// The tokens that have ended its texts; true if its answers name them as the stop.
    ends: Mutex<BTreeMap<TokenId, bool>>,
    /// Number of times that each mark was text in its chats; `None` once it was not.
    marks: Mutex<BTreeMap<TokenId, Option<u32>>>,
}

/// Number of times that a mark has to be text before it is treated as text.
const SHOWN: u32 = 3;

/// Numbers of complete answers that were parsed alike here and by the server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ParsedAlike {
    /// All of them.
    pub answers: u32,
    /// Those with a tool call.
    pub calls: u32,
    /// Those with reasoning.
    pub reasoning: u32,
}

impl ParsedAlike {
    fn add(&mut self, parts: PartsSeen) {
        self.answers += 1;
        self.calls += u32::from(parts.calls);
        self.reasoning += u32::from(parts.reasoning);
    }
}

#[derive(Deserialize)]
struct Named {
    system_fingerprint: Option<String>,
}

/// An answer to a verify request, of which the choices are read.
#[derive(Deserialize)]
struct Answered {
    choices: Vec<Value>,
}

impl AnswerTraits {
    /// The `system_fingerprint` that its last answers had; `None` if they had none.
    pub fn fingerprint(&self) -> Option<Value> {
        self.fingerprint.lock().clone()
    }

    /// Notes the `system_fingerprint` of an answer.
    pub fn note_fingerprint(&self, fingerprint: &Value) {
        let mut known = self.fingerprint.lock();
        if known.as_ref() != Some(fingerprint) {
            *known = Some(fingerprint.clone());
        }
    }

    /// True if its answers name this token as the stop if it ends a text, false if they have null
    /// there; `None` if none has ended so. vLLM names every end-of-text token except that of the
    /// tokenizer (0.32, `sampling_params.py`: `update_from_generation_config`).
    pub fn names_end(&self, token: TokenId) -> Option<bool> {
        self.ends.lock().get(&token).copied()
    }

    /// Notes the choice of an answer, or of one event: the token that ends it, if one does.
    ///
    /// With `ignore_eos` the end of the tokenizer is named too, if the client lists it as a stop
    /// token. So an answer that does not name a token outweighs those that do.
    pub fn note_end(&self, choice: &Value) {
        let member = |name: &str| choice.get(name);
        let stops = member("finish_reason").is_some_and(|reason| reason == "stop" || reason == "tool_calls");
        let last = || member("token_ids")?.as_array()?.last()?.as_u64();
        let end = match member("stop_reason") {
            Some(Value::Null) if stops => last().map(|token| (token, false)),
            Some(stop) if stops => stop.as_u64().map(|token| (token, true)),
            _ => None,
        };
        if let Some((Ok(token), named)) = end.map(|(token, named)| (TokenId::try_from(token), named)) {
            self.ends.lock().entry(token).and_modify(|known| *known &= named).or_insert(named);
        }
    }

    /// Reads complete answers to verify requests, which may be the only ones of an engine start
    /// that hold the end of a text and the `system_fingerprint`: the first call of a speculated
    /// answer is cut aborted before it sends them.
    pub fn reads(&self, bodies: &[Vec<u8>]) {
        // Most answers end no text, and are not parsed a second time.
        let ends = |body: &&Vec<u8>| std::str::from_utf8(body).is_ok_and(|body| body.contains("\"stop\""));
        for body in bodies.iter().filter(ends) {
            let answered = serde_json::from_slice::<Answered>(body);
            answered.iter().flat_map(|answered| &answered.choices).for_each(|choice| self.note_end(choice));
        }
        if self.fingerprint.lock().is_some() {
            return;
        }
        let named = |body: &Vec<u8>| serde_json::from_slice::<Named>(body).ok()?.system_fingerprint;
        if let Some(fingerprint) = bodies.first().and_then(named) {
            self.note_fingerprint(&Value::String(fingerprint));
        }
    }

    /// These marks without those that always were text in its chats, at least `SHOWN` times. An
    /// example is `<think>` of a server without a parser for reasoning.
    pub fn hidden(&self, all: &Arc<[TokenId]>) -> Arc<[TokenId]> {
        let marks = self.marks.lock();
        let shown = |mark: &TokenId| marks.get(mark).copied().flatten().is_some_and(|times| times >= SHOWN);
        if !marks.keys().any(shown) {
            return Arc::clone(all);
        }
        all.iter().copied().filter(|mark| !shown(mark)).collect()
    }

    /// Notes a mark in a chat, which was text or not.
    pub fn note_mark(&self, mark: TokenId, is_text: bool) {
        let mut marks = self.marks.lock();
        let times = marks.entry(mark).or_insert(Some(0));
        *times = if is_text { times.map(|times| times.saturating_add(1)) } else { None };
    }

    /// True if the last event of an aborted answer may contain something that is not known
    /// otherwise: the cached tokens of its prompt, for a client that gets the usage, or the
    /// fingerprint.
    pub fn may_end_with_news(&self, shows_usage: bool) -> bool {
        let cached = shows_usage && !self.uncached.load(Ordering::Relaxed);
        cached || (!self.nameless.load(Ordering::Relaxed) && self.fingerprint.lock().is_none())
    }

    /// Notes an aborted answer that did not end in time, or ended without its last event.
    pub fn has_not_ended(&self) {
        if self.unended.fetch_add(1, Ordering::Relaxed) > 0 {
            self.has_ended(None);
        }
    }

    /// Notes which members the last event of an aborted answer has and lacks; `None`: answers
    /// cannot be aborted with a last event.
    pub fn has_ended(&self, event: Option<&Value>) {
        match event.and_then(|event| event.get("system_fingerprint")) {
            Some(fingerprint) if !fingerprint.is_null() => self.note_fingerprint(fingerprint),
            _ => self.nameless.store(true, Ordering::Relaxed),
        }
        let details = event.and_then(|event| event.pointer("/usage/prompt_tokens_details"));
        if details.is_none_or(Value::is_null) {
            self.uncached.store(true, Ordering::Relaxed);
        }
    }

    /// True once a parser has taken something out of the text of a chat. From then on, a marker
    /// written by the model may mean that no text follows, so that no chat can be continued here by
    /// its tokens.
    pub fn parses(&self) -> bool {
        self.parses.load(Ordering::Relaxed)
    }

    /// True once an answer was parsed differently here than by the server: from then on, none of
    /// its answers is parsed here.
    pub fn misparsed(&self) -> bool {
        self.misparsed.load(Ordering::Relaxed)
    }

    /// Numbers of complete streams that were parsed alike here and by the server.
    pub fn parsed_alike(&self) -> ParsedAlike {
        *self.alike.lock()
    }

    /// Notes a complete stream that was parsed alike.
    pub fn has_parsed_alike(&self, parts: PartsSeen) {
        self.alike.lock().add(parts);
    }

    /// As [`Self::parsed_alike`], for answers that are not streamed: servers parse them by other
    /// code.
    pub fn buffered_parsed_alike(&self) -> ParsedAlike {
        *self.buffered_alike.lock()
    }

    /// Notes an answer that is not streamed and was parsed alike.
    pub fn has_parsed_buffered_alike(&self, parts: PartsSeen) {
        self.buffered_alike.lock().add(parts);
    }

    /// Notes an answer that was parsed differently here. True if it is the first.
    pub fn has_misparsed(&self) -> bool {
        !self.misparsed.swap(true, Ordering::Relaxed)
    }

    /// Notes a chat answer with reasoning or tool calls in addition to its text.
    pub fn has_parsed(&self) {
        self.parses.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_mark_is_text_if_it_always_was() {
        let all: Arc<[TokenId]> = [7, 8].into();
        let traits = AnswerTraits::default();
        for times in 0..SHOWN {
            assert_eq!(*traits.hidden(&all), [7, 8], "{times}");
            traits.note_mark(7, true);
        }
        assert_eq!(*traits.hidden(&all), [8]);
        traits.note_mark(7, false);
        (0..2 * SHOWN).for_each(|_| traits.note_mark(7, true));
        assert_eq!(*traits.hidden(&all), [7, 8], "a parser has taken it once");
    }

    #[test]
    fn an_end_is_named_as_in_the_answers_before() {
        let traits = AnswerTraits::default();
        let choice = |reason: &str, stop: Value, ids: &[TokenId]| json!({"finish_reason": reason, "stop_reason": stop, "token_ids": ids});
        traits.note_end(&choice("length", Value::Null, &[1]));
        traits.note_end(&choice("stop", json!("a text"), &[2]));
        traits.note_end(&json!({"finish_reason": "stop", "token_ids": [3]}));
        assert_eq!([1, 2, 3].map(|token| traits.names_end(token)), [None; 3]);
        traits.note_end(&choice("tool_calls", json!(4), &[9, 4]));
        traits.note_end(&choice("stop", Value::Null, &[9, 5]));
        // Named only for a client that ignores ends of texts.
        traits.note_end(&choice("stop", json!(5), &[5]));
        assert_eq!([4, 5, 9].map(|token| traits.names_end(token)), [Some(true), Some(false), None]);
        let body = json!({"choices": [choice("length", Value::Null, &[1]), choice("stop", json!(6), &[6])]});
        traits.reads(&[body.to_string().into_bytes()]);
        assert_eq!([1, 6].map(|token| traits.names_end(token)), [None, Some(true)]);
    }
}
