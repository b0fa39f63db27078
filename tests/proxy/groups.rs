//! Control groups, projected speedup, plain windows and alarms, as an operator sees them.

mod alarms;
pub mod house;
mod kept;
mod operator;
mod shown;
