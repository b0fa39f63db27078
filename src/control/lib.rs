//! Control of speculation that knows no drafters and no policies, one idea a file: lines through
//! what was measured ([`mod@line`]), what a step costs ([`cost`]), how many tokens of which rows
//! are drafted ([`choose`]), and how much may be lost while costs are learnt ([`regret_budget`]).
//!
//! PURE: no clock, no I/O. Times are seconds.

pub mod choose;
pub mod cost;
pub mod line;
pub mod regret_budget;
