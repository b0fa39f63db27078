//! What a probe finds at engines that are made on purpose, what it costs them, and what the proxy makes of it.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

#[path = "fakes/mod.rs"]
mod fakes;
#[allow(dead_code)]
#[path = "support/wire.rs"]
mod wire;

#[path = "probe/command.rs"]
mod command;
#[path = "probe/engines.rs"]
mod engines;
#[path = "probe/house.rs"]
mod house;
#[path = "probe/serve.rs"]
mod serve;
