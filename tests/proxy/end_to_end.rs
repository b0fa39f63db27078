//! Client, proxy and target together, over real sockets: the client gets the text of the target
//! alone, whatever happens in between.

mod contract;
mod coverage;
mod drift;
mod faults;
#[cfg(feature = "onnx")]
mod heads;
mod hostile;
pub mod house;
mod middlebox;
pub mod model;
mod official_client;
#[cfg(feature = "onnx")]
mod onnx;
#[cfg(feature = "onnx")]
mod paced;
mod parameters;
mod partition;
mod recorded;
mod remembered;
mod replicas;
mod swap;
#[cfg(feature = "onnx")]
mod vocabularies;
