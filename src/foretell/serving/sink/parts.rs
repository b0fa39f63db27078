//! Writes reasoning and tool calls as the server does.

use serde_json::{Map, Value};

use crate::random::fresh_seed;
use foretell_core::session::Parsed;
use foretell_engines::openai::parts;

/// The form of reasoning and tool calls in a server's streams.
pub(super) struct PartWriter {
    /// The member of a delta that holds reasoning.
    reasoning: &'static str,
}

impl Default for PartWriter {
    fn default() -> Self {
        let [reasoning, _] = parts::REASONING;
        Self { reasoning }
    }
}

impl PartWriter {
    /// Learns the member for reasoning from a delta of the server.
    pub(super) fn read(&mut self, delta: &Map<String, Value>) {
        let named = parts::REASONING.into_iter().find(|name| delta.contains_key(*name));
        self.reasoning = named.unwrap_or(self.reasoning);
    }

    /// The delta with these parts.
    pub(super) fn delta(&self, parsed: &Parsed) -> Map<String, Value> {
        parts::write(parsed, self.reasoning, |_| call_id())
    }
}

/// The id of a new call, as vLLM makes it (0.32, `renderers/chat_utils.py`, `make_tool_call_id`).
fn call_id() -> String {
    format!("chatcmpl-tool-{:016x}", fresh_seed())
}
