//! ONNX Runtime and what runs on it: models over a slot cache, sampling, the model drafter.
//!
//! `library`, `device`, `description`, `cache`, `bound`, `model`, `foreign` and `open` come with the feature `onnx`. The rest needs
//! no ONNX Runtime and is always there: it sees models through the trait of `forward`.

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
