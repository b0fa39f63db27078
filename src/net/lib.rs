//! Connections: those of clients, and those to the servers behind. Nothing about tokens.
//!
//! | module | purpose |
//! |---|---|
//! | [`fleet`] | the servers behind: backends, replicas, the process that answers there, health, load, probes |
//! | [`http`] | the base of servers and clients: listeners, bodies, headers, workers |
//! | [`clock`], [`random`] | the moments and the random seeds that the pure crates receive |

pub mod clock;
pub mod fleet;
pub mod http;
pub mod random;
