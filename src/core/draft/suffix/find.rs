//! The query: the draft of the match length with the highest expected number of accepted tokens.
//!
//! SuffixDecoding tries every match length. Here the longest is tried, and then, each time, the
//! greatest length at which at least twice as many positions agree, [`TRIALS`] lengths in all: the
//! lengths in between add few positions. A length whose budget cannot exceed the best score so far
//! is skipped, which does not change the result.

use std::ops::Range;

use super::TokenId;
use super::count::{AHEAD, Continuations, Draft, MANY, Shape};
use super::locate::{Bounds, Located, Source};
use super::order;

/// Match lengths that are tried in one query.
const TRIALS: usize = 2;
/// Entries that are read for the most recent position, so that a text that repeats itself costs no
/// more than others.
const READ: usize = 4096;
/// Matches of at most this many tokens are shortened token by token: the index knows those
/// intervals, and finds them with fewer reads than `reach`.
const SHORT: usize = 4;

/// Limits of the size of a draft, and of the probability of its tokens (SuffixDecoding, arXiv
/// 2411.04975).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rules {
    /// Maximum tokens of a draft.
    pub max_nodes: usize,
    /// Maximum tokens of a draft per token of match.
    pub max_spec_factor: f64,
    /// Tokens added to that maximum; may be negative.
    pub max_spec_offset: f64,
    /// A token is not proposed if its [`super::Proposal::chance`] is below this, 0 to 1.
    pub min_token_prob: f64,
}

impl Default for Rules {
    fn default() -> Self {
        Self { max_nodes: 64, max_spec_factor: 4.0, max_spec_offset: 0.0, min_token_prob: 0.1 }
    }
}

impl Rules {
    /// Maximum tokens proposed from a match of `len` tokens: ⌊`len` · factor + offset⌋, at most
    /// `max_nodes`. Never grows as `len` shrinks.
    pub fn budget(&self, len: usize) -> usize {
        let tokens = len as f64 * self.max_spec_factor.max(0.0) + self.max_spec_offset + 1e-6;
        self.max_nodes.min(tokens.floor() as usize)
    }

    /// A draft from a match of `len` tokens scores at most this.
    fn ceiling(&self, len: usize) -> f64 {
        self.budget(len).min(AHEAD) as f64
    }
}

/// A context, looked up in several sources.
#[derive(Clone, Debug)]
pub struct Finder<'a> {
    lookups: Vec<Located<'a>>,
    longest: usize,
}

impl<'a> Finder<'a> {
    /// Looks `context` up. The oldest source comes first: where counts are equal, the more recent
    /// wins.
    pub fn new(sources: impl IntoIterator<Item = Source<'a>>, context: &'a [TokenId]) -> Self {
        let context = order::usable(context);
        let near = sources.into_iter().map(|source| (source.near(context), source));
        // The index of every source is queried first, so that the memory reads overlap.
        let near: Vec<(Range<usize>, Source<'a>)> = near.collect();
        let located = near.into_iter().map(|(near, source)| source.located(context, near));
        let lookups: Vec<Located<'a>> = located.filter(|located| located.match_len() > 0).collect();
        let longest = lookups.iter().map(Located::match_len).max().unwrap_or(0);
        Self { lookups, longest }
    }

    /// Length of the longest match in any source, tokens.
    pub fn match_len(&self) -> usize {
        self.longest
    }

    /// The most recent position whose context agrees for as long as any does, at most `cap` tokens,
    /// and that length; `None` if nothing matches.
    pub fn latest(&self, cap: usize) -> Option<(usize, usize)> {
        let len = self.longest.min(cap);
        let newest = |lookup: &Located<'_>| {
            lookup.interval(len).rev().take(READ).filter_map(|index| lookup.position(index)).max()
        };
        // The sources come in order, so the last one that agrees has the most recent position.
        Some((self.lookups.iter().rev().find_map(newest)?, len))
    }

    /// The draft with the best score; of equal ones, that of the longer match. `None` if nothing
    /// matches or the rules allow no token.
    pub fn draft(&self, rules: &Rules, shape: Shape) -> Option<Draft> {
        let mut best: Option<Draft> = None;
        let mut spread = Spread::new(&self.lookups, self.longest);
        for _ in 0..TRIALS {
            let draft = spread.draft(rules, shape);
            let score = best.as_ref().map_or(0.0, |best| best.score);
            if draft.score > score {
                best = Some(draft);
            }
            let score = best.as_ref().map_or(0.0, |best| best.score);
            let Some(least) = (1..spread.len).find(|&len| rules.ceiling(len) > score) else { break };
            if !spread.double(least) {
                break;
            }
        }
        best
    }
}

/// The intervals of one match length in all sources.
#[derive(Debug)]
struct Spread<'f, 'a> {
    lookups: &'f [Located<'a>],
    intervals: Vec<Range<usize>>,
    len: usize,
}

impl<'f, 'a> Spread<'f, 'a> {
    fn new(lookups: &'f [Located<'a>], len: usize) -> Self {
        let intervals = lookups.iter().map(Located::nothing).collect();
        let mut this = Self { lookups, intervals, len };
        this.widen(len);
        this
    }

    /// Positions in all intervals.
    fn width(&self) -> usize {
        self.intervals.iter().map(Range::len).sum()
    }

    /// Moves to the greatest length with at least twice as many positions. False if there is none
    /// of at least `least` tokens.
    ///
    /// For the width to grow by `missing`, one of the sides must grow by its part of that. So the
    /// length is at most the number of tokens for which the contexts at that distance agree.
    fn double(&mut self, least: usize) -> bool {
        let wanted = 2 * self.width();
        if self.len <= SHORT {
            return self.shorten(wanted, least);
        }
        while let Some(missing) = wanted.checked_sub(self.width()).filter(|&missing| missing > 0) {
            let step = missing.div_ceil(2 * self.lookups.len().max(1));
            let reach = self.reach(step);
            if reach < least.max(1) {
                return false;
            }
            self.widen(reach);
        }
        true
    }

    /// The same for a short match: one length after the other.
    fn shorten(&mut self, wanted: usize, least: usize) -> bool {
        while self.width() < wanted && self.len > least.max(1) {
            self.widen(self.len - 1);
        }
        self.width() >= wanted
    }

    /// Moves to a length. All sources are queried for bounds first, so that the memory reads
    /// overlap.
    fn widen(&mut self, len: usize) {
        let both = self.lookups.iter().zip(&self.intervals);
        let bounds: Vec<Bounds> =
            both.map(|(lookup, interval)| lookup.bounds(interval.clone(), len)).collect();
        for ((lookup, interval), bounds) in self.lookups.iter().zip(&mut self.intervals).zip(&bounds) {
            *interval = lookup.refined(bounds, len);
        }
        self.len = len;
    }

    /// The maximum number of tokens for which a context agrees that is `step` entries outside of an
    /// interval.
    fn reach(&self, step: usize) -> usize {
        let mut reach = 0;
        for (lookup, interval) in self.lookups.iter().zip(&self.intervals) {
            let before = interval.start.checked_sub(step);
            let after = Some(interval.end + step - 1).filter(|&index| index < lookup.positions());
            for index in [before, after].into_iter().flatten() {
                // A source that never agrees for longer need not be read.
                if lookup.match_len() > reach {
                    reach = reach.max(lookup.shared(index));
                }
            }
        }
        reach
    }

    fn draft(&self, rules: &Rules, shape: Shape) -> Draft {
        let width = self.width();
        let sample = self.sample(width.min(MANY), width);
        let texts = sample.iter().map(|&(source, _, index)| {
            self.lookups.get(source).map_or(&[][..], |lookup| lookup.following(index, AHEAD))
        });
        let draft = Continuations::new(texts).draft(shape, rules.budget(self.len), rules.min_token_prob);
        Draft { match_len: self.len, positions: width, ..draft }
    }

    /// `many` entries, evenly spaced over the concatenated intervals, so that each represents as
    /// many positions: source, position, index. The oldest first.
    fn sample(&self, many: usize, width: usize) -> Vec<(usize, usize, usize)> {
        let mut sample = Vec::with_capacity(many);
        let mut passed = 0;
        for (source, (lookup, interval)) in self.lookups.iter().zip(&self.intervals).enumerate() {
            while sample.len() < many {
                let ahead = (sample.len() + 1) * width / many - 1 - passed;
                if ahead >= interval.len() {
                    break;
                }
                let index = interval.start + ahead;
                sample.push((source, lookup.position(index).unwrap_or(0), index));
            }
            passed += interval.len();
        }
        sample.sort_unstable();
        sample
    }
}

#[cfg(test)]
mod tests {
    use super::super::brute::{self, Occurrence};
    use super::super::{DEPTH, Segment};
    use super::*;
    use proptest::prelude::*;

    fn rules() -> impl Strategy<Value = Rules> {
        let factor = prop_oneof![Just(4.0), -1.0..8.0_f64, Just(f64::NAN), Just(f64::INFINITY)];
        let offset = prop_oneof![Just(0.0), -9.0..9.0_f64, Just(f64::NAN)];
        (0_usize..70, factor, offset, 0.0..0.5_f64).prop_map(|(max_nodes, factor, offset, least)| Rules {
            max_nodes,
            max_spec_factor: factor,
            max_spec_offset: offset,
            min_token_prob: least,
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(80))]

        #[test]
        fn finds_the_best_draft_of_several_segments(
            parts in prop::collection::vec(brute::documents(4, 150), 1..5),
            rules in rules(),
            cut in 0_usize..150,
        ) {
            let all = parts.concat();
            let context: &[TokenId] = all.first().map_or(&[], |(_, tokens)| &tokens[..cut.min(tokens.len())]);
            let texts = parts.iter().map(|part| brute::joined(&brute::borrowed(part)));
            let sources: Vec<Vec<Occurrence>> = texts.map(|text| brute::occurrences(&text)).collect();
            let segments: Vec<Segment> =
                parts.iter().map(|part| Segment::build(&brute::borrowed(part))).collect();
            let finder = Finder::new(segments.iter().map(Segment::source), context);
            let lengths = brute::lengths(&sources, context);
            prop_assert_eq!(finder.match_len(), lengths.first().copied().unwrap_or(0));
            for shape in [Shape::Path, Shape::Tree] {
                for rules in [rules, Rules::default()] {
                    prop_assert_eq!(
                        finder.draft(&rules, shape),
                        brute::best(&sources, context, &rules, shape)
                    );
                }
            }
        }

        #[test]
        fn tries_the_lengths_at_which_the_positions_double(
            parts in prop::collection::vec(brute::texts(300), 1..5),
            context in brute::texts(90),
        ) {
            let sources: Vec<Vec<Occurrence>> = parts.iter().map(|text| brute::occurrences(text)).collect();
            let segments: Vec<Segment> = parts.iter().map(|text| Segment::build(&[(0, text)])).collect();
            let finder = Finder::new(segments.iter().map(Segment::source), &context);
            let mut spread = Spread::new(&finder.lookups, finder.longest);
            let mut lengths = vec![spread.len];
            while lengths.len() < TRIALS && spread.double(1) {
                lengths.push(spread.len);
            }
            lengths.retain(|&len| len > 0);
            prop_assert_eq!(lengths, brute::lengths(&sources, &context));
        }

        #[test]
        fn budgets_never_grow_as_the_match_shrinks(rules in rules(), len in 0_usize..DEPTH) {
            prop_assert!(rules.budget(len) <= rules.budget(len + 1));
        }
    }

    #[test]
    fn the_most_recent_of_the_longest_matches_is_found_in_sorted_and_new_text() {
        let mut growing = crate::draft::suffix::Growing::new();
        growing.extend(&[1, 2, 7, 1, 2, 8, 3, 2, 1, 2]);
        assert_eq!(growing.finder().latest(8), Some((5, 2)));
        assert_eq!(growing.finder().latest(1), Some((8, 1)));
        growing.extend(&(100..400).collect::<Vec<_>>());
        growing.extend(&[1, 2, 7]);
        assert_eq!(growing.finder().latest(8), Some((3, 3)));
    }

    #[test]
    fn a_shorter_match_wins_where_it_is_more_certain() {
        // After 9 1 2 the next token varies; after 1 2 it is mostly 3.
        let tokens = [[9, 1, 2, 5], [9, 1, 2, 6], [9, 1, 2, 7], [9, 1, 2, 8]].concat();
        let often: Vec<TokenId> = [8, 1, 2, 3, 4, 5, 6, 7].repeat(20);
        let segment = Segment::build(&[(1, &tokens), (2, &often)]);
        let draft = |factor: f64| {
            let rules = Rules { max_spec_factor: factor, ..Rules::default() };
            let draft = Finder::new([segment.source()], &[9, 1, 2]).draft(&rules, Shape::Path).unwrap();
            (draft.match_len, draft.positions, draft.nodes[0].token)
        };
        assert_eq!(draft(4.0), (2, 24, 3));
        assert_eq!(draft(0.34), (3, 4, 8), "one token from three of match, none from two");
    }

    #[test]
    fn tries_two_lengths() {
        let context = [7, 6, 5, 4, 3, 2, 1];
        let said = |len: usize, next: &[TokenId]| [&[90], &context[7 - len..], next].concat();
        // Twice as many positions with every token less. A match of five tokens would be the most
        // certain by far.
        let mut documents = vec![said(7, &[70]), said(6, &[60, 61, 62, 63, 64])];
        documents.extend(vec![said(5, &[40, 41, 42, 43, 44]); 64]);
        let documents: Vec<(u64, &[TokenId])> = documents.iter().map(|tokens| (0, &**tokens)).collect();
        let segment = Segment::build(&documents);
        let draft = Finder::new([segment.source()], &context).draft(&Rules::default(), Shape::Path).unwrap();
        assert_eq!((draft.match_len, draft.positions, draft.nodes.len()), (6, 2, 5));
    }

    #[test]
    fn nothing_is_drafted_without_a_match_or_a_budget() {
        let segment = Segment::build(&[(1, &[1, 2, 3])]);
        let draft = |context: &[TokenId], rules: Rules| {
            Finder::new([segment.source()], context).draft(&rules, Shape::Tree)
        };
        let nodes = Rules { max_nodes: 0, ..Rules::default() };
        assert_eq!(
            [draft(&[], Rules::default()), draft(&[8], Rules::default()), draft(&[1], nodes)],
            [None, None, None]
        );
        assert!(Finder::new([], &[1]).draft(&Rules::default(), Shape::Path).is_none());
        assert_eq!(draft(&[1], Rules::default()).map(|draft| draft.nodes.len()), Some(2));
    }

    #[test]
    fn the_default_rules_are_those_of_the_paper() {
        let budgets = [0, 1, 2, 16, 17].map(|len| Rules::default().budget(len));
        assert_eq!(budgets, [0, 4, 8, 64, 64]);
        let tenth = Rules { max_spec_factor: 0.1, ..Rules::default() };
        assert_eq!(tenth.budget(30), 3, "three, although 30 x 0.1 is not quite that in binary");
    }
}
