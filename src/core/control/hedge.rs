//! Chooses the model drafter of a request among several: Hedge with full information.
//!
//! Drafters that answer at once are all queried and merged. A model costs time, so one of those
//! that a policy names drafts for a request. After a request, within a small share of the time, all
//! of them are evaluated on the same part of its text: the draft that each would have made is
//! compared with the output, which takes no request to the backend. So every model has a loss for
//! every evaluated text, whichever one drafted, and the choice needs no exploration. The loss is
//! the time per token that drafting with the model would have taken, as a share of plain decoding.
//!
//! The weights are those of `AdaHedge`: exponential weights whose rate is set by the losses
//! themselves, so that a clear leader is followed soon, and alternating losses are hedged (de
//! Rooij, van Erven, Grünwald, Koolen: Follow the Leader If You Can, Hedge If You Must. JMLR 15,
//! 2014). Older texts are forgotten slowly, since texts and models change.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::round_costs::RoundCosts;
use super::state::Class;
use super::survival::TemperatureBucket;
use super::{Measurements, Way};
use crate::draft::{Agreement, DrafterId, Features, Vote};
use crate::units::SplitMix64;

/// Factor for older losses per evaluated text: about two hundred of them are kept.
const KEEP: f64 = 1.0 - 1.0 / 200.0;

/// The losses of the models that were evaluated on the same texts.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Hedge {
    /// Sums of losses by number of the model.
    losses: Vec<(u8, f64)>,
    /// Sum of the mixability gaps: how much worse the weights were than the best use of them.
    gap: f64,
}

impl Hedge {
    /// The weight of each of these models; they sum to 1. Before any evaluation the first model has
    /// all of it.
    pub fn weights(&self, models: &[u8]) -> Vec<f64> {
        if !self.losses.iter().any(|(evaluated, _)| models.contains(evaluated)) {
            return (0..models.len()).map(|at| f64::from(u8::from(at == 0))).collect();
        }
        self.mixed(models)
    }

    fn mixed(&self, models: &[u8]) -> Vec<f64> {
        let losses = self.of(models);
        let least = losses.iter().copied().fold(f64::INFINITY, f64::min);
        let Some(rate) = self.rate(models.len()) else {
            let leaders = losses.iter().filter(|&&loss| loss <= least).count() as f64;
            return losses.iter().map(|&loss| if loss <= least { 1.0 / leaders } else { 0.0 }).collect();
        };
        let raw: Vec<f64> = losses.iter().map(|loss| (-rate * (loss - least)).exp()).collect();
        let sum: f64 = raw.iter().sum();
        raw.iter().map(|weight| weight / sum).collect()
    }

    /// One of these models, drawn by their weights; `None` of none.
    pub fn draw(&self, models: &[u8], rng: &mut SplitMix64) -> Option<u8> {
        let mut left = rng.unit();
        let weighed = models.iter().zip(self.weights(models));
        let drawn = weighed.filter(|(_, weight)| *weight > 0.0).find(|(_, weight)| {
            left -= weight;
            left < 0.0
        });
        drawn.map(|(model, _)| *model).or_else(|| models.first().copied())
    }

    /// Notes the losses of models on one text, each from 0 to 1.
    pub fn evaluate(&mut self, losses: &[(u8, f64)]) {
        let models: Vec<u8> = losses.iter().map(|(model, _)| *model).collect();
        let (rate, weights, before) = (self.rate(models.len()), self.mixed(&models), self.of(&models));
        let expected: f64 = weights.iter().zip(losses).map(|(weight, (_, loss))| weight * loss).sum();
        let least = |losses: &[f64]| losses.iter().copied().fold(f64::INFINITY, f64::min);
        let after: Vec<f64> = before.iter().zip(losses).map(|(sum, (_, loss))| sum + loss).collect();
        let mixed = match rate {
            None => least(&after) - least(&before),
            Some(rate) => {
                let terms =
                    weights.iter().zip(losses).map(|(weight, (_, loss))| weight * (-rate * loss).exp());
                -terms.sum::<f64>().ln() / rate
            }
        };
        self.gap = KEEP * (self.gap + (expected - mixed).max(0.0));
        for (model, sum) in models.into_iter().zip(after) {
            match self.losses.iter_mut().find(|(known, _)| *known == model) {
                Some((_, known)) => *known = sum,
                None => self.losses.push((model, sum)),
            }
        }
        self.losses.iter_mut().for_each(|(_, sum)| *sum *= KEEP);
    }

    /// Amount of evaluation, by the largest sum of losses.
    fn evaluated(&self) -> f64 {
        self.losses.iter().map(|(_, sum)| *sum).fold(0.0, f64::max)
    }

    /// The learning rate; `None` while it is unbounded, because no loss has contradicted the leader
    /// yet.
    fn rate(&self, models: usize) -> Option<f64> {
        (self.gap > 1e-12).then(|| (models.max(2) as f64).ln() / self.gap)
    }

    /// The sums of losses of these models. One that was never evaluated is assumed as good as the
    /// best of the others.
    fn of(&self, models: &[u8]) -> Vec<f64> {
        let known = |model: u8| self.losses.iter().find(|(known, _)| *known == model).map(|(_, sum)| *sum);
        let least = models.iter().filter_map(|&model| known(model)).fold(f64::INFINITY, f64::min);
        let least = if least.is_finite() { least } else { 0.0 };
        models.iter().map(|&model| known(model).unwrap_or(least)).collect()
    }
}

/// The hedges of an epoch, by temperature and kind of the requests.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Hedges {
    #[serde(with = "super::pairs")]
    by_kind: HashMap<(TemperatureBucket, u64), Hedge>,
}

impl Hedges {
    /// Maximum number of kinds that are kept.
    const MAX: usize = 256;

    /// The hedge of requests of a kind; an empty one where there is none.
    pub fn of(&self, bucket: TemperatureBucket, kind: u64) -> Hedge {
        self.by_kind.get(&(bucket, kind)).cloned().unwrap_or_default()
    }

    fn evaluate(&mut self, bucket: TemperatureBucket, kind: u64, losses: &[(u8, f64)]) {
        if self.by_kind.len() >= Self::MAX && !self.by_kind.contains_key(&(bucket, kind)) {
            // The one with the fewest evaluations makes room.
            let least = self.by_kind.iter().min_by(|a, b| a.1.evaluated().total_cmp(&b.1.evaluated()));
            if let Some(least) = least.map(|(kind, _)| *kind) {
                self.by_kind.remove(&least);
            }
        }
        self.by_kind.entry((bucket, kind)).or_default().evaluate(losses);
    }
}

/// A text that all models were evaluated on.
#[derive(Clone, Debug)]
pub struct EvaluatedText {
    /// The temperature.
    pub bucket: TemperatureBucket,
    /// The kind of the request.
    pub kind: u64,
    /// Verification method and context of its drafts.
    pub way: Way,
    /// Maximum tokens of a draft.
    pub gamma_max: usize,
    /// By model: for each token of the text, true if the model would have drafted it, given those
    /// before it.
    pub hits: Vec<(u8, Vec<bool>)>,
    /// The model that drafted for the request: its drafts have been counted already.
    pub drafted: Option<u8>,
}

/// The rounds that drafts of at most `gamma` tokens make of a text: for each the number of accepted
/// draft tokens. One more token comes with each.
pub fn rounds(hits: &[bool], gamma: usize) -> Vec<usize> {
    let (mut rounds, mut rest) = (Vec::new(), hits);
    while !rest.is_empty() {
        let run = rest.iter().take(gamma).take_while(|hit| **hit).count();
        rounds.push(run);
        rest = rest.get(run + 1..).unwrap_or_default();
    }
    rounds
}

impl Measurements<'_> {
    /// Takes an evaluation of several models on one text; returns the loss of each by its number.
    pub fn evaluate(&mut self, evaluated: &EvaluatedText) -> Vec<(u8, f64)> {
        let losses: Vec<(u8, f64)> = evaluated
            .hits
            .iter()
            .filter_map(|(model, hits)| Some((*model, self.loss(evaluated, *model, hits)?)))
            .collect();
        if losses.len() == evaluated.hits.len() && losses.len() > 1 {
            self.hedges.evaluate(evaluated.bucket, evaluated.kind, &losses);
        }
        for (model, hits) in evaluated.hits.iter().filter(|(model, _)| Some(*model) != evaluated.drafted) {
            self.learn_of(evaluated, *model, hits);
        }
        losses
    }

    /// The time that a text would have taken with drafts of a model, as a share of its plain time;
    /// `None` of an empty one.
    fn loss(&self, evaluated: &EvaluatedText, model: u8, hits: &[bool]) -> Option<f64> {
        let round_costs = RoundCosts::new(self, evaluated.way, model, None);
        let gamma = self.length(evaluated, model, &round_costs);
        let round = round_costs.model_round(gamma);
        let rounds = rounds(hits, gamma).len();
        (rounds > 0)
            .then(|| (rounds as f64 * round / (hits.len() as f64 * round_costs.token)).clamp(0.0, 1.0))
    }

    /// Number of tokens that the model would draft at a time.
    fn length(&self, evaluated: &EvaluatedText, model: u8, round_costs: &RoundCosts) -> usize {
        let survival =
            self.survival
                .chain(evaluated.bucket, DrafterId::model(model), evaluated.gamma_max, |known| known);
        round_costs.cut(&survival, 1.0 / round_costs.token, true).nodes.max(1)
    }

    /// Takes the drafts that a model would have made as rounds in the shadow.
    fn learn_of(&mut self, evaluated: &EvaluatedText, model: u8, hits: &[bool]) {
        let gamma = self.length(evaluated, model, &RoundCosts::new(self, evaluated.way, model, None));
        let drafter = DrafterId::model(model);
        let (vote, class) =
            (Vote::new(drafter, Features::default()), Class::new(drafter, evaluated.bucket, evaluated.kind));
        let mut rest = hits;
        for run in rounds(hits, gamma) {
            let (round, behind) = rest.split_at(rest.len().min(run + 1));
            for (depth, hit) in round.iter().take(gamma).enumerate() {
                self.survival.observe(evaluated.bucket, vote, Agreement::Alone, depth, *hit);
            }
            self.classes.push(class, gamma, gamma, run + 1);
            rest = behind;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::Control;
    use crate::units::Tick;
    use crate::words::VerifyMethod;

    fn near(found: &[f64], expected: &[f64]) {
        assert_eq!(found.len(), expected.len());
        let close = found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6);
        assert!(close, "{found:?} instead of {expected:?}");
    }

    #[test]
    fn a_clear_leader_is_followed_soon_and_alternating_losses_are_hedged() {
        let mut hedge = Hedge::default();
        near(&hedge.weights(&[4, 2]), &[1.0, 0.0]);
        hedge.evaluate(&[(4, 0.8), (2, 0.5)]);
        near(&hedge.weights(&[4, 2]), &[0.2, 0.8]);
        (0..4).for_each(|_| hedge.evaluate(&[(4, 0.8), (2, 0.5)]));
        assert!(hedge.weights(&[4, 2])[1] > 0.95, "{:?}", hedge.weights(&[4, 2]));
        let mut torn = Hedge::default();
        for turn in 0..40 {
            let (a, b) = if turn % 2 == 0 { (0.2, 0.6) } else { (0.6, 0.2) };
            torn.evaluate(&[(4, a), (2, b)]);
        }
        let weights = torn.weights(&[4, 2]);
        assert!(weights.iter().all(|weight| (0.35..0.65).contains(weight)), "{weights:?}");
    }

    // By an independent implementation of the paper's figure 1 (tests/bench/adahedge.py), losses
    // forgotten as here.
    #[test]
    fn weights_are_those_of_the_paper() {
        let mut hedge = Hedge::default();
        let told = [[0.5, 0.4, 0.9], [0.3, 0.7, 0.2], [0.6, 0.1, 0.4], [0.2, 0.2, 0.9], [0.9, 0.3, 0.1]];
        for losses in told {
            hedge.evaluate(&[(0, losses[0]), (1, losses[1]), (2, losses[2])]);
        }
        near(&hedge.weights(&[0, 1, 2]), &[0.144_579_87, 0.708_534_89, 0.146_885_24]);
    }

    #[test]
    fn an_unevaluated_model_starts_equal_to_the_best_and_new_texts_change_the_weights() {
        let mut hedge = Hedge::default();
        (0..30).for_each(|_| hedge.evaluate(&[(0, 0.9), (1, 0.4)]));
        let weights = hedge.weights(&[0, 1, 7]);
        assert!(weights[0] < 0.01 && (weights[1] - weights[2]).abs() < 1e-9, "{weights:?}");
        assert_eq!(
            (hedge.draw(&[], &mut SplitMix64::new(1)), hedge.draw(&[0], &mut SplitMix64::new(1))),
            (None, Some(0))
        );
        (0..60).for_each(|_| hedge.evaluate(&[(0, 0.2), (1, 0.9)]));
        assert!(hedge.weights(&[0, 1])[0] > 0.9, "{:?}", hedge.weights(&[0, 1]));
    }

    #[test]
    fn models_are_drawn_by_their_weights() {
        let mut hedge = Hedge::default();
        for turn in 0..200 {
            let (a, b) = if turn % 3 == 0 { (0.1, 0.6) } else { (0.5, 0.45) };
            hedge.evaluate(&[(0, a), (1, b)]);
        }
        let (weights, mut rng) = (hedge.weights(&[0, 1]), SplitMix64::new(3));
        let drawn = (0..4_000).filter(|_| hedge.draw(&[0, 1], &mut rng) == Some(0)).count();
        assert!((drawn as f64 / 4_000.0 - weights[0]).abs() < 0.03, "{drawn} {weights:?}");
    }

    #[test]
    fn a_text_is_cut_into_rounds_as_drafts_would_be_accepted() {
        let hits = [true, true, true, false, false, true, true];
        assert_eq!(rounds(&hits, 2), [2, 0, 0, 2]);
        assert_eq!(rounds(&hits, 8), [3, 0, 2]);
        assert_eq!((rounds(&[], 4), rounds(&hits, 0)), (vec![], vec![0; 7]));
    }

    #[test]
    fn the_faster_model_is_chosen_though_the_other_predicts_a_little_better() {
        let control = Control::new();
        let way = Way::by(VerifyMethod::Score, 40);
        control.with(|learnt| {
            (0..20).for_each(|_| learnt.note_plain(0.010, 1, Tick(0)));
            for nodes in [0, 4, 8] {
                (0..8).for_each(|_| learnt.costs.verified(way, nodes, 0.012, Tick(0)));
            }
            learnt.costs.drafted(0, 8, 0.040, Tick(0));
            learnt.costs.drafted(1, 8, 0.002, Tick(0));
            let often = |every: usize| (0..64).map(|at| at % every > 0).collect::<Vec<bool>>();
            let evaluated = EvaluatedText {
                bucket: TemperatureBucket::Greedy,
                kind: 1,
                way,
                gamma_max: 16,
                hits: vec![(0, often(6)), (1, often(5))],
                drafted: Some(0),
            };
            (0..12).for_each(|_| drop(learnt.evaluate(&evaluated)));
            let weights = learnt.hedges.of(TemperatureBucket::Greedy, 1).weights(&[0, 1]);
            assert!(weights[1] > 0.99, "{weights:?}");
            let evidence = [0, 1]
                .map(|model| learnt.survival.evidence(TemperatureBucket::Greedy, DrafterId::model(model)));
            assert!(evidence[0] == 0.0 && evidence[1] > 100.0, "{evidence:?}");
            assert!(
                learnt.hedges.of(TemperatureBucket::Greedy, 2).weights(&[0, 1]) == [1.0, 0.0],
                "another kind"
            );
        });
    }
}
