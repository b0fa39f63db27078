//! Client, proxy and target together, over real sockets: what the client gets is what the target would have
//! said, whatever happens in between.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, missing_docs)]

#[path = "support/client.rs"]
mod client;
#[path = "end_to_end/contract.rs"]
mod contract;
#[path = "end_to_end/faults.rs"]
mod faults;
#[cfg(feature = "onnx")]
#[path = "end_to_end/here.rs"]
mod here;
#[path = "end_to_end/house.rs"]
mod house;
#[path = "end_to_end/middlebox.rs"]
mod middlebox;
#[path = "end_to_end/model.rs"]
mod model;
#[path = "end_to_end/official_client.rs"]
mod official_client;
#[cfg(feature = "onnx")]
#[path = "end_to_end/onnx.rs"]
mod onnx;
#[cfg(feature = "onnx")]
#[path = "end_to_end/paced.rs"]
mod paced;
#[path = "end_to_end/parameters.rs"]
mod parameters;
#[path = "end_to_end/partition.rs"]
mod partition;
#[path = "end_to_end/replicas.rs"]
mod replicas;
#[path = "support/wire.rs"]
#[allow(dead_code)]
mod wire;
