//! The configuration as a whole: every key, every error, the generated pages and schemas.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]
#![allow(clippy::float_cmp, reason = "what was written is read back")]

mod config;
mod config_cli;
mod train_cli;
