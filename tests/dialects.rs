//! What every engine is owed through the proxy, told once, and asked of every dialect against its fake.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, missing_docs)]

#[path = "support/client.rs"]
#[allow(dead_code)]
mod client;
#[path = "dialects/contract.rs"]
mod contract;
#[path = "fakes/mod.rs"]
mod fakes;
#[path = "dialects/house.rs"]
mod house;
#[path = "dialects/law.rs"]
mod law;
#[path = "dialects/parameters.rs"]
mod parameters;
#[path = "dialects/table.rs"]
mod table;
#[path = "support/wire.rs"]
#[allow(dead_code)]
mod wire;
