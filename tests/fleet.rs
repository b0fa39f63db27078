//! Several replicas behind Foretell: who gets a request, what a dying one costs, and who may speak to whom.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

#[allow(dead_code, reason = "shared with the other tests of the gateway")]
#[path = "support/wire.rs"]
mod wire;

#[path = "fleet/breaker.rs"]
mod breaker;
#[path = "fleet/discovery.rs"]
mod discovery;
#[path = "fleet/house.rs"]
mod house;
#[path = "fleet/names.rs"]
mod names;
#[path = "fleet/retry.rs"]
mod retry;
#[path = "fleet/tls.rs"]
mod tls;
