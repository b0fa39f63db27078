//! The OpenAI wire: what clients ask for and which of it may be speculated.
//!
//! PURE.

pub mod request;
pub mod sampling;

pub use request::{Prompt, Request, Route};
pub use sampling::Sampling;
