//! Foretell: a sidecar proxy that adds speculative decoding and adaptive control to LLM servers.
//!
//! This crate is the uppermost: commands, the operator's API, and the crate where all parts
//! meet. A module uses only those below it:
//!
//! | module | purpose |
//! |---|---|
//! | [`cli`] | one file per command: the meaning of its arguments, its output, its exit code |
//! | [`mod@bench`] | a server measured directly and through Foretell, and the demonstration |
//! | [`app`] | from a validated configuration to a running proxy |
//! | [`admin`] | the operator's API and status page, above all that they show |
//!
//! ARCHITECTURE.md lists the crates below, and says which function decides what.

pub mod admin;
pub mod app;
pub mod bench;
pub mod cli;
