//! Load gates: reasons for plain decoding from an engine's own load report.
//!
//! The share of Foretell's own verify requests is subtracted first: a fan-out that waits for its
//! slots must not close the gate on itself.

use std::time::Duration;

use crate::words::PlainReason;

/// The last load report of an engine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Signal {
    /// Requests being computed.
    pub running: u32,
    /// Requests that wait.
    pub waiting: u32,
    /// Share of the KV memory in use, 0 to 1; `None` if the engine does not report it.
    pub kv_usage: Option<f64>,
    /// Maximum requests that the engine computes at once; `None` if it does not report that.
    pub limit: Option<u32>,
    /// Sequences of Foretell's own verify requests among them.
    pub own: u32,
    /// Requests in flight through this Foretell at the time of the report; one with several
    /// sequences counts once.
    pub calls: u32,
    /// Time since the report.
    pub age: Duration,
}

impl Signal {
    /// True if only Foretell's own verify requests are computed or wait.
    pub fn is_idle(&self) -> bool {
        self.running.saturating_add(self.waiting) <= self.own
    }
}

/// The limits beyond which speculation is not allowed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoadGates {
    /// Maximum requests that wait, without Foretell's own verify requests.
    pub waiting: u32,
    /// Maximum share of the KV memory in use, 0 to 1.
    pub kv: f64,
    /// Maximum age of the load report.
    pub stale: Duration,
}

impl LoadGates {
    /// `GateStale` or `GateLoad` if a limit is exceeded; `None` if none is. Without a `signal` none
    /// is: the engine has not reported its load yet, or never does.
    pub fn closed(&self, signal: Option<&Signal>) -> Option<PlainReason> {
        let signal = signal?;
        if signal.age > self.stale {
            return Some(PlainReason::GateStale);
        }
        let waiting = signal.waiting.saturating_sub(signal.own);
        let full = signal.kv_usage.is_some_and(|usage| usage > self.kv);
        (waiting > self.waiting || full).then_some(PlainReason::GateLoad)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GATES: LoadGates = LoadGates { waiting: 0, kv: 0.9, stale: Duration::from_secs(2) };
    const QUIET: Signal = Signal {
        running: 3,
        waiting: 0,
        kv_usage: Some(0.2),
        limit: None,
        own: 0,
        calls: 0,
        age: Duration::from_millis(400),
    };

    #[test]
    fn waiting_requests_or_a_full_kv_cache_close_the_gate() {
        assert_eq!(GATES.closed(Some(&QUIET)), None);
        assert_eq!(GATES.closed(Some(&Signal { waiting: 1, ..QUIET })), Some(PlainReason::GateLoad));
        assert_eq!(
            GATES.closed(Some(&Signal { kv_usage: Some(0.95), ..QUIET })),
            Some(PlainReason::GateLoad)
        );
        assert_eq!(GATES.closed(Some(&Signal { kv_usage: None, ..QUIET })), None);
    }

    #[test]
    fn our_own_verify_requests_do_not_count() {
        assert_eq!(GATES.closed(Some(&Signal { waiting: 4, own: 5, ..QUIET })), None);
        assert_eq!(GATES.closed(Some(&Signal { waiting: 6, own: 5, ..QUIET })), Some(PlainReason::GateLoad));
    }

    #[test]
    fn an_old_signal_closes_and_no_signal_does_not() {
        let old = Signal { age: Duration::from_secs(3), ..QUIET };
        assert_eq!(GATES.closed(Some(&old)), Some(PlainReason::GateStale));
        assert_eq!(GATES.closed(None), None);
    }
}
