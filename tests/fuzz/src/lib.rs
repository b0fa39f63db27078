//! Fuzz targets: one module per target, each with one function that takes an input and panics if an
//! oracle fails.
//!
//! Nothing here needs a fuzzing engine, so that a test can replay inputs that once failed.
#![allow(
    clippy::panic,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a panic is a finding"
)]

pub mod admin;
mod bytes;
pub mod config;
pub mod drafts;
pub mod exposition;
mod origin;
pub mod parse;
pub mod request;
pub mod session;
pub mod shared;
pub mod snapshot;
pub mod stream;
pub mod tokenizer;
pub mod verify;
pub mod wire;

/// A fuzz target: its name, and what runs one input.
pub type Target = (&'static str, fn(&[u8]));

/// Every target, in the order of the documentation.
pub const TARGETS: [Target; 13] = [
    ("verify", verify::run),
    ("stream", stream::run),
    ("request", request::run),
    ("tokenizer", tokenizer::run),
    ("wire", wire::run),
    ("session", session::run),
    ("snapshot", snapshot::run),
    ("shared", shared::run),
    ("exposition", exposition::run),
    ("config", config::run),
    ("admin", admin::run),
    ("parse", parse::run),
    ("drafts", drafts::run),
];
