//! What rounds cost at one moment, reckoned once for a decision and looked up many times.

use super::chooser::{Quote, best_cut};
use super::costs::{NODES_MAX, Way};
use super::rounds::{Prices, Rounds, Value};
use super::{Basis, Learnt};
use crate::units::Tick;

/// Prices of one way of leaping, in seconds.
#[derive(Clone, Debug, PartialEq)]
pub struct Tariff {
    /// Of a ridden token.
    pub token: f64,
    /// Of a token of the model drafter, and as far as it makes a round longer.
    draft: f64,
    longer: f64,
    /// Extra, of going from ride to leap.
    pub switch_in: f64,
    /// Extra, of going back.
    pub switch_out: f64,
    /// What the prices of rounds rest on.
    pub basis: Basis,
    /// Of a round by its nodes: the call itself, and what requests of others lose by it.
    rounds: Vec<f64>,
    /// What each node costs our other requests. Where they leap as well it is a part of the time of everybody's rounds
    /// already: it counts where a draft is cut, not where leaping is compared with riding.
    ours: f64,
}

impl Tariff {
    /// Today's prices where this model drafts. `hope`: rounds may cost less than what was measured says, by as much as is
    /// uncertain now.
    pub fn new(learnt: &Learnt<'_>, way: Way, model: u8, hope: Option<Tick>) -> Self {
        let (costs, crowd) = (&*learnt.costs, &*learnt.crowd);
        let token = costs.ride_token_expected();
        let (saved, waited) = costs.saved_by_drafting(model);
        let draft = costs.draft_token(model);
        let round = |nodes: usize| {
            let call = hope.map_or_else(|| costs.verify(way, nodes), |now| costs.hopeful(way, nodes, now));
            call + waited + crowd.others() as f64 * (call - token).max(0.0)
        };
        let rounds: Vec<f64> = (0..=NODES_MAX).map(round).collect();
        Self {
            token,
            draft,
            longer: (draft - saved).max(0.0),
            switch_in: costs.switch_in(),
            switch_out: costs.switch_out(),
            basis: costs.basis(way),
            rounds,
            ours: price_of_ours(learnt, way),
        }
    }

    /// Of a round with so many nodes.
    pub fn round(&self, nodes: usize) -> f64 {
        let last = self.rounds.last().copied().unwrap_or(0.0);
        self.rounds.get(nodes).copied().unwrap_or(last)
    }

    /// Of a round with so many nodes, for which the model drafter computes so many tokens. However much of that is saved by
    /// waiting less for the engine, a step of its own comes after it.
    fn drafted(&self, nodes: usize, modelled: f64) -> f64 {
        let least = if modelled > 0.0 { self.token + modelled * self.draft } else { 0.0 };
        (self.round(nodes) + modelled * self.longer).max(least)
    }

    /// Of a round for which the model drafts so many tokens, all of which are verified.
    pub fn model_round(&self, tokens: usize) -> f64 {
        self.drafted(tokens, tokens as f64)
    }

    /// The best cut of a draft with these survivals, where a second is worth `rate` tokens. `modelled`: its tokens have to
    /// be drafted by the model first.
    pub fn cut(&self, survival: &[f64], rate: f64, modelled: bool) -> Quote {
        let spent = |nodes: usize| self.drafted(nodes, if modelled { nodes as f64 } else { 0.0 });
        let cut = best_cut(survival, rate, |nodes| spent(nodes) + nodes as f64 * self.ours);
        Quote { seconds: spent(cut.nodes), ..cut }
    }

    /// Of one more token of the model drafter, drafted and verified: the mean of those behind the first.
    pub fn one_more(&self, nodes: usize) -> f64 {
        let spent = |nodes: usize| self.model_round(nodes);
        let more = nodes.saturating_sub(1);
        (spent(nodes) - spent(1)).max(0.0) / more.max(1) as f64 + self.ours
    }

    /// What rounds are worth.
    pub fn value(&self, rounds: &Rounds) -> Value {
        rounds.value(&Prices {
            round: &|nodes, modelled| self.drafted(nodes, modelled),
            token: self.token,
            switches: self.switch_in + self.switch_out,
        })
    }

    /// The largest of so many nodes whose round takes no longer than `seconds`; `None` if not even an empty one does.
    pub fn within(&self, most: usize, seconds: f64) -> Option<usize> {
        (0..=most).rev().find(|&nodes| self.round(nodes) <= seconds)
    }
}

/// What a node costs our other requests, seconds. Those that leap: what it adds to everybody's calls beyond what own calls
/// with more nodes showed already. Those that ride: what a node of one call adds to a step.
fn price_of_ours(learnt: &Learnt<'_>, way: Way) -> f64 {
    let own = learnt.costs.per_node(way);
    let all = learnt.costs.per_node_of_all().unwrap_or(own);
    (all - own).max(0.0) + learnt.node_of_riders()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::gates::Signal;
    use crate::control::{Beside, Control};
    use crate::words::Plan;
    use std::time::Duration;

    const WAY: Way = Way::by(Plan::Score, 40);

    fn learnt(control: &Control, ours: usize, others: u32) {
        control.with(|learnt| {
            (0..20).for_each(|_| learnt.rode(0.010, 1, Tick(0)));
            for nodes in [0, 8] {
                let seconds = 0.012 + 0.001 * nodes as f64;
                (0..8).for_each(|_| learnt.costs.verified(WAY, nodes, seconds, Tick(0)));
            }
            let running = ours as u32 + others;
            let signal = Signal {
                running,
                waiting: 0,
                kv_usage: None,
                limit: None,
                own: 0,
                calls: ours as u32,
                age: Duration::ZERO,
            };
            (0..ours).for_each(|_| learnt.crowd.enter());
            learnt.crowd.hear(&signal);
            for call in 0..40 {
                let nodes = 8 * (call % 2);
                let beside = Beside { nodes: nodes as f64, modelled: 0 };
                learnt.costs.shared(WAY, nodes, 0.012 + 0.001 * nodes as f64, beside);
            }
        });
    }

    #[test]
    fn requests_of_others_pay_for_what_a_round_takes_beyond_a_step_and_ours_only_where_a_draft_is_cut() {
        let tariff = |ours, others| {
            let control = Control::new();
            learnt(&control, ours, others);
            control.with(|learnt| Tariff::new(learnt, WAY, 0, None))
        };
        let (alone, ours, others) = (tariff(1, 0), tariff(5, 0), tariff(1, 3));
        assert!((alone.round(8) - 0.020).abs() < 1e-9 && (ours.round(8) - 0.020).abs() < 1e-9);
        assert!((others.round(8) - 0.050).abs() < 1e-9, "{}", others.round(8));
        let survival: Vec<f64> = (1..=8).map(|depth| 0.8_f64.powi(depth)).collect();
        let nodes = [&alone, &ours, &others].map(|tariff| tariff.cut(&survival, 150.0, false).nodes);
        assert!(nodes[0] > nodes[1] && nodes[0] > nodes[2], "{nodes:?}");
        assert_eq!((alone.within(32, 0.0165), alone.within(32, 0.001)), (Some(4), None));
    }

    #[test]
    fn hope_lowers_what_was_measured_long_ago_and_hardly_what_was_measured_just_now() {
        let control = Control::new();
        learnt(&control, 1, 0);
        control.with(|learnt| (0..8).for_each(|_| learnt.costs.verified(WAY, 4, 0.9, Tick(0))));
        let at = |now| control.with(|learnt| Tariff::new(learnt, WAY, 0, Some(now)).round(4));
        let believed = control.with(|learnt| Tariff::new(learnt, WAY, 0, None).round(4));
        assert!(at(Tick(0)) > 0.8 * believed, "{}", at(Tick(0)));
        assert!(at(Tick(3_600_000_000)) < 0.4 * believed, "{}", at(Tick(3_600_000_000)));
    }
}
