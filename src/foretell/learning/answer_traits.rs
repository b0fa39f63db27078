//! Traits of a server's answers, as observed in them.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::Value;

use crate::learning::grammars::Grammars;
use foretell_core::session::PartsSeen;

/// Traits observed in the answers of one epoch, shared by its requests.
#[derive(Debug, Default)]
pub struct AnswerTraits {
    /// Its answers to the question if a grammar binds a request.
    pub grammars: Grammars,
    fingerprint: Mutex<Option<Value>>,
    parses: AtomicBool,
    misparsed: AtomicBool,
    alike: Mutex<ParsedAlike>,
    whole_alike: Mutex<ParsedAlike>,
    uncached: AtomicBool,
    nameless: AtomicBool,
    unended: AtomicU32,
}

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

    /// Reads the `system_fingerprint` of complete answers to verify requests: the first speculated
    /// answer of an epoch is cut off before it sends its own.
    pub fn reads(&self, bodies: &[Vec<u8>]) {
        if self.fingerprint.lock().is_some() {
            return;
        }
        let named = |body: &Vec<u8>| serde_json::from_slice::<Named>(body).ok()?.system_fingerprint;
        if let Some(fingerprint) = bodies.first().and_then(named) {
            self.note_fingerprint(&Value::String(fingerprint));
        }
    }

    /// True if the last event of an aborted answer may hold something that is not known otherwise:
    /// the cached tokens of its prompt, for a client that gets the usage, or the fingerprint.
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
    pub fn whole_parsed_alike(&self) -> ParsedAlike {
        *self.whole_alike.lock()
    }

    /// Notes an answer that is not streamed and was parsed alike.
    pub fn has_parsed_whole_alike(&self, parts: PartsSeen) {
        self.whole_alike.lock().add(parts);
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
