//! ONNX Runtime and the code on top of it: models over a slot cache, sampling, the model drafter,
//! and the server of an ONNX model.
//!
//! | module | purpose |
//! |---|---|
//! | [`open`] | opens a model folder |
//! | [`forward`] | the trait of every model: feeds in, logits out |
//! | `runtime` | models on ONNX Runtime; the only module that needs the feature `onnx` |
//! | [`sampler`], [`noise`] | from logits to tokens, with noise that others can reproduce |
//! | [`grammar`] | the tokens that the grammar of a request allows |
//! | [`drafter`] | the service that drafts for many sessions in one batch |
//! | [`target`] | the OpenAI server over a model |
//! | [`pace`] | a model at the run times of another machine |

pub mod drafter;
#[cfg(any(test, feature = "fake"))]
pub mod fake;
pub mod folder;
pub mod forward;
pub mod grammar;
pub mod layout;
pub mod noise;
pub mod open;
mod open_error;
mod options;
pub mod pace;
#[cfg(feature = "onnx")]
pub mod runtime;
pub mod sampler;
pub mod target;
