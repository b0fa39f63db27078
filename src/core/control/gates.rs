//! Gates of a replica: those of its load, from the engine's report, and those of its
//! measurements.
//!
//! From a load report the share of Foretell's verify requests is subtracted first: a fan-out
//! that waits for its slots must not close the gate on itself.

use std::time::Duration;

use super::Measurements;
use crate::words::PlainReason;

/// A reason not to speculate on a replica, with a sentence for the operator.
pub type Closed = (PlainReason, &'static str);

/// The closed gates of a replica's measurements, in the order in which they are checked.
/// `speculating`: of a session that speculates already, whose limits are wider; `first_token`: the
/// policy's greatest ratio of the times to first tokens with and without drafts.
pub fn closed(
    learnt: &Measurements<'_>,
    speculating: bool,
    first_token: f64,
) -> impl Iterator<Item = Closed> {
    let budget = &*learnt.budget;
    let wastes = if speculating { !budget.may_go_on() } else { !budget.may_begin() };
    let gates = [
        (PlainReason::NotMeasured, learnt.costs.plain_token().is_none()),
        (PlainReason::Budget, wastes && learnt.concurrency.others() > 0),
        (PlainReason::GateRegret, !learnt.is_solvent(speculating)),
        (PlainReason::GateFirstToken, learnt.nodes_allowed(first_token) == 0),
    ];
    gates.into_iter().filter(|gate| gate.1).map(|(reason, _)| (reason, reason.words()))
}

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
    /// Sequences of Foretell's verify requests among them.
    pub verifying: u32,
    /// Requests in flight through this Foretell at the time of the report; one with several
    /// sequences counts once.
    pub calls: u32,
    /// Time since the report.
    pub age: Duration,
}

impl Signal {
    /// True if only Foretell's verify requests are computed or wait.
    pub fn is_idle(&self) -> bool {
        self.running.saturating_add(self.waiting) <= self.verifying
    }
}

/// The limits beyond which speculation is not allowed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoadGates {
    /// Maximum requests that wait, without Foretell's verify requests.
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
        let waiting = signal.waiting.saturating_sub(signal.verifying);
        let full = signal.kv_usage.is_some_and(|usage| usage > self.kv);
        (waiting > self.waiting || full).then_some(PlainReason::GateLoad)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::Control;

    const GATES: LoadGates = LoadGates { waiting: 0, kv: 0.9, stale: Duration::from_secs(2) };
    const QUIET: Signal = Signal {
        running: 3,
        waiting: 0,
        kv_usage: Some(0.2),
        limit: None,
        verifying: 0,
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
        assert_eq!(GATES.closed(Some(&Signal { waiting: 4, verifying: 5, ..QUIET })), None);
        assert_eq!(
            GATES.closed(Some(&Signal { waiting: 6, verifying: 5, ..QUIET })),
            Some(PlainReason::GateLoad)
        );
    }

    #[test]
    fn an_old_signal_closes_and_no_signal_does_not() {
        let old = Signal { age: Duration::from_secs(3), ..QUIET };
        assert_eq!(GATES.closed(Some(&old)), Some(PlainReason::GateStale));
        assert_eq!(GATES.closed(None), None);
    }

    #[test]
    fn a_forecast_lists_all_closed_gates_and_a_session_that_speculates_may_overdraw() {
        Control::new().with(|learnt| {
            learnt.concurrency.set_signal(&QUIET);
            learnt.budget.wasted(0.11);
            let gates = |speculating| closed(learnt, speculating, 1.1).map(|gate| gate.0).collect::<Vec<_>>();
            assert_eq!(gates(false), [PlainReason::NotMeasured, PlainReason::Budget]);
            assert_eq!(gates(true), [PlainReason::NotMeasured], "it may overdraw");
        });
    }
}
