//! The fakes' own tests: each habit of a real engine that a fake claims to have.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, missing_docs)]

#[path = "fakes/mod.rs"]
mod fakes;

#[path = "fakes/checks/client.rs"]
mod client;
#[path = "fakes/checks/core.rs"]
mod core;
#[path = "fakes/checks/goldens.rs"]
mod goldens;
#[path = "fakes/checks/hosted.rs"]
mod hosted;
#[path = "fakes/checks/llamacpp.rs"]
mod llamacpp;
#[path = "fakes/checks/lmdeploy.rs"]
mod lmdeploy;
#[path = "fakes/checks/mlx.rs"]
mod mlx;
#[path = "fakes/checks/ollama.rs"]
mod ollama;
#[path = "fakes/checks/penalties.rs"]
mod penalties;
#[path = "fakes/checks/sglang.rs"]
mod sglang;
#[path = "fakes/checks/tgi.rs"]
mod tgi;
#[path = "fakes/checks/triton.rs"]
mod triton;
#[path = "fakes/checks/trtllm.rs"]
mod trtllm;
#[path = "fakes/checks/vllm.rs"]
mod vllm;
#[path = "support/wire.rs"]
#[allow(dead_code)]
mod wire;
