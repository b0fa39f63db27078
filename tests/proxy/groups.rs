//! Control groups and projected speedup, as an operator sees them.

pub mod house;
mod kept;
mod operator;
mod shown;
