//! Assigns sequences to slots of the cache: to which tensor set, to which slot, and when they move.
//!
//! A set is one tensor per layer of `[lanes, kv_heads, rows, head_dim]`. A run uses a complete set,
//! all lanes with as many tokens as the longest feed has: its cost grows with lanes, rows and
//! tokens, and `TensorScatter` needs the complete tensor. So sequences of similar length
//! that run together and grow by as many tokens belong in one set, and a sequence that runs alone,
//! or with a draft while others take plain steps, belongs alone. Moving costs a copy: a set is
//! assembled only once its missed savings exceed the cost of the move (the ski-rental rule: at most
//! twice the cost of the best schedule made with hindsight).
//!
//! This module only decides. `cache` owns the tensors and carries out the moves.

use crate::forward::{Lane, ModelError};

/// Rows in every set beyond those that its sequences may fill, for the padding of a run: a lane
/// with a short feed, or none, is padded to the length of the longest.
pub const SPARE: usize = 32;
/// Length of the shortest set, tokens.
const SHORTEST: usize = 256;
/// A feed longer than this is prefill: it runs alone, since every other lane of its set would be
/// padded to its length.
const HEAVY: usize = 32;
/// Number of empty sets that are retained for following sequences.
const EMPTY_SETS_MAX: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotAddress {
    pub set: usize,
    /// Index of the slot within its set.
    pub slot: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SetShape {
    /// Cache rows per lane, spare ones included.
    pub rows: usize,
    pub lanes: usize,
}

/// A step that the owner of the tensors has to take, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayoutStep {
    Create(usize, SetShape),
    /// Free the tensors of a set.
    Drop(usize),
    /// Copy the first rows of a slot to another.
    Copy {
        /// Slot that rows are copied from.
        from: SlotAddress,
        /// Slot that rows are copied to.
        to: SlotAddress,
        rows: usize,
    },
}

#[derive(Clone, Copy, Debug)]
struct Sequence {
    len: usize,
    address: Option<SlotAddress>,
}

#[derive(Clone, Debug)]
struct Set {
    shape: SetShape,
    slots: Vec<Option<Lane>>,
}

impl Set {
    fn empty(&self) -> bool {
        self.slots.iter().all(Option::is_none)
    }
}

#[derive(Debug)]
pub struct Layout {
    context: usize,
    widest: usize,
    sequences: Vec<Option<Sequence>>,
    sets: Vec<Option<Set>>,
    /// Cost of a token of one lane.
    token: f64,
    /// Missed savings by the shape that would have been better, in runs as of [`Layout::cost`].
    regret: Vec<(SetShape, f64)>,
    steps: Vec<LayoutStep>,
}

/// Cost of a token of one lane on a CPU, in the unit of [`Layout::cost`].
const TOKEN: f64 = 0.07;

/// Feeds that are to run in one set.
#[derive(Clone, Debug)]
struct Group {
    /// Rows that the longest of its sequences needs.
    rows: usize,
    /// Tokens of its longest feed.
    tokens: usize,
    lanes: Vec<Lane>,
}

impl Group {
    fn shape(&self) -> SetShape {
        SetShape { rows: self.rows, lanes: self.lanes.len().next_power_of_two() }
    }

    fn with(&self, other: &Self) -> Self {
        let lanes = self.lanes.iter().chain(&other.lanes).copied().collect();
        Self { rows: self.rows.max(other.rows), tokens: self.tokens.max(other.tokens), lanes }
    }
}

/// Feeds of one class differ little in their number of tokens: at most by half of it.
fn class(tokens: usize) -> u32 {
    usize::BITS - tokens.leading_zeros()
}

impl Layout {
    /// Room for `lanes` sequences of up to `context` tokens, at most `widest` of them in one set.
    pub fn new(lanes: usize, context: usize, widest: usize) -> Self {
        Self {
            context,
            widest: widest.max(1).next_power_of_two(),
            sequences: vec![None; lanes],
            sets: Vec::new(),
            token: TOKEN,
            regret: Vec::new(),
            steps: Vec::new(),
        }
    }

    /// For a GPU, on which a run takes about as long for many tokens as for one.
    #[must_use]
    pub fn with_free_tokens(self) -> Self {
        Self { token: 0.0, ..self }
    }

    /// Cost of a run of a set with so many tokens of each lane, in runs of one token of a single
    /// lane of 512 rows. Between a target of 6 layers, whose rows cost more, and SmolLM2, whose
    /// weights do, on two cores: attention walks every row of every lane, the weights are read once
    /// for all.
    fn cost(&self, shape: SetShape, tokens: usize) -> f64 {
        let rows = shape.rows as f64 / 512.0;
        0.75 + shape.lanes as f64 * (0.02 + self.token * tokens as f64 + 0.16 * rows)
    }

    /// An empty sequence, if there is room.
    pub fn reserve(&mut self) -> Option<Lane> {
        let index = self.sequences.iter().position(Option::is_none)?;
        *self.sequences.get_mut(index)? = Some(Sequence { len: 0, address: None });
        Some(Lane(index))
    }

    /// Ends a sequence and frees its slot.
    pub fn release(&mut self, lane: Lane) {
        self.leave(lane);
        if let Some(entry) = self.sequences.get_mut(lane.0) {
            *entry = None;
        }
    }

    /// Tokens in a sequence, 0 if it does not exist.
    pub fn len(&self, lane: Lane) -> usize {
        self.sequence(lane).map_or(0, |sequence| sequence.len)
    }

    /// The slot of a sequence that has run.
    pub fn address(&self, lane: Lane) -> Option<SlotAddress> {
        self.sequence(lane)?.address
    }

    /// Sets the length of a sequence; an empty one gives its slot back.
    pub fn set_len(&mut self, lane: Lane, len: usize) {
        if len == 0 {
            self.leave(lane);
        }
        if let Some(Some(sequence)) = self.sequences.get_mut(lane.0) {
            sequence.len = len;
        }
    }

    /// The sequence in each slot of a set; empty if the set does not exist.
    pub fn slots(&self, set: usize) -> &[Option<Lane>] {
        self.sets.get(set).and_then(Option::as_ref).map_or(&[], |set| set.slots.as_slice())
    }

    pub fn shape(&self, set: usize) -> Option<SetShape> {
        Some(self.sets.get(set)?.as_ref()?.shape)
    }

    /// Moves the steps to be taken before the next run to the end of `into`.
    pub fn take_steps(&mut self, into: &mut Vec<LayoutStep>) {
        into.append(&mut self.steps);
    }

    /// Forgets a step that failed: a set that was not created, a slot whose rows were not copied.
    /// Sequences that were moved there are empty.
    pub fn forget(&mut self, failed: LayoutStep) {
        let (set, slot) = match failed {
            LayoutStep::Create(set, _) => (set, None),
            LayoutStep::Copy { to, .. } => (to.set, Some(to.slot)),
            LayoutStep::Drop(_) => return,
        };
        let lanes = self.slots(set).iter().enumerate();
        let lost: Vec<Lane> = lanes
            .filter(|&(at, _)| slot.is_none_or(|slot| slot == at))
            .filter_map(|(_, lane)| *lane)
            .collect();
        for lane in lost {
            self.set_len(lane, 0);
        }
        if slot.is_none()
            && let Some(entry) = self.sets.get_mut(set)
        {
            *entry = None;
        }
    }

    /// Assigns a slot to every sequence for a run in which it grows by that many tokens. The slots
    /// to run together follow from [`Layout::address`].
    pub fn prepare(&mut self, feeds: &[(Lane, usize)]) -> Result<(), ModelError> {
        for &(lane, adding) in feeds {
            let sequence =
                self.sequence(lane).ok_or_else(|| ModelError::Invalid(format!("no lane {}", lane.0)))?;
            let wanted = sequence.len + adding;
            if wanted > self.context {
                return Err(ModelError::Full { wanted, context: self.context });
            }
        }
        for &(lane, adding) in feeds {
            self.fit(lane, adding);
        }
        match *feeds {
            [(lane, adding)] if self.settled(lane, adding) => {}
            _ => self.gather_all(feeds),
        }
        Ok(())
    }

    /// True if a sequence is alone in a set that is no longer than it needs.
    fn settled(&self, lane: Lane, adding: usize) -> bool {
        let wanted = SetShape { rows: self.rows_for(self.len(lane) + adding), lanes: 1 };
        self.address(lane).and_then(|address| self.shape(address.set)) == Some(wanted)
    }

    /// Copies the first `len` rows of `from` into a separate slot for `to`.
    pub fn fork(&mut self, from: Lane, to: Lane, len: usize) -> Result<(), ModelError> {
        let (have, source) = match (self.sequence(from), self.sequence(to)) {
            (Some(sequence), Some(_)) if from != to => (sequence.len, sequence.address),
            _ => return Err(ModelError::Invalid(format!("cannot fork lane {} into {}", from.0, to.0))),
        };
        if len > have {
            return Err(ModelError::Invalid(format!("cannot fork {len} of {have} tokens")));
        }
        self.set_len(to, 0);
        if let (Some(from), true) = (source, len > 0) {
            self.put(to, self.rows_for(len), 1);
            if let Some(to) = self.address(to) {
                self.steps.push(LayoutStep::Copy { from, to, rows: len });
            }
            self.set_len(to, len);
        }
        Ok(())
    }

    fn sequence(&self, lane: Lane) -> Option<Sequence> {
        self.sequences.get(lane.0).copied().flatten()
    }

    /// Rows of the shortest set for this many tokens: powers of two and the midpoints between them.
    fn rows_for(&self, tokens: usize) -> usize {
        let needed = (tokens + SPARE).max(SHORTEST);
        let power = needed.next_power_of_two();
        let halfway = power / 4 * 3;
        if needed <= halfway { halfway } else { power }.min(self.context + SPARE)
    }

    /// Gives a sequence a slot that is long enough for its feed, and a separate set for prefill.
    fn fit(&mut self, lane: Lane, adding: usize) {
        let rows = self.rows_for(self.len(lane) + adding);
        let shape = self.address(lane).and_then(|address| self.shape(address.set));
        let fits = shape.is_some_and(|shape| shape.rows >= rows && (adding <= HEAVY || shape.lanes == 1));
        if !fits {
            self.put(lane, rows, 1);
        }
    }

    /// Moves a sequence into a free slot of a set of this shape that is otherwise empty.
    fn put(&mut self, lane: Lane, rows: usize, lanes: usize) {
        let set = self.free_set(SetShape { rows, lanes });
        self.move_into(lane, set);
    }

    fn move_into(&mut self, lane: Lane, set: usize) {
        let old = self.address(lane);
        let len = self.len(lane);
        let Some(Some(entry)) = self.sets.get_mut(set) else { return };
        let Some(slot) = entry.slots.iter().position(Option::is_none) else { return };
        if let Some(holder) = entry.slots.get_mut(slot) {
            *holder = Some(lane);
        }
        let to = SlotAddress { set, slot };
        if let (Some(from), true) = (old, len > 0) {
            self.steps.push(LayoutStep::Copy { from, to, rows: len });
        }
        self.leave(lane);
        if let Some(Some(sequence)) = self.sequences.get_mut(lane.0) {
            sequence.address = Some(to);
        }
    }

    /// An empty set of this shape: a retained one, or a new one.
    fn free_set(&mut self, shape: SetShape) -> usize {
        let fits = |set: &Option<Set>| set.as_ref().is_some_and(|set| set.shape == shape && set.empty());
        if let Some(index) = self.sets.iter().position(fits) {
            return index;
        }
        self.drop_surplus();
        let index = self.sets.iter().position(Option::is_none).unwrap_or(self.sets.len());
        if index == self.sets.len() {
            self.sets.push(None);
        }
        if let Some(entry) = self.sets.get_mut(index) {
            *entry = Some(Set { shape, slots: vec![None; shape.lanes] });
        }
        self.steps.push(LayoutStep::Create(index, shape));
        index
    }

    /// Frees empty sets beyond [`EMPTY_SETS_MAX`]. Sets that a pending copy reads from are
    /// retained.
    fn drop_surplus(&mut self) {
        let mut empty: Vec<usize> = Vec::new();
        for (index, set) in self.sets.iter().enumerate() {
            let read = |step: &LayoutStep| matches!(step, LayoutStep::Copy { from, .. } if from.set == index);
            if set.as_ref().is_some_and(Set::empty) && !self.steps.iter().any(read) {
                empty.push(index);
            }
        }
        let surplus = (empty.len() + 1).saturating_sub(EMPTY_SETS_MAX);
        for index in empty.into_iter().take(surplus) {
            if let Some(entry) = self.sets.get_mut(index) {
                *entry = None;
            }
            self.steps.push(LayoutStep::Drop(index));
        }
    }

    fn leave(&mut self, lane: Lane) {
        let Some(Some(sequence)) = self.sequences.get_mut(lane.0) else { return };
        let Some(address) = sequence.address.take() else { return };
        let slot = self
            .sets
            .get_mut(address.set)
            .and_then(Option::as_mut)
            .and_then(|set| set.slots.get_mut(address.slot));
        if let Some(slot) = slot {
            *slot = None;
        }
    }

    /// Groups short feeds by the rows they need and by their tokens, and different ones where that
    /// is cheaper than separate runs.
    fn gather_all(&mut self, feeds: &[(Lane, usize)]) {
        let light = feeds.iter().filter(|&&(_, adding)| adding <= HEAVY);
        let mut light: Vec<Group> = light
            .map(|&(lane, tokens)| {
                let rows = self.rows_for(self.len(lane) + tokens);
                Group { rows, tokens, lanes: vec![lane] }
            })
            .collect();
        // By lane as well: the same feeds make the same groups in every run.
        let lane = |one: &Group| one.lanes.first().map(|lane| lane.0);
        light.sort_by_key(|one| (std::cmp::Reverse((one.rows, class(one.tokens))), lane(one)));
        let mut groups: Vec<Group> = Vec::new();
        let alike = light.chunk_by(|a, b| (a.rows, class(a.tokens)) == (b.rows, class(b.tokens)));
        for bucket in alike.flat_map(|bucket| bucket.chunks(self.widest)) {
            let Some(bucket) = bucket.iter().cloned().reduce(|all, one| all.with(&one)) else { continue };
            let joined = groups.iter_mut().map(|group| (group.with(&bucket), group));
            let joined = joined.filter(|(both, _)| both.lanes.len() <= self.widest);
            let cost = |group: &Group| self.cost(group.shape(), group.tokens);
            let saved = |both: &Group, group: &Group| cost(group) + cost(&bucket) - cost(both);
            let best = joined.max_by(|(a, of_a), (b, of_b)| saved(a, of_a).total_cmp(&saved(b, of_b)));
            match best {
                Some((both, group)) if saved(&both, group) > 0.0 => *group = both,
                _ => groups.push(bucket),
            }
        }
        for group in groups {
            self.gather(&group, feeds);
        }
    }

    /// Moves a group into one set once the missed savings exceed the cost of its copies. `feeds`:
    /// all of the run, those of other groups too.
    fn gather(&mut self, group: &Group, feeds: &[(Lane, usize)]) {
        let mut touched: Vec<usize> =
            group.lanes.iter().filter_map(|&lane| Some(self.address(lane)?.set)).collect();
        touched.sort_unstable();
        touched.dedup();
        let wanted = group.shape();
        let run = |set: usize, moved: &[Lane]| self.run_cost(set, feeds, moved);
        let stay: f64 = touched.iter().map(|&set| run(set, &[])).sum();
        let rest: f64 = touched.iter().map(|&set| run(set, &group.lanes)).sum();
        let saving = stay - rest - self.cost(wanted, group.tokens);
        if saving <= 0.0 {
            return;
        }
        let target = touched.into_iter().find(|&set| self.home(set, wanted, &group.lanes));
        let is_moved = |lane: Lane| self.address(lane).map(|address| address.set) != target;
        let moving = group.lanes.iter().filter(|&&lane| is_moved(lane));
        let price: f64 = moving.map(|&lane| 0.3 + self.len(lane) as f64 / 1024.0).sum();
        if !self.regrets(wanted, saving, price) {
            return;
        }
        let set = target.unwrap_or_else(|| self.free_set(wanted));
        for &lane in &group.lanes {
            if self.address(lane).is_none_or(|address| address.set != set) {
                self.move_into(lane, set);
            }
        }
    }

    /// Cost of the run of a set by its feeds but those of the lanes that have `moved`; 0 without
    /// any.
    fn run_cost(&self, set: usize, feeds: &[(Lane, usize)], moved: &[Lane]) -> f64 {
        let is_here = |lane: Lane| self.address(lane).is_some_and(|address| address.set == set);
        let fed = feeds.iter().filter(|&&(lane, _)| is_here(lane) && !moved.contains(&lane));
        let tokens = fed.map(|&(_, adding)| adding).max();
        self.shape(set).zip(tokens).map_or(0.0, |(shape, tokens)| self.cost(shape, tokens))
    }

    /// Adds to the missed savings for this shape; true, and resets them, if they now reach the
    /// price.
    fn regrets(&mut self, wanted: SetShape, saving: f64, price: f64) -> bool {
        let index = self.regret.iter().position(|(shape, _)| *shape == wanted).unwrap_or_else(|| {
            self.regret.push((wanted, 0.0));
            self.regret.len() - 1
        });
        let Some((_, regret)) = self.regret.get_mut(index) else { return false };
        *regret += saving;
        let paid = *regret >= price;
        if paid {
            *regret = 0.0;
        }
        paid
    }

    /// True if a set has the wanted shape and contains no sequence outside the group.
    fn home(&self, set: usize, wanted: SetShape, group: &[Lane]) -> bool {
        self.shape(set) == Some(wanted) && self.slots(set).iter().flatten().all(|lane| group.contains(lane))
    }
}

#[cfg(test)]
mod tests;
