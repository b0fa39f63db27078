//! Every reason not to speculate, provoked: the answer, the metrics and the log of the deployed
//! binary agree.

mod engines;
mod inject;
mod passthrough;
mod plain;
pub mod proxy;
pub mod scene;
mod sources;
mod told;
