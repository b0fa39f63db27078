//! The output tokens of an answer that is passed on unchanged, by any API for text: as its usage
//! reports them, else estimated from its events or bytes.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// Bytes of text per token, as assumed for an estimate.
const BYTES_PER_TOKEN: u64 = 4;
/// Mean bytes of text per event above which an event is assumed to hold several tokens.
const BYTES_PER_EVENT: u64 = 16;

/// Counts the output tokens of one answer, which is read event by event or at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OutputTokens {
    /// Tokens that the server reported last.
    reported: Option<u64>,
    events: u64,
    bytes: u64,
    /// Bytes of the answer that could not be read.
    unread: u64,
}

impl OutputTokens {
    /// Reads an unstreamed answer, or the data of one event. Anything but JSON is ignored.
    pub fn read(&mut self, json: &[u8]) {
        let Ok(part) = serde_json::from_slice::<Part>(json) else { return };
        self.reported = part.reported().or(self.reported);
        let bytes = part.bytes();
        self.events += u64::from(bytes > 0);
        self.bytes += bytes;
    }

    /// Notes a part of a stream that could not be read: one piece of it is taken for one event.
    pub fn skip_event(&mut self) {
        self.events += 1;
    }

    /// Notes bytes of a document that could not be read.
    pub fn skip_bytes(&mut self, bytes: usize) {
        self.unread += bytes as u64;
    }

    /// Output tokens, as reported or estimated.
    pub fn count(&self) -> u64 {
        self.reported.unwrap_or_else(|| self.estimate())
    }

    /// True if the server has not reported their number.
    pub fn is_estimate(&self) -> bool {
        self.reported.is_none()
    }

    /// An event for each token, as most engines send them; a quarter of the bytes where events are
    /// longer, or there are none.
    fn estimate(&self) -> u64 {
        let several = self.bytes > BYTES_PER_EVENT * self.events;
        let read = if several { self.bytes.div_ceil(BYTES_PER_TOKEN) } else { self.events };
        read + self.unread.div_ceil(BYTES_PER_TOKEN)
    }
}

/// The members of an answer or event that hold its output or usage. Chats, completions, Responses
/// and Messages use different ones of them.
#[derive(Deserialize)]
struct Part {
    usage: Option<Usage>,
    /// The answer so far, in events of Responses; its usage is in the last one.
    response: Option<Response>,
    choices: Option<Vec<Choice>>,
    /// An event's output, in Responses and Messages.
    delta: Option<TextBytes>,
    /// The output of an unstreamed answer of Messages.
    content: Option<TextBytes>,
    /// The output of an unstreamed answer of Responses.
    output: Option<TextBytes>,
}

#[derive(Deserialize)]
struct Usage {
    completion_tokens: Option<u64>,
    output_tokens: Option<u64>,
}

#[derive(Deserialize)]
struct Response {
    usage: Option<Usage>,
}

#[derive(Deserialize)]
struct Choice {
    delta: Option<TextBytes>,
    message: Option<TextBytes>,
    text: Option<TextBytes>,
}

impl Part {
    fn reported(&self) -> Option<u64> {
        let within = self.response.as_ref().and_then(|response| response.usage.as_ref());
        let usage = self.usage.as_ref().or(within)?;
        usage.completion_tokens.or(usage.output_tokens)
    }

    fn bytes(&self) -> u64 {
        let choices = self.choices.iter().flatten();
        let of_choices = choices.flat_map(|choice| [&choice.delta, &choice.message, &choice.text]);
        let all = of_choices.chain([&self.delta, &self.content, &self.output]);
        all.flatten().map(|text| text.0).sum()
    }
}

/// Bytes of all texts within a JSON value, but for members that are no output.
struct TextBytes(u64);

/// True for the name of a member that the model has not written.
struct Foreign(bool);

/// Members that the server writes itself.
const FOREIGN: [&str; 11] = [
    "role",
    "type",
    "id",
    "call_id",
    "item_id",
    "status",
    "signature",
    "encrypted_content",
    "stop_reason",
    "stop_sequence",
    "phase",
];

impl<'de> Deserialize<'de> for Foreign {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Name;
        impl Visitor<'_> for Name {
            type Value = Foreign;

            fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
                to.write_str("a name")
            }

            fn visit_str<E>(self, name: &str) -> Result<Foreign, E> {
                Ok(Foreign(FOREIGN.contains(&name)))
            }
        }
        from.deserialize_str(Name)
    }
}

impl<'de> Deserialize<'de> for TextBytes {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(Texts).map(Self)
    }
}

/// Adds up the bytes of texts.
struct Texts;

impl<'de> Visitor<'de> for Texts {
    type Value = u64;

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("a JSON value")
    }

    fn visit_str<E>(self, text: &str) -> Result<u64, E> {
        Ok(text.len() as u64)
    }

    fn visit_bool<E>(self, _: bool) -> Result<u64, E> {
        Ok(0)
    }

    fn visit_i64<E>(self, _: i64) -> Result<u64, E> {
        Ok(0)
    }

    fn visit_u64<E>(self, _: u64) -> Result<u64, E> {
        Ok(0)
    }

    fn visit_f64<E>(self, _: f64) -> Result<u64, E> {
        Ok(0)
    }

    fn visit_unit<E>(self) -> Result<u64, E> {
        Ok(0)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<u64, A::Error> {
        let mut sum = 0;
        while let Some(TextBytes(bytes)) = items.next_element()? {
            sum += bytes;
        }
        Ok(sum)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<u64, A::Error> {
        let mut sum = 0;
        while let Some(Foreign(foreign)) = members.next_key()? {
            if foreign {
                members.next_value::<IgnoredAny>()?;
            } else {
                sum += members.next_value::<TextBytes>()?.0;
            }
        }
        Ok(sum)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(parts: &[Value]) -> OutputTokens {
        let mut tokens = OutputTokens::default();
        for part in parts {
            tokens.read(part.to_string().as_bytes());
        }
        tokens
    }

    #[test]
    fn usage_of_every_api_is_taken_whole_or_streamed() {
        let chat = json!({"choices": [{"message": {"role": "assistant", "content": "Hello"}}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 7}});
        let responses = json!({"object": "response", "output": [{"type": "message", "content":
            [{"type": "output_text", "text": "Hello"}]}], "usage": {"input_tokens": 3, "output_tokens": 7}});
        let messages = json!({"type": "message", "role": "assistant", "content":
            [{"type": "text", "text": "Hello"}], "usage": {"input_tokens": 3, "output_tokens": 7}});
        let streams = [
            vec![
                json!({"choices": [{"delta": {"content": "Hello"}}], "usage": null}),
                json!({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 7}}),
            ],
            vec![
                json!({"type": "response.created", "response": {"status": "in_progress", "usage": null}}),
                json!({"type": "response.output_text.delta", "delta": "Hello"}),
                json!({"type": "response.completed", "response":
                    {"status": "completed", "usage": {"input_tokens": 3, "output_tokens": 7}}}),
            ],
            vec![
                json!({"type": "message_start", "message":
                    {"content": [], "usage": {"input_tokens": 3, "output_tokens": 1}}}),
                json!({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "Hello"}}),
                json!({"type": "message_delta", "delta": {"stop_reason": "end_turn"},
                    "usage": {"output_tokens": 7}}),
                json!({"type": "message_stop"}),
            ],
        ];
        for parts in [vec![chat], vec![responses], vec![messages]].iter().chain(&streams) {
            let tokens = read(parts);
            assert_eq!((tokens.count(), tokens.is_estimate()), (7, false), "{parts:?}");
        }
    }

    #[test]
    fn the_last_of_several_reports_counts() {
        let so_far = |tokens: u64| json!({"choices": [], "usage": {"completion_tokens": tokens}});
        assert_eq!(read(&[so_far(1), so_far(2), json!({"choices": []})]).count(), 2);
    }

    #[test]
    fn without_usage_each_event_with_output_is_a_token() {
        let parts = [
            json!({"choices": [{"delta": {"role": "assistant", "content": ""}}]}),
            json!({"choices": [{"delta": {"content": "Hi"}}]}),
            json!({"choices": [{"delta": {"reasoning_content": "hm"}}]}),
            json!({"choices": [{"delta": {"tool_calls": [{"index": 0, "id": "call_1", "type": "function",
                "function": {"name": "f", "arguments": ""}}]}}]}),
            json!({"choices": [{"text": "a", "logprobs": {"tokens": ["a"]}}]}),
            json!({"choices": [{"delta": {}, "finish_reason": "stop"}]}),
            json!({"type": "response.output_text.done", "text": "Hi"}),
            json!({"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": null}}),
            json!({"type": "content_block_delta", "delta": {"type": "signature_delta", "signature": "x"}}),
            json!({"error": {"message": "no"}}),
        ];
        let tokens = read(&parts);
        assert_eq!((tokens.count(), tokens.is_estimate()), (4, true));
    }

    #[test]
    fn long_events_and_documents_count_by_their_bytes() {
        let long = json!({"choices": [{"delta": {"content": "x".repeat(200)}}]});
        assert_eq!(read(&[long.clone(), long]).count(), 100);
        let whole = json!({"content": [{"type": "text", "text": "x".repeat(41)}]});
        assert_eq!(read(&[whole]).count(), 11);
    }

    #[test]
    fn parts_that_cannot_be_read_are_estimated() {
        let mut tokens = OutputTokens::default();
        for other in [&b"[DONE]"[..], b"", b"7", b"{\"choices\": 7}", b"\xFF"] {
            tokens.read(other);
        }
        assert_eq!(tokens, OutputTokens::default());
        (0..3).for_each(|_| tokens.skip_event());
        tokens.skip_bytes(10);
        assert_eq!((tokens.count(), tokens.is_estimate()), (6, true));
    }
}
