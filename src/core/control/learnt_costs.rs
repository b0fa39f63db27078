//! The learnt costs of a replica as figures for an operator: its decisions follow from them, and
//! nothing here decides.

use serde::Serialize;

use super::Measurements;
use crate::units::Tick;

/// The learnt costs of one replica.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LearntCosts {
    /// Requests in flight now.
    pub requests: usize,
    /// Those of them that are speculated on.
    pub speculating: usize,
    /// Price of a draft node, plain tokens: the used share of the time for rejected tokens next to
    /// requests of others.
    pub price: f64,
    /// The most that speculation may still lose at the present concurrency, seconds.
    pub regret_remaining_seconds: f64,
    /// Its maximum without wins, seconds.
    pub regret_capacity_seconds: f64,
    /// By concurrency, those that were measured.
    pub plain: Vec<PlainCosts>,
    /// Of verify requests, by method, context and concurrency.
    pub verify: Vec<VerifyCosts>,
}

/// Costs at one concurrency; `None` where they were not measured.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlainCosts {
    /// Requests in flight, for instance `3-4`.
    pub requests: &'static str,
    /// Seconds per plain token.
    pub token_seconds: Option<f64>,
    /// Extra seconds of switching from plain decoding to speculation.
    pub switch_in_seconds: Option<f64>,
    /// Extra seconds of switching back.
    pub switch_out_seconds: Option<f64>,
}

/// Measured seconds of verify requests of one kind.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct VerifyCosts {
    /// Verification method.
    pub method: &'static str,
    /// Tokens of the context, for instance `512-2047`.
    pub context: String,
    /// Requests in flight.
    pub requests: &'static str,
    /// Plain requests are among these.
    pub plain_neighbours: bool,
    /// By draft nodes.
    pub drafts: Vec<DraftCosts>,
}

/// Seconds of verify requests with one number of draft nodes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct DraftCosts {
    /// Draft nodes.
    pub nodes: usize,
    /// Mean seconds from request to result.
    pub seconds: f64,
    /// Measurements that the mean is based on, of the last 8 and less after idle time.
    pub weight: f64,
}

impl Measurements<'_> {
    /// The learnt costs at `now`.
    pub fn learnt_costs(&self, now: Tick) -> LearntCosts {
        let capacity = self.costs.regret_capacity();
        LearntCosts {
            requests: self.concurrency.ours() + self.concurrency.others(),
            speculating: self.concurrency.speculating(),
            price: self.budget.price(),
            regret_remaining_seconds: self.regret_budget.remaining(capacity),
            regret_capacity_seconds: capacity,
            plain: self.costs.learnt_plain().collect(),
            verify: self.costs.learnt_verify(now).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Control, Way};
    use super::*;
    use crate::words::VerifyMethod;

    #[test]
    fn measured_costs_are_shown_and_others_are_not() {
        let (control, now) = (Control::new(), Tick(90_000_000));
        let shown = || control.with(|learnt| learnt.learnt_costs(now));
        let before = shown();
        assert!(before.plain.is_empty() && before.verify.is_empty(), "{before:?}");
        control.with(|learnt| {
            (0..20).for_each(|_| learnt.note_plain(0.02, 1, now));
            for nodes in [4, 8] {
                (0..3)
                    .for_each(|_| learnt.costs.verified(Way::by(VerifyMethod::Score, 600), nodes, 0.03, now));
            }
            learnt.note_round(1, 0.06, 0.0, true);
        });
        let LearntCosts { plain, verify, regret_remaining_seconds, regret_capacity_seconds, .. } = shown();
        assert_eq!((plain.len(), plain[0].requests), (1, "1"));
        assert!(
            (plain[0].token_seconds.unwrap() - 0.02).abs() < 1e-9 && plain[0].switch_in_seconds.is_none()
        );
        assert_eq!(verify.len(), 1);
        assert_eq!((verify[0].method, verify[0].context.as_str()), ("score", "512-2047"));
        let drafts: Vec<usize> = verify[0].drafts.iter().map(|draft| draft.nodes).collect();
        assert_eq!(drafts, [4, 8]);
        assert!(
            verify[0].drafts.iter().all(|draft| (draft.seconds - 0.03).abs() < 1e-9 && draft.weight > 2.0)
        );
        assert!(regret_capacity_seconds >= 0.2 - 1e-9 && regret_remaining_seconds < regret_capacity_seconds);
    }
}
