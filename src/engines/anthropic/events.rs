//! The events of a chat's stream as those of a message's.
//!
//! A message is a list of blocks, each begun and ended by an event of its own. Text that comes
//! while a call is open is sent after it, for a block that has ended cannot go on.

use std::collections::HashMap;

use serde_json::{Value, json};

use super::whole::error;
use super::{Called, signature, stopped, usage};

/// Kind of the open block.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Block {
    Text,
    Thinking,
    /// With its id.
    ToolUse(String),
}

/// Translates a stream.
#[derive(Debug)]
pub struct Events {
    seed: u64,
    begun: bool,
    open: Option<Block>,
    /// Index of the open block, or of the next one.
    index: u64,
    /// Text that came while a call was open.
    pending: String,
    /// Ids of the calls by their index in the chat.
    calls: HashMap<u64, String>,
    /// Arguments of the last call; `None` before the first.
    arguments: Option<String>,
    finish: Option<String>,
    stop: Value,
    usage: Option<Value>,
    delta_sent: bool,
}

impl Events {
    /// A translator whose signatures are made from `seed`.
    pub fn new(seed: u64) -> Self {
        Self {
            seed,
            begun: false,
            open: None,
            index: 0,
            pending: String::new(),
            calls: HashMap::new(),
            arguments: None,
            finish: None,
            stop: Value::Null,
            usage: None,
            delta_sent: false,
        }
    }

    /// Appends the events for one of the chat, given its data, to `out`.
    pub fn push(&mut self, data: &str, out: &mut Vec<u8>) {
        if data == crate::openai::sse::DONE {
            return self.done(out);
        }
        let Ok(chunk) = serde_json::from_str::<Value>(data) else {
            return write(out, &error(None, "the engine sent an event that is not JSON"));
        };
        if chunk.get("error").is_some_and(|error| !error.is_null()) {
            return write(out, &error(Some(&chunk), "the engine sent an error"));
        }
        let used = chunk.get("usage").filter(|usage| !usage.is_null());
        self.begin(&chunk, used, out);
        let choice = chunk.get("choices").and_then(|choices| choices.get(0));
        match choice {
            Some(choice) => self.choice(choice, out),
            None if used.is_some() => self.ended(used, out),
            None => {}
        }
        if let Some(used) = used {
            self.usage = Some(used.clone());
        }
    }

    fn begin(&mut self, chunk: &Value, used: Option<&Value>, out: &mut Vec<u8>) {
        if std::mem::replace(&mut self.begun, true) {
            return;
        }
        let message = json!({
            "id": chunk.get("id").cloned().unwrap_or_default(),
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": chunk.get("model").cloned().unwrap_or_default(),
            "stop_reason": null,
            "stop_sequence": null,
            "usage": usage(used),
        });
        write(out, &json!({ "type": "message_start", "message": message }));
    }

    fn choice(&mut self, choice: &Value, out: &mut Vec<u8>) {
        if let Some(finish) = choice.get("finish_reason").and_then(Value::as_str) {
            self.finish = Some(finish.to_owned());
            self.stop = choice.get("stop_reason").cloned().unwrap_or_default();
        }
        let Some(delta) = choice.get("delta") else { return };
        let text = |name: &str| delta.get(name).and_then(Value::as_str).filter(|text| !text.is_empty());
        if let Some(reasoning) = text("reasoning").or_else(|| text("reasoning_content")) {
            self.open(&Block::Thinking, &json!({ "type": "thinking", "thinking": "" }), out);
            self.delta(&json!({ "type": "thinking_delta", "thinking": reasoning }), out);
        }
        if let Some(content) = text("content") {
            if matches!(self.open, Some(Block::ToolUse(_))) {
                self.pending.push_str(content);
            } else {
                self.open(&Block::Text, &json!({ "type": "text", "text": "" }), out);
                self.delta(&json!({ "type": "text_delta", "text": content }), out);
            }
        }
        for call in delta.get("tool_calls").and_then(Value::as_array).into_iter().flatten() {
            self.call(call, out);
        }
    }

    /// A part of a call: the first names it, all may have a piece of its arguments.
    fn call(&mut self, call: &Value, out: &mut Vec<u8>) {
        let index = call.get("index").and_then(Value::as_u64).unwrap_or_default();
        let function = |name: &str| call.get("function")?.get(name)?.as_str();
        if let Some(id) = call.get("id").and_then(Value::as_str) {
            self.calls.insert(index, id.to_owned());
            let block = Block::ToolUse(id.to_owned());
            if let Some(name) = function("name").filter(|_| self.open.as_ref() != Some(&block)) {
                self.arguments = Some(String::new());
                let shown = json!({ "type": "tool_use", "id": id, "name": name, "input": {} });
                self.open(&block, &shown, out);
            }
        }
        let Some(arguments) = function("arguments").filter(|arguments| !arguments.is_empty()) else { return };
        let id = self.calls.get(&index).cloned();
        if id.is_some_and(|id| self.open == Some(Block::ToolUse(id))) {
            self.arguments.get_or_insert_default().push_str(arguments);
            self.delta(&json!({ "type": "input_json_delta", "partial_json": arguments }), out);
        }
    }

    /// Opens a block, unless it is open; another one is closed before.
    fn open(&mut self, block: &Block, shown: &Value, out: &mut Vec<u8>) {
        if self.open.as_ref() == Some(block) {
            return;
        }
        self.close(out);
        self.start(block, shown, out);
    }

    fn start(&mut self, block: &Block, shown: &Value, out: &mut Vec<u8>) {
        self.open = Some(block.clone());
        write(out, &json!({ "type": "content_block_start", "content_block": shown, "index": self.index }));
    }

    fn delta(&self, delta: &Value, out: &mut Vec<u8>) {
        write(out, &json!({ "type": "content_block_delta", "delta": delta, "index": self.index }));
    }

    /// Closes the open block, and sends the text that came meanwhile as one of its own.
    fn close(&mut self, out: &mut Vec<u8>) {
        self.stop_block(out);
        let pending = std::mem::take(&mut self.pending);
        if !pending.is_empty() {
            self.start(&Block::Text, &json!({ "type": "text", "text": "" }), out);
            self.delta(&json!({ "type": "text_delta", "text": pending }), out);
            self.stop_block(out);
        }
    }

    fn stop_block(&mut self, out: &mut Vec<u8>) {
        let Some(block) = self.open.take() else { return };
        if block == Block::Thinking {
            let signature = signature(self.seed, self.index);
            self.delta(&json!({ "type": "signature_delta", "signature": signature }), out);
        }
        write(out, &json!({ "type": "content_block_stop", "index": self.index }));
        self.index += 1;
    }

    /// Ends the blocks and says why the text ended.
    fn ended(&mut self, used: Option<&Value>, out: &mut Vec<u8>) {
        self.close(out);
        let whole = |arguments: &str| serde_json::from_str::<Value>(arguments).is_ok();
        let called = match self.arguments.as_deref() {
            None => Called::No,
            Some(arguments) if whole(arguments) => Called::Complete,
            Some(_) => Called::Yes,
        };
        let finish = self.finish.as_deref().unwrap_or("stop");
        let (reason, sequence) = stopped(Some(finish), Some(&self.stop), called);
        let delta = json!({ "stop_reason": reason, "stop_sequence": sequence });
        write(out, &json!({ "type": "message_delta", "delta": delta, "usage": usage(used) }));
        self.delta_sent = true;
    }

    fn done(&mut self, out: &mut Vec<u8>) {
        if !self.delta_sent {
            let used = self.usage.take();
            self.ended(used.as_ref(), out);
        }
        write(out, &json!({ "type": "message_stop" }));
    }
}

/// Writes an event, named by its type.
fn write(out: &mut Vec<u8>, event: &Value) {
    let name = event.get("type").and_then(Value::as_str).unwrap_or_default();
    out.extend_from_slice(format!("event: {name}\ndata: {event}\n\n").as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(delta: &Value, finish: &Value) -> String {
        let choice = json!({ "index": 0, "delta": delta, "finish_reason": finish, "stop_reason": null });
        json!({ "id": "chatcmpl-1", "model": "m", "choices": [choice] }).to_string()
    }

    fn last() -> String {
        let used = json!({ "prompt_tokens": 5, "completion_tokens": 2 });
        json!({ "id": "chatcmpl-1", "model": "m", "choices": [], "usage": used }).to_string()
    }

    /// The data of all events.
    fn translated(chunks: &[String]) -> Vec<Value> {
        let (mut events, mut out) = (Events::new(3), Vec::new());
        for data in chunks {
            events.push(data, &mut out);
        }
        events.push("[DONE]", &mut out);
        let text = String::from_utf8(out).unwrap();
        let parts = text.split("\n\n").filter(|event| !event.is_empty());
        let read = |event: &str| {
            let (name, data) = event.split_once('\n').unwrap();
            let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
            assert_eq!(name.strip_prefix("event: "), data["type"].as_str());
            data
        };
        parts.map(read).collect()
    }

    fn kinds(events: &[Value]) -> Vec<&str> {
        events.iter().map(|event| event["type"].as_str().unwrap()).collect()
    }

    #[test]
    fn a_text_is_one_block_between_the_start_and_the_reason_for_its_end() {
        let events = translated(&[
            chunk(&json!({ "role": "assistant", "content": "" }), &Value::Null),
            chunk(&json!({ "content": "He" }), &Value::Null),
            chunk(&json!({ "content": "llo" }), &json!("stop")),
            last(),
        ]);
        let (start, delta) = ("content_block_start", "content_block_delta");
        let expected =
            ["message_start", start, delta, delta, "content_block_stop", "message_delta", "message_stop"];
        assert_eq!(kinds(&events), expected);
        assert_eq!(events[0]["message"]["usage"], json!({ "input_tokens": 0, "output_tokens": 0 }));
        assert_eq!(events[2]["delta"], json!({ "type": "text_delta", "text": "He" }));
        let end = json!({
            "type": "message_delta", "delta": { "stop_reason": "end_turn", "stop_sequence": null },
            "usage": { "input_tokens": 5, "output_tokens": 2 },
        });
        assert_eq!(events[5], end);
    }

    #[test]
    fn reasoning_text_and_calls_are_blocks_and_text_within_a_call_comes_after_it() {
        let call = |delta: Value| chunk(&json!({ "tool_calls": [delta] }), &Value::Null);
        let events = translated(&[
            chunk(&json!({ "role": "assistant", "reasoning": "Hm" }), &Value::Null),
            chunk(&json!({ "content": "Now" }), &Value::Null),
            call(
                json!({ "index": 0, "id": "c1", "type": "function", "function": { "name": "f", "arguments": "" } }),
            ),
            call(json!({ "index": 0, "function": { "arguments": "{\"a\":" } })),
            chunk(&json!({ "content": "late" }), &Value::Null),
            call(json!({ "index": 0, "function": { "arguments": "1}" } })),
            call(
                json!({ "index": 1, "id": "c2", "type": "function", "function": { "name": "g", "arguments": "{}" } }),
            ),
            chunk(&json!({}), &json!("tool_calls")),
            last(),
        ]);
        let blocks: Vec<_> = events
            .iter()
            .filter(|event| event["type"] == "content_block_start")
            .map(|event| (event["index"].as_u64().unwrap(), event["content_block"]["type"].as_str().unwrap()))
            .collect();
        assert_eq!(blocks, [(0, "thinking"), (1, "text"), (2, "tool_use"), (3, "text"), (4, "tool_use")]);
        let stops = kinds(&events).into_iter().filter(|kind| *kind == "content_block_stop").count();
        assert_eq!(stops, 5);
        let pieces: String = events
            .iter()
            .filter(|event| event["index"] == 2)
            .filter_map(|event| event["delta"]["partial_json"].as_str())
            .collect();
        assert_eq!(pieces, "{\"a\":1}");
        assert_eq!(events[events.len() - 2]["delta"]["stop_reason"], "tool_use");
        assert!(
            events.iter().any(|event| event["delta"]["type"] == "signature_delta" && event["index"] == 0)
        );
    }

    #[test]
    fn without_usage_the_end_is_told_all_the_same_and_errors_are_events() {
        let events = translated(&[chunk(&json!({ "role": "assistant", "content": "x" }), &json!("length"))]);
        let end = &events[events.len() - 2];
        assert_eq!(end["delta"]["stop_reason"], "max_tokens");
        let broken = json!({ "error": { "message": "gone", "type": "ServerError" } }).to_string();
        let events = translated(&[broken]);
        assert_eq!(
            events[0],
            json!({ "type": "error", "error": { "type": "ServerError", "message": "gone" } })
        );
    }
}
