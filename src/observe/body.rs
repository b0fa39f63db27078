//! A backend's answer on its way to the client, together with the record of the request.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

use super::Record;
use foretell_net::fleet::BrokenOff;
use foretell_net::http::headers;

/// Passes a body on unchanged and ends the record with it. If the client leaves early, both are
/// dropped.
pub struct Recorded<B> {
    body: B,
    record: Record,
    /// A part was passed on. Only the first one is noted in the record.
    begun: bool,
}

impl<B: Body> Recorded<B> {
    /// `body` is the answer to the request that `record` belongs to.
    pub fn new(body: B, mut record: Record) -> Self {
        if body.is_end_stream() {
            record.end(false);
        }
        Self { body, record, begun: false }
    }
}

impl<B: Body<Data = Bytes, Error = BrokenOff> + Unpin> Body for Recorded<B> {
    type Data = Bytes;
    type Error = BrokenOff;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BrokenOff>>> {
        let Self { body, record, begun } = &mut *self;
        let mut frame = ready!(Pin::new(&mut *body).poll_frame(context));
        match &mut frame {
            Some(Ok(frame)) => {
                if let Some(trailers) = frame.trailers_mut() {
                    headers::strip_foretell(trailers);
                }
                if !std::mem::replace(begun, true) {
                    record.emitted();
                }
                if body.is_end_stream() {
                    record.end(false);
                }
            }
            Some(Err(error)) => {
                record.failed(error.cause());
                record.end(false);
            }
            None => record.end(false),
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
