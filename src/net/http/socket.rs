//! The byte stream of a client connection, between the network and hyper.
//!
//! It reports when bytes are received and sent, owns the connection's slot, and truncates a request
//! target that is far too long, so that the request is refused for its target rather than for a
//! head that does not fit hyper's buffer.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::http::activity::Activity;
use crate::http::connections::ConnectionSlot;
use crate::http::opening::{self, Protocol};

/// Maximum number of bytes of a connection's first head that are read at once.
const PIECE: usize = 2 << 10;

/// A client connection.
pub struct Socket<S> {
    stream: S,
    slot: ConnectionSlot,
    target: Target,
    /// Bytes received before the connection's protocol was known, and the number of them that were
    /// handed on.
    opening: Vec<u8>,
    handed: usize,
}

impl<S> Socket<S> {
    /// `uri`: maximum length of the first request's target that is not truncated, bytes.
    pub fn new(stream: S, slot: ConnectionSlot, uri: usize) -> Self {
        Self { stream, slot, target: Target::new(uri), opening: Vec::new(), handed: 0 }
    }

    /// True if nothing has been received yet.
    pub fn is_unused(&self) -> bool {
        self.opening.is_empty()
    }

    fn activity(&self) -> &Arc<Activity> {
        self.slot.activity()
    }

    /// Reports a write: bytes were taken, or the write waits for the client.
    fn sent(&self, taken: bool) {
        if taken { self.activity().written() } else { self.activity().blocked() }
    }
}

impl<S: AsyncRead + Unpin> Socket<S> {
    /// Reads until the protocol is known, which is when the first head is complete; `None` if
    /// nothing was ever received. The server of the connection gets these bytes first.
    pub fn poll_open(
        &mut self,
        cx: &mut Context<'_>,
        max_bytes: usize,
    ) -> Poll<io::Result<Option<Protocol>>> {
        loop {
            let mut piece = [0; PIECE];
            let mut buf = ReadBuf::new(&mut piece);
            ready!(self.poll_stream(cx, &mut buf))?;
            let known = self.opening.len();
            self.opening.extend_from_slice(buf.filled());
            if buf.filled().is_empty() {
                return Poll::Ready(Ok((known > 0).then_some(Protocol::Http1)));
            }
            if let Some(protocol) = opening::protocol(&self.opening, known, max_bytes) {
                return Poll::Ready(Ok(Some(protocol)));
            }
        }
    }

    fn poll_stream(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        loop {
            ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
            let read = buf.filled().len() - before;
            if read == 0 {
                return Poll::Ready(Ok(()));
            }
            self.activity().read();
            let passed = match buf.filled_mut().get_mut(before..) {
                Some(fresh) => self.target.pass(fresh),
                None => read,
            };
            buf.set_filled(before + passed);
            // Zero bytes would mean end of stream.
            if passed > 0 {
                return Poll::Ready(Ok(()));
            }
        }
    }

    /// Hands on bytes received before the protocol was known.
    fn hand_on(&mut self, buf: &mut ReadBuf<'_>) {
        let rest = self.opening.get(self.handed..).unwrap_or_default();
        let piece = rest.get(..buf.remaining()).unwrap_or(rest);
        buf.put_slice(piece);
        self.handed += piece.len();
        if self.handed == self.opening.len() {
            (self.opening, self.handed) = (Vec::new(), 0);
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Socket<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.opening.is_empty() {
            return self.poll_stream(cx, buf);
        }
        self.hand_on(buf);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Socket<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.sent(written.is_ready());
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, pieces);
        self.sent(written.is_ready());
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Truncates the target of a connection's first request to the length needed to refuse it. Only the
/// first line of a connection is certain to be a request line without parsing as hyper does.
struct Target {
    at: At,
    /// Bytes of the target that may still pass.
    remaining: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum At {
    /// Before the method; some clients send line ends first.
    Start,
    Method,
    Target,
    /// After the target of the first request.
    Beyond,
}

impl Target {
    fn new(uri: usize) -> Self {
        // One byte over the limit shows that it is too long.
        Self { at: At::Start, remaining: uri.saturating_add(1) }
    }

    /// Truncates `bytes` and returns their new number.
    fn pass(&mut self, bytes: &mut [u8]) -> usize {
        if self.at == At::Beyond {
            return bytes.len();
        }
        let (mut at, mut passed) = (0, 0);
        while let Some(&byte) = bytes.get(at)
            && self.at != At::Beyond
        {
            if self.passes(byte) {
                if let Some(at) = bytes.get_mut(passed) {
                    *at = byte;
                }
                passed += 1;
            }
            at += 1;
        }
        bytes.copy_within(at.., passed);
        passed + bytes.len() - at
    }

    fn passes(&mut self, byte: u8) -> bool {
        match (self.at, byte) {
            (At::Start, b'\r' | b'\n') | (At::Beyond, _) => true,
            (_, b'\n') | (At::Target, b' ') => {
                self.at = At::Beyond;
                true
            }
            (At::Start | At::Method, b' ') => {
                self.at = At::Target;
                true
            }
            (At::Start | At::Method, _) => {
                self.at = At::Method;
                true
            }
            (At::Target, _) => {
                let passes = self.remaining > 0;
                self.remaining = self.remaining.saturating_sub(1);
                passes
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes that pass, if they arrive in pieces of this size.
    fn passed(text: &str, uri: usize, piece: usize) -> String {
        let mut target = Target::new(uri);
        let mut all = Vec::new();
        for bytes in text.as_bytes().chunks(piece) {
            let mut bytes = bytes.to_vec();
            let kept = target.pass(&mut bytes);
            all.extend_from_slice(&bytes[..kept]);
        }
        String::from_utf8(all).unwrap()
    }

    #[test]
    fn a_target_passes_up_to_one_byte_too_many_and_the_rest_passes() {
        let long = "u".repeat(50);
        for piece in [1, 7, 1000] {
            for (line, uri, wanted) in [
                ("GET /abc HTTP/1.1\r\nhost: long value here\r\n\r\nbody with spaces", 4, None),
                ("\r\n\r\nGET /abc HTTP/1.1\r\n", 4, None),
                ("GET /abcd HTTP/1.1\r\n", 4, None),
                (
                    "GET /abcde HTTP/1.1\r\nx: /abcde HTTP/1.1",
                    4,
                    Some("GET /abcd HTTP/1.1\r\nx: /abcde HTTP/1.1"),
                ),
                ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 4, None),
                (&format!("{long} /a HTTP/1.1\r\n"), 4, None),
                (&format!("GET /{long}\r\n/{long}"), 4, Some(&format!("GET /uuuu\n/{long}"))),
            ] {
                assert_eq!(passed(line, uri, piece), wanted.unwrap_or(line), "{line:?} by {piece}");
            }
        }
    }
}
