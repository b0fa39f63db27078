//! Shared types: verification methods and results, modes, the reasons for passthrough and plain
//! requests, and the tokens of a request.
//!
//! PURE, and below every other module but `units`, so that no two modules or crates depend on each
//! other for a name.

mod conditions;
pub mod context;
mod gate;
mod ledger;
pub mod looping;
mod mode;
mod passthrough_reason;
mod plain_reason;
mod reason;
mod structure;
pub mod verify_result;

pub use conditions::Conditions;
pub use context::TokenContext;
pub use gate::Gate;
pub use ledger::{DriftLimits, Ledger};
pub use mode::Mode;
pub use passthrough_reason::{PassthroughReason, Refused};
pub use plain_reason::PlainReason;
pub use reason::Reason;
pub use structure::Structure;
pub use verify_result::{Dist, Proposal, Put, Row, Shape, VerifyMethod, VerifyResult};
