//! Every reason not to leap, provoked: the answer, the metrics and the log of the deployed binary tell the same.

mod bypass;
mod engines;
mod proxy;
mod ride;
mod scene;
mod sources;
mod told;
