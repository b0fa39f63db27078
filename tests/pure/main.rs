//! The pure crates as a whole: what sessions emit, text and tokens, the table of parameters. No
//! socket, no model computation, no downloads. `make quick` runs these tests.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]
#![allow(clippy::float_cmp, reason = "what was written is read back")]

mod eligibility;
mod exactness;
mod session;
mod text;
mod text_models;
mod trained_tokenizers;
mod translate;
