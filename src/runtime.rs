//! ONNX Runtime and the code on top of it: models over a slot cache, sampling, the model drafter.
//!
//! `library`, `device`, `description`, `cache`, `bound`, `model`, `foreign` and `open` require the
//! feature `onnx`. The other modules need no ONNX Runtime and are always compiled: they use models
//! through the trait in `forward`.

#[cfg(feature = "onnx")]
pub mod bound;
#[cfg(feature = "onnx")]
pub mod cache;
#[cfg(feature = "onnx")]
pub mod description;
#[cfg(feature = "onnx")]
pub mod device;
pub mod drafter;
#[cfg(test)]
pub(crate) mod fake;
pub mod folder;
#[cfg(feature = "onnx")]
pub mod foreign;
pub mod forward;
pub mod layout;
#[cfg(feature = "onnx")]
pub mod library;
#[cfg(feature = "onnx")]
pub mod model;
pub mod noise;
#[cfg(feature = "onnx")]
pub mod open;
pub mod pace;
pub mod sampler;
