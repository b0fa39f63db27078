//! What a probe measured of an engine: what costs begin with.

use crate::words::VerifyMethod;

/// Assumptions about an engine start until there are measurements. Times in seconds; `None` where
/// nothing was measured.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Prior {
    pub verify: Vec<Probed>,
    /// Seconds per plain token.
    pub token: Option<f64>,
    /// Extra cost of switching from plain decoding to speculation.
    pub switch_in: Option<f64>,
    /// Extra cost of switching from speculation to plain decoding.
    pub switch_out: Option<f64>,
    /// Time that a cancelled request takes to end.
    pub cancel: Option<f64>,
}

/// Seconds of a verify request: the shortest of several.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Probed {
    pub method: VerifyMethod,
    /// Tokens of its context.
    pub context: usize,
    /// Draft nodes.
    pub nodes: usize,
    pub seconds: f64,
}
