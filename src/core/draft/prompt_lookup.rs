//! `prompt_lookup`: the tokens after the most recent match of the end of the context.
//!
//! An alignment that continues to predict right is retained although a shorter match may be more
//! recent: text that is being copied continues where it was. Beyond its end an alignment repeats
//! itself, as periodic text does. Where a long alignment breaks, text that is being rewritten
//! usually continues one token later: until a new match is found, the draft assumes that one token
//! was replaced (match length 0, so its acceptance is learnt separately).

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

/// The drafter, on the index of [`super::suffix`]. Memory: 9 to 13 bytes per token of the context.
#[derive(Debug)]
pub struct PromptLookup {
    id: DrafterId,
    ngram: Ngram,
    context: Growing,
    /// Index at which the copied text continues, and the number of tokens that have agreed.
    aligned: Option<(usize, u32)>,
    /// Index at which it would continue if one token was replaced, and the number of tokens for
    /// which that guess still applies.
    broken: Option<(usize, u32)>,
}

/// Tokens of a longer text that are followed one by one: an alignment of earlier tokens is not
/// continued, so a prompt costs one search for each of its last tokens only.
const FOLLOWED: usize = 64;
/// One token is assumed to be replaced when an alignment breaks that agreed for at least this many
/// tokens ...
const LONG: u32 = 6;
/// ... and the draft continues from there for this many tokens.
const GUESSES: u32 = 4;

impl PromptLookup {
    /// A drafter that has seen nothing of its request and votes as `id`. It also copies from the
    /// client's `prediction`, which may be empty.
    pub fn new(ngram: Ngram, prediction: &[TokenId], id: DrafterId) -> Self {
        let mut context = Growing::new();
        if !prediction.is_empty() {
            context.extend(prediction);
            context.push(SEPARATOR);
        }
        Self { id, ngram, context, aligned: None, broken: None }
    }

    fn push(&mut self, token: TokenId) {
        let agrees = |at: usize| self.context.text().get(at) == Some(&token);
        let continued =
            self.aligned.filter(|&(at, _)| agrees(at)).map(|(at, len)| (at + 1, len.saturating_add(1)));
        let broken = match (self.aligned, self.broken) {
            (Some((at, len)), _) if continued.is_none() && len >= LONG => Some((at + 1, GUESSES)),
            (_, Some((at, guesses))) => guesses.checked_sub(1).map(|guesses| (at + 1, guesses)),
            _ => None,
        };
        self.context.push(token);
        let cap = self.ngram.max.max(1);
        // No match counts for more than one of the longest that count.
        let found = match continued {
            Some((_, len)) if len > cap => None,
            _ => self.context.finder().latest(cap as usize).map(|(at, len)| (at, len as u32)),
        };
        self.aligned = match (continued, found) {
            (Some(continued), Some(found)) if continued.1 > found.1 => Some(continued),
            (continued, found) => found.or(continued),
        };
        self.broken = if self.matched().is_none() { broken } else { None };
    }

    fn matched(&self) -> Option<(usize, u32)> {
        self.aligned.filter(|&(_, len)| len >= self.ngram.min.max(1))
    }
}

impl Lookup for PromptLookup {
    fn observe(&mut self, seen: &Feedback<'_>) {
        let (earlier, followed) = seen.tokens.split_at(seen.tokens.len().saturating_sub(FOLLOWED));
        if !earlier.is_empty() {
            self.context.extend(earlier);
            self.aligned = None;
            self.broken = None;
        }
        for &token in followed {
            self.push(token);
        }
    }

    fn tidy(&mut self) -> bool {
        self.context.tidy()
    }

    fn draft(&self, budget: Budget) -> Tree {
        let guess = self.broken.map(|(at, _)| (at, 0));
        let Some((start, match_len)) = self.matched().or(guess) else {
            return Tree::default();
        };
        let text = self.context.text();
        let period = text.len().saturating_sub(start).max(1);
        let tokens: Vec<TokenId> = (0..budget.nodes.min(budget.depth))
            .map_while(|index| text.get(start + index % period).copied().filter(|&token| token != SEPARATOR))
            .collect();
        Tree::chain(&tokens, self.id, Features::matched(match_len))
    }

    fn bytes(&self) -> usize {
        size_of::<Self>() - size_of::<Growing>() + self.context.bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draft::{Origin, Source};

    fn draft(text: &[TokenId], nodes: usize) -> Vec<TokenId> {
        let mut lookup = PromptLookup::new(Ngram::default(), &[], Source::PromptLookup.into());
        lookup.observe(&Feedback { tokens: text, origin: Origin::Prompt });
        lookup.draft(Budget { nodes, depth: nodes }).nodes().iter().map(|node| node.token).collect()
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
        let mut lookup = PromptLookup::new(Ngram::default(), &[], Source::PromptLookup.into());
        lookup.observe(&Feedback { tokens: &text, origin: Origin::Prompt });
        let draft = lookup.draft(Budget { nodes: 1, depth: 1 });
        assert_eq!(draft.nodes()[0].votes.first().features.match_len, 0);
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
        let mut lookup = PromptLookup::new(Ngram::default(), &[1, 2, 3, 4], Source::PromptLookup.into());
        lookup.observe(&Feedback { tokens: &[9, 8, 1, 2], origin: Origin::Prompt });
        let draft = lookup.draft(Budget { nodes: 5, depth: 5 });
        assert_eq!(draft.nodes().iter().map(|node| node.token).collect::<Vec<_>>(), [3, 4]);
    }
}
