//! Every reason not to leap, provoked: the answer, the metrics and the log of the deployed binary tell the same.

mod bypass;
mod engines;
pub mod proxy;
mod ride;
pub mod scene;
mod sources;
mod told;
