//! The bodies that Foretell writes.

use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};

/// Any error that may cut a body short.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;
/// The body type of every response that Foretell writes.
pub type Body = UnsyncBoxBody<Bytes, BoxError>;

/// A body that is known as a whole.
pub fn full(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).map_err(|never| match never {}).boxed_unsync()
}
