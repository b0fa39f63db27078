//! Texts made from a seed, by the share of the output that copies earlier text and the accuracy of
//! the model drafter.

use std::sync::Arc;

use serde::Deserialize;

use super::source::{OUTSIDE, Script, Scripts};
use super::values::{count, number};
use foretell_core::units::{SplitMix64, TokenId};

/// Part of the output that copies earlier text. It decides the acceptance of lookup drafters.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Copied {
    /// Nothing but common words.
    Fresh,
    /// The prompt itself, with this share of its tokens replaced.
    Rewrite(#[serde(deserialize_with = "number::<_, 0, 1>")] f64),
    /// A rewrite that turns into fresh text after this number of tokens.
    Until(usize),
    /// Fresh text that repeats its last `period` tokens, from output token `after + period` on.
    Plateau {
        /// Output tokens before the part that is repeated.
        after: usize,
        /// Tokens of the repeated part.
        #[serde(deserialize_with = "count")]
        period: usize,
    },
}

/// Accuracy of the model drafter.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Agreement {
    #[serde(rename = "none")]
    Never,
    /// Each choice is right with this probability, independently of the others.
    Even(#[serde(deserialize_with = "number::<_, 0, 1>")] f64),
    /// By draft position, given that the ones before are right; the last counts for all beyond.
    Fading(Vec<f64>),
    /// One probability before output token `at`, another one after it: a regime change, or with 0 a
    /// collapse.
    Turning {
        /// Before token `at`.
        #[serde(deserialize_with = "number::<_, 0, 1>")]
        first: f64,
        #[serde(deserialize_with = "number::<_, 0, 1>")]
        then: f64,
        /// Output tokens.
        at: usize,
    },
    /// Alternating easy and hard stretches of text, with a margin that distinguishes them.
    Mixed {
        #[serde(deserialize_with = "number::<_, 0, 1>")]
        easy: f64,
        #[serde(deserialize_with = "number::<_, 0, 1>")]
        hard: f64,
        /// Mean length of a stretch, tokens.
        #[serde(deserialize_with = "number::<_, 1, 1_000_000>")]
        stretch: f64,
    },
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TextKind {
    #[serde(deserialize_with = "count")]
    pub prompt: usize,
    /// Mean tokens of the output.
    #[serde(deserialize_with = "count")]
    pub output: usize,
    /// Outputs are shorter or longer by up to this share of `output`.
    #[serde(deserialize_with = "number::<_, 0, 1>")]
    pub vary: f64,
    /// The part of it that copies earlier text.
    pub copied: Copied,
    /// Accuracy of the model drafter.
    pub agreement: Agreement,
}

impl Default for TextKind {
    fn default() -> Self {
        Self { prompt: 300, output: 128, vary: 0.5, copied: Copied::Fresh, agreement: Agreement::Never }
    }
}

impl TextKind {
    pub fn scripts(&self, count: usize, seed: u64) -> Scripts {
        let seed_of = |number: usize| SplitMix64::mix(seed) ^ SplitMix64::mix(number as u64);
        (0..count).map(|number| Arc::new(self.script(seed_of(number)))).collect()
    }

    pub fn script(&self, seed: u64) -> Script {
        let mut rng = SplitMix64::new(SplitMix64::mix(seed));
        let prompt: Vec<TokenId> = (0..self.prompt.max(1)).map(|_| word(&mut rng)).collect();
        let mut output: Vec<TokenId> = Vec::with_capacity(self.output);
        let length = self.output as f64 * (1.0 + self.vary * (2.0 * rng.unit() - 1.0));
        for position in 0..(length.round() as usize).max(1) {
            let fresh = word(&mut rng);
            let edited = rng.unit();
            let earlier = prompt.get(position % prompt.len()).copied();
            let copied = match self.copied {
                Copied::Rewrite(edits) if edited >= edits => earlier,
                Copied::Until(after) if position < after => earlier,
                Copied::Plateau { after, period } if position >= after + period.max(1) => {
                    output.get(position - period.max(1)).copied()
                }
                Copied::Fresh | Copied::Rewrite(_) | Copied::Until(_) | Copied::Plateau { .. } => None,
            };
            output.push(copied.unwrap_or(fresh));
        }
        let mut script = Script { prompt, output, ..Script::default() };
        self.agreement.choose(&mut script, &mut rng);
        script
    }
}

impl Agreement {
    fn choose(&self, script: &mut Script, rng: &mut SplitMix64) {
        if *self == Self::Never {
            return;
        }
        let mut easy = true;
        for (position, &truth) in script.output.iter().enumerate() {
            let right = match self {
                Self::Never => 0.0,
                Self::Even(right) => *right,
                Self::Fading(by_position) => by_position.first().copied().unwrap_or(0.0),
                Self::Turning { first, then, at } => {
                    if position < *at {
                        *first
                    } else {
                        *then
                    }
                }
                Self::Mixed { easy: high, hard, stretch } => {
                    easy ^= rng.unit() < 1.0 / stretch.max(1.0);
                    if easy { *high } else { *hard }
                }
            };
            let choice = if rng.unit() < right { truth } else { OUTSIDE };
            script.choices.push(choice);
            script.margins.push(margin(right));
        }
        if let Self::Fading(by_position) = self {
            // The first position is drawn above; later ones are drawn by their depth, given that
            // one.
            let first = by_position.first().copied().unwrap_or(0.0).max(1e-9);
            script.fades = by_position.iter().map(|right| (right / first).min(1.0)).collect();
        }
    }
}

/// The margin of a calibrated drafter under a logistic model of its accuracy.
fn margin(right: f64) -> f32 {
    let right = right.clamp(0.02, 0.98);
    ((right / (1.0 - right)).ln() + 4.0) as f32
}

/// Words as frequent as in real text: a few words make up most of it.
fn word(rng: &mut SplitMix64) -> TokenId {
    (8000.0_f64.powf(rng.unit()) - 1.0) as TokenId
}

#[cfg(test)]
mod tests {
    use super::*;

    fn right(agreement: Agreement, positions: std::ops::Range<usize>) -> f64 {
        let kind = TextKind { prompt: 10, output: 20_000, vary: 0.0, copied: Copied::Fresh, agreement };
        let script = kind.script(3);
        let hits = positions
            .clone()
            .filter(|&position| script.choice(position, 0) == script.truth(position))
            .count();
        hits as f64 / positions.len() as f64
    }

    #[test]
    fn the_drafter_has_the_given_accuracy() {
        assert!((right(Agreement::Even(0.7), 0..20_000) - 0.7).abs() < 0.01);
        let turning = || Agreement::Turning { first: 0.9, then: 0.1, at: 10_000 };
        assert!((right(turning(), 0..10_000) - 0.9).abs() < 0.01);
        assert!((right(turning(), 10_000..20_000) - 0.1).abs() < 0.01);
        let mixed = Agreement::Mixed { easy: 0.95, hard: 0.25, stretch: 20.0 };
        assert!((right(mixed, 0..20_000) - 0.6).abs() < 0.06);
    }

    #[test]
    fn copies_are_copies_and_the_same_seed_is_the_same_text() {
        let kind =
            |copied| TextKind { prompt: 100, output: 400, vary: 0.0, copied, agreement: Agreement::Never };
        let same =
            |script: &Script, position: usize| script.output[position] == script.prompt[position % 100];
        let rewrite = kind(Copied::Rewrite(0.05)).script(1);
        assert!((360..400).contains(&(0..400).filter(|&position| same(&rewrite, position)).count()));
        let until = kind(Copied::Until(50)).script(1);
        assert!((0..50).all(|position| same(&until, position)));
        let plateau = kind(Copied::Plateau { after: 100, period: 7 }).script(1);
        assert!((107..400).all(|position| plateau.output[position] == plateau.output[position - 7]));
        let varied = TextKind { vary: 0.5, ..kind(Copied::Fresh) }.scripts(50, 9);
        let lengths = varied.iter().map(|script| script.output.len());
        assert!(lengths.clone().all(|len| (200..=600).contains(&len)) && lengths.max() > Some(500));
        assert_eq!(kind(Copied::Fresh).scripts(3, 9), kind(Copied::Fresh).scripts(3, 9));
        assert_ne!(kind(Copied::Fresh).script(1), kind(Copied::Fresh).script(2));
    }
}
