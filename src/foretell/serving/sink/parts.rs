//! Writes reasoning and tool calls as the server does.

use serde_json::{Map, Value};

use crate::random::fresh_seed;
use foretell_core::session::Parsed;
use foretell_engines::openai::parts;

/// The form of reasoning and tool calls in a server's streams.
pub struct PartWriter {
    /// The member of a delta that holds reasoning.
    pub reasoning: &'static str,
}

impl PartWriter {
    /// The delta with these parts.
    pub(super) fn delta(&self, parsed: &Parsed) -> Map<String, Value> {
        parts::write(parsed, self.reasoning, |_| call_id())
    }
}

/// The id of a new call, as vLLM makes it (`renderers/chat_utils.py`, `make_tool_call_id`).
fn call_id() -> String {
    format!("chatcmpl-tool-{:016x}", fresh_seed())
}
