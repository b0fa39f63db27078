//! The parts of a chat's stream as the events of a message: a message is a list of blocks, each
//! begun and ended by a separate event.

use serde_json::{Value, json};

use super::unstreamed::error;
use super::{Called, signature, stopped, usage};
use crate::translation::{self, AnswerPart, End, Stream, broken_off, write};

#[derive(Debug)]
pub struct Events {
    seed: u64,
    /// Index of the open block, or of the next one.
    index: u64,
}

impl Events {
    /// A translator whose signatures are made from `seed`.
    pub fn stream(seed: u64) -> Stream<Self> {
        Stream::new(Self { seed, index: 0 }, seed)
    }

    fn delta(&self, delta: &Value, out: &mut Vec<u8>) {
        write(&json!({ "type": "content_block_delta", "delta": delta, "index": self.index }), out);
    }
}

impl translation::Events for Events {
    fn begin(&mut self, chunk: &Value, out: &mut Vec<u8>) {
        let message = json!({
            "id": chunk.get("id").cloned().unwrap_or_default(),
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": chunk.get("model").cloned().unwrap_or_default(),
            "stop_reason": null,
            "stop_sequence": null,
            "usage": usage(chunk.get("usage").filter(|usage| !usage.is_null())),
        });
        write(&json!({ "type": "message_start", "message": message }), out);
    }

    fn open(&mut self, part: &AnswerPart, out: &mut Vec<u8>) {
        let block = match part {
            AnswerPart::Reasoning => json!({ "type": "thinking", "thinking": "" }),
            AnswerPart::Text => json!({ "type": "text", "text": "" }),
            AnswerPart::Call(call) => {
                json!({ "type": "tool_use", "id": call.id, "name": call.name, "input": {} })
            }
        };
        write(&json!({ "type": "content_block_start", "content_block": block, "index": self.index }), out);
    }

    fn piece(&mut self, part: &AnswerPart, piece: &str, _: &str, _: &[Value], out: &mut Vec<u8>) {
        let delta = match part {
            AnswerPart::Reasoning => json!({ "type": "thinking_delta", "thinking": piece }),
            AnswerPart::Text => json!({ "type": "text_delta", "text": piece }),
            AnswerPart::Call(_) => json!({ "type": "input_json_delta", "partial_json": piece }),
        };
        self.delta(&delta, out);
    }

    fn close(&mut self, part: &AnswerPart, _: &str, _: Option<&str>, out: &mut Vec<u8>) {
        if *part == AnswerPart::Reasoning {
            let signature = signature(self.seed, self.index);
            self.delta(&json!({ "type": "signature_delta", "signature": signature }), out);
        }
        write(&json!({ "type": "content_block_stop", "index": self.index }), out);
        self.index += 1;
    }

    /// Says why the text ended.
    fn end(&mut self, end: &End, out: &mut Vec<u8>) {
        let is_complete = |arguments: &str| serde_json::from_str::<Value>(arguments).is_ok();
        let called = match end.arguments.as_deref() {
            None => Called::No,
            Some(arguments) if is_complete(arguments) => Called::Complete,
            Some(_) => Called::Yes,
        };
        let Some((reason, sequence)) = stopped(&end.finish, Some(&end.stop), called) else {
            return self.fail(None, &broken_off(&end.finish), out);
        };
        let delta = json!({ "stop_reason": reason, "stop_sequence": sequence });
        let usage = usage(end.usage.as_ref());
        write(&json!({ "type": "message_delta", "delta": delta, "usage": usage }), out);
        write(&json!({ "type": "message_stop" }), out);
    }

    fn fail(&mut self, chunk: Option<&Value>, words: &str, out: &mut Vec<u8>) {
        write(&error(chunk, words), out);
    }
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

    fn translated(chunks: &[String]) -> Vec<Value> {
        let (mut events, mut out) = (Events::stream(3), Vec::new());
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
    fn a_stop_text_of_sglang_is_the_stop_sequence() {
        let choice = json!({ "index": 0, "delta": {}, "finish_reason": "stop", "matched_stop": "END" });
        let events = translated(&[json!({ "id": "1", "model": "m", "choices": [choice] }).to_string()]);
        let wanted = json!({ "stop_reason": "stop_sequence", "stop_sequence": "END" });
        assert_eq!(events[events.len() - 2]["delta"], wanted);
    }

    #[test]
    fn an_answer_that_the_engine_broke_off_has_no_end() {
        let events = translated(&[chunk(&json!({ "content": "x" }), &json!("abort")), last()]);
        let words = "the engine ended its answer: abort";
        let error = json!({ "type": "error", "error": { "type": "api_error", "message": words } });
        assert_eq!(events.last(), Some(&error));
        assert!(!kinds(&events).contains(&"message_delta") && !kinds(&events).contains(&"message_stop"));
        let events = translated(&[chunk(&json!({ "content": "x" }), &json!("content_filter")), last()]);
        assert_eq!(events[events.len() - 2]["delta"]["stop_reason"], "refusal");
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
