//! `prompt_lookup`: the tokens after the most recent match of the end of the context.
//!
//! An alignment that continues to predict right is retained although a shorter match may be more
//! recent: text that is being copied continues where it was. Beyond its end an alignment repeats
//! itself, as periodic text does. Where a long alignment breaks, text that is being rewritten
//! usually continues one token later: until a new match is found, the draft assumes that one token
//! was replaced (match length 0, so its acceptance is learnt separately). The tokens of a round are
//! followed one by one, and the index is searched once for all of them.

use super::suffix::{Growing, SEPARATOR};
use super::{Budget, DrafterId, Features, Feedback, Lookup, Tree};
use crate::units::TokenId;

/// Shortest and longest match that counts, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, schemars::JsonSchema)]
#[serde(default)]
pub struct Ngram {
    /// Shortest match.
    #[schemars(range(min = 1, max = 64))]
    pub min: u32,
    /// Longest match; longer ones are ranked alike: the most recent wins.
    #[schemars(range(min = 1, max = 64))]
    pub max: u32,
}

impl Default for Ngram {
    fn default() -> Self {
        Self { min: 2, max: 8 }
    }
}

/// The drafter, on the index of [`super::suffix`].
#[derive(Debug)]
pub struct PromptLookup {
    id: DrafterId,
    ngram: Ngram,
    /// Index at which the copied text continues, and the number of tokens that have agreed.
    aligned: Option<(usize, u32)>,
    /// Index at which it would continue if one token was replaced, and the number of tokens for
    /// which that guess still applies.
    broken: Option<(usize, u32)>,
}

/// One token is assumed to be replaced when an alignment breaks that agreed for at least this many
/// tokens ...
const LONG: u32 = 6;
/// ... and the draft continues from there for this many tokens.
const GUESSES: u32 = 4;

impl PromptLookup {
    /// A drafter that has seen nothing of its request and votes as `id`.
    pub const fn new(ngram: Ngram, id: DrafterId) -> Self {
        Self { id, ngram, aligned: None, broken: None }
    }

    /// Follows the alignment past `token`, which is at a later position of `text`.
    fn follow(&mut self, token: TokenId, text: &[TokenId]) {
        let continued = self.aligned.filter(|&(at, _)| text.get(at) == Some(&token));
        self.broken = match (self.aligned, self.broken) {
            (Some((at, len)), _) if continued.is_none() && len >= LONG => Some((at + 1, GUESSES)),
            (_, Some((at, guesses))) => guesses.checked_sub(1).map(|guesses| (at + 1, guesses)),
            _ => None,
        };
        self.aligned = continued.map(|(at, len)| (at + 1, len.saturating_add(1)));
    }

    /// Takes the latest match of the end of `text`, unless the present one is longer.
    fn search(&mut self, text: &Growing) {
        let cap = self.ngram.max.max(1);
        let len = self.aligned.map_or(0, |(_, len)| len);
        // No match counts for more than one of the longest that count.
        let found = if len > cap { None } else { text.finder().latest(cap as usize) };
        let found = found.map(|(at, len)| (at, len as u32)).filter(|found| found.1 >= len);
        self.aligned = found.or(self.aligned);
        if self.matched().is_some() {
            self.broken = None;
        }
    }

    fn matched(&self) -> Option<(usize, u32)> {
        self.aligned.filter(|&(_, len)| len >= self.ngram.min.max(1))
    }
}

impl Lookup for PromptLookup {
    fn observe(&mut self, seen: &Feedback<'_>) {
        seen.tokens.iter().for_each(|&token| self.follow(token, seen.text.text()));
        self.search(seen.text);
    }

    fn draft(&self, text: &Growing, budget: Budget) -> Tree {
        let guess = self.broken.map(|(at, _)| (at, 0));
        let Some((start, match_len)) = self.matched().or(guess) else {
            return Tree::default();
        };
        let text = text.text();
        let period = text.len().saturating_sub(start).max(1);
        let tokens: Vec<TokenId> = (0..budget.nodes.min(budget.depth))
            .map_while(|index| text.get(start + index % period).copied().filter(|&token| token != SEPARATOR))
            .collect();
        Tree::chain(&tokens, self.id, Features::matched(match_len))
    }

    fn bytes(&self) -> usize {
        size_of::<Self>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draft::{Context, LookupSpec, Origin, Shared, Source};

    /// The draft after `text`, read token by token; a client's prediction is searched as well.
    fn tree(prediction: &[TokenId], text: &[TokenId], nodes: usize) -> Tree {
        let spec = LookupSpec::PromptLookup(Ngram::default());
        let shared = Shared { prediction: prediction.into(), ..Shared::default() };
        let mut context = Context::new([&spec], &shared);
        let mut lookup = PromptLookup::new(Ngram::default(), Source::PromptLookup.into());
        for token in text.chunks(1) {
            context.read(token, Origin::Output, |seen| lookup.observe(seen));
        }
        lookup.draft(context.text(), Budget { nodes, depth: nodes })
    }

    fn draft(text: &[TokenId], nodes: usize) -> Vec<TokenId> {
        tree(&[], text, nodes).nodes().iter().map(|node| node.token).collect()
    }

    #[test]
    fn proposes_the_continuation_of_the_most_recent_match() {
        assert_eq!(draft(&[1, 2, 3, 9, 1, 2, 4, 8, 1, 2], 3), [4, 8, 1]);
    }

    #[test]
    fn prefers_the_longer_match_to_the_more_recent_one() {
        assert_eq!(draft(&[5, 1, 2, 3, 9, 1, 2, 4, 8, 5, 1, 2], 2), [3, 9]);
    }

    #[test]
    fn goes_on_with_the_period_when_the_continuation_is_short() {
        assert_eq!(draft(&[1, 2, 3, 1, 2, 3, 1], 7), [2, 3, 1, 2, 3, 1, 2]);
        assert_eq!(draft(&[6, 6, 6], 4), [6, 6, 6, 6]);
    }

    #[test]
    fn proposes_nothing_below_the_shortest_match() {
        assert!(draft(&[1, 2, 3, 4, 1], 4).is_empty());
    }

    #[test]
    fn guesses_that_one_token_was_replaced_where_a_long_alignment_breaks() {
        let original: Vec<TokenId> = (100..120).collect();
        let text = [&original[..], &original[..10], &[7]].concat();
        assert_eq!(draft(&text, 3), [111, 112, 113]);
        assert_eq!(tree(&[], &text, 1).nodes()[0].votes.first().features.match_len, 0);
    }

    #[test]
    fn keeps_a_copying_alignment_although_a_shorter_match_is_more_recent() {
        let original: Vec<TokenId> = (100..130).collect();
        let mut text = original.clone();
        text.extend([7, 112, 113, 114, 115, 116, 117, 118, 119, 55, 55, 8]);
        text.extend(&original[..20]);
        assert_eq!(draft(&text, 2), [120, 121]);
    }

    #[test]
    fn copies_from_the_prediction_as_well_and_never_past_its_end() {
        let draft = tree(&[1, 2, 3, 4], &[9, 8, 1, 2], 5);
        assert_eq!(draft.nodes().iter().map(|node| node.token).collect::<Vec<_>>(), [3, 4]);
    }
}
