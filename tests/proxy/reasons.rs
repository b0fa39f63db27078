//! Every reason not to speculate, provoked: the answer, the metrics and the log of the deployed
//! binary agree.

mod engines;
mod plain;
pub mod proxy;
mod relayed;
pub mod scene;
mod sources;
mod told;
