//! `prediction`: the client sends most of the output in advance: a file before an edit, a form to
//! fill in.
//!
//! The output is aligned with the prediction from its first token on. Where they differ, tokens
//! were replaced, inserted or omitted, and the output usually returns nearby: to a position of the
//! prediction before which the last tokens of the output stand, the one with the longest agreement,
//! of several the nearest to the position after one replaced token.

use std::sync::Arc;

use super::{Budget, DrafterId, Features, Feedback, Growing, Lookup, Origin, Tree};
use crate::units::TokenId;

/// Tokens of the output that must agree with the prediction to come back to it.
const ANCHOR: usize = 2;
/// Longest agreement that is compared when it returns.
const LONGEST: usize = 16;
/// Maximum number of positions that are compared then, the nearest ones.
const POSITIONS: usize = 64;
/// Tokens after a difference for which one token is assumed to be replaced.
const GUESSES: u32 = 4;

/// The drafter. Memory: 16 bytes per token of the prediction, and 4 per token of output.
#[derive(Debug)]
pub struct Prediction {
    id: DrafterId,
    text: Arc<[TokenId]>,
    /// Every pair of neighbours in the prediction and where it ends, in order.
    pairs: Vec<([TokenId; ANCHOR], u32)>,
    output: Vec<TokenId>,
    position: Position,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Position {
    /// The token that is expected next.
    at: usize,
    /// Tokens that have agreed in a row.
    agreed: u32,
    /// Tokens since the output deviated from the prediction.
    lost: u32,
}

impl Prediction {
    /// A drafter that has seen nothing of the output and votes as `id`.
    pub fn new(text: Arc<[TokenId]>, id: DrafterId) -> Self {
        let mut pairs: Vec<([TokenId; ANCHOR], u32)> = Vec::with_capacity(text.len());
        for (end, pair) in text.windows(ANCHOR).enumerate() {
            pairs.extend(<[TokenId; ANCHOR]>::try_from(pair).map(|pair| (pair, (end + ANCHOR) as u32)));
        }
        pairs.sort_unstable();
        Self { id, text, pairs, output: Vec::new(), position: Position::default() }
    }

    fn push(&mut self, token: TokenId) {
        self.output.push(token);
        let Position { at, agreed, lost } = self.position;
        self.position = if self.text.get(at) == Some(&token) && lost == 0 {
            Position { at: at + 1, agreed: agreed.saturating_add(1), lost: 0 }
        } else {
            let expected = at + 1;
            self.found(expected).unwrap_or(Position { at: expected, agreed: 0, lost: lost.saturating_add(1) })
        };
    }

    /// The position in the prediction after the last tokens of the output; `None` if it does not
    /// contain them.
    fn found(&self, expected: usize) -> Option<Position> {
        let end: [TokenId; ANCHOR] = self.output.last_chunk().copied()?;
        let first = self.pairs.partition_point(|(pair, _)| *pair < end);
        let until = self.pairs.partition_point(|(pair, _)| *pair <= end);
        let positions = self.pairs.get(first..until).unwrap_or_default();
        let near =
            positions.partition_point(|&(_, at)| (at as usize) < expected).saturating_sub(POSITIONS / 2);
        let positions = positions.get(near..).unwrap_or_default().iter().take(POSITIONS);
        let best = positions
            .map(|&(_, at)| (self.agreement(at as usize), at as usize))
            .max_by_key(|&(agreed, at)| (agreed, std::cmp::Reverse(at.abs_diff(expected))))?;
        Some(Position { at: best.1, agreed: best.0 as u32, lost: 0 })
    }

    /// Number of tokens before a position of the prediction that agree with the end of the output.
    fn agreement(&self, at: usize) -> usize {
        let before = self.text.get(..at).unwrap_or_default().iter().rev();
        before.zip(self.output.iter().rev()).take(LONGEST).take_while(|(a, b)| a == b).count()
    }
}

impl Lookup for Prediction {
    fn observe(&mut self, seen: &Feedback<'_>) {
        match seen.origin {
            Origin::Prompt => {}
            Origin::Output => seen.tokens.iter().for_each(|&token| self.push(token)),
        }
    }

    fn draft(&self, _: &Growing, budget: Budget) -> Tree {
        let Position { at, agreed, lost } = self.position;
        if lost > GUESSES {
            return Tree::default();
        }
        let rest = self.text.get(at..).unwrap_or_default();
        let tokens = rest.get(..budget.nodes.min(budget.depth)).unwrap_or(rest);
        Tree::chain(tokens, self.id, Features::matched(agreed))
    }

    fn bytes(&self) -> usize {
        let pairs = self.pairs.capacity() * size_of::<([TokenId; ANCHOR], u32)>();
        size_of::<Self>() + pairs + (self.text.len() + self.output.capacity()) * size_of::<TokenId>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draft::Source;

    fn followed(text: &[TokenId], output: &[TokenId]) -> Vec<TokenId> {
        let mut drafter = Prediction::new(text.into(), Source::Prediction.into());
        drafter.observe(&Feedback {
            tokens: &[9, 9, 1, 2, 3],
            origin: Origin::Prompt,
            text: &Growing::new(),
        });
        drafter.observe(&Feedback { tokens: output, origin: Origin::Output, text: &Growing::new() });
        drafter
            .draft(&Growing::new(), Budget { nodes: 3, depth: 8 })
            .nodes()
            .iter()
            .map(|node| node.token)
            .collect()
    }

    const TEXT: [TokenId; 12] = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 30, 40];

    #[test]
    fn it_follows_the_output_from_its_beginning_to_its_end() {
        assert_eq!(followed(&TEXT, &[]), [1, 2, 3]);
        assert_eq!(followed(&TEXT, &[1, 2, 3]), [4, 5, 6]);
        assert_eq!(followed(&TEXT, &TEXT[..11]), [40]);
        assert!(followed(&TEXT, &TEXT).is_empty());
        assert!(followed(&[], &[1]).is_empty());
    }

    #[test]
    fn after_an_edit_it_continues_where_the_output_does() {
        assert_eq!(followed(&TEXT, &[1, 2, 99]), [4, 5, 6], "one token replaced: a guess");
        assert_eq!(followed(&TEXT, &[1, 2, 99, 98, 3, 4]), [5, 6, 7], "two tokens put in");
        assert_eq!(followed(&TEXT, &[1, 2, 5, 6]), [7, 8, 1], "two tokens left out");
        assert!(followed(&TEXT, &[99, 98, 97, 96, 95, 94]).is_empty(), "another text altogether");
        assert_eq!(followed(&TEXT, &[99, 98, 97, 96, 95, 94, 6, 7]), [8, 1, 2]);
    }

    #[test]
    fn the_longest_agreement_counts_and_then_the_nearest_position() {
        assert_eq!(followed(&TEXT, &[1, 2, 3, 4, 5, 6, 99, 8, 1, 2]), [30, 40], "8 1 2 occurs once only");
        let twice = [1, 2, 3, 7, 7, 7, 1, 2, 4, 7, 7, 7, 1, 2, 5];
        assert_eq!(
            followed(&twice, &[1, 2, 3, 7, 7, 9, 1, 2]),
            [4, 7, 7],
            "the next one, not the first or last"
        );
    }
}
