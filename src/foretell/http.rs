//! HTTP for all servers of Foretell: listeners, client connections and their limits, network
//! threads, bodies and their memory, error answers, and shutdown.

pub mod activity;
pub mod allocator_purge;
pub mod answer;
pub mod body;
pub mod connections;
pub mod drain;
pub mod gather;
pub mod head;
pub mod headers;
pub mod listen;
pub mod memory;
pub mod opening;
pub mod replay;
pub mod request;
pub mod serve;
pub mod socket;
pub mod workers;
