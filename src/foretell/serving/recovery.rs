//! The ids of a text that a backend sends without them, at temperature 0.
//!
//! Tokenizing the text again proves nothing: a model need not have written it in the tokens that
//! its tokenizer would choose. But those are a good draft. The backend verifies it after the prompt
//! like any other, and returns its own tokens, confirmed or corrected; at temperature 0 they are
//! the ones that it has sampled, if they spell the same text. Meanwhile the plain call is not read,
//! so that text and ids cover the same output and the session may leave the call. The backend keeps
//! generating: the client's stream pauses but loses nothing.
//!
//! Every recovered id costs the backend a token, so this is done at two positions of a request
//! only: near its beginning, where the statistics of other requests decide, and once again when the
//! request itself has given some evidence.

use std::sync::Arc;

use crate::serving::calls::Calls;
use foretell_core::draft::{Features, Source, Tree};
use foretell_core::session::accept::{Accept, Judge, Judged, Walk};
use foretell_core::session::{Decode, Event, Fault, Parsed, Tail};
use foretell_core::units::TokenId;
use foretell_core::words::{TokenContext, VerifyMethod};
use foretell_engines::text::Tokenizer;

/// Numbers of text events after which the ids are requested.
const RECOVER_AT_EVENTS: [usize; 2] = [2, 16];
/// Maximum number of ids that one call recovers.
const CHUNK: usize = 16;
/// Maximum number of calls at one position.
const ROUNDS: u32 = 6;

/// The text of a plain call so far, and the points at which its ids are requested.
pub struct IdRecovery {
    words: Arc<Tokenizer>,
    method: VerifyMethod,
    received: String,
    events: usize,
    positions: std::slice::Iter<'static, usize>,
    next: Option<usize>,
}

impl IdRecovery {
    /// No text yet; the ids will be recovered by verify requests of `method`.
    pub fn new(words: Arc<Tokenizer>, method: VerifyMethod) -> Self {
        let mut positions = RECOVER_AT_EVENTS.iter();
        let next = positions.next().copied();
        Self { words, method, received: String::new(), events: 0, positions, next }
    }

    /// Adds text of the plain call.
    pub fn push_text(&mut self, text: &str) {
        self.received.push_str(text);
        self.events += usize::from(!text.is_empty());
    }

    /// True if the ids are to be requested now, once for each of [`RECOVER_AT_EVENTS`].
    pub fn is_due(&mut self) -> bool {
        let due = self.next.is_some_and(|next| self.events >= next);
        if due {
            self.next = self.positions.next().copied();
        }
        due
    }

    /// Requests the ids of the text so far, after those that are known. All calls together take at
    /// most the timeout of a verify request, because the client waits. The event is `Token`, or
    /// `Doubt` if ids and text disagree.
    pub fn ask(
        &self,
        calls: Calls,
        token_context: TokenContext,
    ) -> impl Future<Output = Event> + Send + 'static {
        let (words, method, received) = (Arc::clone(&self.words), self.method, self.received.clone());
        async move {
            let named = token_context.output().len();
            let known = token_context.output().to_vec();
            let mut text = Spelling { words: &words, token_context, received, known };
            let spelt = tokio::time::timeout(calls.patience(), text.ask(&calls, method)).await;
            if spelt == Ok(false) {
                return Event::Doubt;
            }
            let tokens = text.known.split_off(named);
            Event::Token { tokens, parsed: Parsed::default(), tail: Tail::Open }
        }
    }
}

impl Spelling<'_, Arc<Tokenizer>> {
    /// Calls until the ids cover the text, or a call brings nothing. False if the backend's tokens
    /// spell another text, or may be another engine's.
    async fn ask(&mut self, calls: &Calls, method: VerifyMethod) -> bool {
        for round in 0..ROUNDS {
            let Some(guess) = self.guess() else { break };
            let draft = Tree::chain(&guess, Source::PromptLookup, Features::default());
            let answer =
                calls.clone().verify(self.token_context.clone(), draft.clone().into(), method, round).await;
            let result = match answer {
                Event::VerifyResult(result) => result,
                Event::Fault(Fault::Lost | Fault::Changed) => {
                    calls.changed();
                    return false;
                }
                _ => break,
            };
            // Ids are recovered at temperature 0 only, where nothing is sampled.
            let round = Judged {
                draft: &draft,
                result: &result,
                context: 0,
                output: 0,
                tolerance: 0.0,
                coupled: false,
                free: &|_| false,
            };
            let said = Judge::new(Accept::default(), 0).walk(&round);
            let end = self.words.end();
            let Some(said) = said.filter(|said| !said.tokens.is_empty() && said.is_within(end)) else {
                break;
            };
            // The token that ends the text adds nothing to it.
            let spelt = said.tokens.len() - usize::from(said.ends);
            let fits = self.take(said.tokens.get(..spelt).unwrap_or_default());
            self.token_context.push(self.known.get(self.token_context.output().len()..).unwrap_or_default());
            if !fits || (said.ends && !self.is_level()) {
                return false;
            }
        }
        true
    }
}

/// Conversion between text and tokens; a test has its own.
trait Words {
    /// Tokenizes a text.
    fn cut(&self, text: &str) -> Vec<TokenId>;
    /// The certain part of the text of tokens after a prompt.
    fn spell(&self, prompt: &[TokenId], tokens: &[TokenId]) -> String;
}

impl Words for Arc<Tokenizer> {
    fn cut(&self, text: &str) -> Vec<TokenId> {
        self.encode(text, false).unwrap_or_default()
    }

    fn spell(&self, prompt: &[TokenId], tokens: &[TokenId]) -> String {
        let mut decode = self.detokenizer(prompt, true);
        tokens.iter().map(|&token| decode.push(token)).collect()
    }
}

/// A text received from a plain call, and its known tokens.
struct Spelling<'a, W> {
    words: &'a W,
    /// Prompt and known tokens, as calls carry them.
    token_context: TokenContext,
    received: String,
    known: Vec<TokenId>,
}

impl<W: Words> Spelling<'_, W> {
    fn is_level(&self) -> bool {
        self.words.spell(self.token_context.prompt(), &self.known) == self.received
    }

    /// A guess at the tokens after the known ones, at most [`CHUNK`]; `None` if the known ones
    /// cover the text.
    fn guess(&self) -> Option<Vec<TokenId>> {
        let known = self.words.spell(self.token_context.prompt(), &self.known);
        let rest = self.received.strip_prefix(&known).filter(|rest| !rest.is_empty())?;
        let mut guess = self.words.cut(rest);
        guess.truncate(CHUNK);
        Some(guess)
    }

    /// Takes tokens up to the end of the text. False if they spell another text.
    fn take(&mut self, said: &[TokenId]) -> bool {
        for &token in said {
            if self.is_level() {
                return true;
            }
            self.known.push(token);
            let spelt = self.words.spell(self.token_context.prompt(), &self.known);
            if !self.received.starts_with(&spelt) {
                self.known.pop();
                // This token may spell more than the backend has sent so far.
                return spelt.starts_with(&self.received);
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tokens spell "a", "b", "ab", "c" and nothing; a text is cut greedily.
    struct Toy;

    const SPELT: [&str; 5] = ["a", "b", "ab", "c", ""];

    impl Words for Toy {
        fn cut(&self, mut text: &str) -> Vec<TokenId> {
            let mut tokens = Vec::new();
            while !text.is_empty() {
                let token = [2, 0, 1, 3].into_iter().find(|&token: &usize| text.starts_with(SPELT[token]));
                let Some(token) = token else { break };
                text = &text[SPELT[token].len()..];
                tokens.push(token as TokenId);
            }
            tokens
        }

        fn spell(&self, _: &[TokenId], tokens: &[TokenId]) -> String {
            tokens.iter().map(|&token| SPELT[token as usize]).collect()
        }
    }

    fn received(text: &str, known: &[TokenId]) -> Spelling<'static, Toy> {
        Spelling {
            words: &Toy,
            token_context: TokenContext::new(&[7], known),
            received: text.to_owned(),
            known: known.to_vec(),
        }
    }

    #[test]
    fn tokens_of_the_target_override_those_of_the_tokenizer() {
        let mut text = received("abc", &[]);
        assert_eq!(text.guess(), Some(vec![2, 3]));
        // The target wrote "a" and "b"; its second sample follows its own first.
        assert!(text.take(&[0]));
        assert_eq!(text.guess(), Some(vec![1, 3]));
        assert!(text.take(&[1, 3, 0]));
        assert!(text.is_level() && text.guess().is_none());
        assert_eq!(text.known, [0, 1, 3], "nothing beyond what was received");
    }

    #[test]
    fn tokens_that_spell_nothing_are_kept_where_text_follows_them() {
        let mut text = received("ac", &[0]);
        assert!(text.take(&[4, 3, 4]));
        assert_eq!(text.known, [0, 4, 3]);
    }

    #[test]
    fn another_text_differs_from_one_held_back() {
        assert!(!received("ab", &[]).take(&[0, 3]), "a contradiction");
        let mut held = received("ca", &[3]);
        assert!(held.take(&[2]));
        assert!(!held.is_level() && held.known == [3]);
        assert!(received("c", &[0]).guess().is_none(), "what is known is not what was received");
    }

    #[test]
    fn a_guess_is_no_longer_than_a_call_may_be() {
        assert_eq!(received(&"a".repeat(99), &[]).guess().map(|guess| guess.len()), Some(CHUNK));
    }
}
