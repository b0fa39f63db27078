//! ONNX Runtime and what runs on it: models over a slot cache, sampling, the model drafter.
//!
//! `noise`, `sampler` and `forward` need no ONNX Runtime and are always there; the rest comes with the
//! feature `onnx`.

pub mod forward;
pub mod noise;
pub mod sampler;
