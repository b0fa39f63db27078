//! A request body that can be sent a second time: sent bytes are stored until an answer begins.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use http_body_util::BodyExt;
use parking_lot::Mutex;

use crate::http::body::{Body, BoxError, full, longer};
use crate::http::memory::{Memory, Reservation};

/// Sends a body a second time. Dropping it frees the stored bytes.
pub struct Replay(Content);

enum Content {
    Complete(Bytes),
    Passing(Arc<Mutex<Passing>>),
}

/// A body being sent.
struct Passing {
    source: Body,
    /// The bytes sent so far; `None` once the body cannot be resent.
    copy: Option<SentCopy>,
}

struct SentCopy {
    /// Copies: a small piece may be a part of a large buffer.
    bytes: Vec<u8>,
    /// Bytes reserved in `memory`.
    reserved: u64,
    max_bytes: usize,
    memory: Reservation,
}

impl Replay {
    /// For a body that has been read.
    pub fn of(bytes: Bytes) -> Self {
        Self(Content::Complete(bytes))
    }

    /// For a body that is passed on as it arrives: the body to send, and the means to resend it;
    /// `None` if its announced length is above `max_bytes` or `memory` has no room for it. A body
    /// without announced length is stored as long as it fits.
    pub fn passing(body: Body, max_bytes: usize, memory: &Arc<Memory>) -> (Body, Option<Self>) {
        let announced = http_body::Body::size_hint(&body).upper();
        let mut memory = memory.take(0);
        if announced.is_some_and(|size| size > max_bytes as u64) || !memory.try_grow(announced.unwrap_or(0)) {
            return (body, None);
        }
        let copy = Some(SentCopy { bytes: Vec::new(), reserved: announced.unwrap_or(0), max_bytes, memory });
        let passing = Arc::new(Mutex::new(Passing { source: body, copy }));
        let first = Sent { before: Bytes::new(), passing: Arc::clone(&passing) };
        (first.boxed_unsync(), Some(Self(Content::Passing(passing))))
    }

    /// The complete body: the bytes sent before, then the remaining ones. `None` if it was not
    /// stored.
    pub fn into_body(self) -> Option<Body> {
        match &self.0 {
            Content::Complete(bytes) => Some(full(bytes.clone())),
            Content::Passing(passing) => {
                let copy = passing.lock().copy.take()?;
                let passing = Arc::clone(passing);
                Some(Sent { before: copy.bytes.into(), passing }.boxed_unsync())
            }
        }
    }
}

impl Drop for Replay {
    fn drop(&mut self) {
        if let Content::Passing(passing) = &self.0 {
            passing.lock().copy = None;
        }
    }
}

impl SentCopy {
    /// Stores a piece; false if there is no room for it.
    fn add(&mut self, piece: &Bytes) -> bool {
        let size = self.bytes.len() + piece.len();
        let more = (size as u64).saturating_sub(self.reserved);
        let fits = size <= self.max_bytes && self.memory.try_grow(more);
        if fits {
            self.reserved += more;
            self.bytes.extend_from_slice(piece);
        }
        fits
    }
}

impl Passing {
    fn note(&mut self, frame: &Result<Frame<Bytes>, BoxError>) {
        let Some(copy) = &mut self.copy else { return };
        let piece = frame.as_ref().ok().and_then(Frame::data_ref);
        if !piece.is_some_and(|piece| copy.add(piece)) {
            self.copy = None;
        }
    }
}

/// One transfer of a body to a backend.
struct Sent {
    before: Bytes,
    passing: Arc<Mutex<Passing>>,
}

impl http_body::Body for Sent {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if !self.before.is_empty() {
            return Poll::Ready(Some(Ok(Frame::data(std::mem::take(&mut self.before)))));
        }
        let mut passing = self.passing.lock();
        let polled = Pin::new(&mut passing.source).poll_frame(cx);
        if let Poll::Ready(Some(frame)) = &polled {
            passing.note(frame);
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.before.is_empty() && self.passing.lock().source.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        longer(&self.passing.lock().source.size_hint(), self.before.len() as u64)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    /// A body of six bytes in three pieces, whose length is announced or not.
    struct Pieces(VecDeque<&'static str>, bool);

    impl http_body::Body for Pieces {
        type Data = Bytes;
        type Error = BoxError;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
            Poll::Ready(self.0.pop_front().map(|piece| Ok(Frame::data(Bytes::from_static(piece.as_bytes())))))
        }

        fn size_hint(&self) -> SizeHint {
            let left = self.0.iter().map(|piece| piece.len() as u64).sum();
            if self.1 { SizeHint::with_exact(left) } else { SizeHint::new() }
        }
    }

    fn pieces(announced: bool) -> Body {
        Pieces(["ab", "cd", "ef"].into(), announced).boxed_unsync()
    }

    async fn text(body: Body) -> String {
        String::from_utf8(body.collect().await.unwrap().to_bytes().to_vec()).unwrap()
    }

    #[tokio::test]
    async fn a_body_is_complete_the_second_time_whatever_part_was_sent() {
        for (announced, passed) in [true, false].into_iter().flat_map(|way| (0..=3).map(move |n| (way, n))) {
            let memory = Memory::new(100);
            let (mut first, replay) = Replay::passing(pieces(announced), 6, &memory);
            for _ in 0..passed {
                first.frame().await.unwrap().unwrap();
            }
            assert_eq!(memory.used(), if announced { 6 } else { 2 * passed });
            drop(first);
            assert_eq!(text(replay.unwrap().into_body().unwrap()).await, "abcdef", "{passed}");
            assert_eq!(memory.used(), 0);
        }
    }

    #[tokio::test]
    async fn a_body_without_room_is_passed_on_and_not_kept() {
        for (announced, most, limit) in [(true, 5, 100), (true, 100, 5), (false, 5, 100), (false, 100, 5)] {
            let memory = Memory::new(limit);
            let (first, replay) = Replay::passing(pieces(announced), most, &memory);
            assert_eq!(text(first).await, "abcdef");
            // Announced bytes that do not fit are known before the first byte is sent.
            assert_eq!((replay.is_none(), memory.used()), (announced, 0));
            assert!(replay.and_then(Replay::into_body).is_none());
        }
    }

    #[tokio::test]
    async fn nothing_is_kept_once_an_answer_has_begun() {
        let memory = Memory::new(100);
        let (mut first, replay) = Replay::passing(pieces(true), 100, &memory);
        first.frame().await.unwrap().unwrap();
        drop(replay);
        assert_eq!((text(first).await.as_str(), memory.used()), ("cdef", 0));
    }
}
