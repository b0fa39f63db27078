//! One file per command.

pub mod check;
pub mod explain;
pub mod target;

/// Everything went well.
pub const OK: u8 = 0;
/// Bad configuration or usage.
pub const USAGE: u8 = 64;
