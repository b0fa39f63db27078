//! Output parsers: from text with markers to reasoning, content and tool calls.
//!
//! A server with a reasoning or tool parser sends its chats in these parts. The trait is
//! implemented in `foretell-engines`, one parser per family of models; the session feeds it what
//! the server's own parser is fed, and compares the results.

use crate::units::TokenId;

/// Parts of an output, as one delta of a chat holds them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parsed {
    pub reasoning: String,
    /// Content: text for the user.
    pub text: String,
    /// Pieces of tool calls, in order.
    pub calls: Vec<CallDelta>,
}

impl Parsed {
    pub fn content(text: String) -> Self {
        Self { text, ..Self::default() }
    }

    /// True if there is nothing in it.
    pub fn is_empty(&self) -> bool {
        self.reasoning.is_empty() && self.text.is_empty() && self.calls.is_empty()
    }

    /// Appends what follows. Pieces of one call become one.
    pub fn append(&mut self, next: Self) {
        self.reasoning.push_str(&next.reasoning);
        self.text.push_str(&next.text);
        for delta in next.calls {
            // Mostly it is the last one.
            match self.calls.iter_mut().rev().find(|call| call.index == delta.index) {
                Some(call) => call.append(&delta),
                None => self.calls.push(delta),
            }
        }
    }
}

/// A piece of one tool call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallDelta {
    /// Number of the call in this output, from 0.
    pub index: u32,
    /// The call's id, in the first piece, where the model itself writes ids; `None` elsewhere: the
    /// server makes one.
    pub id: Option<String>,
    /// The function's name, whole, in the first piece of the call; `None` in all others.
    pub name: Option<String>,
    /// Text that this piece adds to the arguments; empty if none.
    pub arguments: String,
}

impl CallDelta {
    fn append(&mut self, next: &Self) {
        if self.name.is_none() {
            self.name.clone_from(&next.name);
            self.id.clone_from(&next.id);
        }
        self.arguments.push_str(&next.arguments);
    }
}

/// The first difference between the parts of an output here and at the backend: its place, without
/// the text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Difference {
    /// The part: `reasoning`, `content`, `name` or `arguments` of a call.
    pub part: &'static str,
    /// Length of the part here, bytes.
    pub own: usize,
    /// Length of the part at the backend, bytes.
    pub backend: usize,
    /// The first byte that differs; the shorter length if one is the beginning of the other.
    pub at: usize,
}

impl Difference {
    /// The difference between two parts; `None` if they are the same.
    pub fn between(part: &'static str, own: &str, backend: &str) -> Option<Self> {
        let at = own.bytes().zip(backend.bytes()).take_while(|(own, backend)| own == backend).count();
        (own != backend).then_some(Self { part, own: own.len(), backend: backend.len(), at })
    }

    /// True if one of the two is the beginning of the other.
    fn is_of_length(self) -> bool {
        self.at == self.own.min(self.backend)
    }

    /// The one that shows most among differences of one output: the first of content, else of
    /// length.
    pub fn first(all: impl IntoIterator<Item = Self>) -> Option<Self> {
        let all: Vec<Self> = all.into_iter().collect();
        all.iter().copied().find(|difference| !difference.is_of_length()).or_else(|| all.first().copied())
    }
}

/// Makes the parser of an output from the ids of its prompt, which tell if the prompt has opened a
/// part; `None` if the server's own parser cannot be told.
pub type MakeParser = Box<dyn FnOnce(&[TokenId]) -> Option<Box<dyn Parse>> + Send>;

/// Parses one output, token by token, as the server's own parser does for a stream.
pub trait Parse: Send {
    /// Adds a token and the text that became certain with it (special tokens as their text; empty
    /// for half a character). Returns the parts that became certain: never part of a marker.
    fn push(&mut self, token: TokenId, text: &str) -> Parsed;

    /// The parts still withheld, at the end of the output.
    fn finish(&mut self) -> Parsed;

    /// True if the last token is not inside a tool call or its markers.
    fn is_outside_calls(&self) -> bool;

    /// Tokens so far that the server counts as reasoning in `usage`; zero without a reasoning
    /// parser.
    fn reasoning_tokens(&self) -> u64;

    /// False once the server's answer cannot be told from the output: what was given since the last
    /// token may differ from it.
    fn is_sure(&self) -> bool;

    /// A copy that continues independently from here.
    fn fork(&self) -> Box<dyn Parse>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_of_content_shows_more_than_one_of_length() {
        let longer = Difference::between("content", "ab", "abc");
        assert_eq!(longer, Some(Difference { part: "content", own: 2, backend: 3, at: 2 }));
        let other = Difference::between("arguments", "{é}", "{è}");
        assert_eq!(other, Some(Difference { part: "arguments", own: 4, backend: 4, at: 2 }));
        assert_eq!(Difference::between("name", "f", "f"), None);
        assert_eq!(Difference::first([longer, other].into_iter().flatten()), other);
        assert_eq!(Difference::first(longer), longer);
        assert_eq!(Difference::first(None), None);
    }
}
