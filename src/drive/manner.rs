//! How a server writes its answers, as far as its answers have shown.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::Value;

/// What the answers of one epoch have shown, shared by its requests.
#[derive(Debug, Default)]
pub struct Manner {
    fingerprint: Mutex<Option<Value>>,
    parses: AtomicBool,
    uncached: AtomicBool,
    nameless: AtomicBool,
    unended: AtomicU32,
}

#[derive(Deserialize)]
struct Named {
    system_fingerprint: Option<String>,
}

impl Manner {
    /// The `system_fingerprint` that its last answers had; `None` if they had none.
    pub fn fingerprint(&self) -> Option<Value> {
        self.fingerprint.lock().clone()
    }

    /// An answer had this `system_fingerprint`.
    pub fn says_fingerprint(&self, fingerprint: &Value) {
        let mut known = self.fingerprint.lock();
        if known.as_ref() != Some(fingerprint) {
            *known = Some(fingerprint.clone());
        }
    }

    /// Reads the `system_fingerprint` of the whole answers to verify calls: the first answer of an epoch that is
    /// speculated on is cut off before it tells its own.
    pub fn reads(&self, bodies: &[Vec<u8>]) {
        if self.fingerprint.lock().is_some() {
            return;
        }
        let named = |body: &Vec<u8>| serde_json::from_slice::<Named>(body).ok()?.system_fingerprint;
        if let Some(fingerprint) = bodies.first().and_then(named) {
            self.says_fingerprint(&Value::String(fingerprint));
        }
    }

    /// Whether the last event of an answer that is aborted may tell something that is not known otherwise: what was cached
    /// of its prompt, for a client that is told the usage, and the fingerprint.
    pub fn may_end_with_news(&self, shows_usage: bool) -> bool {
        let cached = shows_usage && !self.uncached.load(Ordering::Relaxed);
        cached || (!self.nameless.load(Ordering::Relaxed) && self.fingerprint.lock().is_none())
    }

    /// An aborted answer has not ended in time, or without its last event.
    pub fn has_not_ended(&self) {
        if self.unended.fetch_add(1, Ordering::Relaxed) > 0 {
            self.has_ended(None);
        }
    }

    /// Takes over what the last event of an aborted answer tells, and what it does not; `None`: none can be aborted so.
    pub fn has_ended(&self, event: Option<&Value>) {
        match event.and_then(|event| event.get("system_fingerprint")) {
            Some(fingerprint) if !fingerprint.is_null() => self.says_fingerprint(fingerprint),
            _ => self.nameless.store(true, Ordering::Relaxed),
        }
        let details = event.and_then(|event| event.pointer("/usage/prompt_tokens_details"));
        if details.is_none_or(Value::is_null) {
            self.uncached.store(true, Ordering::Relaxed);
        }
    }

    /// Whether a parser has taken something out of the text of a chat. From then on, a mark that the model writes may
    /// mean that what follows is no text, so that no chat can be continued here by its tokens.
    pub fn parses(&self) -> bool {
        self.parses.load(Ordering::Relaxed)
    }

    /// A chat's answer had reasoning or tool calls beside its text.
    pub fn has_parsed(&self) {
        self.parses.store(true, Ordering::Relaxed);
    }
}
