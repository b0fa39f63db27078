//! The content of one event of a plain request, as a dialect reads it.

use std::sync::Arc;

use serde_json::{Map, Value};

use foretell_core::session::Parsed;
use foretell_core::units::TokenId;
use foretell_core::words::Proposal;
use foretell_wire::openai::{Event, UsageText, parts};

/// One event of a plain request's stream.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chunk {
    /// Ids of the prompt, on the first event; `None` on all others, and if the engine does not send
    /// them.
    pub prompt: Option<Vec<TokenId>>,
    /// Token ids of new output, in order.
    pub tokens: Vec<TokenId>,
    /// The text that the backend sent with these tokens.
    pub text: String,
    /// `finish_reason` in OpenAI's words, on the last event of the choice; `None` before it.
    pub finish: Option<String>,
    /// The last of `tokens` ended the text and adds none.
    pub ends: bool,
    /// The backend's `usage` object; `None` if the event has none.
    pub usage: Option<UsageText>,
    /// Members of a chat's delta other than text (reasoning or tool calls that a parser took out of
    /// the text), by name.
    pub more: Map<String, Value>,
    /// Output tokens of this request so far, as the engine counts them; `None` if it does not
    /// report that.
    pub count: Option<u32>,
    /// Tokens of the prompt, as the engine counts them; `None` if it does not report that.
    pub prompt_count: Option<u32>,
    /// Only the next event shows whether the text goes on after these tokens or ends with them.
    pub pending: bool,
    /// The later event that showed what these tokens are; `None` if none was needed.
    pub after: Option<Arc<Event>>,
    /// The backend's proposal for what follows these tokens; `None` if it made none.
    pub proposal: Option<Proposal>,
    /// The event carries text whose ids are not known, or several choices.
    pub doubtful: bool,
}

impl Chunk {
    /// Its text, and the reasoning and tool calls that a parser of the backend has taken out of it.
    /// `None` if the delta has a member that is neither.
    pub fn parsed(&self) -> Option<Parsed> {
        parts::read(&self.text, &self.more)
    }
}
