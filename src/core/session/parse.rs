//! Output parsers: from text with markers to reasoning, content and tool calls.
//!
//! A server with a reasoning or tool parser sends its chats in these parts. The trait is
//! implemented in `foretell-engines`, one parser per family of models; the session feeds it what
//! the server's own parser is fed, and compares the results.

use crate::units::TokenId;

/// Parts of an output, as one delta of a chat holds them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parsed {
    /// Reasoning.
    pub reasoning: String,
    /// Content: text for the user.
    pub text: String,
    /// Pieces of tool calls, in order.
    pub calls: Vec<CallDelta>,
}

impl Parsed {
    /// Only content.
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
            match self.calls.iter_mut().find(|call| call.index == delta.index) {
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

/// Makes the parser of an output from the ids of its prompt, which tell if the prompt has opened a
/// part; `None` if the server's own parser cannot be told.
pub type MakeParser = Box<dyn FnOnce(&[TokenId]) -> Option<Box<dyn Parse>> + Send>;

/// Parses one output, token by token, as the server's own parser does for a stream.
pub trait Parse: Send {
    /// Adds a token and the text that became certain with it (special tokens as their text; empty
    /// for half a character). Returns the parts that became certain: never part of a marker.
    fn push(&mut self, token: TokenId, text: &str) -> Parsed;

    /// The parts still held back, at the end of the output.
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
