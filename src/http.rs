//! HTTP as every server of Foretell speaks it: listeners, connections and what clients may do on them, network
//! threads, bodies and the memory that they take, error answers, stopping.

pub mod activity;
pub mod answer;
pub mod body;
pub mod connections;
pub mod drain;
pub mod gather;
pub mod head;
pub mod headers;
pub mod listen;
pub mod memory;
pub mod request;
pub mod serve;
pub mod socket;
pub mod workers;
