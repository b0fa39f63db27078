//! One file per command.

pub mod target;
