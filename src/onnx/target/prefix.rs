//! Chooses the lane for a sequence: the one whose tokens share the longest prefix with it.
//!
//! The tokens of a freed lane stay in it, so the next request of the same conversation needs only
//! its last tokens computed. If another sequence needs only a part of a lane, that part is copied
//! and the lane stays.

use crate::forward::{Forward, Lane, ModelError};
use foretell_core::units::TokenId;

/// Computing this many tokens is assumed to cost no more than copying a lane.
const COPY_COST: usize = 32;

/// Index of a slot in [`Lanes`].
pub(super) type SlotId = usize;

struct Slot {
    lane: Lane,
    tokens: Vec<TokenId>,
    busy: bool,
    used: u64,
}

/// All reserved lanes with their tokens.
#[derive(Default)]
pub(super) struct Lanes {
    slots: Vec<Slot>,
    clock: u64,
}

/// A lane, and the number of wanted tokens that are in it.
type Match = (SlotId, usize);

impl Lanes {
    /// Takes a free lane for `wanted` and puts as much of the sequence into it as is in any lane,
    /// at most `most` tokens. Returns the lane and that number; `None` if every lane is busy.
    pub(super) fn acquire(
        &mut self,
        model: &mut dyn Forward,
        wanted: &[TokenId],
        most: usize,
    ) -> Result<Option<Match>, ModelError> {
        let idle = self.best(wanted, most, |slot| !slot.busy);
        let any = self.best(wanted, most, |_| true);
        let shared = any.map_or(0, |(_, shared)| shared);
        let good = idle.filter(|&(slot, len)| {
            len > 0
                && len + COPY_COST >= shared
                && (len + COPY_COST >= self.len(slot) || len * 2 >= self.len(slot))
        });
        let free = good.map(|(slot, _)| slot).or_else(|| self.blank(model)).or_else(|| self.oldest());
        let Some(slot) = free else { return Ok(None) };
        let reused = self.common(slot, wanted, most);
        let cached = match any {
            Some((from, len)) if from != slot && len > reused + COPY_COST => {
                self.copy(model, from, slot, len)?;
                len
            }
            _ => {
                self.rewind(model, slot, reused);
                reused
            }
        };
        self.occupy(slot);
        Ok(Some((slot, cached)))
    }

    /// The largest number of tokens of `wanted` that are in one lane, at most `most`.
    pub(super) fn longest_match(&self, wanted: &[TokenId], most: usize) -> usize {
        self.best(wanted, most, |_| true).map_or(0, |(_, len)| len)
    }

    /// The model's lane of a slot.
    pub(super) fn lane(&self, slot: SlotId) -> Option<Lane> {
        self.slots.get(slot).map(|slot| slot.lane)
    }

    /// Records that tokens were appended to the lane.
    pub(super) fn append(&mut self, slot: SlotId, tokens: &[TokenId]) {
        if let Some(slot) = self.slots.get_mut(slot) {
            slot.tokens.extend_from_slice(tokens);
        }
    }

    /// Removes all but the first `len` tokens.
    pub(super) fn rewind(&mut self, model: &mut dyn Forward, slot: SlotId, len: usize) {
        if let Some(slot) = self.slots.get_mut(slot) {
            slot.tokens.truncate(len);
            model.rewind(slot.lane, len);
        }
    }

    /// Reduces a lane to the first `base` tokens and the path `path` of the draft tree behind them.
    pub(super) fn commit(
        &mut self,
        model: &mut dyn Forward,
        slot: SlotId,
        base: usize,
        path: &[usize],
    ) -> Result<(), ModelError> {
        let Some(entry) = self.slots.get_mut(slot) else { return Ok(()) };
        if path.iter().copied().eq(0..path.len()) {
            self.rewind(model, slot, base + path.len());
            return Ok(());
        }
        let branch: Vec<TokenId> =
            path.iter().filter_map(|&node| entry.tokens.get(base + node).copied()).collect();
        model.commit(entry.lane, base, path)?;
        entry.tokens.truncate(base);
        entry.tokens.extend(branch);
        Ok(())
    }

    /// Frees the lane; its tokens stay.
    pub(super) fn free(&mut self, slot: SlotId) {
        self.clock += 1;
        if let Some(slot) = self.slots.get_mut(slot) {
            slot.busy = false;
            slot.used = self.clock;
        }
    }

    /// Empties and frees a lane whose content may be wrong.
    pub(super) fn discard(&mut self, model: &mut dyn Forward, slot: SlotId) {
        self.rewind(model, slot, 0);
        self.free(slot);
    }

    pub(super) fn busy_tokens(&self) -> usize {
        self.slots.iter().filter(|slot| slot.busy).map(|slot| slot.tokens.len()).sum()
    }

    fn len(&self, slot: SlotId) -> usize {
        self.slots.get(slot).map_or(0, |slot| slot.tokens.len())
    }

    fn common(&self, slot: SlotId, wanted: &[TokenId], most: usize) -> usize {
        self.slots.get(slot).map_or(0, |slot| common(&slot.tokens, wanted).min(most))
    }

    /// The slot with the longest match; of equal ones the one with the fewest tokens, then the
    /// least recently used.
    fn best(&self, wanted: &[TokenId], most: usize, of: impl Fn(&Slot) -> bool) -> Option<Match> {
        self.slots
            .iter()
            .enumerate()
            .filter(|(_, slot)| of(slot))
            .map(|(index, slot)| (index, common(&slot.tokens, wanted).min(most)))
            .max_by_key(|&(index, len)| {
                let slot = self.slots.get(index);
                let (tokens, used) = slot.map_or((0, 0), |slot| (slot.tokens.len(), slot.used));
                (len, std::cmp::Reverse((tokens, used)))
            })
    }

    fn blank(&mut self, model: &mut dyn Forward) -> Option<SlotId> {
        let lane = model.reserve()?;
        self.slots.push(Slot { lane, tokens: Vec::new(), busy: false, used: 0 });
        Some(self.slots.len() - 1)
    }

    fn oldest(&self) -> Option<SlotId> {
        let free = self.slots.iter().enumerate().filter(|(_, slot)| !slot.busy);
        free.min_by_key(|(_, slot)| slot.used).map(|(index, _)| index)
    }

    fn copy(
        &mut self,
        model: &mut dyn Forward,
        from: SlotId,
        to: SlotId,
        len: usize,
    ) -> Result<(), ModelError> {
        self.rewind(model, to, 0);
        let (Some(source), Some(target)) = (self.slots.get(from), self.slots.get(to)) else { return Ok(()) };
        model.fork(source.lane, target.lane, len)?;
        let tokens = source.tokens.iter().take(len).copied().collect();
        if let Some(target) = self.slots.get_mut(to) {
            target.tokens = tokens;
        }
        Ok(())
    }

    fn occupy(&mut self, slot: SlotId) {
        self.clock += 1;
        if let Some(slot) = self.slots.get_mut(slot) {
            slot.busy = true;
            slot.used = self.clock;
        }
    }
}

/// Length of the common prefix. Complete blocks are compared first, which is faster.
pub(super) fn common(a: &[TokenId], b: &[TokenId]) -> usize {
    const BLOCK: usize = 64;
    let blocks = a.chunks_exact(BLOCK).zip(b.chunks_exact(BLOCK)).take_while(|(a, b)| a == b).count();
    let same = blocks * BLOCK;
    same + a.iter().zip(b).skip(same).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests;
