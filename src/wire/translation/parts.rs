//! A chat's answer as parts: reasoning, texts and calls, each of which ends before the next begins,
//! as the events of other APIs need it.
//!
//! Text that comes while the arguments of a call are incomplete waits for them: what has ended
//! cannot go on. A stream that fails, or ends before its `[DONE]`, never ends as a complete answer.

use serde::de::IgnoredAny;
use serde_json::Value;

use super::digits;
use crate::openai::answer::STOPS;
use crate::openai::event::{Data, error, finish_reason};
use crate::openai::parts::REASONING;
use crate::openai::sse::DONE;

/// The fault of a stream whose calls cannot be distinguished.
const MIXED: &str = "the engine went on with a call that had ended";

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerPart {
    Reasoning,
    Text,
    /// A call of a tool; its text is its arguments.
    Call(Call),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// Number among the answer's calls.
    pub index: u64,
    /// Id by which its result will name it.
    pub id: String,
    pub name: String,
}

/// The facts that the end of a chat's answer reports.
#[derive(Clone, Debug, Default)]
pub struct End {
    pub finish: String,
    /// The stop that it names, see [`STOPS`].
    pub stop: Value,
    pub usage: Option<Value>,
    /// Arguments of its last call.
    pub arguments: Option<String>,
}

pub trait Events {
    /// The answer begins with this event of the chat.
    fn begin(&mut self, chunk: &Value, out: &mut Vec<u8>);
    fn open(&mut self, part: &AnswerPart, out: &mut Vec<u8>);
    /// `piece` is added to a part, and `text` is all of it by then; `logprobs` are those of the
    /// piece.
    fn piece(&mut self, part: &AnswerPart, piece: &str, text: &str, logprobs: &[Value], out: &mut Vec<u8>);
    /// A part ends; `finish` is the chat's reason where it is the last one.
    fn close(&mut self, part: &AnswerPart, text: &str, finish: Option<&str>, out: &mut Vec<u8>);
    /// The answer is complete.
    fn end(&mut self, end: &End, out: &mut Vec<u8>);
    /// The answer failed, with this error event of the chat; `words` where it has none.
    fn fail(&mut self, error: Option<&Value>, words: &str, out: &mut Vec<u8>);
}

/// Translates a chat's stream.
#[derive(Debug)]
pub struct Stream<E> {
    events: E,
    seed: u64,
    begun: bool,
    over: bool,
    open: Option<(AnswerPart, String)>,
    /// Text that came while a call was open.
    pending: String,
    /// Log-probabilities of text whose characters are still to come.
    rows: Vec<Value>,
    finish: Option<String>,
    end: End,
}

impl<E: Events> Stream<E> {
    /// Writes the stream by `events`. Ids that the engine leaves out are made from `seed`.
    pub fn new(events: E, seed: u64) -> Self {
        let (open, pending, finish) = (None, String::new(), None);
        let rows = Vec::new();
        Self { events, seed, begun: false, over: false, open, pending, rows, finish, end: End::default() }
    }

    /// Appends the events for one of the chat, given its data, to `out`.
    pub fn push(&mut self, data: &str, out: &mut Vec<u8>) {
        if self.over {
            return;
        }
        if data == DONE {
            return self.done(out);
        }
        let chunk = match Data::of(data.to_owned()) {
            Data::Answer(event) => event.value(),
            Data::Foreign(_) => return,
            Data::Damaged => return self.fail(None, "the engine sent an event that is not JSON", out),
        };
        if error(&chunk).is_some() {
            return self.fail(Some(&chunk), "the engine sent an error", out);
        }
        if !std::mem::replace(&mut self.begun, true) {
            self.events.begin(&chunk, out);
        }
        if let Some(usage) = chunk.get("usage").filter(|usage| !usage.is_null()) {
            self.end.usage = Some(usage.clone());
        }
        let mut choices = chunk.get("choices").and_then(Value::as_array).into_iter().flatten();
        let is_first = |choice: &&Value| choice.get("index").and_then(Value::as_u64).unwrap_or(0) == 0;
        if let Some(choice) = choices.find(is_first) {
            self.choice(choice, out);
        }
    }

    /// The chat's stream has no more bytes: a failure, unless it is over.
    pub fn cut(&mut self, out: &mut Vec<u8>) {
        if !self.over {
            self.fail(None, "the engine's stream ended early", out);
        }
    }

    fn fail(&mut self, error: Option<&Value>, words: &str, out: &mut Vec<u8>) {
        self.over = true;
        self.events.fail(error, words, out);
    }

    fn done(&mut self, out: &mut Vec<u8>) {
        let Some(finish) = self.finish.take() else {
            return self.fail(None, "the engine's stream ended without a reason", out);
        };
        self.over = true;
        self.close(Some(&finish), out);
        self.end.finish = finish;
        self.events.end(&self.end, out);
    }

    fn choice(&mut self, choice: &Value, out: &mut Vec<u8>) {
        if let Some(finish) = finish_reason(choice) {
            self.finish = Some(finish.to_owned());
            self.end.stop = stop(choice).cloned().unwrap_or_default();
        }
        let Some(delta) = choice.get("delta") else { return };
        // An event may hold the text of several tokens: the end of the open call, and what follows.
        let (goes_on, new): (Vec<_>, Vec<_>) = calls(delta).partition(|call| self.is_open(call));
        if !goes_on.into_iter().all(|call| self.call(call, out)) {
            return self.fail(None, MIXED, out);
        }
        if let Some(reasoning) = reasoning(delta) {
            self.grow(AnswerPart::Reasoning, reasoning, out);
        } else if calls(delta).next().is_none() {
            self.rows.extend_from_slice(logprobs(choice));
        }
        if let Some(content) = text(delta, "content") {
            if self.text_waits() {
                self.pending.push_str(content);
            } else {
                self.grow(AnswerPart::Text, content, out);
            }
        }
        if !new.into_iter().all(|call| self.call(call, out)) {
            self.fail(None, MIXED, out);
        }
    }

    /// True if this is a piece of the open call.
    fn is_open(&self, call: &Value) -> bool {
        let Some((AnswerPart::Call(open), _)) = &self.open else { return false };
        open.index == number(call) && text(call, "id").is_none_or(|id| id == open.id)
    }

    /// Takes a part of a call: the first names it, all may have a piece of its arguments. False if
    /// it belongs to another than the open one.
    fn call(&mut self, call: &Value, out: &mut Vec<u8>) -> bool {
        let index = number(call);
        let id = text(call, "id");
        let Some(function) = call.get("function") else { return true };
        let open = match &self.open {
            Some((AnswerPart::Call(open), _)) if open.index == index => Some(open),
            _ => None,
        };
        let begins = open.is_none_or(|open| id.is_some_and(|id| id != open.id));
        let part = match text(function, "name") {
            Some(name) if begins => {
                Some(AnswerPart::Call(Call { index, id: self.id_of(id, index), name: name.to_owned() }))
            }
            _ => open.cloned().map(AnswerPart::Call),
        };
        match (part, text(function, "arguments")) {
            (Some(part), arguments) => self.grow(part, arguments.unwrap_or_default(), out),
            (None, arguments) => return arguments.is_none(),
        }
        true
    }

    fn id_of(&self, id: Option<&str>, index: u64) -> String {
        id.map_or_else(|| made_up(self.seed, index), ToOwned::to_owned)
    }

    /// True if text must wait for the end of the open call.
    fn text_waits(&self) -> bool {
        match &self.open {
            Some((AnswerPart::Call(_), arguments)) => !self.pending.is_empty() || !is_json(arguments),
            _ => false,
        }
    }

    /// Adds to the part; it is opened first if another one is open.
    fn grow(&mut self, part: AnswerPart, piece: &str, out: &mut Vec<u8>) {
        if self.open.as_ref().is_none_or(|(open, _)| *open != part) {
            self.close(None, out);
            self.events.open(&part, out);
            self.open = Some((part, String::new()));
        }
        let Some((part, text)) = &mut self.open else { return };
        text.push_str(piece);
        if !piece.is_empty() {
            let rows = if *part == AnswerPart::Text { std::mem::take(&mut self.rows) } else { Vec::new() };
            self.events.piece(part, piece, text, &rows, out);
        }
    }

    /// Closes the open part, and sends the text that came meanwhile as a separate one.
    fn close(&mut self, finish: Option<&str>, out: &mut Vec<u8>) {
        let pending = std::mem::take(&mut self.pending);
        if let Some((part, text)) = self.open.take() {
            self.events.close(&part, &text, if pending.is_empty() { finish } else { None }, out);
            if matches!(part, AnswerPart::Call(_)) {
                self.end.arguments = Some(text);
            }
        }
        if !pending.is_empty() {
            self.grow(AnswerPart::Text, &pending, out);
            self.close(finish, out);
        }
    }
}

/// The parts of an unstreamed answer's message, with their texts. Ids that the engine leaves out
/// are made from `seed`. `None` if a call is malformed.
pub fn of_message(message: &Value, seed: u64) -> Option<Vec<(AnswerPart, String)>> {
    let said = reasoning(message).map(|text| (AnswerPart::Reasoning, text.to_owned()));
    let content = text(message, "content").map(|text| (AnswerPart::Text, text.to_owned()));
    let mut parts: Vec<_> = said.into_iter().chain(content).collect();
    for (index, call) in (0..).zip(calls(message)) {
        let function = call.get("function")?;
        let id = text(call, "id").map_or_else(|| made_up(seed, index), ToOwned::to_owned);
        let part = AnswerPart::Call(Call { index, id, name: text(function, "name")?.to_owned() });
        parts.push((part, text(function, "arguments").unwrap_or_default().to_owned()));
    }
    Some(parts)
}

/// The log-probabilities of a choice, one of each token.
pub fn logprobs(choice: &Value) -> &[Value] {
    let listed = choice.get("logprobs").and_then(|logprobs| logprobs.get("content"));
    listed.and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default()
}

/// Number of a call among those of its answer.
fn number(call: &Value) -> u64 {
    call.get("index").and_then(Value::as_u64).unwrap_or_default()
}

pub fn stop(choice: &Value) -> Option<&Value> {
    STOPS.into_iter().find_map(|name| choice.get(name))
}

/// Words for an answer that ended for a `finish_reason` with which none is complete.
pub fn broken_off(finish: &str) -> String {
    format!("the engine ended its answer: {finish}")
}

fn made_up(seed: u64, index: u64) -> String {
    format!("call_{}", digits(seed, index))
}

fn text<'a>(of: &'a Value, name: &str) -> Option<&'a str> {
    of.get(name).and_then(Value::as_str).filter(|text| !text.is_empty())
}

fn reasoning(of: &Value) -> Option<&str> {
    REASONING.into_iter().find_map(|name| text(of, name))
}

fn calls(of: &Value) -> impl Iterator<Item = &Value> {
    of.get("tool_calls").and_then(Value::as_array).into_iter().flatten()
}

fn is_json(text: &str) -> bool {
    serde_json::from_str::<IgnoredAny>(text).is_ok()
}

/// Writes an event, named by its type.
pub fn write(event: &Value, out: &mut Vec<u8>) {
    let name = event.get("type").and_then(Value::as_str).unwrap_or_default();
    out.extend_from_slice(format!("event: {name}\ndata: {event}\n\n").as_bytes());
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[derive(Debug, Default)]
    struct Words;

    fn word(part: &AnswerPart) -> String {
        match part {
            AnswerPart::Reasoning => "reasoning".to_owned(),
            AnswerPart::Text => "text".to_owned(),
            AnswerPart::Call(call) => format!("{}:{}", call.name, call.id),
        }
    }

    impl Events for Words {
        fn begin(&mut self, _: &Value, out: &mut Vec<u8>) {
            out.extend_from_slice(b"begin");
        }

        fn open(&mut self, part: &AnswerPart, out: &mut Vec<u8>) {
            out.extend_from_slice(format!(" <{}", word(part)).as_bytes());
        }

        fn piece(&mut self, _: &AnswerPart, piece: &str, text: &str, _: &[Value], out: &mut Vec<u8>) {
            assert!(text.ends_with(piece));
            out.extend_from_slice(format!(" {piece}").as_bytes());
        }

        fn close(&mut self, _: &AnswerPart, _: &str, finish: Option<&str>, out: &mut Vec<u8>) {
            out.extend_from_slice(format!(" {}>", finish.unwrap_or_default()).as_bytes());
        }

        fn end(&mut self, end: &End, out: &mut Vec<u8>) {
            out.extend_from_slice(format!(" end:{}", end.finish).as_bytes());
        }

        fn fail(&mut self, _: Option<&Value>, words: &str, out: &mut Vec<u8>) {
            out.extend_from_slice(format!(" fail:{words}").as_bytes());
        }
    }

    fn translated(deltas: &[Value], finish: Option<&str>, last: &[&str]) -> String {
        let (mut stream, mut out) = (Stream::new(Words, 3), Vec::new());
        for delta in deltas {
            stream.push(&json!({ "choices": [{ "delta": delta }] }).to_string(), &mut out);
        }
        stream.push(&json!({ "choices": [{ "delta": {}, "finish_reason": finish }] }).to_string(), &mut out);
        for data in last {
            stream.push(data, &mut out);
        }
        stream.cut(&mut out);
        String::from_utf8(out).unwrap()
    }

    fn call(index: u64, id: Option<&str>, arguments: &str) -> Value {
        let function = json!({ "name": id.map(|_| "f"), "arguments": arguments });
        json!({ "tool_calls": [{ "index": index, "id": id, "function": function }] })
    }

    #[test]
    fn parts_follow_one_another_and_the_last_one_knows_why_it_ends() {
        let deltas = [
            json!({ "reasoning": "Hm", "content": "a" }),
            json!({ "content": "b" }),
            call(0, Some("1"), "{"),
            call(0, None, "}"),
            call(1, Some("2"), "{}"),
        ];
        let wanted = "begin <reasoning Hm > <text a b > <f:1 { } > <f:2 {} tool_calls> end:tool_calls";
        assert_eq!(translated(&deltas, Some("tool_calls"), &["[DONE]"]), wanted);
    }

    #[test]
    fn text_waits_for_a_call_that_is_not_whole_and_only_for_such() {
        let deltas = [
            call(0, Some("1"), "{"),
            json!({ "content": "late" }),
            call(0, None, "}"),
            json!({ "content": "r" }),
            call(1, Some("2"), "{}"),
            json!({ "content": "on" }),
            json!({ "content": "wards" }),
        ];
        let wanted = "begin <f:1 { } > <text later > <f:2 {} > <text on wards stop> end:stop";
        assert_eq!(translated(&deltas, Some("stop"), &["[DONE]"]), wanted);
    }

    #[test]
    fn an_event_may_end_a_call_and_go_on_with_what_follows() {
        let mut ends = call(0, None, "}");
        ends["reasoning"] = "Hm".into();
        ends["content"] = "on".into();
        ends["tool_calls"]
            .as_array_mut()
            .unwrap()
            .extend(call(1, Some("2"), "{}")["tool_calls"].as_array().cloned().unwrap());
        let wanted = "begin <f:1 { } > <reasoning Hm > <text on > <f:2 {} tool_calls> end:tool_calls";
        assert_eq!(translated(&[call(0, Some("1"), "{"), ends], Some("tool_calls"), &["[DONE]"]), wanted);
    }

    #[rstest::rstest]
    #[case::cut(&[json!({ "content": "a" })], Some("stop"), &[], "begin <text a fail:the engine's stream ended early")]
    #[case::no_reason(&[], None, &["[DONE]"], "begin fail:the engine's stream ended without a reason")]
    #[case::error(&[], None, &["{\"error\":{\"code\":500}}", "[DONE]"], "begin fail:the engine sent an error")]
    #[case::no_json(&[], Some("stop"), &["{", "[DONE]"], "begin fail:the engine sent an event that is not JSON")]
    #[case::crossed(&[call(0, Some("1"), "{"), call(1, Some("2"), "{}"), call(0, None, "}")], Some("stop"), &["[DONE]"],
        "begin <f:1 { > <f:2 {} fail:the engine went on with a call that had ended")]
    fn a_stream_that_fails_has_no_end_and_nothing_follows(
        #[case] deltas: &[Value],
        #[case] finish: Option<&str>,
        #[case] last: &[&str],
        #[case] wanted: &str,
    ) {
        assert_eq!(translated(deltas, finish, last), wanted);
    }

    #[test]
    fn an_engine_may_leave_ids_out_or_repeat_them() {
        let nameless =
            json!({ "tool_calls": [{ "index": 0, "function": { "name": "f", "arguments": "{}" } }] });
        let made = format!("begin <f:{} {{}} stop> end:stop", made_up(3, 0));
        assert_eq!(translated(std::slice::from_ref(&nameless), Some("stop"), &["[DONE]"]), made);
        let message = json!({ "tool_calls": nameless["tool_calls"] });
        let part = AnswerPart::Call(Call { index: 0, id: made_up(3, 0), name: "f".to_owned() });
        assert_eq!(of_message(&message, 3), Some(vec![(part, "{}".to_owned())]));
        let repeated = [call(0, Some("1"), "{"), call(0, Some("1"), "}")];
        assert_eq!(translated(&repeated, Some("stop"), &["[DONE]"]), "begin <f:1 { } stop> end:stop");
    }
}
