//! The contract of the proxy, written once and tested for every dialect against its fake engine.

pub mod contract;
mod distribution;
mod evidence;
mod explained;
mod first_token;
mod house;
mod identity;
pub mod parameters;
mod stock;
pub mod table;
