//! HTTP as every server of Foretell speaks it: listeners, network threads, bodies, error answers, stopping.

pub mod answer;
pub mod body;
pub mod drain;
pub mod headers;
pub mod listen;
pub mod workers;
