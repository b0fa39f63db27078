//! A minimal HTTP/2 client for attacks: hand-written frames, fields without compression.

use std::net::SocketAddr;

use crate::kit::Wire;

const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;

/// The last frame of a stream.
pub const END_STREAM: u8 = 1;
/// The whole header block.
pub const END_HEADERS: u8 = 4;

/// One connection without TLS.
pub struct H2 {
    pub wire: Wire,
    next: u32,
}

/// Result of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Status(u16),
    Reset,
    Closed,
}

impl H2 {
    pub fn connect(address: SocketAddr) -> Self {
        Self::with(address, &[])
    }

    /// A connection whose initial window is zero.
    pub fn shut(address: SocketAddr) -> Self {
        const INITIAL_WINDOW_SIZE: u8 = 4;
        Self::with(address, &[0, INITIAL_WINDOW_SIZE, 0, 0, 0, 0])
    }

    fn with(address: SocketAddr, settings: &[u8]) -> Self {
        let mut wire = Wire::connect(address);
        wire.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
        let mut connection = Self { wire, next: 1 };
        connection.frame(SETTINGS, 0, 0, settings);
        connection
    }

    pub fn frame(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) -> bool {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        let mut frame = vec![length[1], length[2], length[3], kind, flags];
        frame.extend_from_slice(&stream.to_be_bytes());
        frame.extend_from_slice(payload);
        self.wire.try_send(frame)
    }

    /// Begins a request with these fields after its pseudo-header fields; returns its stream.
    pub fn request(&mut self, method: &str, path: &str, fields: &[(String, String)], flags: u8) -> u32 {
        let pseudo = [(":method", method), (":scheme", "http"), (":authority", "api"), (":path", path)];
        let fields = fields.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        self.begin(&pseudo.into_iter().chain(fields).collect::<Vec<_>>(), flags)
    }

    /// Begins a request with these fields and no others; returns its stream.
    pub fn begin(&mut self, fields: &[(&str, &str)], flags: u8) -> u32 {
        let mut block = Vec::new();
        for (name, value) in fields {
            literal(&mut block, name, value);
        }
        let stream = self.next;
        self.next += 2;
        self.frame(HEADERS, flags, stream, &block);
        stream
    }

    /// A whole request without a body.
    pub fn get(&mut self, path: &str, fields: &[(String, String)]) -> Outcome {
        let stream = self.request("GET", path, fields, END_STREAM | END_HEADERS);
        self.outcome(stream)
    }

    /// Reads until the head of the answer on `stream`, its reset, or the end of the connection.
    pub fn outcome(&mut self, stream: u32) -> Outcome {
        loop {
            let head = self.wire.exactly(9);
            let Ok(head) = <[u8; 9]>::try_from(head) else { return Outcome::Closed };
            let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
            let payload = self.wire.exactly(length);
            let on = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
            match head[3] {
                SETTINGS if head[4] == 0 => drop(self.frame(SETTINGS, 1, 0, &[])),
                HEADERS if on == stream => return Outcome::Status(status(&payload)),
                RST_STREAM if on == stream => return Outcome::Reset,
                GOAWAY if on == stream => return Outcome::Closed,
                _ => {}
            }
        }
    }
}

/// A field that is neither indexed nor compressed (RFC 7541, 6.2.2).
fn literal(block: &mut Vec<u8>, name: &str, value: &str) {
    block.push(0);
    for text in [name, value] {
        block.push(u8::try_from(text.len()).unwrap());
        block.extend_from_slice(text.as_bytes());
    }
}

/// `:status` of a header block, which comes first: indexed, or a literal with plain or
/// Huffman-coded digits.
fn status(block: &[u8]) -> u16 {
    const INDEXED: [u16; 7] = [200, 204, 206, 304, 400, 404, 500];
    // A dynamic table size update may come before it.
    let block = if block[0] & 0xe0 == 0x20 { &block[1..] } else { block };
    if block[0] & 0x80 != 0 {
        return INDEXED[usize::from(block[0] & 0x7f) - 8];
    }
    let (length, text) = (usize::from(block[1] & 0x7f), &block[2..]);
    let text = &text[..length];
    let digits = if block[1] & 0x80 == 0 { text.to_vec() } else { huffman_digits(text) };
    String::from_utf8(digits).unwrap().parse().unwrap()
}

/// Codes of five bits for 0, 1, 2 and of six bits for 3 to 9 (RFC 7541, appendix B).
fn huffman_digits(text: &[u8]) -> Vec<u8> {
    let bits: Vec<u8> = text.iter().flat_map(|byte| (0..8).rev().map(move |at| byte >> at & 1)).collect();
    let number = |bits: &[u8]| bits.iter().fold(0_u8, |number, bit| number << 1 | bit);
    let (mut digits, mut at) = (Vec::new(), 0);
    while digits.len() < 3 {
        let short = number(&bits[at..at + 5]);
        if short < 3 {
            digits.push(b'0' + short);
            at += 5;
        } else {
            digits.push(b'0' + number(&bits[at..at + 6]) - 0b01_1001 + 3);
            at += 6;
        }
    }
    digits
}

#[test]
fn digits_are_read_from_their_codes() {
    // 431 is 011010 011001 00001, filled up with ones.
    assert_eq!(status(&[0x48, 0x83, 0b0110_1001, 0b1001_0000, 0b1111_1111]), 431);
    assert_eq!(status(&[0x48, 0x03, b'4', b'1', b'4']), 414);
    assert_eq!(status(&[0x88]), 200);
}

/// As over HTTP/1.1: exactly one host, and no value with surrounding space.
#[test]
fn a_head_that_two_readers_could_take_differently_is_refused() {
    let backend = crate::kit::Backend::plain();
    let proxy = crate::kit::Start::before(backend.address).start();
    let base = [(":method", "POST"), (":scheme", "http"), (":path", "/v1/files")];
    let of = |more: &[(&str, &str)]| {
        let mut client = H2::connect(proxy.address);
        let fields: Vec<_> = base.iter().chain(more).copied().collect();
        let stream = client.begin(&fields, END_STREAM | END_HEADERS);
        client.outcome(stream)
    };
    for more in [
        &[(":authority", "api")][..],
        &[("host", "api")],
        &[(":authority", "api"), ("host", "API")],
        &[(":authority", "api"), ("host", "api:80")],
        &[(":authority", "api"), ("x-a", ""), ("authorization", "Bearer a")],
    ] {
        assert_eq!(of(more), Outcome::Status(200), "{more:?}");
    }
    for more in [
        &[][..],
        &[(":authority", "api"), ("host", "evil.example")],
        &[(":authority", "api"), ("host", "api:81")],
        &[(":authority", "api"), ("host", "")],
        &[(":authority", "api"), ("host", "api"), ("host", "api")],
        &[(":authority", "u@api")],
        &[(":authority", "api"), ("x-a", " b")],
        &[(":authority", "api"), ("x-a", "b ")],
        &[(":authority", "api"), ("x-a", "\tb")],
        &[(":authority", "api"), ("x-a", " ")],
        &[(":authority", "api"), ("authorization", "Bearer a"), ("authorization", "Bearer b")],
    ] {
        assert_eq!(of(more), Outcome::Status(400), "{more:?}");
    }
    assert_eq!(backend.requests("/v1/files").len(), 5, "no other has reached the backend");
}
