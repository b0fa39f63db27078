//! What the corpora of a fleet give each other: texts for the others, the keys whose texts this one
//! wants, and purges. The task of the store ([`crate::store`]) carries them; requests and the
//! corpus thread only leave them here.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use parking_lot::Mutex;

use foretell_core::draft::corpus::Key;
use foretell_core::units::{Tick, TokenId};

/// Maximum number of tokens that wait for the store; the oldest texts are dropped.
const WAITING_TOKENS: usize = 1 << 20;
/// Maximum number of tokens of one text; its last ones are shared.
pub const LONGEST: usize = 16 << 10;
/// Maximum number of keys whose texts are wanted, those that requests used last.
const WANTED: usize = 256;
/// Maximum number of purges that wait for the store.
const PURGES: usize = 1_024;

/// A text for the corpora of other sidecars.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedText {
    /// Its key; it has a tenant.
    pub key: Key,
    /// The new part of the text.
    pub ids: Vec<TokenId>,
}

/// Whose texts are removed from the whole fleet: a tenant's, or all (`None`).
pub type Purge = Option<String>;

/// What waits for the store.
#[derive(Debug, Default)]
pub struct Exchange {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    texts: VecDeque<SharedText>,
    /// Tokens of these.
    tokens: usize,
    purges: VecDeque<Purge>,
    /// When a request last used each key.
    wanted: HashMap<Key, Tick>,
}

impl Exchange {
    /// Notes that a request whose policy shares texts uses this key.
    pub fn want(&self, key: &Key, now: Tick) {
        let mut state = self.state.lock();
        if let Some(used) = state.wanted.get_mut(key) {
            *used = now;
            return;
        }
        if state.wanted.len() >= WANTED
            && let Some(oldest) =
                state.wanted.iter().min_by_key(|(_, used)| **used).map(|(key, _)| key.clone())
        {
            state.wanted.remove(&oldest);
        }
        state.wanted.insert(key.clone(), now);
    }

    /// The keys that a request has used within `ttl`.
    pub fn wanted(&self, now: Tick, ttl: Duration) -> Vec<Key> {
        let mut state = self.state.lock();
        state.wanted.retain(|_, used| now - *used <= ttl);
        let mut keys: Vec<Key> = state.wanted.keys().cloned().collect();
        keys.sort_unstable();
        keys
    }

    /// Leaves a text for the others; returns the number of texts that were dropped for it.
    pub fn give(&self, key: &Key, ids: &[TokenId]) -> u64 {
        let last = ids.get(ids.len().saturating_sub(LONGEST)..).unwrap_or_default();
        let mut state = self.state.lock();
        state.tokens += last.len();
        state.texts.push_back(SharedText { key: key.clone(), ids: last.to_vec() });
        let mut dropped = 0;
        while state.tokens > WAITING_TOKENS
            && let Some(text) = state.texts.pop_front()
        {
            state.tokens -= text.ids.len();
            dropped += 1;
        }
        dropped
    }

    /// Takes the texts that wait.
    pub fn take(&self) -> Vec<SharedText> {
        let mut state = self.state.lock();
        state.tokens = 0;
        std::mem::take(&mut state.texts).into()
    }

    /// Drops the texts of a tenant, or all (`None`), that wait.
    pub fn drop_texts(&self, tenant: Option<&str>) {
        let mut state = self.state.lock();
        state.texts.retain(|text| tenant.is_some() && text.key.tenant.as_deref() != tenant);
        state.tokens = state.texts.iter().map(|text| text.ids.len()).sum();
    }

    /// Leaves a purge for the others. If too many wait, the oldest ones become one of all texts.
    pub fn purge(&self, purge: Purge) {
        let mut state = self.state.lock();
        if state.purges.len() >= PURGES {
            state.purges.clear();
            state.purges.push_back(None);
        }
        state.purges.push_back(purge);
    }

    /// The purges that wait, the oldest first. They wait until [`Self::purged`].
    pub fn purges(&self) -> Vec<Purge> {
        self.state.lock().purges.iter().cloned().collect()
    }

    /// Removes purges that the store has taken: the oldest `number` ones, if these are those.
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

    #[test]
    fn what_waits_is_bounded() {
        let exchange = Exchange::default();
        let long: Vec<TokenId> = (0..20_000).collect();
        assert_eq!(exchange.give(&key("a"), &long), 0);
        let dropped: u64 = (0..100).map(|_| exchange.give(&key("b"), &long)).sum();
        assert_eq!(dropped, 101 - (WAITING_TOKENS / LONGEST) as u64);
        exchange.drop_texts(Some("a"));
        let texts = exchange.take();
        assert!(texts.iter().all(|text| text.key == key("b") && text.ids == long[20_000 - LONGEST..]));
        assert_eq!((texts.len(), exchange.take().len()), (WAITING_TOKENS / LONGEST, 0));
        for number in 0..WANTED + 10 {
            exchange.want(&key(&number.to_string()), Tick(number as u64));
        }
        assert_eq!(exchange.wanted(Tick(500), Duration::from_secs(1)).len(), WANTED);
        assert!(!exchange.wanted(Tick(500), Duration::from_secs(1)).contains(&key("9")), "used longest ago");
        assert_eq!(exchange.wanted(Tick(265), Duration::ZERO), [key("265")]);
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
        assert_eq!(exchange.purges().len(), 1, "those were others");
        for _ in 0..PURGES {
            exchange.purge(Some("c".to_owned()));
        }
        assert_eq!(exchange.purges(), [None, Some("c".to_owned())], "too many: all");
    }
}
