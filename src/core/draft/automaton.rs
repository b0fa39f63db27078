//! A suffix automaton that grows by one token at a time, with the most recent end of every match.
//!
//! Why an automaton and not a table of n-grams: one structure serves every match length, costs O(1)
//! amortised per token, and the length of a match is known without trying lengths one after the
//! other. (Blumer et al. 1985; as a drafter: SAM-Decoding, arXiv 2411.10666.)
//!
//! The first edge of a state is stored in the state: most have no other, so nothing else is read.
//! The others are in one hash map, chained per state: a million small maps would cost more than
//! their contents.

use std::hash::{BuildHasherDefault, Hasher};

use hashbrown::HashMap;

use crate::units::{SplitMix64, TokenId};

const ROOT: u32 = 0;
const NONE: u32 = u32::MAX;

/// An earlier occurrence of the end of the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Match {
    /// Tokens that agree (counted up to the cap that the automaton was made with).
    pub len: u32,
    /// Index one past the earlier occurrence: the token there followed it.
    pub end: usize,
}

#[derive(Clone, Copy, Debug)]
struct AutomatonState {
    /// Length of the state's longest string, tokens.
    len: u32,
    link: u32,
    /// Token and target of the first edge; the target is [`NONE`] if there is none.
    token: TokenId,
    target: u32,
    /// The newest of the other edges, [`NONE`] if there is none.
    edge: u32,
    /// One past the most recent occurrence that the cursor has passed.
    end: u32,
}

impl AutomatonState {
    /// A state without edges.
    fn new(len: u32, link: u32, end: u32) -> Self {
        Self { len, link, token: 0, target: NONE, edge: NONE, end }
    }
}

#[derive(Clone, Copy, Debug)]
struct Edge {
    token: TokenId,
    target: u32,
    next: u32,
}

/// The automaton of all tokens pushed so far, with a cursor on the longest suffix that occurred
/// before.
#[derive(Debug)]
pub struct Automaton {
    text: Vec<TokenId>,
    states: Vec<AutomatonState>,
    edges: Vec<Edge>,
    index: HashMap<(u32, TokenId), u32, BuildHasherDefault<Mix>>,
    last: u32,
    cap: u32,
    cursor: u32,
    matched: u32,
    found: Option<Match>,
}

impl Automaton {
    /// An empty automaton; matches are counted up to `cap` tokens, at least 1.
    pub fn new(cap: u32) -> Self {
        Self {
            text: Vec::new(),
            states: vec![AutomatonState::new(0, NONE, 0)],
            edges: Vec::new(),
            index: HashMap::default(),
            last: ROOT,
            cap: cap.max(1),
            cursor: ROOT,
            matched: 0,
            found: None,
        }
    }

    /// Everything pushed so far.
    pub fn text(&self) -> &[TokenId] {
        &self.text
    }

    /// The most recent earlier occurrence of the longest suffix (up to the cap) that has one;
    /// `None` if not even the last token has occurred before.
    pub fn found(&self) -> Option<Match> {
        self.found
    }

    /// Adds one token. Texts of 2^31 tokens and more are not extended any further.
    pub fn push(&mut self, token: TokenId) {
        if self.text.len() >= (NONE / 2) as usize {
            return;
        }
        self.advance(token);
        self.extend(token);
        self.text.push(token);
        self.settle();
    }

    /// Moves the cursor along `token` before the automaton knows it, so every edge is an earlier
    /// text.
    fn advance(&mut self, token: TokenId) {
        loop {
            if let Some(next) = self.target(self.cursor, token) {
                self.cursor = next;
                self.matched += 1;
                return;
            }
            let state = self.state(self.cursor);
            if state.link == NONE {
                self.matched = 0;
                return;
            }
            self.cursor = state.link;
            self.matched = self.state(state.link).len;
        }
    }

    /// The textbook step: a new state, and at most one split.
    fn extend(&mut self, token: TokenId) {
        let end = self.text.len() as u32 + 1;
        let len = self.state(self.last).len + 1;
        let fresh = self.add(AutomatonState::new(len, ROOT, end));
        let mut at = self.last;
        while at != NONE && self.target(at, token).is_none() {
            self.connect(at, token, fresh);
            at = self.state(at).link;
        }
        if let Some(target) = self.target(at, token) {
            let link = self.split(at, token, target);
            self.set_link(fresh, link);
        }
        self.last = fresh;
    }

    /// The state of exactly the strings "`at` then `token`": `target` itself, or a split-off copy
    /// of it.
    fn split(&mut self, at: u32, token: TokenId, target: u32) -> u32 {
        let len = self.state(at).len + 1;
        let old = self.state(target);
        if old.len == len {
            return target;
        }
        let copy = self.add(AutomatonState { len, edge: NONE, ..old });
        let mut edge = old.edge;
        while let Some(&Edge { token, target, next }) = self.edges.get(edge as usize) {
            self.connect(copy, token, target);
            edge = next;
        }
        self.set_link(target, copy);
        let mut walker = at;
        while walker != NONE && self.target(walker, token) == Some(target) {
            self.redirect(walker, token, copy);
            walker = self.state(walker).link;
        }
        copy
    }

    /// After a step: limits the cursor to the cap and moves it to the right half of a split, reads
    /// the most recent end and writes the new one. Every ancestor has a shorter string, so at most
    /// `cap` are updated.
    fn settle(&mut self) {
        self.matched = self.matched.min(self.cap);
        loop {
            let state = self.state(self.cursor);
            if state.link == NONE || self.matched > self.state(state.link).len {
                break;
            }
            self.cursor = state.link;
        }
        let state = self.state(self.cursor);
        self.found = (self.matched > 0).then_some(Match { len: self.matched, end: state.end as usize });
        let now = self.text.len() as u32;
        let mut at = self.cursor;
        while at != ROOT && at != NONE {
            if let Some(state) = self.states.get_mut(at as usize) {
                state.end = now;
                at = state.link;
            }
        }
    }

    fn state(&self, at: u32) -> AutomatonState {
        self.states.get(at as usize).copied().unwrap_or(AutomatonState::new(0, NONE, 0))
    }

    fn add(&mut self, state: AutomatonState) -> u32 {
        self.states.push(state);
        self.states.len() as u32 - 1
    }

    fn set_link(&mut self, at: u32, link: u32) {
        if let Some(state) = self.states.get_mut(at as usize) {
            state.link = link;
        }
    }

    fn target(&self, at: u32, token: TokenId) -> Option<u32> {
        let state = self.states.get(at as usize)?;
        match (state.target, state.edge) {
            (NONE, _) => None,
            (target, _) if state.token == token => Some(target),
            (_, NONE) => None,
            _ => {
                let edge = self.index.get(&(at, token))?;
                self.edges.get(*edge as usize).map(|edge| edge.target)
            }
        }
    }

    /// Adds an edge for a token that has none there.
    fn connect(&mut self, at: u32, token: TokenId, target: u32) {
        let Some(state) = self.states.get_mut(at as usize) else { return };
        if state.target == NONE {
            state.token = token;
            state.target = target;
            return;
        }
        let id = self.edges.len() as u32;
        self.edges.push(Edge { token, target, next: state.edge });
        state.edge = id;
        self.index.insert((at, token), id);
    }

    fn redirect(&mut self, at: u32, token: TokenId, target: u32) {
        let Some(state) = self.states.get_mut(at as usize) else { return };
        if state.token == token {
            state.target = target;
        } else if let Some(edge) =
            self.index.get(&(at, token)).and_then(|&id| self.edges.get_mut(id as usize))
        {
            edge.target = target;
        }
    }

    pub fn heap_bytes(&self) -> usize {
        let table = self.index.allocation_size();
        let edges = self.edges.capacity() * size_of::<Edge>();
        self.text.capacity() * size_of::<TokenId>()
            + self.states.capacity() * size_of::<AutomatonState>()
            + edges
            + table
    }
}

/// A hasher for pairs of small numbers. The keys are states and token ids.
#[derive(Clone, Copy, Debug, Default)]
pub struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        SplitMix64::mix(self.0)
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(byte);
        }
    }

    fn write_u32(&mut self, value: u32) {
        self.0 = self.0.rotate_left(32) ^ u64::from(value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definition, by brute force: longest suffix up to `cap` with an earlier occurrence,
    /// latest end.
    fn by_hand(text: &[TokenId], cap: usize) -> Option<Match> {
        (1..=cap.min(text.len())).rev().find_map(|len| {
            let suffix = &text[text.len() - len..];
            (len..text.len())
                .rev()
                .find(|&end| &text[end - len..end] == suffix)
                .map(|end| Match { len: len as u32, end })
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        #[test]
        fn finds_the_longest_and_then_the_most_recent_match(
            text in proptest::collection::vec(0u32..4, 0..80),
            cap in 1u32..9,
        ) {
            let mut automaton = Automaton::new(cap);
            for (index, &token) in text.iter().enumerate() {
                automaton.push(token);
                prop_assert_eq!(automaton.found(), by_hand(&text[..=index], cap as usize));
            }
        }
    }

    /// Compares the accounted bytes with those of the same states, edges and tokens without
    /// reserve.
    #[test]
    fn the_accounted_bytes_are_the_allocated_ones() {
        let mut rng = crate::units::SplitMix64::new(1);
        let mut automaton = Automaton::new(8);
        assert_eq!(automaton.index.allocation_size(), 0);
        for at in 1..=40_000_usize {
            automaton.push(rng.below(if at % 3 == 0 { 4000 } else { 40 }) as TokenId);
            if at % 1000 != 0 {
                continue;
            }
            let Automaton { text, states, edges, index, .. } = &automaton;
            let held = size_of_val(&text[..]) + size_of_val(&states[..]) + size_of_val(&edges[..]);
            let reserved = 4 * text.capacity() + 24 * states.capacity() + 12 * edges.capacity();
            // The table: an entry and a control byte for each slot, of which at most seven in eight
            // are used.
            let (least, most) = (13 * index.capacity() * 8 / 7, 13 * (index.capacity() * 8 / 7 + 1) + 64);
            let table = automaton.heap_bytes() - reserved;
            assert!((least..=most).contains(&table), "{table} of {least} to {most}");
            assert!(held + 13 * index.len() <= automaton.heap_bytes());
            assert!(automaton.heap_bytes() <= 4 * (held + 13 * index.len()), "a vector doubles, a table too");
        }
    }

    #[test]
    fn grows_linearly_on_a_single_repeated_token() {
        let mut automaton = Automaton::new(8);
        (0..50_000).for_each(|_| automaton.push(7));
        assert!(automaton.states.len() <= 100_000 && automaton.edges.len() <= 150_000);
        assert_eq!(automaton.found(), Some(Match { len: 8, end: 49_999 }));
    }
}
