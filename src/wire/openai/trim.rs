//! Events of an answer that is decoded plainly: their bytes, without the members that are there
//! only because Foretell requested them.

use serde_json::Value;

use super::answer::{Additive, TOKEN_IDS};
use super::cut::{self, Edit};
use super::event::Event;
use super::sse;

/// The members and events that are removed from the stream of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Trim {
    /// Fields that were requested in addition to the client's.
    pub additive: Additive,
    /// The client requested the usage of its stream.
    pub include_usage: bool,
    /// The event with the finish reason has usage even if the client did not request it.
    pub usage_at_end: bool,
    /// A member that the last event of every stream has; earlier events have it only because it was
    /// requested. `None` if there is none.
    pub at_end: Option<&'static str>,
    /// Requesting token ids adds events with an empty delta.
    pub hollow: bool,
}

impl Trim {
    /// The bytes `raw` of an event, for the client; `None` if the client would not get the event.
    pub fn event(&self, raw: &[u8], event: &Event) -> Option<Vec<u8>> {
        if self.is_ours(event) {
            return None;
        }
        let (has_choice, is_end) = (event.choice().is_some(), event.finish().is_some());
        let is_extra = is_end && self.usage_at_end && !self.include_usage;
        let cuts_usage = self.additive.usage && has_choice && !is_extra;
        let top = |name: &str| match name {
            "usage" if cuts_usage && self.additive.null_usage => Edit::Null,
            "usage" if cuts_usage => Edit::Drop,
            "prompt_token_ids" if self.additive.token_ids => self.absent(),
            name if (is_end || !has_choice) && self.at_end == Some(name) => Edit::Retain,
            name if self.additive.members.contains(&name) => Edit::Drop,
            _ => Edit::Retain,
        };
        let choice = |name: &str| match name {
            name if self.additive.token_ids && TOKEN_IDS.contains(&name) => self.absent(),
            name if self.additive.choice.contains(&name) => Edit::Drop,
            _ => Edit::Retain,
        };
        let edited = cut::edited(event, top, choice);
        let replaced = data_of(raw, |_| Some(edited.trim_start().to_owned()));
        Some(replaced.unwrap_or_else(|| sse::encode(&edited)))
    }

    /// True if an event exists only because of the additional fields.
    pub fn is_ours(&self, event: &Event) -> bool {
        if event.choice().is_none() {
            return event.usage().is_some() && self.additive.usage && !self.include_usage;
        }
        let empty = event.delta().is_some_and(|delta| delta.members().next().is_none());
        self.hollow
            && self.additive.token_ids
            && empty
            && event.choices().len() == 1
            && event.finish().is_none()
    }

    fn absent(&self) -> Edit {
        if self.additive.nulls { Edit::Null } else { Edit::Drop }
    }
}

/// The event with these bytes, and one more member in its data; `None` if the data is not an object
/// in one line.
pub fn appended(raw: &[u8], name: &str, value: &Value) -> Option<Vec<u8>> {
    data_of(raw, |json| cut::appended(json, name, value))
}

/// The bytes of an event with its data changed; `None` if the data is not one line of JSON.
fn data_of(raw: &[u8], change: impl Fn(&str) -> Option<String>) -> Option<Vec<u8>> {
    let text = std::str::from_utf8(raw).ok()?;
    let mut found = None;
    let mut at = 0;
    for line in text.split_inclusive(['\n', '\r']) {
        if line.starts_with("data:") && found.replace(at).is_some() {
            return None;
        }
        at += line.len();
    }
    let begin = found? + "data:".len();
    let line = text.get(begin..)?;
    let json = line.split(['\n', '\r']).next()?;
    let space = json.len() - json.trim_start().len();
    let (json, begin) = (json.get(space..)?, begin + space);
    let changed = change(json)?;
    Some([text.get(..begin)?, &changed, text.get(begin + json.len()..)?].concat().into_bytes())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn trimmed(trim: Trim, data: &str) -> Option<String> {
        let event = Event::of(data.to_owned()).unwrap();
        let raw = format!(": a comment\ndata: {data}\n\n");
        let bytes = trim.event(raw.as_bytes(), &event)?;
        let text = String::from_utf8(bytes).unwrap();
        Some(text.strip_prefix(": a comment\ndata: ").unwrap().strip_suffix("\n\n").unwrap().to_owned())
    }

    const VLLM: Trim = Trim {
        additive: Additive {
            usage: true,
            token_ids: true,
            members: &[],
            choice: &[],
            nulls: true,
            null_usage: false,
        },
        include_usage: false,
        usage_at_end: false,
        at_end: None,
        hollow: true,
    };

    #[test]
    fn members_that_vllm_adds_on_request_go_and_the_rest_stays_to_the_byte() {
        let asked = r#"{"id":"c","choices":[{"index":0,"delta":{"reasoning":"x"},"logprobs":null,"finish_reason":null,"token_ids":[9]}],"usage":{"prompt_tokens":1}}"#;
        let plain = r#"{"id":"c","choices":[{"index":0,"delta":{"reasoning":"x"},"logprobs":null,"finish_reason":null,"token_ids":null}]}"#;
        assert_eq!(trimmed(VLLM, asked).unwrap(), plain);
        let hollow = r#"{"choices":[{"delta":{},"finish_reason":null,"token_ids":[33]}]}"#;
        assert_eq!(trimmed(VLLM, hollow), None);
        let last = r#"{"choices":[{"delta":{},"finish_reason":"stop","token_ids":[33]}]}"#;
        assert_eq!(trimmed(VLLM, last).unwrap(), last.replace("[33]", "null"));
    }

    #[test]
    fn the_event_with_the_usage_goes_unless_the_client_asked_for_it() {
        let usage = r#"{"choices":[],"usage":{"prompt_tokens":1}}"#;
        assert_eq!(trimmed(VLLM, usage), None);
        assert_eq!(trimmed(Trim { include_usage: true, ..VLLM }, usage).unwrap(), usage);
        let own = Trim { additive: Additive { usage: false, ..VLLM.additive }, ..VLLM };
        assert_eq!(trimmed(own, usage).unwrap(), usage, "it was not requested: it is the server's own");
    }

    #[test]
    fn a_member_can_be_moved_to_the_event_that_is_last_for_the_client() {
        let raw = b"data: {\"a\":1}\r\n\r\n";
        assert_eq!(appended(raw, "b", &json!("c")).unwrap(), b"data: {\"a\":1,\"b\":\"c\"}\r\n\r\n");
        assert_eq!(appended(b"data: {\ndata: }\n\n", "b", &json!(1)), None);
    }
}
