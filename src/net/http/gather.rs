//! Reads complete bodies.
//!
//! A sender chooses the chunks of a body, and each arrives in a separate buffer: many tiny ones
//! would take a hundred times their bytes. So every byte is copied into pieces of a fixed size,
//! which are reserved in the memory limit before they are filled. A body that does not fit is
//! returned as the part that was read and the rest.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use http_body_util::BodyExt;

use crate::http::body::{BoxError, longer};
use crate::http::memory::{Memory, Reservation};

/// Size of a piece, bytes; the first one starts smaller and grows up to it.
const PIECE: usize = 32 << 10;
/// Minimum allocation for a body of unknown length, bytes.
const MIN: usize = 1 << 10;

/// Result of reading a body.
pub enum Gathered<B> {
    /// The complete body; its bytes stay reserved until the last copy is dropped.
    Complete(Bytes),
    /// The body was not read to its end; it can still be passed on.
    Partial(PartlyRead<B>, Stopped),
}

/// Reason that a body was not read to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stopped {
    /// It is larger than the limit, or has trailers.
    Limit,
    /// The memory limit has no room for it.
    Memory,
}

/// Reads `body` up to `limit` bytes, if the memory limit allows it.
///
/// # Errors
/// The error of `body`.
pub async fn gather<B>(mut body: B, limit: usize, memory: &Arc<Memory>) -> Result<Gathered<B>, BoxError>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    if body.size_hint().lower() > limit as u64 {
        return Ok(Gathered::Partial(PartlyRead { read: VecDeque::new(), rest: body }, Stopped::Limit));
    }
    let expected = body.size_hint().exact().and_then(|length| usize::try_from(length).ok());
    let mut pieces = Pieces::new(memory.take(0), expected.unwrap_or(0));
    while let Some(frame) = body.frame().await {
        let data = match frame.map_err(Into::into)?.into_data() {
            Ok(data) => data,
            Err(trailers) => return Ok(pieces.partial(trailers, body, Stopped::Limit)),
        };
        let rest = pieces.push(data);
        if !rest.is_empty() {
            return Ok(pieces.partial(Frame::data(rest), body, Stopped::Memory));
        }
        if pieces.size > limit {
            return Ok(pieces.partial(Frame::data(Bytes::new()), body, Stopped::Limit));
        }
    }
    Ok(Gathered::Complete(pieces.join(memory)))
}

/// The bytes read so far.
struct Pieces {
    full: Vec<Bytes>,
    open: Vec<u8>,
    /// Reservation for the capacity of `open`.
    taken: Reservation,
    expected: usize,
    size: usize,
}

impl Pieces {
    fn new(taken: Reservation, expected: usize) -> Self {
        Self { full: Vec::new(), open: Vec::new(), taken, expected, size: 0 }
    }

    /// Copies as much of `data` as memory can be reserved for; returns the rest.
    fn push(&mut self, mut data: Bytes) -> Bytes {
        while !data.is_empty() && (self.open.len() < self.open.capacity() || self.grow(data.len())) {
            let now = data.split_to(data.len().min(self.open.capacity() - self.open.len()));
            self.open.extend_from_slice(&now);
            self.size += now.len();
        }
        data
    }

    /// Reserves room for some of `more` bytes; false if there is none.
    fn grow(&mut self, more: usize) -> bool {
        if self.open.capacity() >= PIECE {
            let full = std::mem::take(&mut self.open);
            self.full.push(self.taken.split(full.capacity() as u64).over(full));
        }
        let (old, first) = (self.open.capacity(), self.full.is_empty());
        let size = match self.expected {
            0 if first => (2 * old).max(old + more).max(MIN),
            0 => PIECE,
            expected => expected.saturating_sub(self.size - self.open.len()).max(more),
        };
        let size = size.min(PIECE);
        let grown = self.taken.try_grow((size - old) as u64);
        if grown {
            self.open.reserve_exact(size - self.open.len());
        }
        grown
    }

    fn join(mut self, memory: &Arc<Memory>) -> Bytes {
        if self.size == 0 {
            return Bytes::new();
        }
        if self.full.is_empty() {
            return self.taken.over(self.open);
        }
        let taken = memory.take(self.size as u64);
        let mut all = Vec::with_capacity(self.size);
        for piece in self.full.drain(..) {
            all.extend_from_slice(&piece);
        }
        all.extend_from_slice(&self.open);
        taken.over(all)
    }

    fn partial<B>(self, last: Frame<Bytes>, rest: B, stopped: Stopped) -> Gathered<B> {
        let mut read: VecDeque<_> = self.full.into_iter().map(Frame::data).collect();
        if !self.open.is_empty() {
            read.push_back(Frame::data(self.taken.over(self.open)));
        }
        if last.data_ref().is_none_or(|data| !data.is_empty()) {
            read.push_back(last);
        }
        Gathered::Partial(PartlyRead { read, rest }, stopped)
    }
}

/// A partly read body: yields the part that was read, then the rest.
pub struct PartlyRead<B> {
    read: VecDeque<Frame<Bytes>>,
    rest: B,
}

impl<B> http_body::Body for PartlyRead<B>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match self.read.pop_front() {
            Some(frame) => Poll::Ready(Some(Ok(frame))),
            None => Pin::new(&mut self.rest).poll_frame(cx).map_err(Into::into),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.read.is_empty() && self.rest.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let read: usize = self.read.iter().filter_map(|frame| frame.data_ref().map(Bytes::len)).sum();
        longer(&self.rest.size_hint(), read as u64)
    }
}

/// Reason that a body could not be read completely.
#[derive(Debug, thiserror::Error)]
pub enum Unread {
    /// It has more bytes than this limit.
    #[error("the body has more than {0} bytes")]
    TooLong(usize),
    /// Its sender ended it early.
    #[error(transparent)]
    Broken(BoxError),
}

/// Reads `body` up to `limit` bytes without reserving memory: for small bodies and answers to
/// Foretell's calls.
///
/// # Errors
/// See [`Unread`].
pub async fn read_all<B>(body: B, limit: usize) -> Result<Vec<u8>, Unread>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    read(body, limit, None).await
}

/// As [`read_all`]; `taken` counts the memory, even above the limit.
///
/// # Errors
/// See [`Unread`].
pub async fn read_counted<B>(body: B, limit: usize, taken: &mut Reservation) -> Result<Vec<u8>, Unread>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    read(body, limit, Some(taken)).await
}

async fn read<B>(mut body: B, limit: usize, mut taken: Option<&mut Reservation>) -> Result<Vec<u8>, Unread>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    let mut read = Vec::new();
    while let Some(frame) = body.frame().await {
        let data = frame.map_err(|error| Unread::Broken(error.into()))?.into_data().unwrap_or_default();
        if read.len() + data.len() > limit {
            return Err(Unread::TooLong(limit));
        }
        read.extend_from_slice(&data);
        if let Some(taken) = &mut taken {
            taken.follow(read.capacity() as u64);
        }
    }
    Ok(read)
}

#[cfg(test)]
mod tests {
    use futures_util::stream;
    use http::HeaderMap;
    use http_body_util::{Full, StreamBody};

    use super::*;
    use crate::http::body::Body;

    fn pieces(sizes: &[usize], trailers: bool) -> Body {
        let mut frames: Vec<Result<_, BoxError>> = Vec::new();
        let mut next = 0_u8;
        for size in sizes {
            let data: Vec<u8> = (0..*size)
                .map(|_| {
                    next = next.wrapping_add(1);
                    next
                })
                .collect();
            frames.push(Ok(Frame::data(data.into())));
        }
        if trailers {
            frames.push(Ok(Frame::trailers(HeaderMap::new())));
        }
        StreamBody::new(stream::iter(frames)).boxed_unsync()
    }

    fn wanted(size: usize) -> Vec<u8> {
        (1..=size).map(|n| n as u8).collect()
    }

    async fn is_whole(
        body: impl http_body::Body<Data = Bytes, Error: Into<BoxError>> + Unpin,
        size: usize,
    ) -> u64 {
        let memory = Memory::new(1 << 30);
        let Gathered::Complete(bytes) = gather(body, 1 << 20, &memory).await.unwrap() else {
            panic!("a part")
        };
        assert_eq!(bytes, wanted(size));
        let used = memory.used();
        drop(bytes);
        assert_eq!(memory.used(), 0);
        used
    }

    #[tokio::test]
    async fn a_body_costs_its_bytes_for_any_number_of_pieces() {
        assert_eq!(is_whole(pieces(&[], false), 0).await, 0);
        assert_eq!(is_whole(Full::new(Bytes::from(wanted(300))), 300).await, 300);
        assert_eq!(is_whole(Full::new(Bytes::from(wanted(200_000))), 200_000).await, 200_000);
        assert_eq!(is_whole(pieces(&vec![1; 3000], false), 3000).await, 4096);
        assert_eq!(is_whole(pieces(&vec![1; 100_000], false), 100_000).await, 100_000);
        assert_eq!(is_whole(pieces(&[70_000, 1, 70_000], false), 140_001).await, 140_001);
    }

    #[tokio::test]
    async fn a_partly_read_body_passes_unchanged() {
        for (sizes, trailers, memory, stopped) in [
            (vec![600, 600], false, 1 << 20, Stopped::Limit),
            (vec![700], true, 1 << 20, Stopped::Limit),
            (vec![900], false, 512, Stopped::Memory),
            (vec![1; 900], false, 512, Stopped::Memory),
            (vec![500, 500], false, 1024, Stopped::Memory),
        ] {
            let size: usize = sizes.iter().sum();
            let memory = Memory::new(memory);
            // With this reserved, nothing else fits below the limit.
            let other = memory.take(if stopped == Stopped::Memory { 200 } else { 0 });
            let limit = if stopped == Stopped::Limit { 1000 } else { 1 << 20 };
            let gathered = gather(pieces(&sizes, trailers), limit, &memory).await.unwrap();
            let Gathered::Partial(part, why) = gathered else { panic!("{sizes:?}: whole") };
            assert_eq!(why, stopped);
            let collected = part.collect().await.unwrap();
            assert_eq!(collected.trailers().is_some(), trailers);
            assert_eq!(collected.to_bytes(), wanted(size));
            drop(other);
            assert_eq!(memory.used(), 0);
        }
    }

    #[tokio::test]
    async fn a_body_announced_as_too_large_is_not_read() {
        let memory = Memory::new(1 << 20);
        let gathered = gather(Full::new(Bytes::from(wanted(1001))), 1000, &memory).await.unwrap();
        let Gathered::Partial(part, Stopped::Limit) = gathered else { panic!("read") };
        assert_eq!((part.read.len(), http_body::Body::size_hint(&part).exact()), (0, Some(1001)));
    }

    #[tokio::test]
    async fn a_whole_body_may_be_as_long_as_its_limit() {
        assert_eq!(read_all(pieces(&[1; 100], false), 100).await.unwrap(), wanted(100));
        assert!(matches!(read_all(pieces(&[1; 101], false), 100).await, Err(Unread::TooLong(100))));
    }
}
