//! Memory over requests: the texts that `suffix` drafts from and the successors of `recycling`, kept apart by whose they are.
//!
//! A shelf holds the texts of one tenant with one model. Nothing is ever read from the shelf of another, and what is
//! learnt is what a backend has answered with success. A text whose beginning is known already (the next turn of a chat
//! has the whole chat before it) is kept only from where it is new; what it repeats counts as used.
//!
//! Bytes are bounded: the texts of the shelf that was used least recently go first, the oldest of them before the others.
//! A text that was not used for the time to live goes in any case. Successors are those of one epoch of an engine, for they
//! are what it said; they go behind the texts of their shelf, or when nothing was learnt of them for the time to live.
//!
//! PURE: the owner brings the time, and publishes the views. Everything is done by one thread, away from requests.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::Successors;
use super::suffix::{DEPTH, Segment, View};
use crate::units::{Dice, Tick, TokenId};

/// Tokens of a text that are recognised as one piece.
const CHUNK: usize = 128;
/// Shortest text that is worth keeping, tokens.
const SHORTEST: usize = 8;
/// A segment is merged with the one before it unless that is so many times as large: few segments are quick to ask, and
/// every token is sorted anew only so often.
const APART: usize = 8;
/// What a chunk and a document take beside their tokens, bytes: an entry of a hash table each.
const CHUNK_BYTES: usize = 40;
const DOCUMENT_BYTES: usize = 80;
/// What a shelf takes beside its texts, bytes: its key, its tables, the list of its segments.
const SHELF_BYTES: usize = 512;
/// What a table of successors takes beside its pages, bytes: its epoch and its entry.
const TABLE_BYTES: usize = 128;

/// Whose texts they are. A text is seen by requests with the same key only.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// Backend and model, as the operator calls them.
    pub model: String,
    /// Fingerprint of the vocabulary that the ids belong to.
    pub vocabulary: String,
    /// The tenant; `None` is what is shared by all whose policy says so.
    pub tenant: Option<String>,
}

/// How much is kept, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of all shelves together.
    pub bytes: usize,
    /// How long a text is kept that is not used.
    pub ttl: Duration,
}

/// What a shelf holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Holdings {
    /// Texts.
    pub texts: usize,
    /// Tokens of them.
    pub tokens: usize,
    /// Tokens whose successors are known.
    pub successors: usize,
    /// Bytes that they take with everything that is needed to find them.
    pub bytes: usize,
}

/// What has happened to texts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Events {
    /// Texts that were learnt, those that were known already not counted.
    pub learnt: u64,
    /// Texts that were known already, as a whole.
    pub known: u64,
    /// Texts that went because there was no room.
    pub evicted: u64,
    /// Texts that went because they were not used for too long.
    pub expired: u64,
}

/// The successors that a shelf holds, by the epoch of the engine that they were learnt of.
pub type Tables = HashMap<Arc<str>, Arc<Successors>>;

/// A text that is remembered.
#[derive(Clone, Copy, Debug)]
pub struct Text<'a> {
    /// The shelf that it lies on.
    pub key: &'a Key,
    /// The tenant whose request said it.
    pub owner: Option<&'a str>,
    /// How long it was not used.
    pub age: Duration,
    /// Its tokens.
    pub ids: &'a [TokenId],
}

/// All shelves.
#[derive(Debug)]
pub struct Memory {
    limits: Limits,
    shelves: HashMap<Key, Shelf>,
    /// Begins the hashes of texts: nobody outside can make two texts that have the same.
    salt: u64,
    next: u64,
    events: Events,
}

#[derive(Debug, Default)]
struct Shelf {
    /// The oldest first; mostly each is larger than the next.
    segments: Vec<Arc<Segment>>,
    documents: HashMap<u64, Document>,
    /// By the hash of a text from its beginning to the end of a chunk: the document that holds that chunk.
    chunks: HashMap<u64, u64>,
    /// By epoch: what was learnt of successors, and when it was last.
    tables: HashMap<Arc<str>, (Arc<Successors>, Tick)>,
    used: Tick,
}

#[derive(Clone, Debug)]
struct Document {
    used: Tick,
    tokens: usize,
    /// The tenant whose request said it, on a shelf that is shared; `None` if it had none.
    owner: Option<Arc<str>>,
}

impl Memory {
    /// An empty memory. `salt` is random, so that nobody outside can make a text that counts as another.
    pub fn new(limits: Limits, salt: u64) -> Self {
        Self { limits, shelves: HashMap::new(), salt, next: 0, events: Events::default() }
    }

    /// Learns a text that a request of the tenant `owner` said. True if the view of its key has changed.
    pub fn learn(&mut self, key: &Key, owner: Option<&Arc<str>>, text: &[TokenId], now: Tick) -> bool {
        if text.len() < SHORTEST || self.limits.bytes == 0 {
            return false;
        }
        let id = self.next;
        self.next += 1;
        let shelf = self.shelves.entry(key.clone()).or_default();
        shelf.used = shelf.used.max(now);
        let Some(new) = shelf.chunk(text, self.salt, id, now) else {
            self.events.known += 1;
            return false;
        };
        let document = Document { used: now, tokens: new.len(), owner: owner.cloned() };
        shelf.documents.insert(id, document);
        shelf.segments.push(Arc::new(Segment::build(&[(id, new)])));
        shelf.settle();
        self.events.learnt += 1;
        true
    }

    /// Learns the successors that a request has seen in an epoch of its engine. True if the shelf has changed.
    pub fn recycle(&mut self, key: &Key, epoch: &Arc<str>, seen: &Successors, now: Tick) -> bool {
        if seen.tokens() == 0 || self.limits.bytes == 0 {
            return false;
        }
        let shelf = self.shelves.entry(key.clone()).or_default();
        shelf.used = shelf.used.max(now);
        let (table, used) = shelf.tables.entry(Arc::clone(epoch)).or_default();
        Arc::make_mut(table).adopt(seen);
        *used = now;
        true
    }

    /// A request uses a shelf: it goes later than those that nobody uses.
    pub fn touch(&mut self, key: &Key, now: Tick) {
        if let Some(shelf) = self.shelves.get_mut(key) {
            shelf.used = shelf.used.max(now);
        }
    }

    /// Lets go of what is too old or finds no room in `most` bytes, which its limits bound; returns the keys whose views have
    /// changed.
    pub fn sweep(&mut self, most: usize, now: Tick) -> Vec<Key> {
        let most = most.min(self.limits.bytes);
        let mut changed: Vec<Key> = Vec::new();
        for (key, shelf) in &mut self.shelves {
            let tables = shelf.tables.len();
            shelf.tables.retain(|_, (_, used)| now - *used <= self.limits.ttl);
            let gone = shelf.expire(self.limits.ttl, now);
            if gone > 0 || shelf.tables.len() < tables {
                self.events.expired += gone;
                changed.push(key.clone());
            }
        }
        while self.bytes() > most {
            let oldest = self.shelves.iter().min_by_key(|(key, shelf)| (shelf.used, *key));
            let Some(key) = oldest.map(|(key, _)| key.clone()) else { break };
            let over = self.bytes() - most;
            if let Some(shelf) = self.shelves.get_mut(&key) {
                self.events.evicted += shelf.shrink(over);
            }
            self.shelves.retain(|_, shelf| !shelf.is_empty());
            changed.push(key);
        }
        self.shelves.retain(|_, shelf| !shelf.is_empty());
        changed.sort_unstable();
        changed.dedup();
        changed
    }

    /// Forgets a tenant, what it said on shared shelves included, or everybody (`None`); returns the keys whose views have
    /// changed.
    pub fn clear(&mut self, tenant: Option<&str>) -> Vec<Key> {
        let mut changed = Vec::new();
        for (key, shelf) in &mut self.shelves {
            let whole = tenant.is_none() || key.tenant.as_deref() == tenant;
            let is_meant = |document: &Document| whole || document.owner.as_deref() == tenant;
            let gone: Vec<u64> =
                shelf.documents.iter().filter(|(_, held)| is_meant(held)).map(|(&id, _)| id).collect();
            let tables = if whole { std::mem::take(&mut shelf.tables).len() } else { 0 };
            if !gone.is_empty() || tables > 0 {
                shelf.forget(&gone);
                changed.push(key.clone());
            }
        }
        self.shelves.retain(|_, shelf| !shelf.is_empty());
        changed
    }

    /// The texts of a key.
    pub fn view(&self, key: &Key) -> View {
        self.shelves.get(key).map_or_else(View::default, |shelf| shelf.segments.iter().cloned().collect())
    }

    /// The successors of a key, by epoch.
    pub fn tables(&self, key: &Key) -> Tables {
        let tables = self.shelves.get(key).into_iter().flat_map(|shelf| &shelf.tables);
        tables.map(|(epoch, (table, _))| (Arc::clone(epoch), Arc::clone(table))).collect()
    }

    /// The keys, and what each shelf holds.
    pub fn holdings(&self) -> impl Iterator<Item = (&Key, Holdings)> {
        self.shelves.iter().map(|(key, shelf)| (key, shelf.holdings()))
    }

    /// Bytes of all shelves together.
    pub fn bytes(&self) -> usize {
        self.shelves.values().map(|shelf| shelf.holdings().bytes).sum()
    }

    /// What has happened so far.
    pub fn events(&self) -> Events {
        self.events
    }

    /// Every text, for a snapshot; the oldest first.
    pub fn texts(&self, now: Tick) -> Vec<Text<'_>> {
        let mut texts: Vec<Text<'_>> = Vec::new();
        for (key, shelf) in &self.shelves {
            for (id, text) in shelf.segments.iter().flat_map(|segment| segment.documents()) {
                texts.extend(shelf.documents.get(&id).map(|document| Text {
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

impl Shelf {
    /// Notes the chunks of a text. Those that are known from its beginning on are used; what follows them is what is to be
    /// kept, with the context that it is found by. `None` if nothing is new.
    fn chunk<'a>(&mut self, text: &'a [TokenId], salt: u64, id: u64, now: Tick) -> Option<&'a [TokenId]> {
        let (mut hash, mut known, mut all_known) = (salt, 0, true);
        for chunk in text.chunks(CHUNK) {
            hash = chunk
                .iter()
                .fold(hash ^ chunk.len() as u64, |hash, &token| Dice::mix(hash ^ u64::from(token)));
            let holder = self.chunks.get(&hash).and_then(|holder| self.documents.get_mut(holder));
            if let Some(document) = holder.filter(|_| all_known) {
                document.used = document.used.max(now);
                known += chunk.len();
            } else {
                all_known = false;
                self.chunks.insert(hash, id);
            }
        }
        let new = text.get(known..).filter(|new| !new.is_empty())?;
        let from = text.len() - new.len();
        text.get(from.saturating_sub(DEPTH)..)
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
        let stale: Vec<u64> =
            self.documents.iter().filter(|(_, held)| now - held.used > ttl).map(|(&id, _)| id).collect();
        self.forget(&stale);
        stale.len() as u64
    }

    fn is_empty(&self) -> bool {
        self.documents.is_empty() && self.tables.is_empty()
    }

    /// Lets go of the texts that were used least recently, until so many bytes are free or nothing is left; of the successors,
    /// which are few bytes for what they bring, where there is no text.
    fn shrink(&mut self, bytes: usize) -> u64 {
        if self.documents.is_empty() {
            self.tables.clear();
            return 0;
        }
        let mut held: Vec<(Tick, u64, usize)> =
            self.documents.iter().map(|(&id, held)| (held.used, id, held.tokens)).collect();
        held.sort_unstable();
        let whole = self.holdings();
        let each = (whole.bytes / whole.tokens.max(1)).max(1);
        // A tenth more than needed, so that not every text that is learnt costs a merge of all.
        let wanted = bytes + whole.bytes / 10;
        let mut freed = 0;
        let fits = |&(_, _, tokens): &(Tick, u64, usize)| {
            let wants = freed < wanted;
            freed += tokens * each;
            wants
        };
        let gone: Vec<u64> = held.into_iter().take_while(fits).map(|(_, id, _)| id).collect();
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
                let kept = segment.documents().filter(|(id, _)| documents.contains_key(id)).count();
                match kept {
                    0 => None,
                    kept if kept == segment.documents().len() => Some(segment),
                    _ => Some(Arc::new(Segment::merge(&[&segment], |id| documents.contains_key(&id)))),
                }
            })
            .collect();
        self.settle();
    }

    fn holdings(&self) -> Holdings {
        let tables = || self.tables.values().map(|(table, _)| table);
        let segments: usize = self.segments.iter().map(|segment| segment.bytes()).sum();
        Holdings {
            texts: self.documents.len(),
            tokens: self.segments.iter().map(|segment| segment.tokens()).sum(),
            successors: tables().map(|table| table.tokens()).sum(),
            bytes: SHELF_BYTES
                + segments
                + self.chunks.len() * CHUNK_BYTES
                + self.documents.len() * DOCUMENT_BYTES
                + tables().map(|table| table.bytes() + TABLE_BYTES).sum::<usize>(),
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

    fn memory(bytes: usize) -> Memory {
        Memory::new(Limits { bytes, ttl: HOUR }, 7)
    }

    /// A text that no other number has a token of.
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
    fn a_tenant_finds_its_own_texts_and_nobody_elses() {
        let mut memory = memory(1 << 20);
        assert!(memory.learn(&key("a"), None, &text(1, 40), minutes(0)));
        assert!(memory.learn(&key("b"), None, &text(2, 40), minutes(0)));
        let (one, other) = (text(1, 8), text(2, 8));
        assert_eq!(
            (next(&memory.view(&key("a")), &one), next(&memory.view(&key("b")), &one)),
            (Some(10_008), None)
        );
        assert_eq!(
            (next(&memory.view(&key("a")), &other), next(&memory.view(&key("c")), &one)),
            (None, None)
        );
        let elsewhere = Key { vocabulary: "w".to_owned(), ..key("a") };
        assert!(memory.view(&elsewhere).is_empty(), "other ids mean other words");
        assert_eq!(memory.clear(Some("a")), [key("a")]);
        assert_eq!((next(&memory.view(&key("a")), &one), memory.holdings().count()), (None, 1));
    }

    #[test]
    fn what_is_known_is_not_kept_twice_and_counts_as_used() {
        let mut memory = memory(1 << 20);
        let whole = text(1, 1_000);
        assert!(memory.learn(&key("a"), None, &whole, minutes(0)));
        let once = memory.bytes();
        assert!(!memory.learn(&key("a"), None, &whole, minutes(50)), "nothing is new");
        let turn = [&whole[..], &text(2, 200)].concat();
        assert!(memory.learn(&key("a"), None, &turn, minutes(50)));
        assert!(memory.bytes() < once + once / 2, "only what is new, and a little before it");
        assert_eq!(next(&memory.view(&key("a")), &text(2, 9)), Some(20_009));
        assert_eq!(next(&memory.view(&key("a")), &whole[990..]), Some(20_000), "found across the border");
        assert_eq!(memory.events(), Events { learnt: 2, known: 1, ..Events::default() });
        assert!(memory.sweep(usize::MAX, minutes(100)).is_empty(), "used 50 minutes ago");
        assert_eq!((memory.sweep(usize::MAX, minutes(111)), memory.bytes()), (vec![key("a")], 0));
        assert_eq!(memory.events().expired, 2);
    }

    #[test]
    fn bytes_are_bounded_and_the_tenant_that_was_used_last_keeps_most() {
        let mut memory = memory(40_000);
        for round in 0..200 {
            memory.learn(&key("idle"), None, &text(round, 100), minutes(0));
            memory.sweep(usize::MAX, minutes(0));
            assert!(memory.bytes() <= 40_000);
        }
        for round in 200..400 {
            memory.learn(&key("busy"), None, &text(round, 100), minutes(1));
            memory.sweep(usize::MAX, minutes(1));
            assert!(memory.bytes() <= 40_000);
        }
        let held: Vec<&str> = memory.holdings().filter_map(|(key, _)| key.tenant.as_deref()).collect();
        assert_eq!(held, ["busy"]);
        assert_eq!(
            next(&memory.view(&key("busy")), &text(399, 9)),
            Some(3_990_009),
            "the last text is there"
        );
        assert!(memory.events().evicted > 300);
        assert!(!memory.learn(&key("busy"), None, &[1, 2, 3], minutes(1)), "too short to be worth it");
    }

    #[test]
    fn a_snapshot_brings_every_text_back_with_its_age() {
        let mut memory = memory(1 << 20);
        memory.learn(&key("a"), None, &text(1, 300), minutes(0));
        memory.learn(&key("b"), None, &text(2, 50), minutes(10));
        let texts = memory.texts(minutes(20));
        let ages: Vec<u64> = texts.iter().map(|text| text.age.as_secs() / 60).collect();
        assert_eq!((ages, texts[0].key, texts[1].ids.len()), (vec![20, 10], &key("a"), 50));
    }

    #[test]
    fn a_tenant_that_is_forgotten_is_forgotten_where_it_shared_as_well() {
        let mut memory = memory(1 << 20);
        let all = Key { tenant: None, ..key("") };
        for (owner, number) in [("a", 1), ("b", 2)] {
            memory.learn(&all, Some(&owner.into()), &text(number, 40), minutes(0));
        }
        assert_eq!(memory.clear(Some("a")), std::slice::from_ref(&all));
        let view = memory.view(&all);
        assert_eq!((next(&view, &text(1, 8)), next(&view, &text(2, 8))), (None, Some(20_008)));
        assert!(memory.sweep(0, minutes(0)) == [all] && memory.bytes() == 0, "no room at all");
    }

    /// Successors by which `token` is followed by `next`.
    fn pair(token: TokenId, next: TokenId) -> Successors {
        let mut seen = Successors::default();
        seen.follows(token, next);
        seen
    }

    /// The likeliest successor that a key's table of an epoch has for a token.
    fn successor(memory: &Memory, key: &Key, epoch: &str, token: TokenId) -> Option<TokenId> {
        memory.tables(key).get(epoch)?.row(token).iter().next().map(|(next, _)| next)
    }

    #[test]
    fn successors_are_those_of_a_tenant_and_an_epoch_and_go_with_them() {
        let mut memory = memory(1 << 20);
        let epochs: [Arc<str>; 2] = ["1".into(), "2".into()];
        assert!(memory.recycle(&key("a"), &epochs[0], &pair(1, 2), minutes(0)));
        assert!(memory.recycle(&key("a"), &epochs[1], &pair(1, 3), minutes(30)));
        assert!(memory.recycle(&key("b"), &epochs[0], &pair(1, 4), minutes(0)));
        assert!(
            !memory.recycle(&key("c"), &epochs[0], &Successors::default(), minutes(0)),
            "nothing was seen"
        );
        let first = |memory: &Memory, tenant, epoch| successor(memory, &key(tenant), epoch, 1);
        assert_eq!([first(&memory, "a", "1"), first(&memory, "a", "2")], [Some(2), Some(3)]);
        assert_eq!([first(&memory, "b", "1"), first(&memory, "c", "1")], [Some(4), None]);
        assert_eq!(memory.sweep(usize::MAX, minutes(70)), [key("a"), key("b")], "not learnt for an hour");
        assert_eq!([first(&memory, "a", "1"), first(&memory, "a", "2")], [None, Some(3)]);
        assert_eq!((memory.clear(Some("a")), memory.bytes()), (vec![key("a")], 0));
    }

    #[test]
    fn where_there_is_no_room_successors_go_behind_the_texts_of_their_tenant() {
        let mut memory = memory(1 << 20);
        memory.recycle(&key("a"), &"1".into(), &pair(1, 2), minutes(0));
        memory.learn(&key("a"), None, &text(1, 1_000), minutes(0));
        memory.recycle(&key("b"), &"1".into(), &pair(1, 3), minutes(1));
        memory.sweep(memory.bytes() - 1, minutes(1));
        assert_eq!((memory.events().evicted, successor(&memory, &key("a"), "1", 1)), (1, Some(2)));
        memory.sweep(memory.bytes() - 1, minutes(1));
        let first = ["a", "b"].map(|tenant| successor(&memory, &key(tenant), "1", 1));
        assert_eq!(first, [None, Some(3)], "who was there least recently");
    }
}
