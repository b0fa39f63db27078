//! ONNX Runtime and what runs on it: models over a slot cache, sampling, the model drafter.
//!
//! `noise`, `sampler` and `forward` need no ONNX Runtime and are always there; the rest comes with the
//! feature `onnx`.

#[cfg(feature = "onnx")]
pub mod bound;
#[cfg(feature = "onnx")]
pub mod cache;
#[cfg(feature = "onnx")]
pub mod description;
#[cfg(feature = "onnx")]
pub mod device;
pub mod forward;
pub mod layout;
#[cfg(feature = "onnx")]
pub mod library;
#[cfg(feature = "onnx")]
pub mod model;
pub mod noise;
pub mod sampler;
