//! The learnt costs of a replica as figures for an operator: its decisions follow from them, and
//! nothing here decides.

use serde::Serialize;

use super::Measurements;

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

/// Costs at one concurrency.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlainCosts {
    /// Requests in flight, for instance `4-7`.
    pub requests: &'static str,
    /// Seconds per plain token.
    pub token_seconds: f64,
    /// Extra seconds of switching from plain decoding to speculation.
    pub switch_in_seconds: Option<f64>,
    /// Extra seconds of switching back.
    pub switch_out_seconds: Option<f64>,
}

/// Seconds of verify requests of one kind: the line in the request's draft tokens and in what it
/// shares the engine with.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct VerifyCosts {
    /// Verification method.
    pub method: &'static str,
    /// Tokens of the context, for instance `512-2047`.
    pub context: String,
    /// Requests in flight.
    pub requests: &'static str,
    /// Without draft tokens.
    pub base_seconds: f64,
    /// Of each draft token.
    pub token_seconds: f64,
    /// Of each draft token of Foretell's other verify requests in flight.
    pub concurrent_token_seconds: f64,
    /// Of the wait for the step of plain requests.
    pub wait_seconds: f64,
    /// Measurements that count.
    pub measurements: f64,
}

impl Measurements<'_> {
    /// The learnt costs.
    pub fn learnt_costs(&self) -> LearntCosts {
        let capacity = self.costs.regret_capacity();
        LearntCosts {
            requests: self.concurrency.ours() + self.concurrency.others(),
            speculating: self.concurrency.speculating(),
            price: self.budget.price(),
            regret_remaining_seconds: self.regret_budget.remaining(capacity),
            regret_capacity_seconds: capacity,
            plain: self.costs.learnt_plain().collect(),
            verify: self.costs.learnt_verify().collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::costs::Shared;
    use super::super::{Control, Way};
    use super::*;
    use crate::units::Tick;
    use crate::words::VerifyMethod;

    #[test]
    fn measured_costs_are_shown_and_others_are_not() {
        let control = Control::new();
        let shown = || control.with(|learnt| learnt.learnt_costs());
        let before = shown();
        assert!(before.plain.is_empty() && before.verify.is_empty(), "{before:?}");
        control.with(|learnt| {
            (0..20).for_each(|_| learnt.note_plain(0.02, 1, Tick(0)));
            let way = Way::by(VerifyMethod::Score, 600);
            for nodes in [0, 4, 8].repeat(100) {
                learnt.costs.verified(way, nodes, Shared::default(), 0.02 + 0.001 * nodes as f64);
            }
            learnt.note_round(1, 0.06, 0.0, true);
        });
        let LearntCosts { plain, verify, regret_remaining_seconds, regret_capacity_seconds, .. } = shown();
        assert_eq!((plain.len(), plain[0].requests), (1, "1"));
        assert!((plain[0].token_seconds - 0.02).abs() < 1e-4);
        assert_eq!(verify.len(), 1);
        assert_eq!((verify[0].method, verify[0].context.as_str()), ("score", "512-2047"));
        assert!((verify[0].token_seconds - 0.001).abs() < 2e-4, "{verify:?}");
        assert!((verify[0].base_seconds - 0.02).abs() < 1e-3, "{verify:?}");
        assert!(regret_capacity_seconds >= 0.2 - 1e-3 && regret_remaining_seconds < regret_capacity_seconds);
    }
}
