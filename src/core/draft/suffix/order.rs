//! The order of positions by the context before them: comparing, sorting, merging.
//!
//! A position is the index of a next token: position `p` of a text has the context `text[..p]`,
//! back to the last separator, and the next token `text[p]`. Contexts are compared from their last
//! token backwards; one that ends comes before one that continues. Positions whose last [`DEPTH`]
//! tokens agree are ordered by age.

use std::borrow::Cow;
use std::cmp::Ordering;
use std::ops::Range;

use super::TokenId;
use super::search::{Index, STRIDE};

/// Contexts that agree for this many tokens count as equal.
pub const DEPTH: usize = 64;
/// The id between documents; no context crosses it.
pub const SEPARATOR: TokenId = TokenId::MAX;

/// Groups up to this size are sorted by comparing complete contexts.
const SMALL: usize = 16;
/// Tokens that are compared at a time.
const LANES: usize = 8;
/// Bits of a token in a digest.
const BITS: u32 = 21;
/// Value in a digest of all ids that do not fit.
const WIDE: u32 = (1 << BITS) - 1;

/// The up to [`DEPTH`] tokens before position `at`, separators included.
#[inline]
pub(super) fn before(text: &[TokenId], at: usize) -> &[TokenId] {
    text.get(at.saturating_sub(DEPTH)..at).unwrap_or_default()
}

/// The part of `context` that can be matched: its last [`DEPTH`] tokens, or those after its last
/// separator.
pub(super) fn usable(context: &[TokenId]) -> &[TokenId] {
    let last = before(context, context.len());
    last.rsplit(|&token| token == SEPARATOR).next().unwrap_or_default()
}

/// Number of tokens at the end of both that agree, not counting beyond a separator.
#[inline]
pub(super) fn shared(a: &[TokenId], b: &[TokenId]) -> usize {
    let (mut a, mut b, mut len) = (a, b, 0);
    while let (Some((more_a, last_a)), Some((more_b, last_b))) =
        (a.split_last_chunk::<LANES>(), b.split_last_chunk::<LANES>())
    {
        if last_a != last_b || last_a.contains(&SEPARATOR) {
            break;
        }
        (a, b, len) = (more_a, more_b, len + LANES);
    }
    let alike = |(a, b): &(&TokenId, &TokenId)| a == b && **a != SEPARATOR;
    len + a.iter().rev().zip(b.iter().rev()).take_while(alike).count()
}

/// The token `back` tokens before the end, as a number to sort by: 0 where the context ended.
#[inline]
fn code(context: &[TokenId], back: usize) -> u32 {
    let at = context.len().checked_sub(back + 1);
    at.and_then(|at| context.get(at)).map_or(0, |token| token.wrapping_add(1))
}

/// Two adjacent tokens, `back` tokens before the end, as one number with the same order.
#[inline]
fn pair(context: &[TokenId], back: usize) -> u64 {
    let (first, second) = (code(context, back), code(context, back + 1));
    if first == 0 { 0 } else { u64::from(first) << 32 | u64::from(second) }
}

/// The last three tokens of a context as one number: the order of contexts never contradicts that
/// of their numbers. Ids that do not fit into 21 bits are all equal in it, and so are the tokens
/// before them.
#[inline]
pub(super) fn digest(context: &[TokenId]) -> u64 {
    let [first, second, third] = [0, 1, 2].map(|back| u64::from(code(context, back).min(WIDE)));
    let goes_on = |code: u64| 0 < code && code < u64::from(WIDE);
    let second = if goes_on(first) { second } else { 0 };
    let third = if goes_on(second) { third } else { 0 };
    first << (2 * BITS) | second << BITS | third
}

/// The smallest and the largest digest of the contexts that agree with `context` for `len` tokens,
/// if `len` is at most 3 and these tokens fit.
pub(super) fn digests(context: &[TokenId], len: usize) -> Option<(u64, u64)> {
    let fits = |back: usize| (1..WIDE).contains(&code(context, back));
    if !(1..=3).contains(&len) || !(0..len).all(fits) {
        return None;
    }
    let rest = (1_u64 << (BITS as usize * (3 - len))) - 1;
    let digest = digest(context);
    Some((digest & !rest, digest | rest))
}

/// Order of two contexts (of at most [`DEPTH`] tokens).
#[inline]
pub(super) fn compare(a: &[TokenId], b: &[TokenId]) -> Ordering {
    let len = shared(a, b);
    code(a, len).cmp(&code(b, len))
}

/// The positions in `range` of `text` that have a context and a next token, sorted.
pub(super) fn sorted(text: &[TokenId], range: Range<usize>) -> Vec<u32> {
    let start = range.start.max(1);
    let tokens = text.get(start - 1..range.end.min(text.len())).unwrap_or_default();
    let met = tokens.windows(2).zip(start as u32..).filter(|(pair, _)| !pair.contains(&SEPARATOR));
    let mut entries: Vec<(u64, u32)> = met.map(|(_, position)| (0, position)).collect();
    refine(text, &mut entries, 0);
    entries.into_iter().map(|(_, position)| position).collect()
}

/// Sorts entries whose contexts agree for `depth` tokens: by the next two tokens, then each group
/// by itself. A text that repeats itself costs one pass per two tokens: its groups are sorted
/// already.
fn refine(text: &[TokenId], entries: &mut [(u64, u32)], depth: usize) {
    let context = |position: u32| before(text, position as usize);
    if entries.len() <= SMALL {
        entries.sort_unstable_by(|a, b| compare(context(a.1), context(b.1)).then(a.1.cmp(&b.1)));
        return;
    }
    for (key, position) in entries.iter_mut() {
        *key = pair(context(*position), depth);
    }
    entries.sort_unstable();
    if depth + 2 >= DEPTH {
        return;
    }
    for group in entries.chunk_by_mut(|a, b| a.0 == b.0) {
        let goes_on = group.first().is_some_and(|(key, _)| *key as u32 != 0);
        if goes_on && group.len() > 1 {
            refine(text, group, depth + 2);
        }
    }
}

/// Merges several orders of the same text. The positions of each are later than those of the one
/// before it.
pub(super) fn merged<'a>(text: &[TokenId], orders: &[&'a [u32]]) -> Cow<'a, [u32]> {
    match orders {
        [] => Cow::default(),
        [only] => Cow::Borrowed(only),
        many => {
            let (older, newer) = many.split_at(many.len() / 2);
            Cow::Owned(merged_two(text, &merged(text, older), &merged(text, newer)))
        }
    }
}

fn merged_two(text: &[TokenId], older: &[u32], newer: &[u32]) -> Vec<u32> {
    let mut all = Vec::with_capacity(older.len() + newer.len());
    let (mut older, mut newer) = (older, newer);
    while let (Some((&a, more_a)), Some((&b, more_b))) = (older.split_first(), newer.split_first()) {
        if compare(before(text, a as usize), before(text, b as usize)).is_le() {
            all.push(a);
            older = more_a;
        } else {
            all.push(b);
            newer = more_b;
        }
    }
    all.extend_from_slice(older);
    all.extend_from_slice(newer);
    all
}

/// An order and its index, without the text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Run {
    pub order: Box<[u32]>,
    /// The digest of every [`STRIDE`]th position.
    pub top: Index,
}

impl Run {
    pub fn new(text: &[TokenId], order: Vec<u32>) -> Self {
        let key = |&position: &u32| digest(before(text, position as usize));
        let top = order.iter().step_by(STRIDE).map(key).collect();
        Self { order: order.into_boxed_slice(), top: Index::new(top) }
    }

    pub fn bytes(&self) -> usize {
        size_of_val(&*self.order) + self.top.bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::super::brute;
    use super::*;
    use proptest::prelude::*;

    fn by_hand(text: &[TokenId], range: Range<usize>) -> Vec<u32> {
        let all = brute::occurrences(text).into_iter().map(|found| found.position);
        all.filter(|position| range.contains(position)).map(|position| position as u32).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(150))]

        #[test]
        fn sorts_any_range_of_a_text(text in brute::texts(300), from in 0_usize..320, len in 0_usize..320) {
            prop_assert_eq!(sorted(&text, from..from + len), by_hand(&text, from..from + len));
            prop_assert_eq!(sorted(&text, 0..text.len()), by_hand(&text, 0..text.len()));
        }

        #[test]
        fn merges_runs_into_what_one_sort_gives(
            text in brute::texts(300),
            cuts in prop::collection::vec(0_usize..300, 0..5),
        ) {
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(text.len())).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let runs: Vec<Vec<u32>> = cuts.windows(2).map(|ends| sorted(&text, ends[0]..ends[1])).collect();
            let runs: Vec<&[u32]> = runs.iter().map(Vec::as_slice).collect();
            prop_assert_eq!(merged(&text, &runs).into_owned(), by_hand(&text, 0..text.len()));
        }

        #[test]
        fn digests_follow_the_order_and_distinguish_up_to_three_tokens(
            text in brute::texts(120),
            context in brute::texts(9),
            len in 0_usize..5,
        ) {
            let context = usable(&context);
            let positions = sorted(&text, 0..text.len());
            let keys: Vec<u64> = positions.iter().map(|&at| digest(before(&text, at as usize))).collect();
            prop_assert!(keys.is_sorted());
            if let Some((low, high)) = digests(context, len) {
                for (&position, &key) in positions.iter().zip(&keys) {
                    let agrees = shared(before(&text, position as usize), context) >= len;
                    prop_assert_eq!((low..=high).contains(&key), agrees);
                }
            }
        }
    }

    #[test]
    fn a_repeated_token_is_ordered_by_length_and_then_by_age() {
        let order = sorted(&vec![7; 50_000], 0..50_000);
        assert!(order.iter().copied().eq(1..50_000));
    }

    #[test]
    fn tokens_before_a_separator_do_not_count() {
        let text: Vec<TokenId> = (0..400).flat_map(|at| [at * at % 7, at % 3, SEPARATOR, 1, 2, 3]).collect();
        assert_eq!(sorted(&text, 0..text.len()), by_hand(&text, 0..text.len()));
        let context = |first: TokenId| [first, 5, 5, 5, 5, 5, SEPARATOR, 1, 2, 3];
        assert_eq!(shared(&context(8), &context(9)), 3);
        assert_eq!(compare(&context(8), &context(9)), Ordering::Equal);
    }

    #[test]
    fn contexts_are_compared_no_further_than_their_cap() {
        let differs_at = |back: usize| {
            let (mut older, newer) = (vec![5; 70], vec![5; 70]);
            older[70 - back] = 9;
            let text = [&older[..], &[1], &newer[..], &[1]].concat();
            let order = sorted(&text, 0..text.len());
            let rank = |position: u32| order.iter().position(|&at| at == position).unwrap();
            (rank(70) < rank(141), shared(before(&text, 70), before(&text, 141)))
        };
        assert_eq!((differs_at(DEPTH), differs_at(DEPTH + 1)), ((false, DEPTH - 1), (true, DEPTH)));
    }
}
