//! Control groups, projected speedup and plain windows, as an operator sees them.

pub mod house;
mod kept;
mod operator;
mod shown;
