//! The rooms by themselves: no socket, no model that computes, nothing to fetch. `make quick` runs these.
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
mod tongues;
mod translate;
