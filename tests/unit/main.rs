//! The layers in isolation: no socket, no model computation, no downloads. `make quick` runs these
//! tests.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, missing_docs)]
#![allow(clippy::float_cmp, reason = "what was written is read back")]

mod config;
mod config_cli;
mod control;
mod eligibility;
mod exactness;
mod purity;
mod session;
mod sim;
mod text;
mod text_models;
mod trained_tokenizers;
mod translate;
