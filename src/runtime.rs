//! ONNX Runtime and what runs on it: models over a slot cache, sampling, the model drafter.
//!
//! `noise` and `sampler` need no ONNX Runtime and are always there; the rest comes with the feature `onnx`.

pub mod noise;
