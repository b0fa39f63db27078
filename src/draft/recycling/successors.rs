//! The table of likely successors: for each token that was seen, at most eight that may follow it.
//!
//! A successor takes 4 bytes: 24 bits of token and 8 of probability, so that a row is 8 words. Rows lie in pages that are
//! shared until one is written to: a table that is read by running requests while the next one is learnt is not copied
//! as a whole.

use std::collections::HashMap;
use std::sync::Arc;

use crate::units::TokenId;

/// Most successors of a token.
pub const WIDTH: usize = 8;

/// Rows of a page.
const PAGE: usize = 8;
/// What a page takes beside its rows, bytes: its counts, and its entry in the table of pages.
const PAGE_BYTES: usize = 40;

/// How often the successor at each place is the one that comes, where no probability is known: over the recorded texts, the
/// latest successors of a token first. (Ordered by how often they came, the first one is right as often.)
const RANKED: [f32; WIDTH] = [0.58, 0.13, 0.05, 0.025, 0.015, 0.01, 0.006, 0.005];

/// A successor. The low byte is 0 where there is none, 1 where its probability is not known, else one more than that in 254ths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Entry(u32);

impl Entry {
    const NONE: Self = Self(0);

    /// A successor of which only its place is known; none if the token has more than 24 bits.
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

    /// Its probability. One that was told as less than can be written is not known.
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
            let Some(place) = row.0.get_mut(filled) else { break };
            *place = entry;
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

    /// This row, with the successors of an older one behind. Probabilities of the older one count only beside none: those of
    /// one row are of one moment.
    #[must_use]
    pub fn before(self, older: Self) -> Self {
        let forgets = self.is_told();
        let behind = older.entries().map(|entry| if forgets { entry.without_p() } else { entry });
        Self::of(self.entries().chain(behind))
    }

    /// The successors, each with its probability: the one that was told, else what its place is worth.
    pub fn iter(&self) -> impl Iterator<Item = (TokenId, f32)> {
        self.entries().zip(RANKED).map(|(entry, ranked)| (entry.token(), entry.p().unwrap_or(ranked)))
    }
}

/// The successors of all tokens that were seen.
#[derive(Clone, Debug, Default)]
pub struct Successors {
    pages: HashMap<u32, Arc<Page>>,
    tokens: usize,
}

type Page = [Row; PAGE];

impl Successors {
    /// The successors of a token; none if it was never seen.
    pub fn row(&self, token: TokenId) -> Row {
        let (page, at) = place(token);
        self.pages.get(&page).and_then(|page| page.get(at)).copied().unwrap_or_default()
    }

    fn put(&mut self, token: TokenId, row: Row) {
        let (page, at) = place(token);
        let page = Arc::make_mut(self.pages.entry(page).or_default());
        let Some(known) = page.get_mut(at) else { return };
        self.tokens += usize::from(*known == Row::default() && row != Row::default());
        *known = row;
    }

    /// Learns that `next` has followed `token` in a text. Where the target has told what it thinks of `next` there, that
    /// stands.
    pub fn follows(&mut self, token: TokenId, next: TokenId) {
        let row = self.row(token);
        let known = row.entries().any(|entry| entry.token() == next && entry.p().is_some());
        if !known {
            self.put(token, Row::of(std::iter::once(Entry::seen(next)).chain(row.entries())));
        }
    }

    /// Learns what the target thinks may follow `token`, the most probable first.
    pub fn tell(&mut self, token: TokenId, top: &[(TokenId, f64)]) {
        let told = Row::of(top.iter().map(|&(next, p)| Entry::told(next, p)));
        if told != Row::default() {
            self.put(token, told.before(self.row(token)));
        }
    }

    /// Learns what a later request has learnt.
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

    /// Tokens whose successors are known.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Bytes that it takes.
    pub fn bytes(&self) -> usize {
        self.pages.len() * (size_of::<Page>() + PAGE_BYTES)
    }
}

/// Page and place in it.
fn place(token: TokenId) -> (u32, usize) {
    (token / PAGE as u32, token as usize % PAGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(table: &Successors, token: TokenId) -> Vec<TokenId> {
        table.row(token).iter().map(|(token, _)| token).collect()
    }

    #[test]
    fn of_what_was_seen_the_latest_comes_first_and_eight_are_kept() {
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
    fn what_the_target_told_stands_before_what_was_seen_and_is_not_moved_by_it() {
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
        assert!(table.row(1).iter().skip(1).all(|(_, share)| share < 0.2), "older ones only have a place");
        table.tell(1, &[]);
        assert_eq!(tokens(&table, 1)[0], 2, "nothing was told");
    }

    #[test]
    fn a_later_request_is_adopted_before_what_was_there_and_readers_keep_what_they_have() {
        let (mut shelf, mut request) = (Successors::default(), Successors::default());
        shelf.follows(1, 2);
        shelf.follows(100, 7);
        request.follows(1, 3);
        request.follows(u32::MAX, 1);
        let reader = shelf.clone();
        shelf.adopt(&request);
        assert_eq!((tokens(&shelf, 1), tokens(&shelf, 100)), (vec![3, 2], vec![7]));
        assert_eq!((tokens(&reader, 1), shelf.tokens()), (vec![2], 3));
        shelf.follows(1, 1 << 24);
        assert_eq!(tokens(&shelf, 1), [3, 2], "more than 24 bits are no token of any model");
    }
}
