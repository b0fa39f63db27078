//! The grammars of a server that are followed here, and whether they have proved themselves.
//!
//! A grammar is compiled here as on the server ([`foretell_engines::masks`]). It is used once the
//! server has shown that it uses the same library, and once an answer of the server's own under
//! this grammar was one that it allows here; at temperature 0 also, token by token, what it makes
//! of the server's probabilities.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use tokio::sync::Semaphore;

use foretell_core::control::ExpiringMap;
use foretell_core::units::Tick;
use foretell_engines::masks::{Compiled, Rules, Shown, Vocabulary};
use foretell_engines::text::Tokenizer;

/// Maximum number of grammars kept; the least recently used one is evicted.
const GRAMMARS: usize = 128;
/// Maximum number of proofs of a grammar that come to nothing.
const PROOFS: u32 = 5;
/// A grammar that was not used for this long may be dropped.
const KEPT: Duration = Duration::from_hours(4);

/// Identifies a grammar.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MaskKey([u8; 32]);

impl MaskKey {
    /// The key of a grammar, with the kind of its proof: at temperature 0 another one, and with
    /// other variables of the chat template. A schema with its members in another order is another
    /// grammar.
    pub fn of(rules: &Rules, greedy: bool, template: Option<&Map<String, Value>>) -> Self {
        let is_tag = matches!(rules, Rules::Tag(_));
        let template = template.map(|template| json!(template).to_string()).unwrap_or_default();
        Self(Sha256::digest(format!("{greedy} {is_tag} {template} {}", rules.to_json_text())).into())
    }
}

/// The trust in a grammar that is followed here.
#[derive(Clone, Default)]
pub enum Trust {
    /// Not known: an answer has to prove it.
    #[default]
    Unproven,
    /// An answer is being held against it.
    Proving,
    /// It is the server's own, as an answer has shown that began with reasoning (true) or not.
    Proven(Arc<Compiled>, bool),
    /// It cannot be followed here, for this reason.
    Refused(Arc<str>),
}

/// A grammar, and how many proofs of it have come to nothing.
type Kept = (Trust, u32);

/// The grammars of one epoch.
pub struct Masks {
    grammars: Mutex<ExpiringMap<MaskKey, Kept>>,
    /// The library by which the server makes its grammars, as far as it was asked.
    library: Mutex<Shown>,
    vocabulary: OnceLock<Arc<Vocabulary>>,
    /// The right to compile one.
    pub compiling: Arc<Semaphore>,
}

impl Default for Masks {
    fn default() -> Self {
        Self {
            grammars: Mutex::new(ExpiringMap::new(GRAMMARS, KEPT)),
            library: Mutex::new(Shown::Open),
            vocabulary: OnceLock::new(),
            compiling: Arc::new(Semaphore::new(1)),
        }
    }
}

impl std::fmt::Debug for Masks {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Masks").field("library", &self.library).finish_non_exhaustive()
    }
}

impl Masks {
    /// The trust in this grammar.
    pub fn trust(&self, key: &MaskKey, now: Tick) -> Trust {
        self.grammars.lock().get(key, now).0.clone()
    }

    /// Begins to hold an answer against a grammar; false if that is not needed, or under way.
    pub fn begin_proof(&self, key: &MaskKey, now: Tick) -> bool {
        let mut grammars = self.grammars.lock();
        let (trust, _) = grammars.get(key, now);
        let begins = matches!(trust, Trust::Unproven);
        if begins {
            *trust = Trust::Proving;
        }
        begins
    }

    /// Ends a proof; [`Trust::Unproven`] where it came to nothing, which is refused in the end:
    /// every proof costs the server a request.
    pub fn end_proof(&self, key: &MaskKey, trust: Trust, now: Tick) {
        let mut grammars = self.grammars.lock();
        let (kept, failed) = grammars.get(key, now);
        *failed += u32::from(matches!(trust, Trust::Unproven));
        let given_up = *failed >= PROOFS && matches!(trust, Trust::Unproven);
        *kept = if given_up { Trust::Refused("its answers could not be scored".into()) } else { trust };
    }

    /// The library by which the server makes its grammars, as far as it was asked.
    pub fn library(&self) -> Shown {
        *self.library.lock()
    }

    /// Notes what the server has shown of it.
    pub fn note_library(&self, shown: Shown) {
        *self.library.lock() = shown;
    }

    /// The server's vocabulary, which has this tokenizer.
    pub fn vocabulary(&self, tokenizer: &Arc<Tokenizer>) -> Arc<Vocabulary> {
        Arc::clone(self.vocabulary.get_or_init(|| Vocabulary::new(Arc::clone(tokenizer))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use foretell_engines::openai::{Grammar, Language};

    #[test]
    fn a_grammar_is_proved_once() {
        let (masks, now) = (Masks::default(), Tick(0));
        let grammar = |text: &str| {
            Rules::Asked(Arc::new(Grammar {
                parameter: "response_format",
                language: Language::Regex(text.to_owned()),
                any_whitespace: true,
            }))
        };
        let [a, b] = ["a", "b"].map(|text| MaskKey::of(&grammar(text), true, None));
        assert_ne!(a, MaskKey::of(&grammar("a"), false, None));
        let thinks = Map::from_iter([("enable_thinking".to_owned(), Value::Bool(true))]);
        assert_ne!(a, MaskKey::of(&grammar("a"), true, Some(&thinks)));
        assert!(matches!(masks.trust(&a, now), Trust::Unproven));
        assert!(masks.begin_proof(&a, now) && !masks.begin_proof(&a, now) && masks.begin_proof(&b, now));
        masks.end_proof(&a, Trust::Refused("wrong".into()), now);
        masks.end_proof(&b, Trust::Unproven, now);
        assert!(!masks.begin_proof(&a, now) && masks.begin_proof(&b, now));
        masks.end_proof(&b, Trust::Unproven, now);
        for failed in 2..PROOFS {
            assert!(masks.begin_proof(&b, now), "{failed}");
            masks.end_proof(&b, Trust::Unproven, now);
        }
        assert!(matches!(masks.trust(&b, now), Trust::Refused(_)), "the last one");
    }
}
