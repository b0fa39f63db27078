//! What every room shares: plans, verdicts, modes, the reasons of bypasses and rides, and the tokens of a request.
//!
//! PURE, and below every other room but `units`, so that no two rooms need each other for a name.

mod bypass;
mod gate;
mod law;
mod ledger;
pub mod looping;
pub mod metric;
mod mode;
pub mod past;
mod ride;
mod structure;
pub mod verdict;

pub use bypass::{BypassReason, Refused};
pub use gate::Gate;
pub use law::Law;
pub use ledger::{DriftLimits, Ledger};
pub use mode::Mode;
pub use past::Past;
pub use ride::RideReason;
pub use structure::Structure;
pub use verdict::{Dist, Plan, Put, Row, Shape, Verdict};
