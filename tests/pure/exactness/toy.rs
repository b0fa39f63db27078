//! Exact enumeration of random choices, and the small targets that make them.

use std::cell::RefCell;
use std::collections::BTreeMap;

use foretell_core::units::{SplitMix64, TokenId};
use foretell_core::words::Row;
use foretell_engines::score;
use foretell_wire::openai::Sampling;

// ------------------------------------------- Exact enumeration of random choices

/// Plays one path through all choices; the paths are visited in order.
#[derive(Default)]
pub struct Oracle {
    tape: Vec<(usize, usize)>,
    at: usize,
    weight: f64,
}

impl Oracle {
    /// One of the choices that have any weight.
    fn pick(&mut self, weights: &[f64]) -> usize {
        let open: Vec<usize> = (0..weights.len()).filter(|&choice| weights[choice] > 0.0).collect();
        if self.at == self.tape.len() {
            self.tape.push((0, open.len()));
        }
        let choice = open[self.tape[self.at].0];
        self.at += 1;
        self.weight *= weights[choice];
        choice
    }
}

/// Source of the choices of one path; shared by everything in the world that draws.
pub struct Chance<'a>(RefCell<&'a mut Oracle>);

impl Chance<'_> {
    pub fn pick(&self, weights: &[f64]) -> usize {
        self.0.borrow_mut().pick(weights)
    }

    pub fn token(&self, weights: &[f64]) -> TokenId {
        self.pick(weights) as TokenId
    }
}

pub type Distribution = BTreeMap<String, f64>;

/// Distribution of the results of `run`, over all its choices.
pub fn distribution(mut run: impl FnMut(&Chance<'_>) -> String) -> Distribution {
    let mut distribution = Distribution::new();
    let mut oracle = Oracle::default();
    loop {
        oracle.at = 0;
        oracle.weight = 1.0;
        let key = run(&Chance(RefCell::new(&mut oracle)));
        *distribution.entry(key).or_default() += oracle.weight;
        oracle.tape.truncate(oracle.at);
        while oracle.tape.last().is_some_and(|&(choice, of)| choice + 1 == of) {
            oracle.tape.pop();
        }
        match oracle.tape.last_mut() {
            Some(last) => last.0 += 1,
            None => return distribution,
        }
    }
}

pub fn distance(a: &Distribution, b: &Distribution) -> f64 {
    let keys: std::collections::BTreeSet<&String> = a.keys().chain(b.keys()).collect();
    let of = |distribution: &Distribution, key: &String| distribution.get(key).copied().unwrap_or(0.0);
    keys.into_iter().map(|key| (of(a, key) - of(b, key)).abs()).sum::<f64>() / 2.0
}

// -------------------------------------------------------------------------- Toys

/// A target whose distribution depends on the last two tokens and the length of the context.
pub trait Target: Copy {
    /// Distribution of the next token, as it is sampled.
    fn weights(self, context: &[TokenId]) -> Vec<f64>;

    /// The backend's row for a position of a scored prompt, as read by the shipped codecs; `None`
    /// for most targets.
    fn row(self, _context: &[TokenId]) -> Option<Row> {
        None
    }

    fn favourite(self, context: &[TokenId], rank: usize) -> TokenId {
        let weights = self.weights(context);
        let mut order: Vec<usize> = (0..weights.len()).collect();
        order.sort_by(|&a, &b| weights[b].total_cmp(&weights[a]));
        order[rank % order.len()] as TokenId
    }
}

fn tail(salt: u64, context: &[TokenId]) -> u64 {
    let start = salt + context.len() as u64;
    context.iter().rev().take(2).fold(start, |seed, &token| SplitMix64::mix(seed ^ (u64::from(token) + 1)))
}

/// Any token may follow any other.
#[derive(Clone, Copy)]
pub struct Toy {
    pub vocabulary: usize,
    pub salt: u64,
}

impl Target for Toy {
    fn weights(self, context: &[TokenId]) -> Vec<f64> {
        let tail = tail(self.salt, context);
        let raw: Vec<f64> = (0..self.vocabulary)
            .map(|token| 1.0 + (SplitMix64::mix(tail + token as u64 * 77) % 9) as f64)
            .collect();
        let sum: f64 = raw.iter().sum();
        raw.iter().map(|weight| weight / sum).collect()
    }
}

/// A target of four tokens that samples with `top_k` 2, or at every other position with `top_p`
/// 0.7, and returns log-probabilities: its tokens have 8, 4, 2 and 1 fifteenths, so two thirds and
/// one third remain after either. It lists the three likeliest tokens. The last token ends a text.
#[derive(Clone, Copy)]
pub struct ScoringToy {
    pub salt: u64,
    /// The end of a text is decided by the backend alone.
    pub special: bool,
}

impl ScoringToy {
    pub const END: TokenId = 3;
    /// One draw in three for each third: exact for all probabilities of this target.
    pub const DRAWS: [f64; 3] = [1.0 / 6.0, 0.5, 5.0 / 6.0];

    /// Before the request's sampling parameters. At half of the positions the end of a text is the
    /// least likely token.
    fn raw(self, context: &[TokenId]) -> [f64; 4] {
        let mut rng = SplitMix64::new(tail(self.salt, context));
        let mut rank: [usize; 4] = [0, 1, 2, 3];
        let last = if rng.chance(2) { 2 } else { 3 };
        for at in (1..=last).rev() {
            rank.swap(at, rng.below(at as u64 + 1) as usize);
        }
        rank.map(|rank| [8.0, 4.0, 2.0, 1.0][rank] / 15.0)
    }
}

impl Target for ScoringToy {
    fn weights(self, context: &[TokenId]) -> Vec<f64> {
        let kept = |p: f64| if p < 0.2 { 0.0 } else { p * 15.0 / 12.0 };
        self.raw(context).map(kept).to_vec()
    }
    fn row(self, context: &[TokenId]) -> Option<Row> {
        let (top_k, top_p) = if context.len().is_multiple_of(2) { (Some(2), 1.0) } else { (None, 0.7) };
        let sampling = Sampling { temperature: 1.0, top_k, top_p, ..Sampling::default() };
        let mut top: Vec<(TokenId, f64)> = (0..).zip(self.raw(context).map(f64::ln)).collect();
        top.sort_by(|a, b| b.1.total_cmp(&a.1));
        let width = score::width(&sampling, 3).expect("can be told");
        top.truncate(width);
        score::row(&top, width, &sampling, if self.special { &[Self::END] } else { &[] })
    }
}
