//! Writes reasoning and tool calls as the server does.

use serde_json::{Map, Value};

use foretell_core::session::{Finish, Parsed};
use foretell_net::random::fresh_seed;
use foretell_parsers::parse::{ParsedMessage, Parsers};
use foretell_wire::openai::parts;

const CALLS: &str = Finish::ToolCalls.name();
const STOP: &str = Finish::Stop.name();

/// The form of reasoning and tool calls in a server's streams.
pub(super) struct PartWriter {
    /// The member of a delta for reasoning.
    reasoning: &'static str,
    /// The server's parsers, which make the ids of new calls.
    parsers: Parsers,
}

impl PartWriter {
    pub(super) const fn new(parsers: Parsers) -> Self {
        let [reasoning, _] = parts::REASONING;
        Self { reasoning, parsers }
    }

    /// Learns the member for reasoning from a delta of the server.
    pub(super) fn read(&mut self, delta: &Map<String, Value>) {
        let named = parts::REASONING.into_iter().find(|name| delta.contains_key(*name));
        self.reasoning = named.unwrap_or(self.reasoning);
    }

    pub(super) fn delta(&self, parsed: &Parsed) -> Map<String, Value> {
        parts::write(parsed, self.reasoning, |_| self.call_id())
    }

    /// Writes the parts of a buffered answer into its message, and its finish reason.
    pub(super) fn write_message(&self, answer: &mut Value, parsed: &ParsedMessage) {
        let Some(choice) = answer.pointer_mut("/choices/0").and_then(Value::as_object_mut) else { return };
        if let Some(message) = choice.get_mut("message").and_then(Value::as_object_mut) {
            parts::write_message(message, parsed, self.reasoning, || self.call_id());
        }
        finish(choice, !parsed.calls.is_empty());
    }

    fn call_id(&self) -> String {
        self.parsers.call_id(fresh_seed())
    }
}

/// Writes the finish reason of a buffered answer; `called`: it has calls.
fn finish(choice: &mut Map<String, Value>, called: bool) {
    let reason = choice.get("finish_reason").and_then(Value::as_str);
    if called || reason.is_some_and(|reason| [CALLS, STOP].contains(&reason)) {
        let reason = if called { CALLS } else { STOP };
        choice.insert("finish_reason".to_owned(), reason.into());
    }
}

/// Writes the joined members of a server's deltas, which its parser of streams took out of the
/// text, into a buffered answer. `None` if their calls cannot be joined. `parses`: the server's
/// parsers are known.
pub(super) fn write_pieces(
    answer: &mut Value,
    text: &str,
    pieces: &Map<String, Value>,
    parses: bool,
) -> Option<()> {
    let Some(choice) = answer.pointer_mut("/choices/0").and_then(Value::as_object_mut) else {
        return Some(());
    };
    let Some(message) = choice.get_mut("message").and_then(Value::as_object_mut) else { return Some(()) };
    message.extend(pieces.clone());
    // If a parser of the server has taken all of it, there is no text.
    if text.is_empty() && !pieces.is_empty() {
        message.insert("content".to_owned(), Value::Null);
    }
    if let Some(calls) = pieces.get("tool_calls") {
        message.insert("tool_calls".to_owned(), parts::joined_calls(calls)?);
        if parses {
            finish(choice, true);
        }
    }
    Some(())
}
