//! Black box: the binary alone, attacked over raw sockets.
//!
//! These tests use no code of the library, so they run unchanged against any build:
//! `FORETELL_BIN=/path/to/foretell`. Without it they use the binary that Cargo built for them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

#[path = "attack/kit.rs"]
#[allow(dead_code)]
mod kit;

#[path = "attack/log.rs"]
mod log;

#[path = "attack/ops_kit.rs"]
#[allow(dead_code)]
mod ops_kit;

#[path = "attack/commands.rs"]
mod commands;
#[path = "attack/descriptors.rs"]
mod descriptors;
#[path = "attack/explain.rs"]
mod explain;
#[path = "attack/fields.rs"]
mod fields;
#[path = "attack/framing.rs"]
mod framing;
#[path = "attack/h2.rs"]
mod h2;
#[path = "attack/keep_alive.rs"]
mod keep_alive;
#[path = "attack/manager.rs"]
mod manager;
#[path = "attack/memory.rs"]
mod memory;
#[path = "attack/ops.rs"]
mod ops;
#[path = "attack/patience.rs"]
mod patience;
#[path = "attack/policies.rs"]
mod policies;
#[path = "attack/slow_heads.rs"]
mod slow_heads;
