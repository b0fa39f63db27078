//! Server-sent events: reads them from any partition of bytes, and writes them.
//!
//! Reading follows the WHATWG rules (CRLF, LF or CR ends a line, a blank line ends an event, `:`
//! begins a comment, several `data` lines are one text), with a limit on the size of one event.

/// Default of the maximum bytes of one event before its blank line.
pub const EVENT_BYTES: usize = 2 << 20;
/// The same for the answer to a first call, of which every byte has to reach the client.
const FIRST_CALL_BYTES: usize = 8 << 20;
/// Bytes of the longest token id in a JSON list: seven digits, a comma and a space.
const ID_BYTES: usize = 9;

/// Maximum bytes of one event in the answer to a request of `bytes`: the ids of its prompt, which
/// Foretell itself asks for, stand in one event, and a token is a byte of the prompt at least.
pub const fn longest_event(bytes: usize) -> usize {
    FIRST_CALL_BYTES.saturating_add(bytes.saturating_mul(ID_BYTES))
}

/// The data of the event that ends a stream.
pub const DONE: &str = "[DONE]";

/// One server-sent event.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Message {
    /// The value of its `event` line, if it had one.
    pub event: Option<String>,
    /// Its `data` lines, joined by line feeds.
    pub data: String,
    /// All its bytes as they came, comments and blank line included; empty unless the reader stores
    /// them.
    pub raw: Vec<u8>,
    /// It has comments only. Set by decoders that store bytes.
    pub is_comment: bool,
}

impl Message {
    /// True if this is the event that ends a stream.
    pub fn is_done(&self) -> bool {
        self.data == DONE
    }
}

/// An event is longer than the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a server-sent event is longer than {limit} bytes")]
pub struct TooLong {
    /// The limit, in bytes.
    pub limit: usize,
}

/// Reads a stream of events piece by piece.
#[derive(Clone, Debug)]
pub struct Decoder {
    line: Vec<u8>,
    data: Vec<u8>,
    event: Option<String>,
    has_data: bool,
    /// The last byte was a CR: a LF that follows belongs to it.
    after_cr: bool,
    first_line: bool,
    limit: usize,
    /// The bytes of the event so far, if they are stored.
    raw: Option<Vec<u8>>,
}

impl Default for Decoder {
    fn default() -> Self {
        Self::new(EVENT_BYTES)
    }
}

impl Decoder {
    /// A reader that refuses events longer than `limit` bytes.
    pub fn new(limit: usize) -> Self {
        Self {
            line: Vec::new(),
            data: Vec::new(),
            event: None,
            has_data: false,
            after_cr: false,
            first_line: true,
            limit,
            raw: None,
        }
    }

    /// As [`Self::new`], but it stores the bytes of the events, and reports comments.
    pub fn storing(limit: usize) -> Self {
        Self { raw: Some(Vec::new()), ..Self::new(limit) }
    }

    /// Takes the next bytes and returns the events that they complete. An event beyond the limit is
    /// an error once no complete event remains to be returned.
    ///
    /// # Errors
    /// [`TooLong`]; the decoder cannot be used after that.
    pub fn push(&mut self, mut bytes: &[u8]) -> Result<Vec<Message>, TooLong> {
        let mut messages = Vec::new();
        if self.is_over() {
            self.store(bytes);
            return Err(TooLong { limit: self.limit });
        }
        if self.after_cr && !bytes.is_empty() {
            if let Some(rest) = bytes.strip_prefix(b"\n") {
                self.store(b"\n");
                bytes = rest;
            }
            self.after_cr = false;
        }
        while let Some(end) = bytes.iter().position(|&byte| byte == b'\n' || byte == b'\r') {
            let (line, rest) = bytes.split_at(end);
            let after = match rest {
                [b'\r', b'\n', after @ ..] | [_, after @ ..] => after,
                [] => rest,
            };
            self.line.extend_from_slice(line);
            self.store(bytes.get(..bytes.len() - after.len()).unwrap_or_default());
            messages.extend(self.end_line());
            bytes = after;
            self.after_cr = rest == b"\r";
        }
        self.line.extend_from_slice(bytes);
        self.store(bytes);
        if messages.is_empty() && self.is_over() { Err(TooLong { limit: self.limit }) } else { Ok(messages) }
    }

    /// Stores bytes as received.
    fn store(&mut self, bytes: &[u8]) {
        if let Some(raw) = &mut self.raw {
            raw.extend_from_slice(bytes);
        }
    }

    /// True if the event that has begun is beyond the limit; comments may add the same length.
    fn is_over(&self) -> bool {
        let comments = self.raw.as_ref().is_some_and(|raw| raw.len() > self.limit.saturating_mul(2));
        comments || self.line.len() + self.data.len() > self.limit
    }

    /// The bytes of an event that has not ended, if they are stored.
    pub fn unfinished(&mut self) -> Vec<u8> {
        self.raw.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// True if no event has begun: a stream that ends in another state was cut short.
    pub fn is_between_events(&self) -> bool {
        self.line.is_empty() && !self.has_data
    }

    fn end_line(&mut self) -> Option<Message> {
        let mut line = std::mem::take(&mut self.line);
        if std::mem::take(&mut self.first_line) && line.starts_with(b"\xEF\xBB\xBF") {
            line.drain(..3);
        }
        if line.is_empty() {
            return self.end_event();
        }
        let colon = line.iter().position(|&byte| byte == b':').unwrap_or(line.len());
        let (name, value) = line.split_at(colon);
        let value = value.strip_prefix(b":").unwrap_or(value);
        let value = value.strip_prefix(b" ").unwrap_or(value);
        match name {
            b"data" => {
                if std::mem::replace(&mut self.has_data, true) {
                    self.data.push(b'\n');
                }
                self.data.extend_from_slice(value);
            }
            b"event" => self.event = Some(String::from_utf8_lossy(value).into_owned()),
            // Comments, `id`, `retry` and unknown fields are not needed.
            _ => {}
        }
        None
    }

    fn end_event(&mut self) -> Option<Message> {
        let event = self.event.take();
        let data = std::mem::take(&mut self.data);
        let raw = self.raw.as_mut().map(std::mem::take).unwrap_or_default();
        let has_data = std::mem::take(&mut self.has_data);
        (has_data || !raw.is_empty()).then(|| Message {
            event,
            data: String::from_utf8_lossy(&data).into_owned(),
            raw,
            is_comment: !has_data,
        })
    }
}

pub fn encode(data: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(data.len() + 8);
    for line in data.split('\n') {
        bytes.extend_from_slice(b"data: ");
        bytes.extend_from_slice(line.as_bytes());
        bytes.push(b'\n');
    }
    bytes.push(b'\n');
    bytes
}

/// One event with this JSON, in one line.
pub fn encode_json(value: &serde_json::Value) -> Vec<u8> {
    encode(&value.to_string())
}

/// The event that ends a stream.
pub fn encode_done() -> Vec<u8> {
    encode(DONE)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(bytes: &[u8]) -> Vec<Message> {
        Decoder::default().push(bytes).unwrap()
    }

    fn data(text: &str) -> Message {
        Message { data: text.to_owned(), ..Message::default() }
    }

    #[test]
    fn every_line_ending_ends_a_line() {
        for end in ["\n", "\r\n", "\r"] {
            let stream = format!("data: a{end}data:b{end}{end}: ping{end}{end}data:  c{end}{end}");
            assert_eq!(read(stream.as_bytes()), [data("a\nb"), data(" c")], "{end:?}");
        }
    }

    #[test]
    fn comments_and_events_without_data_are_passed_over() {
        assert_eq!(read(b": keep-alive\n\nevent: x\nid: 7\n\ndata\n\n"), [data("")]);
        let named = Message { event: Some("error".to_owned()), ..data("{}") };
        assert_eq!(read(b"\xEF\xBB\xBFevent: error\ndata: {}\n\n"), [named]);
    }

    #[test]
    fn an_event_without_its_blank_line_is_not_an_event() {
        let mut decoder = Decoder::default();
        assert_eq!(decoder.push(b"data: a\n").unwrap(), []);
        assert!(!decoder.is_between_events());
        assert_eq!(decoder.push(b"\n").unwrap(), [data("a")]);
        assert!(decoder.is_between_events());
    }

    #[test]
    fn an_endless_line_is_refused() {
        let mut decoder = Decoder::new(100);
        assert!((0..10).all(|_| decoder.push(b"data: a\n\n").is_ok()));
        assert_eq!(decoder.push(&[b'x'; 101]), Err(TooLong { limit: 100 }));
        let mut decoder = Decoder::new(100);
        let outcome: Result<Vec<_>, _> = (0..60).map(|_| decoder.push(b"data: a\n")).collect();
        assert_eq!(outcome, Err(TooLong { limit: 100 }));
    }

    #[test]
    fn complete_events_in_front_of_an_endless_one_are_returned_and_no_byte_is_lost() {
        let endless = [b"data: a\n\ndata: ".as_slice(), &[b'x'; 120]].concat();
        let mut decoder = Decoder::storing(100);
        let read = decoder.push(&endless).unwrap();
        assert_eq!((read.len(), read[0].raw.as_slice()), (1, b"data: a\n\n".as_slice()));
        assert_eq!(decoder.push(b"yy"), Err(TooLong { limit: 100 }));
        assert_eq!(decoder.unfinished(), [&endless[9..], b"yy"].concat());
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(texts in prop::collection::vec("[^\r]{0,20}", 0..8)) {
            let stream: Vec<u8> = texts.iter().flat_map(|text| encode(text)).collect();
            let expected: Vec<Message> = texts.iter().map(|text| data(text)).collect();
            prop_assert_eq!(read(&stream), expected);
        }

        #[test]
        fn any_partition_gives_the_same_events(
            pieces in prop::collection::vec(
                prop::sample::select(vec![
                    "data:", "data: ", "x", "é", ":", " ", "\n", "\r", "\r\n", "\n\n", "\r\r", "event: e", "\u{feff}",
                ]),
                0..60,
            ),
            cuts in prop::collection::vec(1usize..5, 1..80),
        ) {
            let stream = pieces.concat().into_bytes();
            let whole = read(&stream);
            let mut decoder = Decoder::default();
            let mut parts = Vec::new();
            let mut rest = stream.as_slice();
            for cut in cuts.iter().cycle() {
                let (now, later) = rest.split_at((*cut).min(rest.len()));
                parts.extend(decoder.push(now).unwrap());
                rest = later;
                if rest.is_empty() {
                    break;
                }
            }
            prop_assert_eq!(parts, whole);
        }
    }
}
