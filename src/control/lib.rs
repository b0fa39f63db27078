//! Control of speculation, one idea a file: what a step costs ([`cost`]), what a draft token brings
//! ([`acceptance`]), how many tokens of which rows are drafted ([`choose`]), and how much may be
//! lost while that is learnt ([`budget`]).
//!
//! PURE: no clock, no I/O, no names of drafters or policies. Times are seconds.

pub mod acceptance;
pub mod budget;
pub mod choose;
pub mod cost;
pub mod line;
