//! The table of likely successors: at most eight for each token that was seen.
//!
//! A successor takes 4 bytes: 24 bits of token and 8 of probability, so a row is 8 words. Rows are
//! in pages with copy on write: a table that running requests read while the next one is learnt is
//! not copied as a whole.

use std::collections::HashMap;
use std::sync::Arc;

use crate::units::TokenId;

/// Maximum successors of a token.
pub const WIDTH: usize = 8;

/// Rows of a page.
const PAGE: usize = 8;
/// Bytes of a page in addition to its rows: its reference counts, and its entry in the table of
/// pages.
const PAGE_BYTES: usize = 40;

/// Frequency with which the successor at each rank is the next token, where no probability is
/// known: over the recorded texts, the latest successors of a token first. (Ordered by frequency,
/// the first one is right as often.)
const RANKED: [f32; WIDTH] = [0.58, 0.13, 0.05, 0.025, 0.015, 0.01, 0.006, 0.005];

/// A successor. The low byte is 0 where there is none, 1 where its probability is not known, else
/// one more than that in 254ths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Entry(u32);

impl Entry {
    const NONE: Self = Self(0);

    /// A successor of which only the rank is known; none if the token has more than 24 bits.
    fn seen(token: TokenId) -> Self {
        if token >> 24 == 0 { Self(token << 8 | 1) } else { Self::NONE }
    }

    /// A successor with its probability.
    fn told(token: TokenId, p: f64) -> Self {
        let p = (p.clamp(0.0, 1.0) * 254.0).round() as u32;
        if token >> 24 == 0 { Self(token << 8 | (p + 1)) } else { Self::NONE }
    }

    fn is_some(self) -> bool {
        self != Self::NONE
    }

    fn token(self) -> TokenId {
        self.0 >> 8
    }

    /// Its probability; `None` if it is not known, or was below half of 1/254.
    fn p(self) -> Option<f32> {
        (self.0 & 0xff).checked_sub(2).map(|more| (more + 1) as f32 / 254.0)
    }

    fn without_p(self) -> Self {
        if self.is_some() { Self::seen(self.token()) } else { self }
    }
}

/// The successors of one token, the likeliest first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Row([Entry; WIDTH]);

impl Row {
    fn of(entries: impl Iterator<Item = Entry>) -> Self {
        let mut row = Self::default();
        let mut filled = 0;
        for entry in entries.filter(|entry| entry.is_some()) {
            if row.entries().take(filled).any(|known| known.token() == entry.token()) {
                continue;
            }
            let Some(position) = row.0.get_mut(filled) else { break };
            *position = entry;
            filled += 1;
        }
        row
    }

    fn entries(&self) -> impl Iterator<Item = Entry> {
        self.0.iter().copied().filter(|entry| entry.is_some())
    }

    fn is_told(&self) -> bool {
        self.entries().any(|entry| entry.p().is_some())
    }

    /// This row, followed by the successors of an older one. Probabilities of the older row are
    /// kept only if this one has none: those of one row come from one result.
    #[must_use]
    pub fn before(self, older: Self) -> Self {
        let forgets = self.is_told();
        let behind = older.entries().map(|entry| if forgets { entry.without_p() } else { entry });
        Self::of(self.entries().chain(behind))
    }

    /// The successors, each with its probability, 0 to 1: the reported one, otherwise that of its
    /// rank.
    pub fn iter(&self) -> impl Iterator<Item = (TokenId, f32)> {
        self.entries().zip(RANKED).map(|(entry, ranked)| (entry.token(), entry.p().unwrap_or(ranked)))
    }
}

/// The successors of all tokens that were seen; successors with ids of more than 24 bits are left
/// out.
#[derive(Clone, Debug, Default)]
pub struct Successors {
    pages: HashMap<u32, Arc<Page>>,
    tokens: usize,
}

type Page = [Row; PAGE];

impl Successors {
    /// The successors of a token; none if it was never seen.
    pub fn row(&self, token: TokenId) -> Row {
        let (page, at) = position(token);
        self.pages.get(&page).and_then(|page| page.get(at)).copied().unwrap_or_default()
    }

    fn put(&mut self, token: TokenId, row: Row) {
        let (page, at) = position(token);
        let page = Arc::make_mut(self.pages.entry(page).or_default());
        let Some(known) = page.get_mut(at) else { return };
        self.tokens += usize::from(*known == Row::default() && row != Row::default());
        *known = row;
    }

    /// Learns that `next` has followed `token` in a text. If the target has reported a probability
    /// of `next` there, the row stays as it is.
    pub fn follows(&mut self, token: TokenId, next: TokenId) {
        let row = self.row(token);
        let known = row.entries().any(|entry| entry.token() == next && entry.p().is_some());
        if !known {
            self.put(token, Row::of(std::iter::once(Entry::seen(next)).chain(row.entries())));
        }
    }

    /// Learns the target's probabilities (0 to 1) of the tokens after `token`, the most probable
    /// first.
    pub fn tell(&mut self, token: TokenId, top: &[(TokenId, f64)]) {
        let told = Row::of(top.iter().map(|&(next, p)| Entry::told(next, p)));
        if told != Row::default() {
            self.put(token, told.before(self.row(token)));
        }
    }

    /// Adds the rows of a later request, whose successors come first.
    pub fn adopt(&mut self, newer: &Self) {
        for (token, row) in newer.rows() {
            self.put(token, row.before(self.row(token)));
        }
    }

    fn rows(&self) -> impl Iterator<Item = (TokenId, Row)> {
        let of_page = |(&page, rows): (&u32, &Arc<Page>)| {
            let rows: Page = **rows;
            rows.into_iter().enumerate().map(move |(at, row)| (page * PAGE as u32 + at as u32, row))
        };
        self.pages.iter().flat_map(of_page).filter(|(_, row)| *row != Row::default())
    }

    /// Number of tokens whose successors are known.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Bytes of the table.
    pub fn bytes(&self) -> usize {
        self.pages.len() * (size_of::<Page>() + PAGE_BYTES)
    }
}

/// Page and index in it.
fn position(token: TokenId) -> (u32, usize) {
    (token / PAGE as u32, token as usize % PAGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(table: &Successors, token: TokenId) -> Vec<TokenId> {
        table.row(token).iter().map(|(token, _)| token).collect()
    }

    #[test]
    fn the_latest_successor_comes_first_and_eight_are_kept() {
        let mut table = Successors::default();
        for next in [3, 4, 3, 5] {
            table.follows(1, next);
        }
        assert_eq!(tokens(&table, 1), [5, 3, 4]);
        assert_eq!(table.row(1).iter().map(|(_, share)| share).collect::<Vec<_>>(), RANKED[..3]);
        (10..30).for_each(|next| table.follows(1, next));
        assert_eq!(tokens(&table, 1), [29, 28, 27, 26, 25, 24, 23, 22]);
        assert_eq!((table.tokens(), tokens(&table, 2)), (1, vec![]));
        assert_eq!(table.bytes(), WIDTH * PAGE * 4 + PAGE_BYTES);
    }

    #[test]
    fn reported_successors_come_before_seen_ones_and_are_not_moved_by_them() {
        let mut table = Successors::default();
        for next in [8, 9] {
            table.follows(1, next);
        }
        table.tell(1, &[(5, 0.75), (6, 0.2), (9, 0.001)]);
        assert_eq!(tokens(&table, 1), [5, 6, 9, 8]);
        let shares: Vec<f32> = table.row(1).iter().map(|(_, share)| share).collect();
        assert!((shares[0] - 0.75).abs() < 0.003 && (shares[1] - 0.2).abs() < 0.003, "{shares:?}");
        table.follows(1, 6);
        assert_eq!(tokens(&table, 1), [5, 6, 9, 8], "its probability is known");
        table.follows(1, 7);
        assert_eq!(tokens(&table, 1), [7, 5, 6, 9, 8]);
        table.tell(1, &[(2, 1.0)]);
        assert_eq!(table.row(1).iter().map(|(token, _)| token).next(), Some(2));
        assert!(table.row(1).iter().skip(1).all(|(_, share)| share < 0.2), "older ones only have a rank");
        table.tell(1, &[]);
        assert_eq!(tokens(&table, 1)[0], 2, "nothing was reported");
    }

    #[test]
    fn a_later_request_is_adopted_first_and_readers_keep_their_copy() {
        let (mut table, mut request) = (Successors::default(), Successors::default());
        table.follows(1, 2);
        table.follows(100, 7);
        request.follows(1, 3);
        request.follows(u32::MAX, 1);
        let reader = table.clone();
        table.adopt(&request);
        assert_eq!((tokens(&table, 1), tokens(&table, 100)), (vec![3, 2], vec![7]));
        assert_eq!((tokens(&reader, 1), table.tokens()), (vec![2], 3));
        table.follows(1, 1 << 24);
        assert_eq!(tokens(&table, 1), [3, 2], "more than 24 bits are no token of any model");
    }
}
