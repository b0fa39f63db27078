//! A draft that was made for a row, compared with what the row then emits.
//!
//! What is learnt does not depend on how much of a draft was sent: a token that comes next although
//! it was never verified says as much about its drafter as one that was accepted.

use foretell_control::acceptance::{Acceptance, Evidence, RowFactor};
use foretell_core::control::TemperatureBucket;
use foretell_core::draft::{Agreement, BUCKETS, Merged, Source, Tree, Vote};
use foretell_core::units::TokenId;

/// A chain of draft tokens that is being followed.
#[derive(Debug)]
pub(crate) struct Chain {
    tree: Tree,
    temperature: TemperatureBucket,
    /// Tokens that have been emitted as drafted.
    followed: usize,
}

/// The evidence of a vote at a temperature where the other drafters agree so, and the drafter's
/// prior.
pub(crate) fn evidence(vote: Vote, company: Agreement, temperature: TemperatureBucket) -> (Evidence, f64) {
    let source = vote.drafter.source;
    let bucket = source.bucket(vote.features);
    let class = source.index() * TemperatureBucket::COUNT + temperature.index();
    let number = (class * BUCKETS + bucket) * Agreement::COUNT + company.index();
    (Evidence(number as u16), source.prior().get(bucket).copied().unwrap_or(0.5))
}

impl Chain {
    /// Follows this draft; `None` if it is empty.
    pub(crate) fn of(merged: &Merged, temperature: TemperatureBucket) -> Option<Self> {
        (!merged.tree.is_empty()).then(|| Self { tree: merged.tree.clone(), temperature, followed: 0 })
    }

    /// Learns from the tokens that the row has emitted; false once nothing remains to be followed.
    pub(crate) fn follow(&mut self, emitted: &[TokenId], all: &mut Acceptance, row: &mut RowFactor) -> bool {
        for token in emitted {
            let Some(node) = self.tree.nodes().get(self.followed) else { return false };
            let hit = node.token == *token;
            for vote in node.votes.by_source() {
                let (evidence, prior) = evidence(vote, node.company, self.temperature);
                all.note(row, evidence, self.followed, prior, hit);
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
