//! Where a context stands in an order, and how far around it others agree.

use std::borrow::Cow;
use std::ops::Range;

use super::TokenId;
use super::order::{self, Run, STRIDE};

/// A text and the positions of it that can be found.
#[derive(Clone, Debug)]
pub struct Source<'a> {
    text: &'a [TokenId],
    entries: Entries<'a>,
}

#[derive(Clone, Debug)]
enum Entries<'a> {
    Sorted(&'a Run),
    /// Not sorted yet: looked at one by one.
    Tail(Range<usize>),
}

impl<'a> Source<'a> {
    pub(super) fn sorted(text: &'a [TokenId], run: &'a Run) -> Self {
        Self { text, entries: Entries::Sorted(run) }
    }

    pub(super) fn tail(text: &'a [TokenId], range: Range<usize>) -> Self {
        Self { text, entries: Entries::Tail(range) }
    }

    /// Finds the positions whose context has the longest end in common with `context`.
    pub fn locate(&self, context: &'a [TokenId]) -> Located<'a> {
        let (text, context) = (self.text, order::usable(context));
        let (order, top, at) = match &self.entries {
            Entries::Sorted(run) => (Cow::Borrowed(&*run.order), &*run.top, lower_bound(text, run, context)),
            Entries::Tail(range) => (Cow::Owned(ranked(text, range.clone(), context)), &[][..], 0),
        };
        let mut located = Located { text, order, top, context, at, len: 0 };
        let beside = [at.checked_sub(1), Some(at)];
        located.len = beside.into_iter().flatten().map(|index| located.shared(index)).max().unwrap_or(0);
        located
    }
}

/// Index of the first entry that does not come before `context`.
fn lower_bound(text: &[TokenId], run: &Run, context: &[TokenId]) -> usize {
    let key = order::digest(context);
    let first = run.top.partition_point(|&top| top < key);
    let alike = leading(run.top.len() - first, |step| run.top.get(first + step) == Some(&key));
    let start = first.saturating_sub(1) * STRIDE;
    let end = ((first + alike) * STRIDE).min(run.order.len());
    let comes_before =
        |&position: &u32| order::compare(order::before(text, position as usize), context).is_lt();
    start + run.order.get(start..end).unwrap_or_default().partition_point(comes_before)
}

/// The positions in `range` that agree with `context` at all, those that agree longest first: cut at any
/// length, they are what a sorted order would have in that interval.
fn ranked(text: &[TokenId], range: Range<usize>, context: &[TokenId]) -> Vec<u32> {
    let shared = |position: usize| order::shared(order::before(text, position), context);
    let has_next = |position: &usize| text.get(*position).is_some_and(|&next| next != order::SEPARATOR);
    let met = range.filter(has_next).map(|position| (shared(position), position as u32));
    let mut met: Vec<(usize, u32)> = met.filter(|&(len, _)| len > 0).collect();
    met.sort_by_key(|&(len, _)| std::cmp::Reverse(len));
    met.into_iter().map(|(_, position)| position).collect()
}

/// A context's place among the positions of one source.
#[derive(Clone, Debug)]
pub struct Located<'a> {
    text: &'a [TokenId],
    order: Cow<'a, [u32]>,
    top: &'a [u64],
    context: &'a [TokenId],
    at: usize,
    len: usize,
}

impl<'a> Located<'a> {
    /// Length of the longest match, tokens, at most [`super::DEPTH`].
    pub fn match_len(&self) -> usize {
        self.len
    }

    /// The places in the order of all positions whose context agrees for `len` tokens; empty for a `len` above
    /// the longest match.
    pub fn interval(&self, len: usize) -> Range<usize> {
        self.widened(self.at..self.at, len)
    }

    /// The position at a place of the order.
    pub fn position(&self, index: usize) -> Option<usize> {
        self.order.get(index).map(|&position| position as usize)
    }

    /// What stands in the text from a place of the order on, at most `len` tokens.
    pub fn following(&self, index: usize, len: usize) -> &'a [TokenId] {
        let rest = self.position(index).and_then(|position| self.text.get(position..)).unwrap_or_default();
        rest.get(..len).unwrap_or(rest)
    }

    /// Number of places.
    pub(super) fn places(&self) -> usize {
        self.order.len()
    }

    /// Number of tokens for which a place's context agrees.
    pub(super) fn shared(&self, index: usize) -> usize {
        self.position(index).map_or(0, |at| order::shared(order::before(self.text, at), self.context))
    }

    /// The interval of `len`, grown out of that of a greater length.
    pub(super) fn widened(&self, inner: Range<usize>, len: usize) -> Range<usize> {
        if len > self.len {
            return self.at..self.at;
        }
        let suffix = self.context.get(self.context.len().saturating_sub(len)..).unwrap_or_default();
        let agrees = |index: usize| {
            let at = self.position(index).unwrap_or(0);
            self.text.get(at.saturating_sub(len)..at) == Some(suffix)
        };
        let (left, right) = self.bounds(inner, len);
        let start = left.end - leading(left.len(), |step| agrees(left.end - 1 - step));
        let end = right.start + leading(right.len(), |step| agrees(right.start + step));
        start..end
    }

    /// Where the two ends of the interval of `len` may lie. The index knows it closely for a few tokens.
    fn bounds(&self, inner: Range<usize>, len: usize) -> (Range<usize>, Range<usize>) {
        let Range { start, end } = inner;
        let digests = order::digests(self.context, len).filter(|_| !self.top.is_empty());
        let Some((low, high)) = digests else { return (0..start, end..self.places()) };
        let top = |index: usize| self.top.get(index).copied().unwrap_or_default();
        let (left, right) = (start.div_ceil(STRIDE), end.div_ceil(STRIDE));
        let below = left - leading(left, |step| top(left - 1 - step) >= low);
        let up_to = right + leading(self.top.len() - right, |step| top(right + step) <= high);
        let start = start.min(below * STRIDE);
        let end = if up_to > below { end.max((up_to - 1) * STRIDE + 1) } else { end };
        (below.saturating_sub(1) * STRIDE..start, end..(up_to * STRIDE).min(self.places()).max(end))
    }
}

/// Number of steps, of at most `limit`, that hold before the first that does not: doubling steps, then halving.
fn leading(limit: usize, holds: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut step) = (0, 1);
    while low + step <= limit && holds(low + step - 1) {
        low += step;
        step *= 2;
    }
    let mut high = (low + step - 1).min(limit);
    while low < high {
        let middle = low.midpoint(high);
        if holds(middle) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::super::brute;
    use super::super::order::DEPTH;
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(100))]

        #[test]
        fn finds_the_interval_of_every_length(
            text in brute::texts(400),
            other in brute::texts(90),
            end in 0_usize..400,
            own in any::<bool>(),
        ) {
            let context = if own { &text[..end.min(text.len())] } else { &other[..] };
            let all = brute::occurrences(&text);
            let run = Run::new(&text, order::sorted(&text, 0..text.len()));
            let located = Source::sorted(&text, &run).locate(context);
            let longest = (1..=DEPTH).rev().find(|&len| !brute::agreeing(&all, context, len).is_empty());
            prop_assert_eq!(located.match_len(), longest.unwrap_or(0));
            let mut inner = located.interval(located.match_len());
            for len in (0..=DEPTH + 1).rev() {
                let interval = located.interval(len);
                prop_assert_eq!(interval.clone().collect::<Vec<_>>(), brute::agreeing(&all, context, len));
                if len <= located.match_len() {
                    inner = located.widened(inner, len);
                    prop_assert_eq!(&inner, &interval);
                }
            }
            for (index, found) in all.iter().enumerate() {
                prop_assert_eq!(located.position(index), Some(found.position));
                prop_assert!(located.following(index, 99).starts_with(&found.after));
            }
        }

        #[test]
        fn a_tail_has_the_same_positions_without_being_sorted(
            text in brute::texts(150),
            context in brute::texts(90),
            from in 0_usize..150,
        ) {
            let all: Vec<_> = brute::occurrences(&text);
            let all: Vec<_> = all.into_iter().filter(|found| found.position >= from).collect();
            let all = brute::by_agreement(all, &context);
            let located = Source::tail(&text, from..text.len()).locate(&context);
            for len in 1..=DEPTH + 1 {
                let interval = located.interval(len);
                prop_assert_eq!(interval.clone().collect::<Vec<_>>(), brute::agreeing(&all, &context, len));
                for index in interval {
                    prop_assert_eq!(located.position(index), Some(all[index].position));
                }
            }
        }

        #[test]
        fn steps_are_counted_up_to_the_first_that_does_not_hold(limit in 0_usize..200, first in 0_usize..220) {
            prop_assert_eq!(leading(limit, |step| step < first), first.min(limit));
        }
    }
}
