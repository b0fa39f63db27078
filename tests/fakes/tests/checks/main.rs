//! The fakes' own tests: each behaviour of a real engine that a fake reproduces.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use foretell_fakes::{self as fakes, wire};

mod client;
mod core;
mod goldens;
mod hosted;
mod llamacpp;
mod sglang;
mod vllm;
