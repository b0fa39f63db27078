//! A server's answers to the question if a grammar binds a request.

use std::time::Duration;

use parking_lot::Mutex;

use foretell_core::control::ExpiringMap;
use foretell_core::units::Tick;
use foretell_engines::openai::GrammarKey;

/// Maximum number of answers kept; the least recently used one is evicted.
const ANSWERS: usize = 256;
/// An answer that was not used for this long may be dropped.
const KEPT: Duration = Duration::from_hours(1);

/// The answers of one engine start, by what they depend on.
#[derive(Debug)]
pub struct Grammars(Mutex<ExpiringMap<GrammarKey, Option<bool>>>);

impl Default for Grammars {
    fn default() -> Self {
        Self(Mutex::new(ExpiringMap::new(ANSWERS, KEPT)))
    }
}

impl Grammars {
    /// True if a grammar binds requests of this key; `None` if the server has not said.
    pub fn bound(&self, key: &GrammarKey, now: Tick) -> Option<bool> {
        let mut answers = self.0.lock();
        // Looking up a key that is not there must not make room for it.
        answers.look(key)?;
        *answers.get(key, now)
    }

    /// Notes the server's answer for requests of this key.
    pub fn note(&self, key: &GrammarKey, bound: bool, now: Tick) {
        *self.0.lock().get(key, now) = Some(bound);
    }
}
