//! Servers whose first call returns text without ids, and servers that are only relayed: the client
//! gets the server's own answer, and the server gets no request that it should not get.

mod hosted;
mod house;
pub mod triton;
mod trtllm;
