//! The ids of a text that a backend sends without them, at temperature 0.
//!
//! Tokenizing the text again proves nothing: a model need not have written it in the tokens that its tokenizer
//! would choose. But those are a good draft. It is put to the backend after the prompt like any other, and what
//! comes back are the backend's own tokens, right or corrected; at temperature 0 they are the ones that it has
//! sampled, if they spell the same text. Meanwhile the ride is not read, so that text and ids are level and the
//! session may leave it. The backend keeps generating, so the client's stream pauses but loses nothing.
//!
//! Every token whose id is recovered costs the backend a token, so this is done at two places of a request only:
//! near its beginning, where what other requests have taught decides, and once again after some more evidence.

use std::sync::Arc;

use crate::draft::{Features, Source, Tree};
use crate::drive::calls::Calls;
use crate::session::accept::{Accept, Judge, Judged, Walk};
use crate::session::{Decode, Event, Fault, Tail};
use crate::text::Tokenizer;
use crate::units::TokenId;
use crate::words::{Past, Plan};

/// The numbers of text events after which the ids are asked for.
const PLACES: [usize; 2] = [2, 16];
/// Most tokens whose ids one call recovers.
const CHUNK: usize = 16;
/// Most calls at one place.
const ROUNDS: u32 = 6;

/// The text of a ride so far, and when its ids are to be asked for.
pub struct IdRecovery {
    words: Arc<Tokenizer>,
    plan: Plan,
    heard: String,
    events: usize,
    places: std::slice::Iter<'static, usize>,
    next: Option<usize>,
}

impl IdRecovery {
    /// No text yet; the ids will be recovered by verify calls of `plan`.
    pub fn new(words: Arc<Tokenizer>, plan: Plan) -> Self {
        let mut places = PLACES.iter();
        let next = places.next().copied();
        Self { words, plan, heard: String::new(), events: 0, places, next }
    }

    /// Adds text of the ride.
    pub fn hear(&mut self, text: &str) {
        self.heard.push_str(text);
        self.events += usize::from(!text.is_empty());
    }

    /// Whether the ids are to be asked for now; true once for each of [`PLACES`].
    pub fn is_due(&mut self) -> bool {
        let due = self.next.is_some_and(|next| self.events >= next);
        if due {
            self.next = self.places.next().copied();
        }
        due
    }

    /// Asks for the ids of the text so far, after those that are known. All calls together take at most the timeout
    /// of a verify round, because the client waits. The event is `Token`, or `Doubt` if ids and text disagree.
    pub fn ask(&self, calls: Calls, past: Past) -> impl Future<Output = Event> + Send + 'static {
        let (words, plan, heard) = (Arc::clone(&self.words), self.plan, self.heard.clone());
        async move {
            let named = past.output().len();
            let known = past.output().to_vec();
            let mut text = Spelling { words: &words, past, heard, known };
            let spelt = tokio::time::timeout(calls.patience(), text.ask(&calls, plan)).await;
            if spelt == Ok(false) {
                return Event::Doubt;
            }
            let tokens = text.known.split_off(named);
            Event::Token { tokens, text: String::new(), tail: Tail::Open }
        }
    }
}

impl Spelling<'_, Arc<Tokenizer>> {
    /// Calls until the ids cover the text, or a call brings nothing. False if the backend's tokens spell another text, or may
    /// be another engine's.
    async fn ask(&mut self, calls: &Calls, plan: Plan) -> bool {
        for round in 0..ROUNDS {
            let Some(guess) = self.guess() else { break };
            let draft = Tree::chain(&guess, Source::PromptLookup, Features::default());
            let answer = calls.clone().verify(self.past.clone(), draft.clone().into(), plan, round).await;
            let verdict = match answer {
                Event::Verdict(verdict) => verdict,
                Event::Fault(Fault::Lost | Fault::Changed) => {
                    calls.changed();
                    return false;
                }
                _ => break,
            };
            // Ids are recovered at temperature 0 only, where nothing is drawn.
            let round = Judged {
                draft: &draft,
                verdict: &verdict,
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
            self.past.push(self.known.get(self.past.output().len()..).unwrap_or_default());
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
    /// The text of tokens after a prompt, as far as it is certain.
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

/// A text that a ride has brought, and the tokens of it that are known.
struct Spelling<'a, W> {
    words: &'a W,
    /// Prompt and known tokens, as calls carry them.
    past: Past,
    heard: String,
    known: Vec<TokenId>,
}

impl<W: Words> Spelling<'_, W> {
    fn is_level(&self) -> bool {
        self.words.spell(self.past.prompt(), &self.known) == self.heard
    }

    /// A guess at the tokens after the known ones, at most [`CHUNK`]; `None` if the known ones cover the text.
    fn guess(&self) -> Option<Vec<TokenId>> {
        let known = self.words.spell(self.past.prompt(), &self.known);
        let rest = self.heard.strip_prefix(&known).filter(|rest| !rest.is_empty())?;
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
            let spelt = self.words.spell(self.past.prompt(), &self.known);
            if !self.heard.starts_with(&spelt) {
                self.known.pop();
                // This token may spell more than the backend has sent so far.
                return spelt.starts_with(&self.heard);
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

    fn heard(text: &str, known: &[TokenId]) -> Spelling<'static, Toy> {
        Spelling { words: &Toy, past: Past::new(&[7], known), heard: text.to_owned(), known: known.to_vec() }
    }

    #[test]
    fn what_the_target_says_counts_and_not_what_the_text_would_be_cut_into() {
        let mut text = heard("abc", &[]);
        assert_eq!(text.guess(), Some(vec![2, 3]));
        // The target wrote "a" and "b"; its second sample follows its own first.
        assert!(text.take(&[0]));
        assert_eq!(text.guess(), Some(vec![1, 3]));
        assert!(text.take(&[1, 3, 0]));
        assert!(text.is_level() && text.guess().is_none());
        assert_eq!(text.known, [0, 1, 3], "nothing beyond what was heard");
    }

    #[test]
    fn tokens_that_spell_nothing_are_kept_where_text_follows_them() {
        let mut text = heard("ac", &[0]);
        assert!(text.take(&[4, 3, 4]));
        assert_eq!(text.known, [0, 4, 3]);
    }

    #[test]
    fn another_text_is_told_from_one_that_is_held_back() {
        assert!(!heard("ab", &[]).take(&[0, 3]), "a contradiction");
        let mut held = heard("ca", &[3]);
        assert!(held.take(&[2]));
        assert!(!held.is_level() && held.known == [3]);
        assert!(heard("c", &[0]).guess().is_none(), "what is known is not what was heard");
    }

    #[test]
    fn a_guess_is_no_longer_than_a_call_may_be() {
        assert_eq!(heard(&"a".repeat(99), &[]).guess().map(|guess| guess.len()), Some(CHUNK));
    }
}
