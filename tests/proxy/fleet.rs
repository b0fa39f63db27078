//! Several replicas behind Foretell: who gets a request, what a dying one costs, and who may speak to whom.

mod breaker;
mod discovery;
mod house;
mod names;
mod retry;
mod tls;
