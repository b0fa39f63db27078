//! The first bytes of a connection: detects its protocol, and the end of its first head.
//!
//! hyper takes 16 KiB of buffers for a connection as soon as it gets it. So it gets one only when
//! the first head is complete: clients that have sent nothing, or half a head, cost only the bytes
//! they have sent. A head is not parsed here; hyper validates it.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1.1 or 1.0, or bytes that hyper refuses as such.
    Http1,
    /// HTTP/2 without negotiation, or as TLS has negotiated it.
    Http2,
}

/// Start of an HTTP/2 connection (RFC 9113, 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// The protocol of a connection that has begun with `bytes`, of which those after `known` are new.
/// `None` while its first head is incomplete, shorter than `max_bytes`, and not certainly
/// malformed.
pub fn protocol(bytes: &[u8], known: usize, max_bytes: usize) -> Option<Protocol> {
    if PREFACE.starts_with(bytes) {
        return (bytes.len() == PREFACE.len()).then_some(Protocol::Http2);
    }
    if bytes.starts_with(PREFACE) {
        return Some(Protocol::Http2);
    }
    let new = bytes.get(known..).unwrap_or_default();
    // The end of a head may be spread over two reads.
    let last = bytes.get(known.saturating_sub(3)..).unwrap_or_default();
    let ends = last.windows(2).any(|two| two == b"\n\n") || last.windows(3).any(|three| three == b"\n\r\n");
    let over = ends || bytes.len() >= max_bytes || new.iter().copied().any(is_control);
    (over || is_wrong(bytes)).then_some(Protocol::Http1)
}

/// True for a byte that no head contains; the first message of TLS begins with one.
fn is_control(byte: u8) -> bool {
    byte < b' ' && !matches!(byte, b'\r' | b'\n' | b'\t')
}

/// True if the first line is complete and not a request line.
fn is_wrong(bytes: &[u8]) -> bool {
    let line = bytes.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let complete = line.len() < bytes.len();
    complete && !line.windows(8).any(|piece| piece == b" HTTP/1.")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Number of bytes until the protocol is known, if they arrive in pieces of this size.
    fn known_after(text: &[u8], piece: usize) -> Option<(usize, Protocol)> {
        let ends = (piece..text.len()).step_by(piece).chain([text.len()]);
        let mut known = 0;
        for end in ends {
            if let Some(protocol) = protocol(&text[..end], known, 64) {
                return Some((end, protocol));
            }
            known = end;
        }
        None
    }

    #[rstest::rstest]
    #[case("GET / HTTP/1.1\r\nhost: a\r\n\r\n", Some(27))]
    #[case("GET / HTTP/1.1\nhost: a\n\n", Some(24))]
    #[case("GET / HTTP/1.1\r\nhost: a\r\n", None)]
    #[case("PRI * HTTP/1.1\r\n\r\n", Some(18))]
    #[case("\r\nGET / HTTP/1.1\r\n", Some(2))]
    #[case("nonsense\r\n", Some(10))]
    #[case("nonsense", None)]
    #[case("\x16\x03\x01", Some(1))]
    #[case("PRI * HTTP/2.0\r\n\r\nSM\r\n\r", None)]
    fn the_protocol_is_known_when_the_head_is_complete(#[case] text: &str, #[case] wanted: Option<usize>) {
        assert_eq!(known_after(text.as_bytes(), 1), wanted.map(|end| (end, Protocol::Http1)));
        let whole = known_after(text.as_bytes(), 1000);
        assert_eq!(whole, wanted.map(|_| (text.len(), Protocol::Http1)));
    }

    #[test]
    fn http2_begins_with_its_preface() {
        let more = [PREFACE, b"\0\0\0\x04\0\0\0\0\0"].concat();
        assert_eq!(known_after(&more, 1), Some((24, Protocol::Http2)));
        assert_eq!(known_after(&more, 1000), Some((33, Protocol::Http2)));
    }

    #[test]
    fn a_head_that_is_too_long_is_for_hyper_to_refuse() {
        let long = format!("GET / HTTP/1.1\r\nx: {}", "a".repeat(100));
        assert_eq!(known_after(long.as_bytes(), 1), Some((64, Protocol::Http1)));
    }
}
