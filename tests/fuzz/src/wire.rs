//! Bytes of a client on an HTTP/1.1 or HTTP/2 connection, through the whole proxy, to the requests
//! that the server reads.
//!
//! Input: the protocol, then the bytes. The server must get only requests that every reader reads
//! alike; from a connection on which every message is unambiguous it must get exactly those
//! messages, with unchanged bodies.

use std::time::Duration;

pub use crate::origin::ReceivedRequest;
use crate::origin::world;

/// Maximum size of an input, bytes.
const MAX_LEN: usize = 8 << 10;
/// Timeouts after which a silent connection is closed.
const SETTINGS: &str = "mode: \"off\"\ntimeouts: { header: 300ms, body: 300ms, keep_alive: 300ms }\n";
/// A silence after which most clients close their side; the others wait for the timeouts.
const SILENCE: Duration = Duration::from_millis(50);
/// Minimum first byte of an input whose client waits.
const PATIENT: u8 = 240;
/// The request that ends a connection.
const LAST: &[u8] = b"GET /last HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";
/// The preface of HTTP/2, with empty settings.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00";
/// No more streams will be opened.
const GOAWAY: &[u8] = b"\x00\x00\x08\x07\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00";

/// Runs one input.
pub fn run(input: &[u8]) {
    if input.len() > MAX_LEN {
        return;
    }
    let Some((kind, bytes)) = input.split_first() else { return };
    if kind % 4 == 0 {
        let mut turn = world(SETTINGS).turn();
        turn.answers(vec![b"ok".to_vec()], false);
        // If the end of the connection is read as part of a body, the server waits ten seconds for
        // it.
        turn.exchange(&[PREFACE, bytes, GOAWAY].concat(), Some(SILENCE));
        turn.asked();
        return;
    }
    let asked = arrive(bytes, (*kind < PATIENT).then_some(SILENCE));
    let (clean, all) = clean(bytes);
    let last = ReceivedRequest { line: "GET /last".into(), body: Vec::new() };
    if !all {
        let same = asked.iter().zip(&clean).take_while(|(asked, clean)| asked == clean).count();
        assert_eq!(same, asked.len().min(clean.len()), "{asked:?} of {clean:?}");
        return;
    }
    // On a busy machine a connection may be closed before its end.
    let expected: Vec<ReceivedRequest> = clean.into_iter().chain([last]).collect();
    assert!(expected.starts_with(&asked), "{asked:?} of {expected:?}");
}

/// The requests that the server gets from a client's bytes on an HTTP/1.1 connection; see
/// `Turn::exchange`.
pub fn arrive(bytes: &[u8], patience: Option<Duration>) -> Vec<ReceivedRequest> {
    let mut turn = world(SETTINGS).turn();
    turn.answers(vec![b"ok".to_vec()], false);
    turn.exchange(&[bytes, LAST].concat(), patience);
    turn.asked()
}

/// The unambiguous messages at the head of `bytes`, and true if there is nothing else.
fn clean(mut bytes: &[u8]) -> (Vec<ReceivedRequest>, bool) {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let Some((asked, used)) = message(bytes) else { return (found, false) };
        found.push(asked);
        bytes = &bytes[used..];
    }
    (found, true)
}

/// The first message and its length, if it is unambiguous.
fn message(bytes: &[u8]) -> Option<(ReceivedRequest, usize)> {
    let mut fields = [httparse::EMPTY_HEADER; 64];
    let mut request = httparse::Request::new(&mut fields);
    let Ok(httparse::Status::Complete(head)) = request.parse(bytes) else { return None };
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"/.-_?=&".contains(byte);
    let target =
        request.path.filter(|path| path.starts_with('/') && path.bytes().all(|byte| plain(&byte)))?;
    let method = request.method.filter(|method| ["GET", "POST", "PUT", "DELETE"].contains(method))?;
    let text = std::str::from_utf8(&bytes[..head]).ok()?;
    // Bare line feeds and folded lines are read in more than one way.
    if request.version != Some(1)
        || text.replace("\r\n", "").contains(['\r', '\n', '\0'])
        || bytes.starts_with(b"\r")
    {
        return None;
    }
    let (mut hosts, mut length) = (0, None);
    for field in request.headers.iter() {
        match field.name.to_ascii_lowercase().as_str() {
            "host" => {
                hosts += 1;
                (!field.value.is_empty() && field.value.iter().all(u8::is_ascii_lowercase)).then_some(())?;
            }
            "content-length" if length.is_none() => {
                let digits = std::str::from_utf8(field.value).ok()?;
                length = Some(
                    digits
                        .bytes()
                        .all(|byte| byte.is_ascii_digit())
                        .then(|| digits.parse::<usize>().ok())??,
                );
            }
            "content-length" | "transfer-encoding" | "connection" | "expect" | "upgrade" => return None,
            _ => {}
        }
    }
    let end = head.checked_add(length.unwrap_or(0)).filter(|&end| end <= bytes.len() && hosts == 1)?;
    Some((ReceivedRequest { line: format!("{method} {target}"), body: bytes[head..end].to_vec() }, end))
}
