//! The models on ONNX Runtime itself.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]
#![allow(clippy::needless_pass_by_value)] // `json!` at the call reads best

mod foreign;
mod heads;
mod runtime_drafter;
mod runtime_model;
mod target_onnx;
