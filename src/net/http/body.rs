//! Body types of the messages that Foretell writes.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};

/// Any error that can end a body early.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;
/// The body type of every response that Foretell writes.
pub type Body = UnsyncBoxBody<Bytes, BoxError>;

/// A body that is completely in memory.
pub fn full(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).map_err(|never| match never {}).boxed_unsync()
}

/// Maximum size of a slice handed to a connection, bytes.
pub const SLICE: usize = 16 << 10;

/// A body that is passed on in slices. hyper copies each piece completely, so a stalled connection
/// buffers at most one slice.
pub struct Sliced<B> {
    body: B,
    rest: Bytes,
}

impl<B> Sliced<B> {
    /// `body`, in slices of at most 16 KiB.
    pub fn new(body: B) -> Self {
        Self { body, rest: Bytes::new() }
    }

    fn slice(&mut self) -> Frame<Bytes> {
        Frame::data(self.rest.split_to(self.rest.len().min(SLICE)))
    }
}

impl<B: http_body::Body<Data = Bytes> + Unpin> http_body::Body for Sliced<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        if !self.rest.is_empty() {
            return Poll::Ready(Some(Ok(self.slice())));
        }
        Pin::new(&mut self.body).poll_frame(cx).map_ok(|frame| match frame.into_data() {
            Ok(data) => {
                self.rest = data;
                self.slice()
            }
            Err(trailers) => trailers,
        })
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        longer(&self.body.size_hint(), self.rest.len() as u64)
    }
}

/// The size of a body with `more` bytes before it.
pub fn longer(rest: &SizeHint, more: u64) -> SizeHint {
    let mut total = SizeHint::new();
    total.set_lower(rest.lower().saturating_add(more));
    if let Some(upper) = rest.upper() {
        total.set_upper(upper.saturating_add(more));
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body::Body as _;

    #[tokio::test]
    async fn slices_are_the_body_and_its_remaining_length_is_known() {
        let all: Vec<u8> = (0..40_000_u32).map(|index| index as u8).collect();
        let mut body = Sliced::new(full(all.clone()));
        let mut read = Vec::new();
        while let Some(frame) = body.frame().await {
            let slice = frame.unwrap().into_data().unwrap();
            assert!((1..=SLICE).contains(&slice.len()));
            read.extend_from_slice(&slice);
            assert_eq!(body.size_hint().exact(), Some((all.len() - read.len()) as u64));
            assert_eq!(body.is_end_stream(), read.len() == all.len());
        }
        assert_eq!(read, all);
        assert!(Sliced::new(full("")).is_end_stream());
    }
}
