//! A language model without weights: its logits are a hash of the last tokens visible to a row.
//!
//! Code above [`Forward`] is tested with it: it is exact, immediate, supports trees, and gives the
//! same logits for the same text regardless of how the text got into the cache. Tests count its
//! runs and make it fail.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::{Condvar, Mutex};

use super::forward::{Feed, Forward, Lane, Logits, ModelConfig, ModelError, Rows};
use super::noise::hash;
use foretell_core::units::TokenId;

/// Counts the runs of a [`Fake`] and makes them fail, from outside the thread that owns it.
#[derive(Clone, Debug, Default)]
pub struct Controls {
    runs: Arc<AtomicUsize>,
    tokens: Arc<AtomicUsize>,
    failing: Arc<AtomicBool>,
    panicking: Arc<AtomicBool>,
    paused: Arc<(Mutex<bool>, Condvar)>,
}

impl Controls {
    /// Number of runs so far.
    pub fn runs(&self) -> usize {
        self.runs.load(Ordering::SeqCst)
    }

    /// From now on every run waits, after it has been counted, until this is set to false.
    pub fn pause(&self, pause: bool) {
        *self.paused.0.lock() = pause;
        self.paused.1.notify_all();
    }

    /// Tokens fed so far.
    pub fn tokens(&self) -> usize {
        self.tokens.load(Ordering::SeqCst)
    }

    /// Sets whether every following run fails.
    pub fn fail(&self, failing: bool) {
        self.failing.store(failing, Ordering::SeqCst);
    }

    /// The next run panics, which ends its thread.
    pub fn crash(&self) {
        self.panicking.store(true, Ordering::SeqCst);
    }
}

/// A row of a lane: its token and the row that it follows.
#[derive(Clone, Copy, Debug)]
struct Row {
    token: TokenId,
    parent: Option<usize>,
}

/// A model without weights: its logits are a function of the context.
#[derive(Debug)]
pub struct Fake {
    config: ModelConfig,
    lanes: Vec<Option<Vec<Row>>>,
    controls: Controls,
    seed: u64,
}

impl Fake {
    /// A model with `vocabulary` token ids, whose last id ends a text.
    pub fn new(vocabulary: usize, context: usize, lanes: usize) -> Self {
        let eos = vec![vocabulary.saturating_sub(1) as TokenId];
        let config = ModelConfig { vocabulary, context, lanes, eos, proposes: 0 };
        Self { config, lanes: vec![None; lanes], controls: Controls::default(), seed: 0 }
    }

    /// The handle by which a test controls and observes it.
    pub fn controls(&self) -> Controls {
        self.controls.clone()
    }

    /// The logits after a text, without a cache.
    pub fn logits(&self, text: &[TokenId]) -> Vec<f32> {
        let tail = text.iter().rev().take(3);
        let key = tail.fold(self.seed, |key, &token| hash(key, 0, 0, token));
        (0..self.config.vocabulary as TokenId)
            .map(|token| (hash(key, 1, 0, token) >> 40) as f32 * 6e-7)
            .collect()
    }

    fn rows(&self, lane: Lane) -> Result<&Vec<Row>, ModelError> {
        let rows = self.lanes.get(lane.0).and_then(Option::as_ref);
        rows.ok_or_else(|| ModelError::Invalid(format!("no lane {}", lane.0)))
    }

    fn rows_mut(&mut self, lane: Lane) -> Result<&mut Vec<Row>, ModelError> {
        let rows = self.lanes.get_mut(lane.0).and_then(Option::as_mut);
        rows.ok_or_else(|| ModelError::Invalid(format!("no lane {}", lane.0)))
    }

    fn append(&mut self, feed: &Feed<'_>) -> Result<usize, ModelError> {
        let context = self.config.context;
        let rows = self.rows_mut(feed.lane)?;
        let base = rows.len();
        let wanted = base + feed.tokens.len();
        if wanted > context {
            return Err(ModelError::Full { wanted, context });
        }
        for (index, &token) in feed.tokens.iter().enumerate() {
            let within = match feed.parents {
                Some(parents) => parents.get(index).copied().flatten(),
                None => index.checked_sub(1),
            };
            let parent = within.map_or(base.checked_sub(1), |parent| Some(base + parent));
            rows.push(Row { token, parent });
        }
        Ok(base)
    }

    fn after(&self, lane: Lane, row: usize) -> Result<Vec<f32>, ModelError> {
        let rows = self.rows(lane)?;
        let mut text = Vec::new();
        let mut next = Some(row);
        while let Some(row) = next.and_then(|index| rows.get(index)) {
            text.push(row.token);
            next = row.parent;
        }
        text.reverse();
        Ok(self.logits(&text))
    }
}

impl Forward for Fake {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn reserve(&mut self) -> Option<Lane> {
        let index = self.lanes.iter().position(Option::is_none)?;
        *self.lanes.get_mut(index)? = Some(Vec::new());
        Some(Lane(index))
    }

    fn release(&mut self, lane: Lane) {
        if let Some(entry) = self.lanes.get_mut(lane.0) {
            *entry = None;
        }
    }

    fn len(&self, lane: Lane) -> usize {
        self.rows(lane).map_or(0, Vec::len)
    }

    fn rewind(&mut self, lane: Lane, len: usize) {
        if let Ok(rows) = self.rows_mut(lane) {
            rows.truncate(len);
        }
    }

    fn commit(&mut self, lane: Lane, base: usize, path: &[usize]) -> Result<(), ModelError> {
        let rows = self.rows_mut(lane)?;
        let mut branch = Vec::new();
        for (index, &node) in path.iter().enumerate() {
            let row = rows.get(base + node).ok_or_else(|| ModelError::Invalid(format!("no row {node}")))?;
            branch.push(Row { token: row.token, parent: (base + index).checked_sub(1) });
        }
        rows.truncate(base);
        rows.extend(branch);
        Ok(())
    }

    fn fork(&mut self, from: Lane, to: Lane, len: usize) -> Result<(), ModelError> {
        let copied: Vec<Row> = self.rows(from)?.iter().take(len).copied().collect();
        *self.rows_mut(to)? = copied;
        Ok(())
    }

    fn run(&mut self, feeds: &[Feed<'_>]) -> Result<Logits, ModelError> {
        self.controls.runs.fetch_add(1, Ordering::SeqCst);
        self.controls.paused.1.wait_while(&mut self.controls.paused.0.lock(), |paused| *paused);
        assert!(!self.controls.panicking.load(Ordering::SeqCst), "the fake model crashes on request");
        if self.controls.failing.load(Ordering::SeqCst) {
            return Err(ModelError::Runtime("the fake model fails on request".to_owned()));
        }
        let mut logits = Logits::new(self.config.vocabulary);
        for feed in feeds {
            self.controls.tokens.fetch_add(feed.tokens.len(), Ordering::SeqCst);
            let base = self.append(feed)?;
            let first = match feed.rows {
                Rows::None => feed.tokens.len(),
                Rows::Last => feed.tokens.len().saturating_sub(1),
                Rows::From(first) => first,
            };
            for index in first..feed.tokens.len() {
                logits.push_row(&self.after(feed.lane, base + index)?);
            }
            logits.end_feed();
        }
        Ok(logits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tree_feeds_commit_and_fork_follow_a_branch() {
        let mut fake = Fake::new(50, 100, 2);
        let (lane, other) = (fake.reserve().unwrap(), fake.reserve().unwrap());
        fake.run(&[Feed { lane, tokens: &[1, 2, 3], parents: None, rows: Rows::None, draft: None }]).unwrap();
        let parents = [None, Some(0), Some(0)];
        let tree =
            Feed { lane, tokens: &[4, 5, 6], parents: Some(&parents), rows: Rows::From(1), draft: None };
        let logits = fake.run(&[tree]).unwrap();
        assert_eq!(logits.row(0, 1).unwrap(), fake.logits(&[1, 2, 3, 4, 6]));
        fake.commit(lane, 3, &[0, 2]).unwrap();
        fake.fork(lane, other, 5).unwrap();
        let logits = fake
            .run(&[Feed { lane: other, tokens: &[7], parents: None, rows: Rows::Last, draft: None }])
            .unwrap();
        assert_eq!(logits.row(0, 0).unwrap(), fake.logits(&[1, 2, 3, 4, 6, 7]));
        assert_ne!(fake.logits(&[6, 7]), fake.logits(&[5, 7]));
    }
}
