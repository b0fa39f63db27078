//! The gateway from outside: a client and a backend that speak raw bytes, and Foretell between them.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

#[allow(dead_code, reason = "shared with the end-to-end tests")]
#[path = "support/wire.rs"]
mod wire;

#[path = "gateway/admin.rs"]
mod admin;
#[path = "gateway/disconnect.rs"]
mod disconnect;
#[path = "gateway/drain.rs"]
mod drain;
#[path = "gateway/errors.rs"]
mod errors;
#[path = "gateway/golden.rs"]
mod golden;
#[path = "gateway/handover.rs"]
mod handover;
#[path = "gateway/house.rs"]
mod house;
#[path = "gateway/relay.rs"]
mod relay;
