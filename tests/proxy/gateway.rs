//! The gateway from outside: a client and a backend that speak raw bytes, and Foretell between them.

mod admin;
mod disconnect;
mod drain;
mod errors;
mod golden;
mod handover;
mod house;
mod relay;
