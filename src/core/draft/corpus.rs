//! The corpus: texts of earlier requests that `suffix` drafts from, separated by tenant.
//!
//! An entry stores the texts of one tenant with one model. Nothing is ever read from another
//! tenant's texts, and only successful answers of a backend are learnt. A text whose beginning is
//! known already (the next turn of a chat begins with the complete chat) is stored only from its
//! first new token on; the repeated part counts as used.
//!
//! Bytes are bounded: the texts of the tenant that was used least recently are evicted first, the
//! oldest of them before the others. A text that was not used for the time to live expires in any
//! case.
//!
//! PURE: the owner passes the time, and publishes the views. One thread, separate from requests,
//! does all the work.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::suffix::{DEPTH, Segment, View};
use crate::units::{SplitMix64, Tick, TokenId};

/// Tokens per chunk, the unit in which known text is recognised.
const CHUNK: usize = 128;
/// Shortest text that is stored, tokens.
const SHORTEST: usize = 8;
/// A segment is merged with the one before it unless that one is at least this many times as large:
/// few segments are fast to query, and every token is sorted a second time only a few times.
const APART: usize = 8;
/// Bytes of a chunk and of a document in addition to their tokens: an entry of a hash table each.
const CHUNK_BYTES: usize = 40;
const DOCUMENT_BYTES: usize = 80;
/// Bytes of a tenant's entry in addition to its texts: its key and the list of its segments.
const TENANT_BYTES: usize = 512;

/// Owner of texts. A text is visible only to requests with the same key.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// Backend and model, by the operator's names.
    pub model: String,
    /// Fingerprint of the vocabulary that the ids belong to.
    pub vocabulary: String,
    /// The tenant; `None` for the texts shared by all tenants whose policy allows it.
    pub tenant: Option<String>,
}

/// Limits of size and age.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum bytes of all tenants' texts together.
    pub bytes: usize,
    /// Time to live of a text that is not used.
    pub ttl: Duration,
}

/// Sizes of a tenant's texts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Holdings {
    /// Number of texts.
    pub texts: usize,
    /// Tokens stored for these texts.
    pub tokens: usize,
    /// Bytes of all of them, their indexes included.
    pub bytes: usize,
}

/// Events of texts, counted since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Events {
    /// Texts that were learnt, without those that were known already.
    pub learnt: u64,
    /// Texts all of whose tokens were known already.
    pub known: u64,
    /// Texts that were evicted because there was no room.
    pub evicted: u64,
    /// Texts that expired because they were not used for too long.
    pub expired: u64,
}

#[derive(Clone, Copy, Debug)]
pub struct Text<'a> {
    /// The key that it is stored under.
    pub key: &'a Key,
    /// The tenant whose request it is from; `None` if it had none.
    pub owner: Option<&'a str>,
    /// Time since it was last used.
    pub age: Duration,
    pub ids: &'a [TokenId],
}

/// The hash of a text that goes on with this chunk.
fn extended(hash: u64, chunk: &[TokenId]) -> u64 {
    let begun = hash ^ chunk.len() as u64;
    chunk.iter().fold(begun, |hash, &token| SplitMix64::mix(hash ^ u64::from(token)))
}

/// The texts of all tenants.
#[derive(Debug)]
pub struct Corpus {
    limits: Limits,
    tenants: HashMap<Key, TenantTexts>,
    /// Initial value of the hashes of texts, so that no client can make two texts with the same
    /// hash.
    salt: u64,
    next: u64,
    events: Events,
}

#[derive(Debug, Default)]
struct TenantTexts {
    /// The oldest first; usually each is larger than the next.
    segments: Vec<Arc<Segment>>,
    documents: HashMap<u64, Document>,
    /// The document that contains a chunk, by the hash of the text from its beginning to the end of
    /// that chunk.
    chunks: HashMap<u64, u64>,
    used: Tick,
}

#[derive(Clone, Debug)]
struct Document {
    used: Tick,
    tokens: usize,
    /// The tenant whose request it is from, if the texts are shared; `None` if it had none.
    owner: Option<Arc<str>>,
}

impl Corpus {
    /// An empty corpus. `salt` is random, so that no client can make a text that is taken for
    /// another.
    pub fn new(limits: Limits, salt: u64) -> Self {
        Self { limits, tenants: HashMap::new(), salt, next: 0, events: Events::default() }
    }

    /// Learns a text from a request of the tenant `owner`; one of fewer than 8 tokens is ignored.
    /// True if the view of its key has changed.
    pub fn learn(&mut self, key: &Key, owner: Option<&Arc<str>>, text: &[TokenId], now: Tick) -> bool {
        if text.len() < SHORTEST || self.limits.bytes == 0 {
            return false;
        }
        let id = self.next;
        self.next += 1;
        let entry = self.tenants.entry(key.clone()).or_default();
        entry.used = entry.used.max(now);
        let Some(new) = entry.chunk(text, self.salt, id, now) else {
            self.events.known += 1;
            return false;
        };
        let document = Document { used: now, tokens: new.len(), owner: owner.cloned() };
        entry.documents.insert(id, document);
        entry.segments.push(Arc::new(Segment::build(&[(id, new)])));
        entry.settle();
        self.events.learnt += 1;
        true
    }

    /// Marks a tenant's texts as used by a request, so that they are evicted later.
    pub fn touch(&mut self, key: &Key, now: Tick) {
        if let Some(entry) = self.tenants.get_mut(key) {
            entry.used = entry.used.max(now);
        }
    }

    /// Removes texts that are too old or exceed `most` bytes (at most
    /// [`Limits::bytes`]); returns the keys whose views have changed.
    pub fn sweep(&mut self, most: usize, now: Tick) -> Vec<Key> {
        let most = most.min(self.limits.bytes);
        let mut changed: Vec<Key> = Vec::new();
        for (key, entry) in &mut self.tenants {
            let gone = entry.expire(self.limits.ttl, now);
            if gone > 0 {
                self.events.expired += gone;
                changed.push(key.clone());
            }
        }
        while self.bytes() > most {
            let oldest = self.tenants.iter().min_by_key(|(key, entry)| (entry.used, *key));
            let Some(key) = oldest.map(|(key, _)| key.clone()) else { break };
            let over = self.bytes() - most;
            if let Some(entry) = self.tenants.get_mut(&key) {
                self.events.evicted += entry.shrink(over);
            }
            self.tenants.retain(|_, entry| !entry.is_empty());
            changed.push(key);
        }
        self.tenants.retain(|_, entry| !entry.is_empty());
        changed.sort_unstable();
        changed.dedup();
        changed
    }

    /// Removes the texts of a tenant, the shared ones included, or of all tenants (`None`); returns
    /// the keys whose views have changed.
    pub fn clear(&mut self, tenant: Option<&str>) -> Vec<Key> {
        let mut changed = Vec::new();
        for (key, entry) in &mut self.tenants {
            let all = tenant.is_none() || key.tenant.as_deref() == tenant;
            let is_meant = |document: &Document| all || document.owner.as_deref() == tenant;
            let gone: Vec<u64> = entry
                .documents
                .iter()
                .filter(|(_, document)| is_meant(document))
                .map(|(&id, _)| id)
                .collect();
            if !gone.is_empty() {
                entry.forget(&gone);
                changed.push(key.clone());
            }
        }
        self.tenants.retain(|_, entry| !entry.is_empty());
        changed
    }

    /// The texts of a key; empty if it has none.
    pub fn view(&self, key: &Key) -> View {
        self.tenants.get(key).map_or_else(View::default, |entry| entry.segments.iter().cloned().collect())
    }

    /// The keys, each with its sizes.
    pub fn holdings(&self) -> impl Iterator<Item = (&Key, Holdings)> {
        self.tenants.iter().map(|(key, entry)| (key, entry.holdings()))
    }

    /// Bytes of all tenants' texts together.
    pub fn bytes(&self) -> usize {
        self.tenants.values().map(|entry| entry.holdings().bytes).sum()
    }

    /// The events since the start.
    pub fn events(&self) -> Events {
        self.events
    }

    /// Every text, for a snapshot; the oldest first.
    pub fn texts(&self, now: Tick) -> Vec<Text<'_>> {
        let mut texts: Vec<Text<'_>> = Vec::new();
        for (key, entry) in &self.tenants {
            for (id, text) in entry.segments.iter().flat_map(|segment| segment.documents()) {
                texts.extend(entry.documents.get(&id).map(|document| Text {
                    key,
                    owner: document.owner.as_deref(),
                    age: now - document.used,
                    ids: text,
                }));
            }
        }
        texts.sort_by_key(|text| std::cmp::Reverse(text.age));
        texts
    }
}

impl TenantTexts {
    /// Records the chunks of a text. Known ones at its beginning are marked as used; returns the
    /// rest, which is stored, with the [`DEPTH`] tokens before it, by which it is found. `None` if
    /// nothing is new.
    fn chunk<'a>(&mut self, text: &'a [TokenId], salt: u64, id: u64, now: Tick) -> Option<&'a [TokenId]> {
        let (mut hash, mut known, mut all_known) = (salt, 0, true);
        for chunk in text.chunks(CHUNK) {
            hash = extended(hash, chunk);
            let holder = self.chunks.get(&hash).and_then(|holder| self.documents.get_mut(holder));
            if let Some(document) = holder
                && all_known
            {
                document.used = document.used.max(now);
                known += chunk.len();
            } else {
                all_known = false;
                self.chunks.insert(hash, id);
            }
        }
        if known < text.len() { text.get(known.saturating_sub(DEPTH)..) } else { None }
    }

    /// Merges the last segments until each is much larger than the next.
    fn settle(&mut self) {
        while let [.., before, last] = self.segments.as_slice() {
            if before.tokens() >= APART * last.tokens() {
                return;
            }
            let merged = Segment::merge(&[before, last], |_| true);
            self.segments.truncate(self.segments.len() - 2);
            self.segments.push(Arc::new(merged));
        }
    }

    fn expire(&mut self, ttl: Duration, now: Tick) -> u64 {
        let stale: Vec<u64> = self
            .documents
            .iter()
            .filter(|(_, document)| now - document.used > ttl)
            .map(|(&id, _)| id)
            .collect();
        self.forget(&stale);
        stale.len() as u64
    }

    fn is_empty(&self) -> bool {
        self.documents.is_empty()
    }

    /// Evicts the texts that were used least recently, until `bytes` bytes are free or no text
    /// remains.
    fn shrink(&mut self, bytes: usize) -> u64 {
        let mut by_age: Vec<(Tick, u64, usize)> =
            self.documents.iter().map(|(&id, document)| (document.used, id, document.tokens)).collect();
        by_age.sort_unstable();
        let total = self.holdings();
        let each = (total.bytes / total.tokens.max(1)).max(1);
        // A tenth more than needed, so that not every new text costs a merge of all segments.
        let wanted = bytes + total.bytes / 10;
        let mut freed = 0;
        let fits = |&(_, _, tokens): &(Tick, u64, usize)| {
            let wants = freed < wanted;
            freed += tokens * each;
            wants
        };
        let gone: Vec<u64> = by_age.into_iter().take_while(fits).map(|(_, id, _)| id).collect();
        self.forget(&gone);
        gone.len() as u64
    }

    fn forget(&mut self, ids: &[u64]) {
        if ids.is_empty() {
            return;
        }
        for id in ids {
            self.documents.remove(id);
        }
        let documents = &self.documents;
        self.chunks.retain(|_, holder| documents.contains_key(holder));
        self.segments = std::mem::take(&mut self.segments)
            .into_iter()
            .filter_map(|segment| {
                let retained = segment.documents().filter(|(id, _)| documents.contains_key(id)).count();
                match retained {
                    0 => None,
                    count if count == segment.documents().len() => Some(segment),
                    _ => Some(Arc::new(Segment::merge(&[&segment], |id| documents.contains_key(&id)))),
                }
            })
            .collect();
        self.settle();
    }

    fn holdings(&self) -> Holdings {
        let segments: usize = self.segments.iter().map(|segment| segment.bytes()).sum();
        Holdings {
            texts: self.documents.len(),
            tokens: self.segments.iter().map(|segment| segment.tokens()).sum(),
            bytes: TENANT_BYTES
                + segments
                + self.chunks.len() * CHUNK_BYTES
                + self.documents.len() * DOCUMENT_BYTES,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draft::suffix::{Finder, Rules, Shape};

    const HOUR: Duration = Duration::from_hours(1);

    fn key(tenant: &str) -> Key {
        Key { model: "m".to_owned(), vocabulary: "v".to_owned(), tenant: Some(tenant.to_owned()) }
    }

    fn corpus(bytes: usize) -> Corpus {
        Corpus::new(Limits { bytes, ttl: HOUR }, 7)
    }

    /// A text whose tokens are in no text of another number.
    fn text(number: u32, len: u32) -> Vec<TokenId> {
        (0..len).map(|at| number * 10_000 + at).collect()
    }

    fn minutes(minutes: u64) -> Tick {
        Tick::default().after(Duration::from_mins(minutes))
    }

    fn next(view: &View, context: &[TokenId]) -> Option<TokenId> {
        let finder = Finder::new(view.iter().map(|segment| segment.source()), context);
        finder.draft(&Rules::default(), Shape::Path).and_then(|draft| Some(draft.nodes.first()?.token))
    }

    #[test]
    fn a_tenant_finds_its_own_texts_only() {
        let mut corpus = corpus(1 << 20);
        let first = text(1, 40);
        assert!(corpus.learn(&key("a"), None, &first, minutes(0)));
        assert_eq!(corpus.texts(minutes(0))[0].ids, first);
        assert!(corpus.learn(&key("b"), None, &text(2, 40), minutes(0)));
        let (one, other) = (text(1, 8), text(2, 8));
        assert_eq!(
            (next(&corpus.view(&key("a")), &one), next(&corpus.view(&key("b")), &one)),
            (Some(10_008), None)
        );
        assert_eq!(
            (next(&corpus.view(&key("a")), &other), next(&corpus.view(&key("c")), &one)),
            (None, None)
        );
        let elsewhere = Key { vocabulary: "w".to_owned(), ..key("a") };
        assert!(corpus.view(&elsewhere).is_empty(), "the ids of another vocabulary mean other texts");
        assert_eq!(corpus.clear(Some("a")), [key("a")]);
        assert_eq!((next(&corpus.view(&key("a")), &one), corpus.holdings().count()), (None, 1));
    }

    #[test]
    fn known_text_is_not_kept_twice_and_counts_as_used() {
        let mut corpus = corpus(1 << 20);
        let whole = text(1, 1_000);
        assert!(corpus.learn(&key("a"), None, &whole, minutes(0)));
        let once = corpus.bytes();
        assert!(!corpus.learn(&key("a"), None, &whole, minutes(50)), "nothing is new");
        let turn = [&whole[..], &text(2, 200)].concat();
        // 7 whole chunks of 128 tokens are known, and the tokens before the new ones lead to them.
        assert!(corpus.learn(&key("a"), None, &turn, minutes(50)));
        let kept: Vec<&[TokenId]> = corpus.texts(minutes(50)).iter().map(|text| text.ids).collect();
        assert_eq!(kept, [&whole[..], &turn[7 * CHUNK - DEPTH..]]);
        assert!(corpus.bytes() < once + once / 2, "only what is new, and a little before it");
        assert_eq!(next(&corpus.view(&key("a")), &text(2, 9)), Some(20_009));
        assert_eq!(next(&corpus.view(&key("a")), &whole[990..]), Some(20_000), "found across the border");
        assert_eq!(corpus.events(), Events { learnt: 2, known: 1, ..Events::default() });
        assert!(corpus.sweep(usize::MAX, minutes(100)).is_empty(), "used 50 minutes ago");
        assert_eq!((corpus.sweep(usize::MAX, minutes(111)), corpus.bytes()), (vec![key("a")], 0));
        assert_eq!(corpus.events().expired, 2);
    }

    #[test]
    fn bytes_are_bounded_and_the_tenant_used_last_keeps_its_texts() {
        let mut corpus = corpus(40_000);
        for round in 0..200 {
            corpus.learn(&key("idle"), None, &text(round, 100), minutes(0));
            corpus.sweep(usize::MAX, minutes(0));
            assert!(corpus.bytes() <= 40_000);
        }
        for round in 200..400 {
            corpus.learn(&key("busy"), None, &text(round, 100), minutes(1));
            corpus.sweep(usize::MAX, minutes(1));
            assert!(corpus.bytes() <= 40_000);
        }
        let held: Vec<&str> = corpus.holdings().filter_map(|(key, _)| key.tenant.as_deref()).collect();
        assert_eq!(held, ["busy"]);
        assert_eq!(
            next(&corpus.view(&key("busy")), &text(399, 9)),
            Some(3_990_009),
            "the last text is there"
        );
        assert!(corpus.events().evicted > 300);
        assert!(!corpus.learn(&key("busy"), None, &[1, 2, 3], minutes(1)), "too short to be worth it");
    }

    #[test]
    fn a_snapshot_brings_every_text_back_with_its_age() {
        let mut corpus = corpus(1 << 20);
        corpus.learn(&key("a"), None, &text(1, 300), minutes(0));
        corpus.learn(&key("b"), None, &text(2, 50), minutes(10));
        let texts = corpus.texts(minutes(20));
        let ages: Vec<u64> = texts.iter().map(|text| text.age.as_secs() / 60).collect();
        assert_eq!((ages, texts[0].key, texts[1].ids.len()), (vec![20, 10], &key("a"), 50));
    }

    #[test]
    fn clearing_a_tenant_removes_its_shared_texts_too() {
        let mut corpus = corpus(1 << 20);
        let all = Key { tenant: None, ..key("") };
        for (owner, number) in [("a", 1), ("b", 2)] {
            corpus.learn(&all, Some(&owner.into()), &text(number, 40), minutes(0));
        }
        assert_eq!(corpus.clear(Some("a")), std::slice::from_ref(&all));
        let view = corpus.view(&all);
        assert_eq!((next(&view, &text(1, 8)), next(&view, &text(2, 8))), (None, Some(20_008)));
        assert!(corpus.sweep(0, minutes(0)) == [all] && corpus.bytes() == 0, "no room at all");
    }
}
