//! `foretell target` over real loopback HTTP, with a model whose every logit is known.

mod calls;
mod client;
mod errors;
mod fake;
mod identity;
mod paced;
mod serving;
mod shapes;
