//! A draft that was made for a row, compared with what the row then emits.
//!
//! What is learnt does not depend on how much of a draft was sent: a token that comes next although
//! it was never verified says as much about its drafter as one that was accepted.

use foretell_core::control::{Survival, TemperatureBucket, Tuning};
use foretell_core::draft::{Merged, Source, Tree};
use foretell_core::units::TokenId;

/// A chain of draft tokens that is being followed.
#[derive(Debug)]
pub(crate) struct Chain {
    tree: Tree,
    temperature: TemperatureBucket,
    /// Tokens that have been emitted as drafted.
    followed: usize,
}

impl Chain {
    /// Follows this draft; `None` if it is empty.
    pub(crate) fn of(merged: &Merged, temperature: TemperatureBucket) -> Option<Self> {
        (!merged.tree.is_empty()).then(|| Self { tree: merged.tree.clone(), temperature, followed: 0 })
    }

    /// Learns from the tokens that the row has emitted; false once nothing remains to be followed.
    pub(crate) fn follow(&mut self, emitted: &[TokenId], all: &mut Survival, row: &mut Tuning) -> bool {
        for token in emitted {
            let Some(node) = self.tree.nodes().get(self.followed) else { return false };
            let hit = node.token == *token;
            for vote in node.votes.by_source() {
                all.learn(row, self.temperature, vote, node.company, self.followed, hit);
            }
            self.followed += 1;
            if !hit {
                return false;
            }
        }
        self.followed < self.tree.len()
    }
}

/// The drafter of a draft: that of its first token.
pub(crate) fn drafter(merged: &Merged) -> Option<Source> {
    merged.tree.nodes().first().map(|node| node.votes.first().drafter.source)
}
