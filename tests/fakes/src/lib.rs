//! Strict, deterministic fakes of inference engines, each with the habits of the real one.
//!
//! A fake answers over real sockets, from a model that is a pure function of the whole context, so
//! a text that differs from the plain run shows a fault. A fake refuses and ignores the same inputs
//! as the real engine, and records calls that would kill it in [`House::fatal`].
//!
//! The core: [`toy`] computes logits, [`sample`] samples, [`sequence`] builds text and decides when
//! to stop, [`batch`] runs the sequences of one call over the [`cache`], [`house`] holds the common
//! state of every engine, [`server`] speaks HTTP with [`http`], and [`fault`] schedules faults.
//! [`wire`] is hand-written HTTP for tests, byte by byte, at either end.

// A fake that is used wrongly should stop its test at once; it is not a service.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

pub mod batch;
pub mod cache;
pub mod fault;
pub mod fields;
pub mod freezer;
pub mod frontend;
pub mod hermes;
pub mod hosted;
pub mod house;
pub mod http;
pub mod llamacpp;
pub mod openai;
pub mod passthrough;
mod rng;
pub mod sample;
pub mod sequence;
pub mod server;
pub mod sglang;
pub mod toy;
pub mod vllm;
pub mod wire;
mod words;

pub use fault::{Fault, When};
pub use freezer::Freezer;
pub use house::{Defaults, House, Load, Pace, Setup, Tally};
pub use server::{Engine, Fake, Front, Switch};
pub use toy::{Temper, Toy};

/// A token id of the vocabulary.
pub type TokenId = u32;
