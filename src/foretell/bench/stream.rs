//! Reads a streamed answer: bytes to events while they arrive, events to an answer afterwards.
//!
//! While the stream runs, only the time of each event is recorded; JSON is parsed afterwards, so
//! that the client takes as little processor time as possible from the servers it measures.

use std::time::Duration;

use serde::Deserialize;

use foretell_core::units::TokenId;
use foretell_wire::openai::event::Data;

/// Splits a stream into the payloads of its `data:` fields, independent of chunk boundaries.
#[derive(Debug, Default)]
pub struct Events {
    line: Vec<u8>,
    data: Vec<u8>,
}

impl Events {
    /// Adds bytes; calls `each` with every payload they complete.
    pub fn push(&mut self, bytes: &[u8], mut each: impl FnMut(Vec<u8>)) {
        for &byte in bytes {
            if byte != b'\n' {
                self.line.push(byte);
                continue;
            }
            let line = std::mem::take(&mut self.line);
            let line = line.strip_suffix(b"\r").unwrap_or(&line);
            if let Some(data) = line.strip_prefix(b"data:") {
                if !self.data.is_empty() {
                    self.data.push(b'\n');
                }
                self.data.extend_from_slice(data.strip_prefix(b" ").unwrap_or(data));
            } else if line.is_empty() && !self.data.is_empty() {
                each(std::mem::take(&mut self.data));
            }
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// Time since the request was sent.
    pub at: Duration,
    /// Payload of the event's `data` fields.
    pub data: Vec<u8>,
}

/// The output text of one event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Time since the request was sent.
    pub at: Duration,
    /// End of its text in the output, bytes.
    pub end: usize,
    /// Number of token ids in the event; 0 if the server does not send them.
    pub tokens: usize,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    pub text: String,
    /// Events with output text, in order.
    pub pieces: Vec<Piece>,
    /// Time from sending the request to the last event of any kind.
    pub last: Duration,
    pub finish: String,
    /// Number of output tokens as counted by the server.
    pub completion_tokens: u64,
    /// The `usage.foretell` object; `None` if the server sent none.
    pub foretell: Option<ForetellUsage>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct ForetellUsage {
    /// Path of the request: `speculated`, `plain` or `passthrough`.
    pub path: String,
    /// Reason for which it was not speculated on, or no longer.
    #[serde(default)]
    pub reason: Option<String>,
    #[serde(default)]
    pub rounds: u64,
    /// Number of tokens drafted.
    #[serde(default)]
    pub drafted: u64,
    /// Number of drafted tokens accepted.
    #[serde(default)]
    pub accepted: u64,
}

/// Reason for which a request got no complete answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// No connection could be made, or it broke before the answer began.
    #[error("unreachable: {0}")]
    Unreachable(String),
    /// The server answered with this error status and message.
    #[error("HTTP {0}: {1}")]
    Status(u16, String),
    /// The stream ended before the answer was complete.
    #[error("cut off: {0}")]
    Cut(String),
    /// The stream contained an error object.
    #[error("error in the stream: {0}")]
    Reported(String),
    /// The stream is not in the format of the OpenAI API.
    #[error("unreadable: {0}")]
    Unreadable(String),
    /// The answer was not complete within this time.
    #[error("no answer within {0:?}")]
    TooLate(Duration),
}

impl Answer {
    /// Time to the first output text; to the last event if there was no text.
    pub fn first(&self) -> Duration {
        self.pieces.first().map_or(self.last, |piece| piece.at)
    }

    /// Times between successive events with output.
    pub fn gaps(&self) -> impl Iterator<Item = Duration> + '_ {
        self.pieces.iter().zip(self.pieces.iter().skip(1)).map(|(one, next)| next.at.saturating_sub(one.at))
    }

    /// Mean time per token after the first; `None` for fewer than two tokens.
    pub fn per_token(&self) -> Option<Duration> {
        let span = self.pieces.last()?.at.saturating_sub(self.first());
        let steps = u32::try_from(self.completion_tokens.checked_sub(1)?).ok().filter(|&steps| steps > 0)?;
        Some(span / steps)
    }

    /// The text of each event with its number of token ids.
    pub fn runs(&self) -> impl Iterator<Item = (&str, usize)> {
        self.pieces.iter().scan(0, |start, piece| {
            let text = self.text.get(*start..piece.end).unwrap_or_default();
            *start = piece.end;
            Some((text, piece.tokens))
        })
    }
}

#[derive(Deserialize)]
struct Usage {
    completion_tokens: u64,
    foretell: Option<ForetellUsage>,
}

/// Combines the events of one stream. A complete answer ends with `[DONE]`, has a finish reason and
/// counts its tokens; anything else is a failure rather than a fast answer.
pub fn understand(arrivals: &[Arrival]) -> Result<Answer, Failure> {
    let mut answer = Answer::default();
    let (mut finish, mut usage, mut done) = (None, None, false);
    for arrival in arrivals {
        answer.last = arrival.at;
        if arrival.data == b"[DONE]" {
            done = true;
            break;
        }
        let event = match Data::of(String::from_utf8_lossy(&arrival.data).into_owned()) {
            Data::Answer(event) => event,
            Data::Foreign(_) => continue,
            Data::Damaged => return Err(Failure::Unreadable("an event that is not JSON".into())),
        };
        if let Some(error) = event.error() {
            return Err(Failure::Reported(message(&error)));
        }
        finish = event.finish().or(finish);
        let text = event.text();
        // Events without text (a role, an incomplete character, the end) are not visible to a
        // reader.
        if !text.is_empty() {
            answer.text.push_str(&text);
            let ids = event.choice().and_then(|choice| choice.read::<Vec<TokenId>>("token_ids"));
            let tokens = ids.map_or(0, |ids| ids.len());
            answer.pieces.push(Piece { at: arrival.at, end: answer.text.len(), tokens });
        }
        usage = event.top().read::<Usage>("usage").or(usage);
    }
    if !done {
        return Err(Failure::Cut(format!("after {} events, no [DONE]", arrivals.len())));
    }
    answer.finish = finish.ok_or_else(|| Failure::Unreadable("no finish_reason".into()))?;
    let usage = usage.ok_or_else(|| Failure::Unreadable("no usage chunk".into()))?;
    answer.completion_tokens = usage.completion_tokens;
    answer.foretell = usage.foretell;
    Ok(answer)
}

/// The message of an OpenAI error object, or its JSON if it has none.
pub fn message(error: &serde_json::Value) -> String {
    let words = error.get("message").or_else(|| error.get("error")?.get("message"));
    words.and_then(serde_json::Value::as_str).map_or_else(|| error.to_string(), ToOwned::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrivals(events: &[(u64, &str)]) -> Vec<Arrival> {
        events
            .iter()
            .map(|&(ms, data)| Arrival { at: Duration::from_millis(ms), data: data.as_bytes().to_vec() })
            .collect()
    }

    const PLAIN: &[(u64, &str)] = &[
        (5, r#"{"choices":[{"text":"a","token_ids":[1],"finish_reason":null}]}"#),
        (7, r#"{"choices":[{"text":"bcd","token_ids":[2,3],"finish_reason":null}]}"#),
        (13, r#"{"choices":[{"text":"e","token_ids":[4],"finish_reason":"length"}]}"#),
        (
            14,
            r#"{"choices":[],"usage":{"completion_tokens":5,"foretell":{"path":"speculated","reason":null,
                "policy":"default@0","rounds":1,"drafted":4,"accepted":2,"drift":{"charged":0}}}}"#,
        ),
        (15, "[DONE]"),
    ];

    #[test]
    fn an_answer_is_put_together_and_timed() {
        let answer = understand(&arrivals(PLAIN)).unwrap();
        assert_eq!((answer.text.as_str(), answer.finish.as_str()), ("abcde", "length"));
        assert_eq!(answer.first(), Duration::from_millis(5));
        assert_eq!(answer.last, Duration::from_millis(15));
        assert_eq!(answer.gaps().map(|gap| gap.as_millis()).collect::<Vec<_>>(), [2, 6]);
        assert_eq!(answer.per_token(), Some(Duration::from_millis(2)));
        assert_eq!(answer.runs().collect::<Vec<_>>(), [("a", 1), ("bcd", 2), ("e", 1)]);
        let told = answer.foretell.unwrap();
        assert_eq!((told.path.as_str(), told.rounds, told.drafted, told.accepted), ("speculated", 1, 4, 2));
    }

    #[test]
    fn the_role_chunk_of_a_chat_is_not_its_first_token() {
        let answer = understand(&arrivals(&[
            (1, r#"{"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}"#),
            (4, r#"{"choices":[{"delta":{"content":"Hi"},"finish_reason":null}]}"#),
            (5, r#"{"choices":[{"delta":{},"finish_reason":"stop"}]}"#),
            (5, r#"{"choices":[],"usage":{"completion_tokens":2}}"#),
            (6, "[DONE]"),
        ]))
        .unwrap();
        assert_eq!((answer.text.as_str(), answer.first()), ("Hi", Duration::from_millis(4)));
        assert_eq!(answer.foretell, None);
    }

    #[test]
    fn an_unfinished_stream_is_no_answer() {
        assert!(matches!(understand(&arrivals(&PLAIN[..4])), Err(Failure::Cut(_))));
        assert!(matches!(understand(&[]), Err(Failure::Cut(_))));
        let uncounted: Vec<_> = [&PLAIN[..3], &PLAIN[4..]].concat();
        assert_eq!(understand(&arrivals(&uncounted)), Err(Failure::Unreadable("no usage chunk".into())));
    }

    #[test]
    fn an_error_in_the_stream_is_reported() {
        let told = understand(&arrivals(&[(1, r#"{"error":{"message":"out of slots","code":500}}"#)]));
        assert_eq!(told, Err(Failure::Reported("out of slots".into())));
    }

    #[test]
    fn any_cut_of_the_bytes_gives_the_same_events() {
        let bytes = b": hello\r\n\r\ndata: {\"a\":\"\xc3\xa9\"}\r\n\r\ndata:one\ndata: two\n\nid: 3\ndata: [DONE]\n\n";
        let whole = [&b"{\"a\":\"\xc3\xa9\"}"[..], b"one\ntwo", b"[DONE]"];
        for size in 1..bytes.len() {
            let (mut events, mut found) = (Events::default(), Vec::new());
            for part in bytes.chunks(size) {
                events.push(part, |data| found.push(data));
            }
            assert_eq!(found, whole, "in parts of {size}");
        }
    }
}
