//! A fleet in virtual time: real sessions and the real controller in front of a simulated engine.
//!
//! The engine is a discrete-event model of continuous batching. It shares nothing with the
//! controller's cost estimates: step times come from a roofline, a table of measurements or a paced
//! server, with jumps and heavy tails, and a request waits for the running step to end. Texts are
//! recorded traces or made from a seed. Everything is a function of the settings and the seed, and
//! every emitted token is compared with the true text.

pub mod agenda;
pub mod drafter;
pub mod engine;
pub mod figures;
pub mod grid;
pub mod html;
pub mod permit;
pub mod play;
pub mod pool;
pub mod profile;
pub mod record;
pub mod report;
pub mod request;
pub mod sidecar;
pub mod source;
pub mod sweep;
pub mod synthetic;
pub mod table;
pub mod traffic;
mod values;
pub mod workloads;
pub mod world;

use foretell_core::units::Tick;

/// The moment `seconds` after `now`, to the microsecond.
pub(crate) fn later(now: Tick, seconds: f64) -> Tick {
    Tick(now.0.saturating_add((seconds.max(0.0) * 1e6).round() as u64))
}

/// The moment `seconds` after the origin.
pub(crate) fn at(seconds: f64) -> Tick {
    later(Tick(0), seconds)
}
