//! Costs of rounds at one moment, computed once for a decision and looked up many times.

use super::chooser::{Quote, best_cut};
use super::costs::Way;
use super::{Basis, Measurements};

/// Duration that a round may always take, in plain tokens.
const GAP_TOKENS: f64 = 2.0;

/// Costs of rounds by one method and context, in seconds.
#[derive(Clone, Debug, PartialEq)]
pub struct RoundCosts {
    pub token: f64,
    /// A round without draft tokens, and each draft token, for the request itself.
    base: f64,
    node: f64,
    /// Cost of a token of the model drafter, and the part of it that makes a round longer.
    draft: f64,
    longer: f64,
    /// Extra cost of switching from plain decoding to speculation.
    pub switch_in: f64,
    /// Extra cost of switching back.
    pub switch_out: f64,
    pub basis: Basis,
    /// Seconds that requests of others lose by each draft token.
    lost: f64,
    /// Seconds that our other requests lose by each draft token.
    shared: f64,
    /// Price of a draft token in tokens beyond its time, where requests of others are in flight
    /// ([`super::Budget::price`]).
    pub price: f64,
}

impl RoundCosts {
    /// Present costs. `model`: number of the model drafter.
    pub fn new(learnt: &Measurements<'_>, way: Way, model: u8) -> Self {
        let costs = &*learnt.costs;
        let (line, shares, draft) = (costs.line(way), learnt.shares(), costs.draft_token(model));
        let saved = shares.waits * line.saved.min(draft);
        let base = costs.verify(way, 0, shares);
        Self {
            token: costs.plain_token_expected(),
            base,
            node: costs.verify(way, 1, shares) - base,
            draft,
            longer: draft - saved,
            switch_in: costs.switch_in(),
            switch_out: costs.switch_out(),
            basis: costs.basis(way),
            lost: learnt.lost_by_others(way),
            shared: learnt.lost_by_ours(way),
            price: if learnt.concurrency.others() > 0 { learnt.budget.price() } else { 0.0 },
        }
    }

    /// Costs of a request alone; a switch costs a plain token.
    #[cfg(test)]
    pub(super) fn of(token: f64, base: f64, node: f64, draft: f64) -> Self {
        let (basis, lost, shared, price) = (Basis::Measured, 0.0, 0.0, 0.0);
        Self {
            token,
            base,
            node,
            draft,
            longer: draft,
            switch_in: token,
            switch_out: token,
            basis,
            lost,
            shared,
            price,
        }
    }

    /// Cost of a round with `nodes` draft tokens: the request itself, and the time that requests of
    /// others lose by it.
    pub fn round(&self, nodes: usize) -> f64 {
        self.drafted(nodes as f64, 0.0)
    }

    /// Seconds that the client waits for a round with `nodes` draft tokens.
    fn call(&self, nodes: usize) -> f64 {
        self.base + self.node * nodes as f64
    }

    /// Cost of a round with `nodes` nodes, for which the model drafter computes `modelled` tokens.
    /// However much of that is saved by waiting less for the engine, a separate step comes after
    /// it.
    pub fn drafted(&self, nodes: f64, modelled: f64) -> f64 {
        let least = if modelled > 0.0 { self.token + modelled * self.draft } else { 0.0 };
        (self.base + (self.node + self.lost) * nodes + modelled * self.longer).max(least)
    }

    /// The best cut of a draft with these survival probabilities, where a second is worth `rate`
    /// tokens: of ours, which all wait for its nodes where they share a step, and which book their
    /// time. `modelled`: its tokens have to be drafted by the model first.
    pub fn cut(&self, survival: &[f64], rate: f64, modelled: bool) -> Quote {
        let more = self.more(rate);
        let cut = best_cut(survival, rate, |nodes| self.spent(nodes, modelled) + nodes as f64 * more);
        Quote { seconds: self.spent(cut.nodes, modelled), ..cut }
    }

    /// Seconds beyond its time that a draft token is charged.
    fn more(&self, rate: f64) -> f64 {
        self.shared + self.price / rate.max(1e-9)
    }

    /// Seconds of a round with `nodes` nodes. `modelled`: as in [`Self::cut`].
    pub fn spent(&self, nodes: usize, modelled: bool) -> f64 {
        self.drafted(nodes as f64, if modelled { nodes as f64 } else { 0.0 })
    }

    /// Survival probability from which on one more token of a draft of at most `gamma` is worth its
    /// time; see [`Self::cut`].
    pub fn min_survival(&self, rate: f64, gamma: usize, modelled: bool) -> f64 {
        let more = gamma.max(2) - 1;
        let seconds = (self.spent(1 + more, modelled) - self.spent(1, modelled)).max(0.0) / more as f64;
        rate * (seconds + self.more(rate))
    }

    /// The largest number of nodes up to `most` whose round pauses the client's stream no longer
    /// than `max_gap` seconds, or `GAP_TOKENS` plain tokens if that is more; `None` if not even
    /// an empty one does.
    pub fn within_gap(&self, most: usize, max_gap: f64) -> Option<usize> {
        let pause = max_gap.max(GAP_TOKENS * self.token);
        (0..=most).rev().find(|&nodes| self.call(nodes) <= pause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::Control;
    use crate::control::costs::Shared;
    use crate::control::gates::Signal;
    use crate::units::Tick;
    use crate::words::VerifyMethod;
    use std::time::Duration;

    const WAY: Way = Way::by(VerifyMethod::Score, 40);

    /// Rounds of 12 ms, and 1 ms for each draft token; `shared` for each of our others in flight.
    fn costs(ours: usize, others: u32, shared: f64) -> RoundCosts {
        let control = Control::new();
        control.with(|learnt| {
            let signal = Signal {
                running: ours as u32 + others,
                waiting: 0,
                kv_usage: None,
                limit: None,
                verifying: 0,
                calls: ours as u32,
                age: Duration::ZERO,
            };
            (0..ours).for_each(|_| learnt.concurrency.enter());
            learnt.concurrency.set_signal(&signal);
            (0..40).for_each(|_| learnt.note_plain(0.010, 1, Tick(0)));
            for round in 0..2_000 {
                let (nodes, concurrent) = (round % 9, (round % 5 + round % 3) as f64 * 20.0);
                let seconds = 0.012 + 0.001 * nodes as f64 + shared * concurrent;
                let shares = Shared { concurrent, ..Shared::default() };
                learnt.costs.verified(WAY, nodes, shares, seconds);
            }
            RoundCosts::new(learnt, WAY, 0)
        })
    }

    #[test]
    fn others_are_charged_for_draft_tokens_and_rejected_ones_shorten_drafts() {
        let (alone, others) = (costs(1, 0, 0.0), costs(1, 3, 0.0));
        assert!((alone.round(8) - 0.020).abs() < 1e-3, "{alone:?}");
        let lost = others.round(8) - others.call(8);
        assert!((lost - 0.024).abs() < 3e-3, "{lost}");
        let survival: Vec<f64> = (1..=8).map(|depth| 0.8_f64.powi(depth)).collect();
        let priced = RoundCosts { price: 0.5, ..alone.clone() };
        let nodes =
            [&alone, &others, &priced].map(|round_costs| round_costs.cut(&survival, 150.0, false).nodes);
        assert!(nodes[0] > nodes[1] && nodes[0] > nodes[2], "{nodes:?}");
        assert!((priced.cut(&survival, 150.0, false).seconds - alone.round(nodes[2])).abs() < 1e-9);
        assert_eq!((alone.within_gap(32, 0.0), alone.within_gap(32, 0.0205)), (Some(8), Some(8)));
        let fast = RoundCosts { token: 0.001, ..alone };
        assert_eq!((fast.within_gap(32, 0.0165), fast.within_gap(32, 0.001)), (Some(4), None));
    }

    #[test]
    fn our_others_wait_for_a_draft_token_too_where_they_share_its_step() {
        let survival: Vec<f64> = (1..=8).map(|depth| 0.8_f64.powi(depth)).collect();
        let cut = |ours, shared| costs(ours, 0, shared).cut(&survival, 150.0, false).nodes;
        assert_eq!(cut(1, 0.0), cut(1, 0.000_5));
        assert!(cut(4, 0.000_5) < cut(4, 0.0), "{} {}", cut(4, 0.000_5), cut(4, 0.0));
    }
}
