//! The gateway from outside: a client and a backend that exchange raw bytes, and Foretell in
//! between.

mod admin;
mod disconnect;
mod drain;
mod errors;
mod golden;
mod handover;
mod house;
mod passthrough;
