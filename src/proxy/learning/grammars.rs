//! Requests to which a server applies a grammar.

use std::num::NonZeroUsize;

use lru::LruCache;
use parking_lot::Mutex;

use foretell_wire::openai::GrammarKey;

/// Maximum number of stored answers; the least recently used one is evicted.
const ANSWERS: NonZeroUsize = NonZeroUsize::new(256).unwrap();

/// The answers of one engine start, by the key of their requests.
#[derive(Debug)]
pub struct Grammars(Mutex<LruCache<GrammarKey, bool>>);

impl Default for Grammars {
    fn default() -> Self {
        Self(Mutex::new(LruCache::new(ANSWERS)))
    }
}

impl Grammars {
    /// True if a grammar applies to requests of this key; `None` if the server has not answered.
    pub fn applies(&self, key: &GrammarKey) -> Option<bool> {
        self.0.lock().get(key).copied()
    }

    /// Notes the server's answer for requests of this key.
    pub fn note(&self, key: GrammarKey, applies: bool) {
        self.0.lock().put(key, applies);
    }
}
