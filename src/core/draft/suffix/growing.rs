//! One text that grows token by token: the prompt and the output of one session.
//!
//! It has sorted runs, each several times as large as the next, and after them an unsorted tail
//! that is read token by token. All of them refer to one text, so a context continues across their
//! borders. The amortised cost of a token, merging included, is logarithmic in the length.

use super::TokenId;
use super::find::Finder;
use super::locate::Source;
use super::order::{self, Run};

/// Tokens that may stay unsorted.
const TAIL: usize = 128;
/// The same while nobody calls [`Growing::tidy`]: queries of a long tail are slow.
const LONGEST_TAIL: usize = 4 * TAIL;
/// Longer texts are not extended: a position is a `u32`.
const LIMIT: usize = u32::MAX as usize - 1;

/// The positions between the end of the run before and `end`, sorted.
#[derive(Clone, Debug)]
struct Piece {
    end: usize,
    run: Run,
}

/// The text so far and the order of its positions.
#[derive(Clone, Debug, Default)]
pub struct Growing {
    text: Vec<TokenId>,
    pieces: Vec<Piece>,
}

impl Growing {
    /// An empty text.
    pub fn new() -> Self {
        Self::default()
    }

    /// Everything added so far.
    pub fn text(&self) -> &[TokenId] {
        &self.text
    }

    /// Adds tokens; faster than one by one. Tokens beyond 2^32 are ignored.
    pub fn extend(&mut self, tokens: &[TokenId]) {
        let room = LIMIT.saturating_sub(self.text.len());
        self.text.extend_from_slice(tokens.get(..room).unwrap_or(tokens));
        if self.unsorted() > LONGEST_TAIL {
            self.sort();
        }
    }

    /// Sorts what was added, if that is much: a sort and its merges may take milliseconds, so this
    /// is called where nobody waits. True if it did something.
    pub fn tidy(&mut self) -> bool {
        let is_due = self.unsorted() > TAIL;
        if is_due {
            self.sort();
        }
        is_due
    }

    /// The sources for a [`Finder`], the oldest first.
    pub fn sources(&self) -> impl Iterator<Item = Source<'_>> {
        let sorted = self.pieces.iter().map(|piece| Source::sorted(&self.text, &piece.run));
        sorted.chain([Source::tail(&self.text, self.sorted()..self.text.len())])
    }

    /// Looks up earlier occurrences of the end of this text.
    pub fn finder(&self) -> Finder<'_> {
        Finder::new(self.sources(), &self.text)
    }

    /// Bytes of the text and its runs, this value included.
    pub fn bytes(&self) -> usize {
        let text = self.text.capacity() * size_of::<TokenId>();
        let pieces = self.pieces.capacity() * size_of::<Piece>();
        let runs: usize = self.pieces.iter().map(|piece| piece.run.bytes()).sum();
        size_of::<Self>() + text + pieces + runs
    }

    fn unsorted(&self) -> usize {
        self.text.len() - self.sorted()
    }

    /// Positions before this one are sorted.
    fn sorted(&self) -> usize {
        self.pieces.last().map_or(0, |piece| piece.end)
    }

    /// Sorts the tail and merges it with the runs that are at most four times as large: few runs
    /// are fast to query.
    fn sort(&mut self) {
        let mut order = order::sorted(&self.text, self.sorted()..self.text.len());
        while let Some(piece) = self.pieces.pop_if(|piece| piece.run.order.len() <= 4 * order.len()) {
            order = order::merged(&self.text, &[&piece.run.order, &order]).into_owned();
        }
        self.pieces.push(Piece { end: self.text.len(), run: Run::new(&self.text, order) });
    }
}

#[cfg(test)]
mod tests {
    use super::super::brute::{self, Occurrence};
    use super::super::{MANY, Rules, Shape};
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Debug)]
    enum Step {
        Push(TokenId),
        Extend(Vec<TokenId>),
        Tidy,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            3 => (0_u32..3).prop_map(Step::Push),
            3 => brute::texts(300).prop_map(Step::Extend),
            2 => Just(Step::Tidy),
        ];
        prop::collection::vec(step, 1..12)
    }

    /// The positions as the pieces hold them, by brute force.
    fn sources(growing: &Growing) -> Vec<Vec<Occurrence>> {
        let all = brute::occurrences(growing.text());
        let ends = growing.pieces.iter().map(|piece| piece.end);
        let borders: Vec<usize> = [0].into_iter().chain(ends).chain([growing.text.len()]).collect();
        let within = |ends: &[usize]| -> Vec<Occurrence> {
            all.iter().filter(|found| (ends[0]..ends[1]).contains(&found.position)).cloned().collect()
        };
        let mut sources: Vec<_> = borders.windows(2).map(within).collect();
        let tail = sources.pop().unwrap();
        sources.push(brute::by_agreement(tail, growing.text()));
        sources
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(50))]

        #[test]
        fn finds_in_its_own_text_whatever_its_history(steps in steps()) {
            let (mut growing, mut text) = (Growing::new(), Vec::new());
            for step in steps {
                match step {
                    Step::Push(token) => {
                        growing.extend(&[token]);
                        text.push(token);
                    }
                    Step::Extend(tokens) => {
                        growing.extend(&tokens);
                        text.extend(tokens);
                    }
                    Step::Tidy => {
                        growing.tidy();
                        prop_assert!(growing.unsorted() <= TAIL);
                    }
                }
                prop_assert_eq!(growing.text(), &text[..]);
                prop_assert!(growing.unsorted() <= LONGEST_TAIL);
                let orders = growing.pieces.iter().flat_map(|piece| &*piece.run.order);
                let in_tail = |found: &&Occurrence| found.position >= growing.sorted();
                let all = brute::occurrences(&text);
                prop_assert_eq!(orders.count() + all.iter().filter(in_tail).count(), all.len());
            }
            let whole = [brute::occurrences(&text)];
            for shape in [Shape::Path, Shape::Tree] {
                let draft = growing.finder().draft(&Rules::default(), shape);
                let expected = brute::best(&sources(&growing), &text, &Rules::default(), shape);
                prop_assert_eq!(&draft, &expected);
                // Where all positions are read, the number of pieces makes no difference.
                let lengths = brute::lengths(&whole, &text);
                prop_assert_eq!(growing.finder().match_len(), lengths.first().copied().unwrap_or(0));
                if lengths.iter().all(|&len| brute::agreeing(&whole[0], &text, len).len() <= MANY) {
                    prop_assert_eq!(draft, brute::best(&whole, &text, &Rules::default(), shape));
                }
            }
        }
    }

    #[test]
    fn the_end_is_not_its_own_match() {
        let mut growing = Growing::new();
        growing.extend(&[1, 2, 3]);
        assert_eq!(growing.finder().match_len(), 0);
        growing.extend(&[9, 1, 2, 3]);
        let draft = growing.finder().draft(&Rules::default(), Shape::Path).unwrap();
        assert_eq!((draft.match_len, draft.positions, draft.nodes[0].token), (3, 1, 9));
    }

    #[test]
    fn pieces_stay_few_for_any_chunks() {
        let text: Vec<TokenId> = (0..20_000).map(|at| at * at % 101).collect();
        for chunk in [1, 100, 129, 1000, 1024] {
            let mut growing = Growing::new();
            text.chunks(chunk).for_each(|chunk| growing.extend(chunk));
            assert!(growing.pieces.len() <= 8, "{chunk}: {}", growing.pieces.len());
        }
        let mut empty = Growing::new();
        (0..2000).for_each(|_| empty.extend(&[order::SEPARATOR]));
        assert_eq!((empty.pieces.len(), empty.finder().match_len()), (1, 0));
    }

    #[test]
    fn a_token_takes_little_memory() {
        let mut growing = Growing::new();
        growing.extend(&[4; 4096]);
        let run = 4 * 4095 + 8 * (512 + 32 + 2) + 2 * size_of::<Box<[u64]>>();
        let pieces = growing.pieces.capacity() * size_of::<Piece>();
        assert_eq!(growing.bytes(), size_of::<Growing>() + 4 * growing.text.capacity() + run + pieces);
    }
}
