//! Requests to which a server applies a grammar.

use std::time::Duration;

use parking_lot::Mutex;

use foretell_core::control::ExpiringMap;
use foretell_core::units::Tick;
use foretell_wire::openai::GrammarKey;

/// Maximum number of stored answers; the least recently used one is evicted.
const ANSWERS: usize = 256;
/// An answer that was not used for this long may be dropped.
const TTL: Duration = Duration::from_hours(1);

/// The answers of one engine start, by the key of their requests.
#[derive(Debug)]
pub struct Grammars(Mutex<ExpiringMap<GrammarKey, Option<bool>>>);

impl Default for Grammars {
    fn default() -> Self {
        Self(Mutex::new(ExpiringMap::new(ANSWERS, TTL)))
    }
}

impl Grammars {
    /// True if a grammar applies to requests of this key; `None` if the server has not answered.
    pub fn applies(&self, key: &GrammarKey, now: Tick) -> Option<bool> {
        let mut answers = self.0.lock();
        // `get` would insert an absent key, and evict another.
        answers.look(key)?;
        *answers.get(key, now)
    }

    /// Notes the server's answer for requests of this key.
    pub fn note(&self, key: &GrammarKey, applies: bool, now: Tick) {
        *self.0.lock().get(key, now) = Some(applies);
    }
}
