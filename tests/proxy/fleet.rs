//! Several replicas behind Foretell: routing, failures of a replica, keys and TLS.

mod breaker;
mod discovery;
mod house;
mod names;
mod retry;
mod silent;
mod tls;
