//! Every reason not to leap, provoked: the answer, the metrics and the log of the deployed binary tell the same.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

#[path = "fakes/mod.rs"]
mod fakes;
#[path = "support/wire.rs"]
#[allow(dead_code)]
mod wire;

#[path = "reasons/bypass.rs"]
mod bypass;
#[path = "reasons/engines.rs"]
mod engines;
#[path = "reasons/proxy.rs"]
mod proxy;
#[path = "reasons/ride.rs"]
mod ride;
#[path = "reasons/scene.rs"]
mod scene;
#[path = "reasons/sources.rs"]
mod sources;
#[path = "reasons/told.rs"]
mod told;
