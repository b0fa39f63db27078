//! The parts of a chat's stream as the events of a response: a response is a list of items, each
//! begun and ended by separate events.

use serde_json::{Value, json};

use super::custom::Growing;
use super::echo::{Echo, ResponseStatus};
use super::error_words;
use super::item::{ItemKind, item, logprobs, streamed_logprobs};
use crate::translation::{self, AnswerPart, End, Stream, digits, set, write};

#[derive(Debug)]
pub struct Events {
    echo: Echo,
    seed: u64,
    begun: bool,
    /// Number of the next event.
    sequence: u64,
    /// Items that have ended.
    output: Vec<Value>,
    /// Log-probabilities of the open item, as the chat tells them.
    logprobs: Vec<Value>,
    /// Input of the open call of a free-form tool.
    input: Growing,
}

impl Events {
    /// A translator of the answer to this request, whose ids are made from `seed`.
    pub fn stream(echo: Echo, seed: u64) -> Stream<Self> {
        let (output, logprobs, input) = (Vec::new(), Vec::new(), Growing::default());
        Stream::new(Self { echo, seed, begun: false, sequence: 0, output, logprobs, input }, seed)
    }

    fn number(&self) -> u64 {
        self.output.len() as u64
    }

    fn kind_and_id(&self, part: &AnswerPart) -> (ItemKind, String) {
        let kind = ItemKind::of(part, &self.echo);
        (kind, kind.id(self.seed, self.number()))
    }

    /// Writes an event with these members, its number and its type, in the order of their names.
    fn write(&mut self, kind: &str, members: Value, out: &mut Vec<u8>) {
        let Value::Object(mut event) = members else { return };
        // The only member that follows the others.
        let name = event.shift_remove("name");
        set(&mut event, "sequence_number", json!(self.sequence));
        set(&mut event, "type", json!(format!("response.{kind}")));
        event.sort_keys();
        event.extend(name.map(|name| ("name".to_owned(), name)));
        self.sequence += 1;
        write(&Value::Object(event), out);
    }

    /// Writes an event of the open item.
    fn of_item(&mut self, kind: &str, mut members: Value, out: &mut Vec<u8>) {
        if let Some(members) = members.as_object_mut() {
            set(members, "output_index", json!(self.number()));
        }
        self.write(kind, members, out);
    }

    /// Writes the response in this state, as an event.
    fn state(&mut self, kind: &str, state: &ResponseStatus, usage: Option<&Value>, out: &mut Vec<u8>) {
        let response = self.echo.response(state, self.output.clone(), usage);
        self.write(kind, json!({ "response": response }), out);
    }

    fn started(&mut self, chunk: &Value, out: &mut Vec<u8>) {
        self.begun = true;
        self.echo.begin(chunk);
        for kind in ["created", "in_progress"] {
            self.state(kind, &ResponseStatus::InProgress, None, out);
        }
    }

    /// Writes the events that end the text of an item, and returns the text.
    fn close_text(&mut self, part: &AnswerPart, id: &str, text: &str, out: &mut Vec<u8>) -> String {
        match part {
            AnswerPart::Reasoning => {
                let members = json!({ "content_index": 0, "item_id": id, "text": text });
                self.of_item("reasoning_text.done", members, out);
            }
            AnswerPart::Text => {
                let members = json!({ "content_index": 0, "item_id": id, "logprobs": [], "text": text });
                self.of_item("output_text.done", members, out);
            }
            AnswerPart::Call(call) if self.echo.is_custom(&call.name) => {
                let (input, missing) = std::mem::take(&mut self.input).end(text);
                self.input_delta(id, &missing, out);
                let members = json!({ "input": input, "item_id": id });
                self.of_item("custom_tool_call_input.done", members, out);
                return input;
            }
            AnswerPart::Call(call) => {
                let members = json!({ "arguments": text, "item_id": id, "name": call.name });
                self.of_item("function_call_arguments.done", members, out);
            }
        }
        text.to_owned()
    }

    fn input_delta(&mut self, id: &str, piece: &str, out: &mut Vec<u8>) {
        if !piece.is_empty() {
            let members = json!({ "delta": piece, "item_id": id });
            self.of_item("custom_tool_call_input.delta", members, out);
        }
    }
}

impl translation::Events for Events {
    fn begin(&mut self, chunk: &Value, out: &mut Vec<u8>) {
        self.started(chunk, out);
    }

    fn open(&mut self, part: &AnswerPart, out: &mut Vec<u8>) {
        let (kind, id) = self.kind_and_id(part);
        let item = item(part, kind, &id, "", &[], ResponseStatus::InProgress.name());
        self.of_item("output_item.added", json!({ "item": item }), out);
        if let Some(content) = kind.content("", &[]) {
            let members = json!({ "content_index": 0, "item_id": id, "part": content });
            self.of_item("content_part.added", members, out);
        }
    }

    fn piece(&mut self, part: &AnswerPart, piece: &str, text: &str, rows: &[Value], out: &mut Vec<u8>) {
        let (kind, id) = self.kind_and_id(part);
        match kind {
            ItemKind::Reasoning => {
                let members = json!({ "content_index": 0, "delta": piece, "item_id": id });
                self.of_item("reasoning_text.delta", members, out);
            }
            ItemKind::Message => {
                self.logprobs.extend_from_slice(rows);
                let rows = streamed_logprobs(rows);
                let members = json!({ "content_index": 0, "delta": piece, "item_id": id, "logprobs": rows });
                self.of_item("output_text.delta", members, out);
            }
            ItemKind::Function => {
                let members = json!({ "delta": piece, "item_id": id });
                self.of_item("function_call_arguments.delta", members, out);
            }
            ItemKind::Custom => {
                let piece = self.input.push(text);
                self.input_delta(&id, &piece, out);
            }
        }
    }

    fn close(&mut self, part: &AnswerPart, text: &str, finish: Option<&str>, out: &mut Vec<u8>) {
        let (kind, id) = self.kind_and_id(part);
        let text = self.close_text(part, &id, text, out);
        let rows = logprobs(&std::mem::take(&mut self.logprobs));
        if let Some(content) = kind.content(&text, &rows) {
            let members = json!({ "content_index": 0, "item_id": id, "part": content });
            self.of_item("content_part.done", members, out);
        }
        let status = finish.map_or(ResponseStatus::Completed, ResponseStatus::of).of_item();
        let item = item(part, kind, &id, &text, &rows, status);
        self.of_item("output_item.done", json!({ "item": item }), out);
        self.output.push(item);
    }

    fn end(&mut self, end: &End, out: &mut Vec<u8>) {
        let state = ResponseStatus::of(&end.finish);
        self.state(state.name(), &state, end.usage.as_ref(), out);
    }

    fn fail(&mut self, chunk: Option<&Value>, words: &str, out: &mut Vec<u8>) {
        if !self.begun {
            self.started(&json!({ "id": digits(self.seed, 0) }), out);
        }
        let words = error_words(chunk).unwrap_or(words).to_owned();
        self.state("failed", &ResponseStatus::Failed(words), None, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The data of all events for a text that ends so.
    fn events(last: &[Value]) -> Vec<Value> {
        let request = json!({ "input": "x", "model": "m" });
        let echo = Echo::of(request.as_object().unwrap());
        let (mut stream, mut out) = (Events::stream(echo, 3), Vec::new());
        for data in last {
            let data = data.as_str().map_or_else(|| data.to_string(), ToOwned::to_owned);
            stream.push(&data, &mut out);
        }
        stream.cut(&mut out);
        let text = String::from_utf8(out).unwrap();
        let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
        let events: Vec<Value> = data.map(|data| serde_json::from_str(data).unwrap()).collect();
        for (number, event) in events.iter().enumerate() {
            assert_eq!(event["sequence_number"], number);
        }
        events
    }

    fn chunk(content: &str, finish: Option<&str>) -> Value {
        let choice = json!({ "delta": { "content": content }, "finish_reason": finish });
        json!({ "id": "chatcmpl-7", "created": 5, "model": "m2", "choices": [choice] })
    }

    #[test]
    fn a_limit_makes_the_last_item_and_the_response_incomplete() {
        let events = events(&[chunk("a", None), chunk("", Some("length")), json!("[DONE]")]);
        let last = events.last().unwrap();
        assert_eq!(last["type"], "response.incomplete");
        assert_eq!(last["response"]["incomplete_details"], json!({ "reason": "max_output_tokens" }));
        assert_eq!(last["response"]["output"][0]["status"], "incomplete");
        let told = ["id", "created_at", "model"].map(|name| last["response"][name].clone());
        assert_eq!(told, [json!("resp_7"), json!(5), json!("m2")]);
    }

    #[rstest::rstest]
    #[case::cut(&[chunk("a", None)], "the engine's stream ended early")]
    #[case::cut_before_done(&[chunk("a", Some("stop"))], "the engine's stream ended early")]
    #[case::error(&[chunk("a", None), json!({ "error": { "message": "gone" } }), json!("[DONE]")], "gone")]
    #[case::aborted(&[chunk("a", Some("abort")), json!("[DONE]")], "the engine ended its answer: abort")]
    #[case::nothing(&[], "the engine's stream ended early")]
    fn a_stream_that_breaks_fails(#[case] last: &[Value], #[case] words: &str) {
        let events = events(last);
        assert_eq!(
            (&events[0]["type"], &events[1]["type"]),
            (&json!("response.created"), &json!("response.in_progress"))
        );
        let end = events.last().unwrap();
        assert_eq!(end["type"], "response.failed");
        assert_eq!(end["response"]["status"], "failed");
        assert_eq!(end["response"]["error"], json!({ "code": "server_error", "message": words }));
    }
}
