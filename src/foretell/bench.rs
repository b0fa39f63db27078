//! Benchmarks and comparisons: a server called directly against the same server called through
//! Foretell.
//!
//! `client` and `run` use the network and the clock; pure functions (`alternate`, `stats`,
//! `formula`, `tally`, `require`) evaluate their results, so every figure of a report can be tested
//! without a server.

pub mod about;
pub mod alternate;
pub mod canvas;
pub mod client;
pub mod counters;
pub mod demo;
pub mod formula;
pub mod html;
pub mod judge;
pub mod probed;
pub mod report;
pub mod require;
pub mod run;
pub mod stats;
pub mod stream;
pub mod tally;
pub mod workload;
