//! Texts and purges on their way to the other sidecars of a fleet, and the keys whose texts this
//! one wants. The task of the store ([`crate::store`]) carries them; requests and the corpus thread
//! only leave them here.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;

use foretell_core::draft::corpus::{Key, Part};
use foretell_core::units::{Tick, TokenId};

/// Maximum number of tokens, and of texts, that wait for the store; the oldest texts are dropped.
const WAITING_TOKENS: usize = 1 << 20;
const WAITING: usize = 4_096;
/// Maximum number of new tokens of one text; a longer one goes in pieces.
pub const LONGEST: usize = 16 << 10;
/// Maximum number of keys whose texts are wanted, those that requests used last.
const WANTED: usize = 256;
/// Maximum number of purges that wait for the store.
const PURGES: usize = 1_024;

/// A part of a text for the corpora of other sidecars; see [`Part`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedText {
    /// Its key; it has a tenant.
    pub key: Key,
    /// The model's id: other sidecars may have other names for the backend.
    pub model: Arc<str>,
    /// Its tokens.
    pub ids: Vec<TokenId>,
    /// Number of tokens before the new ones.
    pub lead: usize,
    /// Hash of the text before the new ones.
    pub chain: u64,
}

/// A key whose texts are wanted from other sidecars.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Wanted {
    /// The key; it has a tenant.
    pub key: Key,
    /// The model's id.
    pub model: Arc<str>,
}

/// Whose texts are removed from the whole fleet: a tenant's, or all (`None`).
pub type Purge = Option<String>;

/// All that waits for the store.
#[derive(Debug, Default)]
pub struct Exchange {
    state: Mutex<State>,
    /// A purge waits.
    purges: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// The texts in the order in which they came, with their numbers.
    texts: VecDeque<(u64, SharedText)>,
    /// Number of texts so far.
    number: u64,
    /// Tokens of those that wait.
    tokens: usize,
    purges: VecDeque<Purge>,
    /// The id of each key's model, and when a request last used the key.
    wanted: HashMap<Key, (Arc<str>, Tick)>,
    /// Number of the other sidecars, and the cause of the last exchange's failure.
    others: usize,
    fault: Option<String>,
}

/// The steps of a purge in the fleet that are open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenPurge {
    /// The store has it.
    pub is_written: bool,
    /// Why the last exchange with the store failed.
    pub fault: Option<String>,
    /// Number of the other sidecars: each carries it out at its next exchange.
    pub others: usize,
}

impl State {
    /// Drops the oldest texts until the others may wait; returns their number.
    fn shrink(&mut self) -> u64 {
        let mut dropped = 0;
        while (self.tokens > WAITING_TOKENS || self.texts.len() > WAITING)
            && let Some((_, text)) = self.texts.pop_front()
        {
            self.tokens -= text.ids.len();
            dropped += 1;
        }
        dropped
    }

    /// Keeps those texts alone.
    fn retain(&mut self, keep: impl Fn(u64, &SharedText) -> bool) {
        self.texts.retain(|(number, text)| keep(*number, text));
        self.tokens = self.texts.iter().map(|(_, text)| text.ids.len()).sum();
    }
}

impl Exchange {
    /// Notes that a request whose policy shares texts uses this key.
    pub fn want(&self, key: &Key, model: &str, now: Tick) {
        let mut state = self.state.lock();
        if let Some((_, used)) = state.wanted.get_mut(key) {
            *used = now;
            return;
        }
        if state.wanted.len() >= WANTED
            && let Some(oldest) =
                state.wanted.iter().min_by_key(|(_, (_, used))| *used).map(|(key, _)| key.clone())
        {
            state.wanted.remove(&oldest);
        }
        state.wanted.insert(key.clone(), (model.into(), now));
    }

    /// The keys that a request has used within `ttl`.
    pub fn wanted(&self, now: Tick, ttl: Duration) -> Vec<Wanted> {
        let mut state = self.state.lock();
        state.wanted.retain(|_, (_, used)| now - *used <= ttl);
        let one = |(key, (model, _)): (&Key, &(Arc<str>, Tick))| Wanted {
            key: key.clone(),
            model: Arc::clone(model),
        };
        let mut wanted: Vec<Wanted> = state.wanted.iter().map(one).collect();
        wanted.sort_unstable();
        wanted
    }

    /// Leaves the new part of a text for the others; returns the number of texts that were dropped
    /// for it.
    pub fn give(&self, key: &Key, model: &Arc<str>, part: Part<'_>) -> u64 {
        let mut state = self.state.lock();
        for Part { ids, lead, chain } in part.pieces(LONGEST) {
            state.tokens += ids.len();
            let (key, model, ids) = (key.clone(), Arc::clone(model), ids.to_vec());
            let number = state.number;
            state.number += 1;
            state.texts.push_back((number, SharedText { key, model, ids, lead, chain }));
        }
        state.shrink()
    }

    /// The texts that wait, with their numbers, the oldest first. They wait until
    /// [`Self::written`].
    pub fn texts(&self) -> Vec<(u64, SharedText)> {
        self.state.lock().texts.iter().cloned().collect()
    }

    /// Removes the texts up to this number, which the store has taken.
    pub fn written(&self, last: u64) {
        self.state.lock().retain(|number, _| number > last);
    }

    /// Drops the texts of these tenants, or all, that wait.
    pub fn drop_texts(&self, purges: &[Purge]) {
        let all = purges.contains(&None);
        self.state.lock().retain(|_, text| !all && !purges.contains(&text.key.tenant));
    }

    /// Leaves a purge for the others. If too many wait, they become one of all texts.
    pub fn purge(&self, purge: Purge) {
        let mut state = self.state.lock();
        if state.purges.len() >= PURGES {
            state.purges.clear();
            state.purges.push_back(None);
        }
        state.purges.push_back(purge);
        drop(state);
        self.purges.notify_one();
    }

    /// Resolves once a purge was left.
    pub async fn purge_waits(&self) {
        self.purges.notified().await;
    }

    /// Takes the outcome of an exchange: the cause of its failure.
    pub fn exchanged(&self, fault: Option<String>) {
        self.state.lock().fault = fault;
    }

    /// Takes the number of other sidecars.
    pub fn note_others(&self, others: usize) {
        self.state.lock().others = others;
    }

    /// The steps of a purge that are open.
    pub fn open_steps(&self, purge: &Purge) -> OpenPurge {
        let state = self.state.lock();
        let is_written = !state.purges.contains(purge) && !state.purges.contains(&None);
        OpenPurge { is_written, fault: state.fault.clone(), others: state.others }
    }

    /// The purges that wait, the oldest first. They wait until [`Self::purged`].
    pub fn purges(&self) -> Vec<Purge> {
        self.state.lock().purges.iter().cloned().collect()
    }

    /// Removes the purges that the store has taken, if they are still the oldest ones.
    pub fn purged(&self, taken: &[Purge]) {
        let mut state = self.state.lock();
        if state.purges.iter().take(taken.len()).eq(taken) {
            state.purges.drain(..taken.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(tenant: &str) -> Key {
        Key { model: "b/m".to_owned(), vocabulary: "v".to_owned(), tenant: Some(tenant.to_owned()) }
    }

    fn give(exchange: &Exchange, tenant: &str, ids: &[TokenId]) -> u64 {
        exchange.give(&key(tenant), &"m".into(), Part { ids, lead: 0, chain: 7 })
    }

    #[test]
    fn texts_that_wait_are_bounded() {
        let exchange = Exchange::default();
        let long: Vec<TokenId> = (0..LONGEST as u32).collect();
        assert_eq!(give(&exchange, "a", &long), 0);
        let dropped: u64 = (0..100).map(|_| give(&exchange, "b", &long)).sum();
        assert_eq!(dropped, 101 - (WAITING_TOKENS / LONGEST) as u64);
        let texts = exchange.texts();
        assert!(texts.iter().all(|(_, text)| text.key == key("b") && text.ids == long));
        assert_eq!((texts.len(), exchange.texts().len()), (WAITING_TOKENS / LONGEST, texts.len()));
        give(&exchange, "c", &long);
        exchange.written(texts.last().unwrap().0);
        assert_eq!(exchange.texts().iter().map(|(_, text)| &text.key).collect::<Vec<_>>(), [&key("c")]);
        exchange.drop_texts(&[Some("c".to_owned())]);
        assert!(exchange.texts().is_empty());
        let dropped: u64 = (0..=WAITING).map(|_| give(&exchange, "d", &[1; 8])).sum();
        assert_eq!(dropped, 1);
        exchange.drop_texts(&[None]);
        assert!(exchange.texts().is_empty());
        let longer = [&long[..], &long[..100]].concat();
        give(&exchange, "a", &longer);
        let pieces: Vec<usize> =
            exchange.texts().iter().map(|(_, text)| text.ids.len() - text.lead).collect();
        assert_eq!(pieces, [LONGEST, 100]);
    }

    #[test]
    fn the_keys_used_last_are_wanted() {
        let exchange = Exchange::default();
        for number in 0..WANTED + 10 {
            exchange.want(&key(&number.to_string()), "m", Tick(number as u64));
        }
        let wanted = |now, ttl| {
            let wanted = exchange.wanted(now, ttl).into_iter();
            wanted.map(|wanted| wanted.key).collect::<Vec<Key>>()
        };
        let all = wanted(Tick(500), Duration::from_secs(1));
        assert!(all.len() == WANTED && !all.contains(&key("9")) && all.contains(&key("10")));
        assert_eq!(wanted(Tick(265), Duration::ZERO), [key("265")]);
    }

    #[test]
    fn a_purge_waits_until_the_store_has_it() {
        let exchange = Exchange::default();
        exchange.purge(Some("a".to_owned()));
        let first = exchange.purges();
        exchange.purge(Some("b".to_owned()));
        assert_eq!(exchange.purges().len(), 2);
        exchange.purged(&first);
        assert_eq!(exchange.purges(), [Some("b".to_owned())]);
        exchange.purged(&first);
        assert_eq!(exchange.purges().len(), 1, "another one");
        for _ in 0..PURGES {
            exchange.purge(Some("c".to_owned()));
        }
        assert_eq!(exchange.purges(), [None, Some("c".to_owned())], "too many: all");
    }
}
