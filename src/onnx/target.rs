//! `foretell target`: an OpenAI server over an ONNX model.
//!
//! The model's thread (`scheduler`) handles tokens only; the HTTP side (`server`, `wire`, `stream`)
//! handles text and JSON. A client that leaves drops its receiver, and its lane is freed before the
//! next run.

mod active;
pub mod errors;
mod fields;
pub mod hugging;
pub mod job;
mod judge;
mod logprobs;
pub mod metrics;
pub mod open;
mod output;
mod parts;
mod prefix;
mod reply;
pub mod scheduler;
pub mod server;
mod stops;
mod stream;
mod wire;
pub mod words;
