//! Servers whose first ride is text without ids, and servers that are only relayed: what the client gets is what
//! the server would have said by itself, and nothing is asked of a server that it was not to be asked.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, missing_docs)]

#[path = "fakes/mod.rs"]
mod fakes;
#[path = "text_rides/hosted.rs"]
mod hosted;
#[path = "text_rides/house.rs"]
mod house;
#[path = "text_rides/triton.rs"]
mod triton;
#[path = "text_rides/trtllm.rs"]
mod trtllm;
#[path = "support/wire.rs"]
#[allow(dead_code)]
mod wire;
