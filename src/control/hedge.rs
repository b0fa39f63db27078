//! Which of several model drafters drafts for a request: Hedge with full information.
//!
//! Drafters that answer at once are all asked and merged. A model costs time, so one of those that a policy names drafts for a
//! request. After a request, within a small share of the time, all of them are heard on the same passage of its text: what
//! each would have drafted is compared with what came, which takes no call to the backend. So every model has a loss for every
//! passage, whichever one drafted, and the choice needs no exploration. The loss is the time per token that drafting with the
//! model would have taken, as a share of riding.
//!
//! The weights are those of `AdaHedge`: exponential weights whose rate is set by the losses themselves, so that a clear leader is
//! followed soon, and what alternates is hedged (de Rooij, van Erven, Grünwald, Koolen: Follow the Leader If You Can,
//! Hedge If You Must. JMLR 15, 2014). Older passages are forgotten slowly, since texts and models change.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::state::Class;
use super::survival::Heat;
use super::tariff::Tariff;
use super::{Learnt, Way};
use crate::draft::{Company, DrafterId, Features, Vote};
use crate::units::Dice;

/// What is left of older losses with every passage: about two hundred of them are remembered.
const KEEP: f64 = 1.0 - 1.0 / 200.0;

/// The losses of the models that were heard side by side.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Hedge {
    /// Sums of losses by number of the model.
    losses: Vec<(u8, f64)>,
    /// The mixability gap, summed up: by how much the weights were worse than the best use of them.
    gap: f64,
}

impl Hedge {
    /// The weight of each of these models; they sum up to 1. Before any was heard it is the first of them.
    pub fn weights(&self, models: &[u8]) -> Vec<f64> {
        if !self.losses.iter().any(|(heard, _)| models.contains(heard)) {
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
    pub fn draw(&self, models: &[u8], dice: &mut Dice) -> Option<u8> {
        let mut left = dice.unit();
        let weighed = models.iter().zip(self.weights(models));
        let drawn = weighed.filter(|(_, weight)| *weight > 0.0).find(|(_, weight)| {
            left -= weight;
            left < 0.0
        });
        drawn.map(|(model, _)| *model).or_else(|| models.first().copied())
    }

    /// Notes the losses of models on one passage, each from 0 to 1.
    pub fn hear(&mut self, losses: &[(u8, f64)]) {
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

    /// How much it has heard, by the largest sum of losses.
    fn heard(&self) -> f64 {
        self.losses.iter().map(|(_, sum)| *sum).fold(0.0, f64::max)
    }

    /// The learning rate; `None` while it is without bound: nothing has yet spoken against following the leader.
    fn rate(&self, models: usize) -> Option<f64> {
        (self.gap > 1e-12).then(|| (models.max(2) as f64).ln() / self.gap)
    }

    /// The sums of losses of these models. One that was never heard is taken to be as good as the best of the others.
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
    by_kind: HashMap<(Heat, u64), Hedge>,
}

impl Hedges {
    /// Most kinds that are kept.
    const MOST: usize = 256;

    /// The hedge of requests of a kind; one that has heard nothing where there is none.
    pub fn of(&self, heat: Heat, kind: u64) -> Hedge {
        self.by_kind.get(&(heat, kind)).cloned().unwrap_or_default()
    }

    fn hear(&mut self, heat: Heat, kind: u64, losses: &[(u8, f64)]) {
        if self.by_kind.len() >= Self::MOST && !self.by_kind.contains_key(&(heat, kind)) {
            // The one that has heard least makes room.
            let least = self.by_kind.iter().min_by(|a, b| a.1.heard().total_cmp(&b.1.heard()));
            if let Some(least) = least.map(|(kind, _)| *kind) {
                self.by_kind.remove(&least);
            }
        }
        self.by_kind.entry((heat, kind)).or_default().hear(losses);
    }
}

/// A passage of a text that all models were heard on.
#[derive(Clone, Debug)]
pub struct Passage {
    /// The temperature.
    pub heat: Heat,
    /// The kind of the request.
    pub kind: u64,
    /// How its drafts are verified.
    pub way: Way,
    /// Most tokens of a draft.
    pub gamma_max: usize,
    /// By model, whether it would have drafted each token of the passage, given those before it.
    pub heard: Vec<(u8, Vec<bool>)>,
    /// The model that drafted for the request: what it drafted has been learnt of already.
    pub drafted: Option<u8>,
}

/// The rounds that drafts of at most `gamma` tokens make of a passage: for each how many tokens of its draft are accepted. One
/// more token comes with each.
pub fn rounds(hits: &[bool], gamma: usize) -> Vec<usize> {
    let (mut rounds, mut rest) = (Vec::new(), hits);
    while !rest.is_empty() {
        let run = rest.iter().take(gamma).take_while(|hit| **hit).count();
        rounds.push(run);
        rest = rest.get(run + 1..).unwrap_or_default();
    }
    rounds
}

impl Learnt<'_> {
    /// Learns from a passage that several models were heard on; returns the loss of each by its number.
    pub fn hear(&mut self, passage: &Passage) -> Vec<(u8, f64)> {
        let losses: Vec<(u8, f64)> = passage
            .heard
            .iter()
            .filter_map(|(model, hits)| Some((*model, self.loss(passage, *model, hits)?)))
            .collect();
        if losses.len() == passage.heard.len() && losses.len() > 1 {
            self.hedges.hear(passage.heat, passage.kind, &losses);
        }
        for (model, hits) in passage.heard.iter().filter(|(model, _)| Some(*model) != passage.drafted) {
            self.learn_of(passage, *model, hits);
        }
        losses
    }

    /// The time that a passage would have taken by drafts of a model, as a share of riding it; `None` of an empty one.
    fn loss(&self, passage: &Passage, model: u8, hits: &[bool]) -> Option<f64> {
        let tariff = Tariff::new(self, passage.way, model, None);
        let gamma = self.length(passage, model, &tariff);
        let round = tariff.model_round(gamma);
        let rounds = rounds(hits, gamma).len();
        (rounds > 0).then(|| (rounds as f64 * round / (hits.len() as f64 * tariff.token)).clamp(0.0, 1.0))
    }

    /// How many tokens the model would draft at a time.
    fn length(&self, passage: &Passage, model: u8, tariff: &Tariff) -> usize {
        let survival =
            self.survival.chain(passage.heat, DrafterId::model(model), passage.gamma_max, |known| known);
        tariff.cut(&survival, 1.0 / tariff.token, true).nodes.max(1)
    }

    /// Takes what a model would have drafted as rounds in the shadow.
    fn learn_of(&mut self, passage: &Passage, model: u8, hits: &[bool]) {
        let gamma = self.length(passage, model, &Tariff::new(self, passage.way, model, None));
        let drafter = DrafterId::model(model);
        let (vote, class) =
            (Vote::new(drafter, Features::default()), Class::new(drafter, passage.heat, passage.kind));
        let mut rest = hits;
        for run in rounds(hits, gamma) {
            let (round, behind) = rest.split_at(rest.len().min(run + 1));
            for (depth, hit) in round.iter().take(gamma).enumerate() {
                self.survival.observe(passage.heat, vote, Company::Alone, depth, *hit);
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
    use crate::words::Plan;

    fn near(found: &[f64], expected: &[f64]) {
        assert_eq!(found.len(), expected.len());
        let close = found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6);
        assert!(close, "{found:?} instead of {expected:?}");
    }

    #[test]
    fn a_clear_leader_is_followed_soon_and_what_alternates_is_hedged() {
        let mut hedge = Hedge::default();
        near(&hedge.weights(&[4, 2]), &[1.0, 0.0]);
        hedge.hear(&[(4, 0.8), (2, 0.5)]);
        near(&hedge.weights(&[4, 2]), &[0.2, 0.8]);
        (0..4).for_each(|_| hedge.hear(&[(4, 0.8), (2, 0.5)]));
        assert!(hedge.weights(&[4, 2])[1] > 0.95, "{:?}", hedge.weights(&[4, 2]));
        let mut torn = Hedge::default();
        for turn in 0..40 {
            let (a, b) = if turn % 2 == 0 { (0.2, 0.6) } else { (0.6, 0.2) };
            torn.hear(&[(4, a), (2, b)]);
        }
        let weights = torn.weights(&[4, 2]);
        assert!(weights.iter().all(|weight| (0.35..0.65).contains(weight)), "{weights:?}");
    }

    // By an implementation of the paper's figure 1 in other words (tests/bench/adahedge.py), losses forgotten as here.
    #[test]
    fn weights_are_those_of_the_paper() {
        let mut hedge = Hedge::default();
        let told = [[0.5, 0.4, 0.9], [0.3, 0.7, 0.2], [0.6, 0.1, 0.4], [0.2, 0.2, 0.9], [0.9, 0.3, 0.1]];
        for losses in told {
            hedge.hear(&[(0, losses[0]), (1, losses[1]), (2, losses[2])]);
        }
        near(&hedge.weights(&[0, 1, 2]), &[0.144_579_87, 0.708_534_89, 0.146_885_24]);
    }

    #[test]
    fn what_was_never_heard_starts_beside_the_best_and_a_new_text_is_learnt() {
        let mut hedge = Hedge::default();
        (0..30).for_each(|_| hedge.hear(&[(0, 0.9), (1, 0.4)]));
        let weights = hedge.weights(&[0, 1, 7]);
        assert!(weights[0] < 0.01 && (weights[1] - weights[2]).abs() < 1e-9, "{weights:?}");
        assert_eq!(
            (hedge.draw(&[], &mut Dice::new(1)), hedge.draw(&[0], &mut Dice::new(1))),
            (None, Some(0))
        );
        (0..60).for_each(|_| hedge.hear(&[(0, 0.2), (1, 0.9)]));
        assert!(hedge.weights(&[0, 1])[0] > 0.9, "{:?}", hedge.weights(&[0, 1]));
    }

    #[test]
    fn models_are_drawn_as_often_as_they_weigh() {
        let mut hedge = Hedge::default();
        for turn in 0..200 {
            let (a, b) = if turn % 3 == 0 { (0.1, 0.6) } else { (0.5, 0.45) };
            hedge.hear(&[(0, a), (1, b)]);
        }
        let (weights, mut dice) = (hedge.weights(&[0, 1]), Dice::new(3));
        let drawn = (0..4_000).filter(|_| hedge.draw(&[0, 1], &mut dice) == Some(0)).count();
        assert!((drawn as f64 / 4_000.0 - weights[0]).abs() < 0.03, "{drawn} {weights:?}");
    }

    #[test]
    fn a_passage_is_cut_into_rounds_as_drafts_would_be_accepted() {
        let hits = [true, true, true, false, false, true, true];
        assert_eq!(rounds(&hits, 2), [2, 0, 0, 2]);
        assert_eq!(rounds(&hits, 8), [3, 0, 2]);
        assert_eq!((rounds(&[], 4), rounds(&hits, 0)), (vec![], vec![0; 7]));
    }

    #[test]
    fn the_model_that_drafts_in_less_time_is_taken_though_the_other_guesses_a_little_better() {
        let control = Control::new();
        let way = Way::by(Plan::Score, 40);
        control.with(|learnt| {
            (0..20).for_each(|_| learnt.rode(0.010, 1, Tick(0)));
            for nodes in [0, 4, 8] {
                (0..8).for_each(|_| learnt.costs.verified(way, nodes, 0.012, Tick(0)));
            }
            learnt.costs.drafted(0, 8, 0.040, Tick(0));
            learnt.costs.drafted(1, 8, 0.002, Tick(0));
            let often = |every: usize| (0..64).map(|at| at % every > 0).collect::<Vec<bool>>();
            let passage = Passage {
                heat: Heat::Greedy,
                kind: 1,
                way,
                gamma_max: 16,
                heard: vec![(0, often(6)), (1, often(5))],
                drafted: Some(0),
            };
            (0..12).for_each(|_| drop(learnt.hear(&passage)));
            let weights = learnt.hedges.of(Heat::Greedy, 1).weights(&[0, 1]);
            assert!(weights[1] > 0.99, "{weights:?}");
            let evidence =
                [0, 1].map(|model| learnt.survival.evidence(Heat::Greedy, DrafterId::model(model)));
            assert!(evidence[0] == 0.0 && evidence[1] > 100.0, "{evidence:?}");
            assert!(learnt.hedges.of(Heat::Greedy, 2).weights(&[0, 1]) == [1.0, 0.0], "another kind");
        });
    }
}
