//! The sequences of one call, run together: the prompts in one step, then one token each per step.

use std::sync::Arc;

use super::house::{House, Slots};
use super::sequence::{Piece, Sequence};

/// Treatment of the prompts of one call by the engine's prefix cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reuse {
    /// Blocks are in the cache once they are scheduled: prompts of one call share them.
    AtOnce,
    /// Blocks are in the cache at the end of the step.
    AfterStep,
    /// The cache is written and not read.
    WriteOnly,
    /// The engine has a separate cache: the sequences hold the numbers of cached tokens.
    Given,
}

pub struct Batch {
    house: Arc<House>,
    pub sequences: Vec<Sequence>,
    slots: Option<Slots>,
    reuse: Reuse,
    began: bool,
}

impl Batch {
    /// Waits for slots, looks the prompts up and computes the tokens that are not cached.
    pub async fn begin(house: &Arc<House>, sequences: Vec<Sequence>, reuse: Reuse) -> Self {
        let slots = house.admit(sequences.len()).await;
        let house = Arc::clone(house);
        let mut batch = Self { house, sequences, slots: Some(slots), reuse, began: false };
        let computed = batch.look_up();
        batch.house.compute(computed).await;
        batch
    }

    /// Number of prompt tokens to be computed.
    fn look_up(&mut self) -> usize {
        let mut cache = self.house.cache.lock();
        for sequence in &mut self.sequences {
            if self.reuse == Reuse::Given {
                continue;
            }
            if self.reuse != Reuse::WriteOnly {
                let limit = sequence.cache_limit.unwrap_or(sequence.prompt).min(sequence.prompt);
                sequence.cached = cache.cached(&sequence.context, limit, sequence.salt);
            }
            if self.reuse == Reuse::AtOnce {
                cache.store(&sequence.context, sequence.prompt, sequence.salt);
            }
        }
        if matches!(self.reuse, Reuse::AfterStep | Reuse::WriteOnly) {
            for sequence in &self.sequences {
                cache.store(&sequence.context, sequence.prompt, sequence.salt);
            }
        }
        let prompt: usize = self.sequences.iter().map(|sequence| sequence.prompt).sum();
        let cached: usize = self.sequences.iter().map(|sequence| sequence.cached).sum();
        self.house.note(|tally| {
            tally.sequences += self.sequences.len();
            tally.prompt += prompt;
            tally.cached += cached;
        });
        prompt - cached
    }

    /// The next token of every unfinished sequence; empty at the end.
    pub async fn step(&mut self) -> Vec<(usize, Piece)> {
        let alive = self.sequences.iter().filter(|sequence| sequence.finish.is_none()).count();
        if alive == 0 {
            if let Some(slots) = self.slots.take() {
                self.keep();
                slots.done();
                self.house.note(|tally| tally.finished += self.sequences.len());
            }
            return Vec::new();
        }
        if self.began {
            self.house.compute(alive).await;
        }
        self.began = true;
        self.house.note(|tally| tally.generated += alive);
        let toy = &self.house.toy;
        self.sequences.iter_mut().enumerate().filter_map(|(at, it)| Some((at, it.step(toy)?))).collect()
    }

    /// All tokens of all sequences, one list per sequence.
    pub async fn finish(&mut self) -> Vec<Vec<Piece>> {
        let mut all: Vec<Vec<Piece>> = self.sequences.iter().map(|_| Vec::new()).collect();
        loop {
            let pieces = self.step().await;
            if pieces.is_empty() {
                return all;
            }
            for (at, piece) in pieces {
                all[at].push(piece);
            }
        }
    }

    pub fn prompt_tokens(&self) -> usize {
        self.sequences.iter().map(|sequence| sequence.prompt).sum()
    }

    pub fn cached_tokens(&self) -> usize {
        self.sequences.iter().map(|sequence| sequence.cached).sum()
    }

    pub fn output_tokens(&self) -> usize {
        self.sequences.iter().map(|sequence| sequence.output().len()).sum()
    }

    /// Computed tokens stay in the cache; the last token was sampled but never fed.
    fn keep(&self) {
        if self.reuse == Reuse::Given {
            return;
        }
        let mut cache = self.house.cache.lock();
        for sequence in &self.sequences {
            cache.store(&sequence.context, sequence.context.len() - 1, sequence.salt);
        }
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        if self.slots.is_some() {
            self.keep();
        }
    }
}
