//! The closed lists that every room shares: plans, verdicts, modes, and the reasons of bypasses and rides.
//!
//! PURE, and below every other room but `units`, so that no two rooms need each other for a name.

mod bypass;
mod mode;
mod ride;
pub mod verdict;

pub use bypass::BypassReason;
pub use mode::Mode;
pub use ride::RideReason;
pub use verdict::{Plan, Row, Shape, Verdict};
