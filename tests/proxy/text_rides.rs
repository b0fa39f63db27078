//! Servers whose first ride is text without ids, and servers that are only relayed: what the client gets is what
//! the server would have said by itself, and nothing is asked of a server that it was not to be asked.

mod hosted;
mod house;
pub mod triton;
mod trtllm;
