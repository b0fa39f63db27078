//! `foretell target` over real loopback HTTP, with a model whose every logit is known.

mod client;
mod errors;
mod fake;
mod identity;
mod serving;
mod shapes;
