//! Prompt and output of one request, shared by all parts that read them.
//!
//! The tokens of a request only grow. Every sender of them (a verify request, a later plain
//! request, a request to the model drafter) gets a clone, which copies no token. Their JSON text,
//! which is most of a request body, is written once and extended, not rewritten for every request.

use std::fmt::Write;
use std::sync::Arc;

use crate::units::TokenId;

/// Prompt and output of one request. Clones share the tokens; tokens added to one clone do not
/// appear in the others.
#[derive(Clone, Debug, Default)]
pub struct TokenContext {
    prompt: Arc<[TokenId]>,
    output: Arc<Vec<TokenId>>,
    json: Arc<Json>,
}

/// The ids in JSON form, separated by commas.
#[derive(Clone, Debug, Default)]
struct Json {
    text: String,
    /// Number of tokens in the text, those of the prompt first.
    tokens: usize,
}

impl TokenContext {
    /// A prompt, and the output that followed it.
    pub fn new(prompt: &[TokenId], output: &[TokenId]) -> Self {
        Self { prompt: prompt.into(), output: Arc::new(output.to_vec()), json: Arc::default() }
    }

    /// Ids of the prompt; empty until they are known.
    pub fn prompt(&self) -> &[TokenId] {
        &self.prompt
    }

    pub fn output(&self) -> &[TokenId] {
        &self.output
    }

    /// Tokens of prompt and output.
    pub fn len(&self) -> usize {
        self.prompt.len() + self.output.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Every token in order.
    pub fn tokens(&self) -> impl Iterator<Item = TokenId> {
        self.prompt.iter().chain(self.output.iter()).copied()
    }

    /// Takes over the growth of a request: the prompt once it is known, and new output. Both are
    /// passed in full; only the new tokens are copied.
    pub fn follow(&mut self, prompt: &[TokenId], output: &[TokenId]) {
        if self.prompt.len() != prompt.len() {
            *self = Self::new(prompt, output);
        } else if let Some(new) = output.get(self.output.len()..).filter(|new| !new.is_empty()) {
            self.push(new);
        }
    }

    /// As [`Self::follow`], and returns a clone with its JSON text for a request to a server.
    #[must_use]
    pub fn for_call(&mut self, prompt: &[TokenId], output: &[TokenId]) -> Self {
        self.follow(prompt, output);
        self.write_json();
        self.clone()
    }

    /// Adds tokens to the output.
    pub fn push(&mut self, tokens: &[TokenId]) {
        if tokens.is_empty() {
            return;
        }
        Arc::make_mut(&mut self.output).extend_from_slice(tokens);
    }

    /// Writes the JSON text of the tokens added since the last call, for [`Self::json`].
    pub fn write_json(&mut self) {
        let (from, prompt) = (self.json.tokens, self.prompt.len());
        let new = [self.prompt.get(from..), self.output.get(from.saturating_sub(prompt)..)];
        if new.iter().flatten().any(|new| !new.is_empty()) {
            let json = Arc::make_mut(&mut self.json);
            new.into_iter().flatten().for_each(|new| write_ids(&mut json.text, new));
            json.tokens = prompt + self.output.len();
        }
    }

    /// The ids in JSON form, separated by commas and without brackets; `None` if the text does not
    /// contain all of them.
    pub fn json(&self) -> Option<&str> {
        (self.json.tokens == self.len()).then_some(self.json.text.as_str())
    }
}

/// Appends ids in decimal, separated by commas, to those that `text` contains already.
pub fn write_ids(text: &mut String, ids: &[TokenId]) {
    for id in ids {
        let comma = if text.is_empty() { "" } else { "," };
        // Writing to a string cannot fail.
        let _ = write!(text, "{comma}{id}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_clone_keeps_its_tokens_and_shares_the_prompt() {
        let mut context = TokenContext::new(&[1, 2], &[]);
        context.follow(&[1, 2], &[3]);
        let then = context.clone();
        context.follow(&[1, 2], &[3, 4, 5]);
        assert_eq!((then.output(), context.output()), (&[3][..], &[3, 4, 5][..]));
        assert!(std::ptr::eq(then.prompt(), context.prompt()), "one copy of the prompt");
        assert_eq!(context.tokens().collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
    }

    #[test]
    fn without_a_clone_the_output_grows_in_its_buffer() {
        let mut context = TokenContext::new(&[1], &[]);
        context.push(&[7; 100]);
        context.push(&[8]);
        let position = context.output().as_ptr();
        context.follow(&[1], &[&[7; 100][..], &[8; 10]].concat());
        assert_eq!((context.output().as_ptr(), context.len()), (position, 111));
    }

    #[test]
    fn a_prompt_that_becomes_known_is_taken_with_the_output() {
        let mut context = TokenContext::default();
        context.follow(&[], &[3]);
        context.write_json();
        assert_eq!(context.json(), Some("3"));
        context.follow(&[1, 2], &[3, 4]);
        assert_eq!((context.prompt(), context.output(), context.json()), (&[1, 2][..], &[3, 4][..], None));
    }

    proptest! {
        #[test]
        fn the_text_equals_serde_json_however_it_grew(
            prompt in proptest::collection::vec(any::<TokenId>(), 0..5),
            pieces in proptest::collection::vec(proptest::collection::vec(any::<TokenId>(), 0..4), 0..6),
        ) {
            let mut context = TokenContext::new(&prompt, &[]);
            let mut all = prompt;
            for piece in pieces {
                context.push(&piece);
                all.extend(&piece);
                context.write_json();
                let json = serde_json::to_string(&all).expect("ids");
                prop_assert_eq!(context.json().map(|text| format!("[{text}]")), Some(json));
            }
        }
    }
}
