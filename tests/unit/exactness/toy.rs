//! Exact enumeration of random choices, and the small targets that make them.

use std::cell::RefCell;
use std::collections::BTreeMap;

use foretell::dialect::score;
use foretell::openai::Sampling;
use foretell::units::{Dice, TokenId};
use foretell::words::Row;

// ---- exact enumeration of random choices -----------------------------------------------------------------

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

/// What makes the choices of one path; shared by everything in the world that draws.
pub struct Chance<'a>(RefCell<&'a mut Oracle>);

impl Chance<'_> {
    pub fn pick(&self, weights: &[f64]) -> usize {
        self.0.borrow_mut().pick(weights)
    }

    pub fn token(&self, weights: &[f64]) -> TokenId {
        self.pick(weights) as TokenId
    }
}

pub type Law = BTreeMap<String, f64>;

/// The law of what `run` returns, over all its choices.
pub fn law(mut run: impl FnMut(&Chance<'_>) -> String) -> Law {
    let mut law = Law::new();
    let mut oracle = Oracle::default();
    loop {
        oracle.at = 0;
        oracle.weight = 1.0;
        let key = run(&Chance(RefCell::new(&mut oracle)));
        *law.entry(key).or_default() += oracle.weight;
        oracle.tape.truncate(oracle.at);
        while oracle.tape.last().is_some_and(|&(choice, of)| choice + 1 == of) {
            oracle.tape.pop();
        }
        match oracle.tape.last_mut() {
            Some(last) => last.0 += 1,
            None => return law,
        }
    }
}

pub fn distance(a: &Law, b: &Law) -> f64 {
    let keys: std::collections::BTreeSet<&String> = a.keys().chain(b.keys()).collect();
    let of = |law: &Law, key: &String| law.get(key).copied().unwrap_or(0.0);
    keys.into_iter().map(|key| (of(a, key) - of(b, key)).abs()).sum::<f64>() / 2.0
}

// ---- toys ------------------------------------------------------------------------------------------------

/// A target whose law depends on the last two tokens and on how long the context is.
pub trait Target: Copy {
    /// The law of the next token, as it is sampled.
    fn weights(self, context: &[TokenId]) -> Vec<f64>;

    /// What the backend tells of a place of a scored prompt, as the shipped codecs read it; nothing of most targets.
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
    context.iter().rev().take(2).fold(start, |seed, &token| Dice::mix(seed ^ (u64::from(token) + 1)))
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
            .map(|token| 1.0 + (Dice::mix(tail + token as u64 * 77) % 9) as f64)
            .collect();
        let sum: f64 = raw.iter().sum();
        raw.iter().map(|weight| weight / sum).collect()
    }
}

/// A target of four tokens that samples with `top_k` 2 and tells log-probabilities: of its tokens one has 8, one 4,
/// one 2 and one 1 fifteenths, so two thirds and one third are left, and the last token is the end of a text.
#[derive(Clone, Copy)]
pub struct Told {
    pub salt: u64,
    /// The end of a text is decided by the backend alone.
    pub special: bool,
}

impl Told {
    pub const END: TokenId = 3;
    /// One draw in three for each third: exact for all that this target tells.
    pub const DRAWS: [f64; 3] = [1.0 / 6.0, 0.5, 5.0 / 6.0];

    /// Before the request's sampling. At half of the places the end of a text is the least likely token.
    fn raw(self, context: &[TokenId]) -> [f64; 4] {
        let mut dice = Dice::new(tail(self.salt, context));
        let mut rank: [usize; 4] = [0, 1, 2, 3];
        let last = if dice.one_in(2) { 2 } else { 3 };
        for at in (1..=last).rev() {
            rank.swap(at, dice.below(at as u64 + 1) as usize);
        }
        rank.map(|rank| [8.0, 4.0, 2.0, 1.0][rank] / 15.0)
    }
}

impl Target for Told {
    fn weights(self, context: &[TokenId]) -> Vec<f64> {
        let kept = |p: f64| if p < 0.2 { 0.0 } else { p * 15.0 / 12.0 };
        self.raw(context).map(kept).to_vec()
    }
    fn row(self, context: &[TokenId]) -> Option<Row> {
        let sampling = Sampling { temperature: 1.0, top_k: Some(2), ..Sampling::default() };
        let mut top: Vec<(TokenId, f64)> = (0..).zip(self.raw(context).map(f64::ln)).collect();
        top.sort_by(|a, b| b.1.total_cmp(&a.1));
        top.truncate(score::width(&sampling, 20).expect("can be told"));
        score::row(&top, &sampling, if self.special { &[Self::END] } else { &[] })
    }
}
