//! What every engine is owed through the proxy, told once, and asked of every dialect against its fake.

pub mod contract;
mod evidence;
mod explained;
mod house;
mod identity;
mod law;
pub mod parameters;
pub mod table;
