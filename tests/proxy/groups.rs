//! Control groups, what leaping would have gained, ride-only windows and alarms, as an operator sees them.

mod alarms;
pub mod house;
mod kept;
mod shown;
mod windows;
