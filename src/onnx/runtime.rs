//! ONNX Runtime itself: its library, sessions, devices, and models over a slot cache.

pub mod cache;
pub mod description;
pub mod device;
pub mod foreign;
mod head;
pub mod library;
pub mod load;
pub mod model;
pub mod run_binding;
