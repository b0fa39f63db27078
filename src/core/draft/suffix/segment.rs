//! Finished texts, sorted once and never changed.

use std::ops::Range;

use super::TokenId;
use super::locate::Source;
use super::order::{self, Run, SEPARATOR};

/// Maximum tokens of all texts of one segment: a position is a `u32`.
const LIMIT: usize = u32::MAX as usize - 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Document {
    id: u64,
    start: u32,
    len: u32,
}

impl Document {
    fn range(self) -> Range<usize> {
        self.start as usize..self.start as usize + self.len as usize
    }
}

/// Concatenated documents with separators between them, and the order of their positions. Older
/// ones first.
///
/// A document's first token is never proposed: it has no context. A separator id within a document
/// splits its contexts; it stays one document.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    text: Box<[TokenId]>,
    documents: Box<[Document]>,
    run: Run,
}

impl Segment {
    /// Sorts documents: pairs of an id of the caller's (it need not be unique) and a text.
    /// Documents beyond 2^32 tokens are omitted.
    pub fn build(documents: &[(u64, &[TokenId])]) -> Self {
        let mut texts = Texts::for_documents(documents.iter().map(|(_, tokens)| tokens.len()));
        for (id, tokens) in documents {
            texts.add(*id, tokens);
        }
        let order = order::sorted(&texts.text, 0..texts.text.len());
        texts.into_segment(order)
    }

    /// Merges several segments, the oldest first, into one, without the documents for which
    /// `retain` is false.
    ///
    /// Time: linear in the tokens (times the logarithm of the number of segments). Memory while it
    /// runs: up to 8 bytes per token in addition to the old segments and the new one.
    pub fn merge(segments: &[&Self], retain: impl Fn(u64) -> bool) -> Self {
        let retained = |segment: &&Self| -> Vec<bool> {
            segment.documents.iter().map(|document| retain(document.id)).collect()
        };
        let retained: Vec<Vec<bool>> = segments.iter().map(retained).collect();
        let lengths = segments.iter().zip(&retained).flat_map(|(segment, retained)| {
            let all = segment.documents.iter().zip(retained);
            all.filter(|(_, retained)| **retained).map(|(document, _)| document.len as usize)
        });
        let mut texts = Texts::for_documents(lengths);
        let moved = |(segment, retained): (&&Self, Vec<bool>)| segment.moved_to(&mut texts, &retained);
        let orders: Vec<Vec<u32>> = segments.iter().zip(retained).map(moved).collect();
        let orders: Vec<&[u32]> = orders.iter().map(Vec::as_slice).collect();
        let order = order::merged(&texts.text, &orders).into_owned();
        texts.into_segment(order)
    }

    /// Adds the retained documents to `texts`; returns this segment's order in terms of the new
    /// text.
    fn moved_to(&self, texts: &mut Texts, retained: &[bool]) -> Vec<u32> {
        let new_start = |(document, &retained): (&Document, &bool)| {
            let tokens = self.text.get(document.range()).unwrap_or_default();
            if retained { texts.add(document.id, tokens) } else { None }
        };
        let starts: Vec<Option<u32>> = self.documents.iter().zip(retained).map(new_start).collect();
        let moved = |&position: &u32| {
            let after = self.documents.partition_point(|document| document.start <= position);
            let index = after.checked_sub(1)?;
            let offset = position - self.documents.get(index)?.start;
            Some(starts.get(index).copied().flatten()? + offset)
        };
        self.run.order.iter().filter_map(moved).collect()
    }

    /// The documents, the oldest first: id and tokens.
    pub fn documents(&self) -> impl ExactSizeIterator<Item = (u64, &[TokenId])> {
        self.documents
            .iter()
            .map(|document| (document.id, self.text.get(document.range()).unwrap_or_default()))
    }

    /// Number of tokens of all documents.
    pub fn tokens(&self) -> usize {
        self.documents.iter().map(|document| document.len as usize).sum()
    }

    /// Bytes of the texts and their order, this value included.
    pub fn bytes(&self) -> usize {
        let texts = size_of_val(&*self.text) + size_of_val(&*self.documents);
        size_of::<Self>() + texts + self.run.bytes()
    }

    /// The source for a [`super::Finder`].
    pub fn source(&self) -> Source<'_> {
        Source::sorted(&self.text, &self.run)
    }
}

/// The texts of a segment that is being built.
struct Texts {
    text: Vec<TokenId>,
    documents: Vec<Document>,
}

impl Texts {
    fn for_documents(lengths: impl Iterator<Item = usize>) -> Self {
        let (count, tokens) = lengths.fold((0, 0), |(count, sum), len| (count + 1, sum + len + 1));
        Self { text: Vec::with_capacity(tokens.min(LIMIT)), documents: Vec::with_capacity(count) }
    }

    /// Appends a document; returns its start, or `None` if there is no room.
    fn add(&mut self, id: u64, tokens: &[TokenId]) -> Option<u32> {
        if self.text.len() + 1 + tokens.len() > LIMIT {
            return None;
        }
        if self.text.last().is_some_and(|&last| last != SEPARATOR) {
            self.text.push(SEPARATOR);
        }
        let start = self.text.len() as u32;
        self.text.extend_from_slice(tokens);
        self.documents.push(Document { id, start, len: tokens.len() as u32 });
        Some(start)
    }

    fn into_segment(self, order: Vec<u32>) -> Segment {
        let run = Run::new(&self.text, order);
        Segment { text: self.text.into_boxed_slice(), documents: self.documents.into_boxed_slice(), run }
    }
}

#[cfg(test)]
mod tests {
    use super::super::brute;
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(100))]

        #[test]
        fn holds_the_documents_in_order(documents in brute::documents(5, 90)) {
            let documents = brute::borrowed(&documents);
            let segment = Segment::build(&documents);
            prop_assert_eq!(segment.documents().collect::<Vec<_>>(), &documents[..]);
            let text = brute::joined(&documents);
            prop_assert_eq!(&*segment.text, &text[..]);
            let order = brute::occurrences(&text).into_iter().map(|found| found.position as u32);
            prop_assert_eq!(&*segment.run.order, order.collect::<Vec<_>>());
        }

        #[test]
        fn merging_equals_building_from_the_kept_documents(
            parts in prop::collection::vec(brute::documents(7, 50), 0..5),
            evicted in prop::collection::vec(0_u64..4, 0..3),
        ) {
            let retain = |id: u64| !evicted.contains(&id);
            let segments: Vec<Segment> =
                parts.iter().map(|part| Segment::build(&brute::borrowed(part))).collect();
            let merged = Segment::merge(&segments.iter().collect::<Vec<_>>(), retain);
            let retained: Vec<_> = parts.concat().into_iter().filter(|(id, _)| retain(*id)).collect();
            prop_assert_eq!(merged, Segment::build(&brute::borrowed(&retained)));
        }
    }

    #[test]
    fn takes_little_more_than_nine_bytes_per_token() {
        let tokens: Vec<TokenId> = (0..100_000_u64).map(|at| (at * at % 977) as TokenId).collect();
        let segment = Segment::build(&[(1, &tokens)]);
        let levels = [12_500, 782, 49, 4];
        assert_eq!(99_999_usize.div_ceil(crate::draft::suffix::STRIDE), levels[0]);
        let order = 4 * 99_999 + 8 * levels.iter().sum::<usize>() + 3 * size_of::<Box<[u64]>>();
        assert_eq!(segment.bytes(), size_of::<Segment>() + 16 + 400_000 + order);
        assert_eq!(segment.tokens(), 100_000);
        let evicted = Segment::merge(&[&segment], |_| false);
        assert_eq!((evicted.bytes(), evicted.tokens()), (size_of::<Segment>(), 0));
    }

    #[test]
    fn no_context_crosses_from_one_document_to_the_next() {
        let segment = Segment::build(&[(1, &[1, 2, 3]), (2, &[4, 5])]);
        assert_eq!(segment.source().locate(&[1, 2, 3]).match_len(), 0, "nothing follows 3");
        assert_eq!(segment.source().locate(&[3, 4]).match_len(), 1, "3 is not before 4");
        assert_eq!(segment.source().locate(&[1, 2, SEPARATOR, 2]).match_len(), 1);
        let located = segment.source().locate(&[1, 2]);
        assert_eq!(located.interval(2).map(|index| located.following(index, 1)).collect::<Vec<_>>(), [[3]]);
    }
}
