//! Prompt and output of one request, shared by everything that reads them.
//!
//! The tokens of a request only grow. Whoever sends them (a verify call, a later ride, a question to the model
//! drafter) gets a clone, which copies no token; and their JSON text, which is most of what a call sends, is
//! written once and extended, not written again for every call.

use std::fmt::Write;
use std::sync::Arc;

use crate::units::TokenId;

/// Prompt and output of one request. Clones share the tokens; what is added to one is not seen by the others.
#[derive(Clone, Debug, Default)]
pub struct Past {
    prompt: Arc<[TokenId]>,
    output: Arc<Vec<TokenId>>,
    json: Arc<Json>,
}

/// The ids as JSON writes them, separated by commas.
#[derive(Clone, Debug, Default)]
struct Json {
    text: String,
    /// How many tokens it holds, those of the prompt first.
    tokens: usize,
}

impl Past {
    /// A prompt, and the output that followed it.
    pub fn new(prompt: &[TokenId], output: &[TokenId]) -> Self {
        Self { prompt: prompt.into(), output: Arc::new(output.to_vec()), json: Arc::default() }
    }

    /// Ids of the prompt; empty until they are known.
    pub fn prompt(&self) -> &[TokenId] {
        &self.prompt
    }

    /// The output so far.
    pub fn output(&self) -> &[TokenId] {
        &self.output
    }

    /// Tokens of prompt and output.
    pub fn len(&self) -> usize {
        self.prompt.len() + self.output.len()
    }

    /// Whether there is no token at all.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Every token in order.
    pub fn tokens(&self) -> impl Iterator<Item = TokenId> {
        self.prompt.iter().chain(self.output.iter()).copied()
    }

    /// Takes what a request has grown by: the prompt once it is known, and new output. Copies only that.
    pub fn follow(&mut self, prompt: &[TokenId], output: &[TokenId]) {
        if self.prompt.len() != prompt.len() {
            *self = Self::new(prompt, output);
        } else if let Some(new) = output.get(self.output.len()..).filter(|new| !new.is_empty()) {
            self.push(new);
        }
    }

    /// As [`Self::follow`], and a clone for a call, which sends the JSON text.
    #[must_use]
    pub fn for_call(&mut self, prompt: &[TokenId], output: &[TokenId]) -> Self {
        self.follow(prompt, output);
        self.write_json();
        self.clone()
    }

    /// This past as it will be if these tokens come next.
    #[must_use]
    pub fn assuming(mut self, tokens: &[TokenId]) -> Self {
        self.push(tokens);
        self
    }

    /// Adds tokens to the output.
    pub fn push(&mut self, tokens: &[TokenId]) {
        if tokens.is_empty() {
            return;
        }
        Arc::make_mut(&mut self.output).extend_from_slice(tokens);
    }

    /// Writes the JSON text of what was added since the last time, for [`Self::json`].
    pub fn write_json(&mut self) {
        let (from, prompt) = (self.json.tokens, self.prompt.len());
        let new = [self.prompt.get(from..), self.output.get(from.saturating_sub(prompt)..)];
        if new.iter().flatten().any(|new| !new.is_empty()) {
            let json = Arc::make_mut(&mut self.json);
            new.into_iter().flatten().for_each(|new| write_ids(&mut json.text, new));
            json.tokens = prompt + self.output.len();
        }
    }

    /// The ids as JSON writes them, separated by commas and without brackets; `None` if the text does not hold all
    /// of them.
    pub fn json(&self) -> Option<&str> {
        (self.json.tokens == self.len()).then_some(self.json.text.as_str())
    }
}

/// Writes ids behind those that `text` holds already.
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
    fn a_clone_keeps_what_it_has_and_shares_the_prompt() {
        let mut past = Past::new(&[1, 2], &[]);
        past.follow(&[1, 2], &[3]);
        let then = past.clone();
        past.follow(&[1, 2], &[3, 4, 5]);
        assert_eq!((then.output(), past.output()), (&[3][..], &[3, 4, 5][..]));
        assert!(std::ptr::eq(then.prompt(), past.prompt()), "one copy of the prompt");
        assert_eq!(past.tokens().collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
    }

    #[test]
    fn without_a_clone_the_output_grows_in_its_place() {
        let mut past = Past::new(&[1], &[]);
        past.push(&[7; 100]);
        past.push(&[8]);
        let place = past.output().as_ptr();
        past.follow(&[1], &[&[7; 100][..], &[8; 10]].concat());
        assert_eq!((past.output().as_ptr(), past.len()), (place, 111));
    }

    #[test]
    fn a_prompt_that_becomes_known_is_taken_with_the_output() {
        let mut past = Past::default();
        past.follow(&[], &[3]);
        past.write_json();
        assert_eq!(past.json(), Some("3"));
        past.follow(&[1, 2], &[3, 4]);
        assert_eq!((past.prompt(), past.output(), past.json()), (&[1, 2][..], &[3, 4][..], None));
    }

    proptest! {
        #[test]
        fn the_text_is_what_json_writes_however_it_grew(
            prompt in proptest::collection::vec(any::<TokenId>(), 0..5),
            pieces in proptest::collection::vec(proptest::collection::vec(any::<TokenId>(), 0..4), 0..6),
        ) {
            let mut past = Past::new(&prompt, &[]);
            let mut all = prompt;
            for piece in pieces {
                past.push(&piece);
                all.extend(&piece);
                past.write_json();
                let json = serde_json::to_string(&all).expect("ids");
                prop_assert_eq!(past.json().map(|text| format!("[{text}]")), Some(json));
            }
        }
    }
}
