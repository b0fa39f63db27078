//! Events that differ in their text alone, of which only the text is serialized.

use bytes::Bytes;
use foretell_wire::openai::answer::Template;
use foretell_wire::openai::sse;

/// The bytes of an event before and after its text. All events of a stream but the last differ in
/// nothing else, so only the text is serialized per token; fast engines send thousands a second.
pub(super) struct PlainFrame {
    before: Vec<u8>,
    after: Vec<u8>,
}

impl PlainFrame {
    /// Serializes an event with a marker as text; `None` if the marker is not found exactly once.
    pub(super) fn of(template: &Template) -> Option<Self> {
        const MARK: &str = "\u{1}text\u{1}";
        let event = sse::encode_json(&template.chunk(MARK, &[], None));
        let mark = serde_json::to_vec(MARK).ok()?;
        let mut positions =
            (0..event.len()).filter(|&at| event.get(at..).is_some_and(|rest| rest.starts_with(&mark)));
        let (at, None) = (positions.next()?, positions.next()) else { return None };
        let (before, rest) = event.split_at(at);
        Some(Self { before: before.to_vec(), after: rest.get(mark.len()..)?.to_vec() })
    }

    pub(super) fn around(&self, text: &str) -> Bytes {
        let mut event = Vec::with_capacity(self.before.len() + text.len() + 16 + self.after.len());
        event.extend_from_slice(&self.before);
        // Writing a string to memory cannot fail.
        let _ = serde_json::to_writer(&mut event, text);
        event.extend_from_slice(&self.after);
        event.into()
    }
}

#[cfg(test)]
mod tests {
    use foretell_wire::openai::Route;
    use foretell_wire::openai::answer::Additive;
    use serde_json::json;

    use super::*;

    #[test]
    fn a_frame_around_a_text_is_the_template_written_out() {
        let first = json!({"id": "c", "object": "text_completion", "created": 1, "model": "text",
            "choices": [{"index": 0, "text": "a", "logprobs": null, "finish_reason": null, "token_ids": [1]}]});
        let additive = Additive { usage: true, token_ids: true, ..Additive::default() };
        let template = Template::from_first_chunk(&first, Route::Completions, additive).unwrap();
        let frame = PlainFrame::of(&template).unwrap();
        for text in ["", "plain", "\"quoted\"\n\t\\", "é€𝄞", "\u{1}text\u{1}"] {
            assert_eq!(frame.around(text), sse::encode_json(&template.chunk(text, &[], None)));
        }
    }
}
