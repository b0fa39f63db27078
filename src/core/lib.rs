//! The pure heart of Foretell: drafts, sessions, accept rules and control, without any I/O.
//!
//! Time ([`units::Tick`]), random numbers and answers are arguments, so a test plays hours in
//! microseconds and enumerates complete distributions. This crate depends on no runtime, network or
//! model library, as Cargo.toml shows, and reads no clock.
//! | module | purpose |
//! |---|---|
//! | [`units`] | moments, token ids, random numbers |
//! | [`words`] | the closed lists that all crates share: verification methods and results, modes, reasons |
//! | [`draft`] | trees of draft tokens, and the lookups that propose them |
//! | [`control`] | measured costs and acceptance, and the decision which draft pays |
//! | [`session`] | the state machine of one request: plain decoding or speculation, token by token |
//!
//! A module uses only those above it in this table.

pub mod control;
pub mod draft;
pub mod session;
pub mod units;
pub mod words;
