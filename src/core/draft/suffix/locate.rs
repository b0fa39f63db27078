//! Position of a context in an order, and the interval around it whose contexts agree.

use std::borrow::Cow;
use std::hint::black_box;
use std::ops::Range;

use super::TokenId;
use super::order::{self, Run};
use super::search::{self, Index, STRIDE, leading};

/// A text and its positions that can be found.
#[derive(Clone, Debug)]
pub struct Source<'a> {
    text: &'a [TokenId],
    entries: Entries<'a>,
}

#[derive(Clone, Debug)]
enum Entries<'a> {
    Sorted(&'a Run),
    /// Not sorted yet: read one by one.
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
    #[cfg(test)]
    pub(super) fn locate(&self, context: &'a [TokenId]) -> Located<'a> {
        let context = order::usable(context);
        self.located(context, self.near(context))
    }

    /// The range of the order that contains a usable context, by the index; prefetches the next
    /// read.
    pub(super) fn near(&self, context: &[TokenId]) -> Range<usize> {
        let Entries::Sorted(run) = &self.entries else { return 0..0 };
        let key = order::digest(context);
        let first = run.top.below(key);
        let is_known = run.top.keys().get(first) == Some(&key);
        let last = if is_known { run.top.below(key + 1) } else { first };
        let start = first.saturating_sub(1) * STRIDE;
        black_box(run.order.get(start).copied());
        start..(last * STRIDE).min(run.order.len())
    }

    /// Finds a usable context in the range `near`.
    pub(super) fn located(&self, context: &'a [TokenId], near: Range<usize>) -> Located<'a> {
        let text = self.text;
        let (order, top, at) = match &self.entries {
            Entries::Sorted(run) => {
                (Cow::Borrowed(&*run.order), Some(&run.top), partition_point(text, run, context, near))
            }
            Entries::Tail(range) => (Cow::Owned(ranked(text, range.clone(), context)), None, 0),
        };
        let mut located = Located { text, order, top, context, at, len: 0 };
        let adjacent = [at.checked_sub(1), Some(at)];
        located.len = adjacent.into_iter().flatten().map(|index| located.shared(index)).max().unwrap_or(0);
        located
    }
}

/// Index of the first entry that does not come before `context`; it is in `near`, or the one after.
fn partition_point(text: &[TokenId], run: &Run, context: &[TokenId], near: Range<usize>) -> usize {
    let comes_before = |index: usize| {
        let position = run.order.get(index).map_or(0, |&position| position as usize);
        order::compare(order::before(text, position), context).is_lt()
    };
    search::within(near.start, near.end, |index| touch(text, &run.order, index), comes_before)
}

/// Reads the last token of the context at an entry of an order, so that it is in the cache when it
/// is compared. The reads overlap.
fn touch(text: &[TokenId], order: &[u32], index: usize) {
    let position = order.get(index).map_or(0, |&position| position as usize);
    black_box(text.get(position.wrapping_sub(1)).copied());
}

/// The positions in `range` that agree with `context` for at least one token, those that agree
/// longest first: cut at any length, they are the positions of a sorted order's interval.
fn ranked(text: &[TokenId], range: Range<usize>, context: &[TokenId]) -> Vec<u32> {
    let shared = |position: usize| order::shared(order::before(text, position), context);
    let has_next = |position: &usize| text.get(*position).is_some_and(|&next| next != order::SEPARATOR);
    // Most positions end here: their last token is another one.
    let Some(last) = context.last() else { return Vec::new() };
    let from = range.start.max(1);
    let tokens = text.get(from - 1..range.end.max(from) - 1).unwrap_or_default();
    let ends_alike = tokens.iter().enumerate().filter(|&(_, token)| token == last).map(|(at, _)| from + at);
    let met = ends_alike.filter(has_next).map(|position| (shared(position), position as u32));
    let mut met: Vec<(usize, u32)> = met.collect();
    met.sort_by_key(|&(len, _)| std::cmp::Reverse(len));
    met.into_iter().map(|(_, position)| position).collect()
}

/// A context located among the positions of one source.
#[derive(Clone, Debug)]
pub struct Located<'a> {
    text: &'a [TokenId],
    order: Cow<'a, [u32]>,
    top: Option<&'a Index>,
    context: &'a [TokenId],
    at: usize,
    len: usize,
}

impl<'a> Located<'a> {
    /// Length of the longest match, tokens, at most [`super::DEPTH`].
    pub fn match_len(&self) -> usize {
        self.len
    }

    /// The range of entries of the order whose contexts agree for `len` tokens; empty for a `len`
    /// above the longest match.
    pub fn interval(&self, len: usize) -> Range<usize> {
        self.widened(self.nothing(), len)
    }

    /// The interval of a length for which no context agrees.
    pub(super) fn nothing(&self) -> Range<usize> {
        self.at..self.at
    }

    /// Position in the text of an entry of the order; `None` beyond its end.
    pub fn position(&self, index: usize) -> Option<usize> {
        self.order.get(index).map(|&position| position as usize)
    }

    /// The text from an entry's position on, at most `len` tokens; empty beyond the end of the
    /// order.
    pub fn following(&self, index: usize, len: usize) -> &'a [TokenId] {
        let rest = self.position(index).and_then(|position| self.text.get(position..)).unwrap_or_default();
        rest.get(..len).unwrap_or(rest)
    }

    pub(super) fn positions(&self) -> usize {
        self.order.len()
    }

    /// Number of tokens for which an entry's context agrees.
    pub(super) fn shared(&self, index: usize) -> usize {
        self.position(index).map_or(0, |at| order::shared(order::before(self.text, at), self.context))
    }

    /// The interval of `len`, grown from that of a greater length.
    pub(super) fn widened(&self, inner: Range<usize>, len: usize) -> Range<usize> {
        self.refined(&self.bounds(inner, len), len)
    }

    /// Bounds of the two ends of the interval of `len`, which is grown from that of a greater
    /// length. The index makes them tight for up to three tokens.
    pub(super) fn bounds(&self, inner: Range<usize>, len: usize) -> Bounds {
        if len > self.len {
            return Bounds { start: self.nothing(), end: self.nothing() };
        }
        let Range { start, end } = inner;
        let Some((top, (low, high))) = self.top.zip(order::digests(self.context, len)) else {
            return Bounds { start: 0..start, end: end..self.positions() };
        };
        let (below, up_to) = (top.below(low), top.below(high + 1));
        let start = start.min(below * STRIDE);
        let end = if up_to > below { end.max((up_to - 1) * STRIDE + 1) } else { end };
        let start = below.saturating_sub(1) * STRIDE..start;
        let end = end..(up_to * STRIDE).min(self.positions()).max(end);
        black_box([start.start, end.start].map(|index| self.order.get(index).copied()));
        Bounds { start, end }
    }

    /// The interval of `len` between its bounds.
    pub(super) fn refined(&self, bounds: &Bounds, len: usize) -> Range<usize> {
        let suffix = self.context.get(self.context.len().saturating_sub(len)..).unwrap_or_default();
        let agrees = |index: usize| {
            let at = self.position(index).unwrap_or(0);
            self.text.get(at.saturating_sub(len)..at) == Some(suffix)
        };
        let touch = |index: usize| touch(self.text, &self.order, index);
        let Bounds { start, end } = bounds;
        let outwards = |step: usize| start.end - 1 - step;
        let before = leading(start.len(), |step| touch(outwards(step)), |step| agrees(outwards(step)));
        let onwards = |step: usize| end.start + step;
        let behind = leading(end.len(), |step| touch(onwards(step)), |step| agrees(onwards(step)));
        start.end - before..end.start + behind
    }
}

/// Ranges in which an interval's start and end lie.
#[derive(Clone, Debug)]
pub(super) struct Bounds {
    start: Range<usize>,
    end: Range<usize>,
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
        fn an_unsorted_tail_has_the_same_positions(
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
    }
}
