//! `foretell target` over real loopback HTTP, with a model whose every logit is known.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]
#![allow(clippy::needless_pass_by_value)] // `json!` at the call reads best

mod client;
mod errors;
mod fake;
mod identity;
mod serving;
mod shapes;
