//! The tokens that two vocabularies have in common (TLI: token-level intersection, arXiv
//! 2502.05202).
//!
//! A drafter that may choose only among them drafts tokens of the target directly. Two tokens are
//! the same if they have the same bytes; how a vocabulary spells a space does not matter.

use std::collections::HashMap;

use super::super::Tokenizer;
use foretell_core::units::TokenId;

/// No such token.
const NONE: TokenId = TokenId::MAX;

/// The drafter's tokens that the target has too, with their ids in both.
#[derive(Debug)]
pub struct Common {
    /// By the drafter's id.
    to_target: Vec<TokenId>,
    /// By the target's id.
    to_drafter: Vec<TokenId>,
    size: usize,
}

impl Common {
    /// Tokens are matched by their bytes, marks by `marks` (from drafter to target). Where several
    /// tokens of one side have the same bytes, the lowest id counts.
    pub(super) fn new(
        target: &Tokenizer,
        drafter: &Tokenizer,
        marks: &HashMap<TokenId, Option<TokenId>>,
    ) -> Self {
        let mut by_bytes: HashMap<Vec<u8>, TokenId> = HashMap::new();
        for id in (0..target.end()).rev().filter(|&id| target.added().binary_search(&id).is_err()) {
            if let Some(bytes) = target.spelling(id) {
                by_bytes.insert(bytes, id);
            }
        }
        let mut common = Self {
            to_target: vec![NONE; drafter.end() as usize],
            to_drafter: vec![NONE; target.end() as usize],
            size: 0,
        };
        for id in 0..drafter.end() {
            let twin = match marks.get(&id) {
                Some(twin) => *twin,
                None => drafter.spelling(id).and_then(|bytes| by_bytes.get(&bytes).copied()),
            };
            if let Some(twin) = twin {
                common.join(id, twin);
            }
        }
        common
    }

    fn join(&mut self, drafter: TokenId, target: TokenId) {
        let back = self.to_drafter.get_mut(target as usize).filter(|known| **known == NONE);
        if let (Some(back), Some(there)) = (back, self.to_target.get_mut(drafter as usize)) {
            (*back, *there) = (drafter, target);
            self.size += 1;
        }
    }

    /// The target's id of a token of the drafter; `None` if the target does not have it.
    pub fn target(&self, drafter: TokenId) -> Option<TokenId> {
        self.to_target.get(drafter as usize).copied().filter(|&id| id != NONE)
    }

    /// The drafter's id of a token of the target; `None` if the drafter does not have it.
    pub fn drafter(&self, target: TokenId) -> Option<TokenId> {
        self.to_drafter.get(target as usize).copied().filter(|&id| id != NONE)
    }

    /// Number of common tokens.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Writes a row of the drafter's logits, indexed by its token ids, into `target`, indexed by
    /// the target's. A token that the drafter does not have gets −∞, so that the distribution over
    /// the common tokens is the drafter's own, renormalised.
    pub fn row(&self, drafter: &[f32], target: &mut Vec<f32>) {
        target.clear();
        let logit = |&id: &TokenId| drafter.get(id as usize).copied().unwrap_or(f32::NEG_INFINITY);
        target.extend(self.to_drafter.iter().map(logit));
    }
}
