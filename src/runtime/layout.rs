//! Where sequences lie in the cache: which tensor set, which slot, and when they move.
//!
//! A set is one tensor per layer of `[lanes, kv_heads, rows, head_dim]`. A run uses a whole set, its cost grows
//! with its lanes and rows, and `TensorScatter` in place needs the whole tensor. So sequences of like length
//! that run together belong into one set, and a sequence that runs alone belongs alone. Moving costs a copy:
//! a set is put together only once what it would have saved exceeds what the move costs (the ski-rental rule:
//! never worse than twice the best plan made with hindsight).
//!
//! This file only decides. `cache` owns the tensors and carries the moves out.

use crate::runtime::forward::{Lane, ModelError};

/// Rows that every set keeps beyond what its sequences may fill, for the padding of a run: a lane that is fed
/// little, or nothing, is padded to the length of the longest.
pub const SPARE: usize = 32;
/// The shortest set.
const SHORTEST: usize = 256;
/// A feed longer than this is prefill: it runs alone, since every other lane of its set would be padded to it.
const HEAVY: usize = 32;
/// Empty sets that are kept for the next sequence.
const KEPT_EMPTY: usize = 4;

/// A slot of a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Index of the set.
    pub set: usize,
    /// Index within it.
    pub slot: usize,
}

/// The size of a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SetShape {
    /// Cache rows per lane, spare ones included.
    pub rows: usize,
    /// Lanes.
    pub lanes: usize,
}

/// What the owner of the tensors has to do, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Make a set of this shape, zeroed.
    Create(usize, SetShape),
    /// Free a set.
    Drop(usize),
    /// Copy the first rows of a slot to another.
    Copy {
        /// Whence.
        from: Place,
        /// Whither.
        to: Place,
        /// How many.
        rows: usize,
    },
}

#[derive(Clone, Copy, Debug)]
struct Sequence {
    len: usize,
    place: Option<Place>,
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

/// All sequences and all sets.
#[derive(Debug)]
pub struct Layout {
    context: usize,
    widest: usize,
    sequences: Vec<Option<Sequence>>,
    sets: Vec<Option<Set>>,
    /// Per bucket, what staying apart has cost so far, in runs of a single lane.
    regret: Vec<f64>,
    steps: Vec<Step>,
}

/// Cost of a run of a set, in runs of a single lane: measured, four lanes of one new token took 1.97 times one.
fn cost(lanes: usize) -> f64 {
    1.0 + 0.33 * (lanes as f64 - 1.0)
}

impl Layout {
    /// Room for `lanes` sequences of up to `context` tokens, at most `widest` of them in one set.
    pub fn new(lanes: usize, context: usize, widest: usize) -> Self {
        Self {
            context,
            widest: widest.max(1).next_power_of_two(),
            sequences: vec![None; lanes],
            sets: Vec::new(),
            regret: vec![0.0; usize::BITS as usize],
            steps: Vec::new(),
        }
    }

    /// An empty sequence, if there is room.
    pub fn reserve(&mut self) -> Option<Lane> {
        let index = self.sequences.iter().position(Option::is_none)?;
        *self.sequences.get_mut(index)? = Some(Sequence { len: 0, place: None });
        Some(Lane(index))
    }

    /// Ends a sequence.
    pub fn release(&mut self, lane: Lane) {
        self.leave(lane);
        if let Some(entry) = self.sequences.get_mut(lane.0) {
            *entry = None;
        }
    }

    /// Tokens in a sequence, 0 if there is no such one.
    pub fn len(&self, lane: Lane) -> usize {
        self.sequence(lane).map_or(0, |sequence| sequence.len)
    }

    /// The slot of a sequence that has run.
    pub fn place(&self, lane: Lane) -> Option<Place> {
        self.sequence(lane)?.place
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

    /// Who lies in the slots of a set.
    pub fn slots(&self, set: usize) -> &[Option<Lane>] {
        self.sets.get(set).and_then(Option::as_ref).map_or(&[], |set| set.slots.as_slice())
    }

    /// The shape of a set.
    pub fn shape(&self, set: usize) -> Option<SetShape> {
        Some(self.sets.get(set)?.as_ref()?.shape)
    }

    /// What is to be done before the next run; empties the list.
    pub fn take_steps(&mut self, into: &mut Vec<Step>) {
        into.append(&mut self.steps);
    }

    /// Places every sequence for a run in which it grows by so many tokens. The slots to run together follow
    /// from [`Layout::place`].
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
        let alone = |lane: Lane| {
            self.place(lane).and_then(|place| self.shape(place.set)).is_some_and(|shape| shape.lanes == 1)
        };
        match feeds {
            [(lane, _)] if alone(*lane) => {}
            _ => self.gather_all(feeds),
        }
        Ok(())
    }

    /// Makes `to` lie in a slot that holds the first `len` rows of `from`.
    pub fn fork(&mut self, from: Lane, to: Lane, len: usize) -> Result<(), ModelError> {
        let (have, source) = match (self.sequence(from), self.sequence(to)) {
            (Some(sequence), Some(_)) if from != to => (sequence.len, sequence.place),
            _ => return Err(ModelError::Invalid(format!("cannot fork lane {} into {}", from.0, to.0))),
        };
        if len > have {
            return Err(ModelError::Invalid(format!("cannot fork {len} of {have} tokens")));
        }
        self.set_len(to, 0);
        if let (Some(from), true) = (source, len > 0) {
            self.put(to, self.rows_for(len), 1);
            if let Some(to) = self.place(to) {
                self.steps.push(Step::Copy { from, to, rows: len });
            }
            self.set_len(to, len);
        }
        Ok(())
    }

    fn sequence(&self, lane: Lane) -> Option<Sequence> {
        self.sequences.get(lane.0).copied().flatten()
    }

    /// Rows of the shortest set for so many tokens.
    fn rows_for(&self, tokens: usize) -> usize {
        (tokens + SPARE).next_power_of_two().max(SHORTEST).min(self.context + SPARE)
    }

    /// Gives a sequence a slot that is long enough for its feed, and its own set if it is prefill.
    fn fit(&mut self, lane: Lane, adding: usize) {
        let rows = self.rows_for(self.len(lane) + adding);
        let shape = self.place(lane).and_then(|place| self.shape(place.set));
        let fits = shape.is_some_and(|shape| shape.rows >= rows && (adding <= HEAVY || shape.lanes == 1));
        if !fits {
            self.put(lane, rows.max(shape.map_or(0, |shape| shape.rows)), 1);
        }
    }

    /// Moves a sequence into a free slot of a set of this shape that is otherwise empty.
    fn put(&mut self, lane: Lane, rows: usize, lanes: usize) {
        let set = self.free_set(SetShape { rows, lanes });
        self.move_into(lane, set);
    }

    fn move_into(&mut self, lane: Lane, set: usize) {
        let old = self.place(lane);
        let len = self.len(lane);
        let Some(Some(entry)) = self.sets.get_mut(set) else { return };
        let Some(slot) = entry.slots.iter().position(Option::is_none) else { return };
        if let Some(holder) = entry.slots.get_mut(slot) {
            *holder = Some(lane);
        }
        let to = Place { set, slot };
        if let (Some(from), true) = (old, len > 0) {
            self.steps.push(Step::Copy { from, to, rows: len });
        }
        self.leave(lane);
        if let Some(Some(sequence)) = self.sequences.get_mut(lane.0) {
            sequence.place = Some(to);
        }
    }

    /// An empty set of this shape: a kept one, or a new one.
    fn free_set(&mut self, shape: SetShape) -> usize {
        let kept = |set: &Option<Set>| set.as_ref().is_some_and(|set| set.shape == shape && set.empty());
        if let Some(index) = self.sets.iter().position(kept) {
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
        self.steps.push(Step::Create(index, shape));
        index
    }

    /// Frees empty sets beyond those that are kept. Slots that a pending copy reads from are left alone.
    fn drop_surplus(&mut self) {
        let mut empty: Vec<usize> = Vec::new();
        for (index, set) in self.sets.iter().enumerate() {
            let read = |step: &Step| matches!(step, Step::Copy { from, .. } if from.set == index);
            if set.as_ref().is_some_and(Set::empty) && !self.steps.iter().any(read) {
                empty.push(index);
            }
        }
        let surplus = (empty.len() + 1).saturating_sub(KEPT_EMPTY);
        for index in empty.into_iter().take(surplus) {
            if let Some(entry) = self.sets.get_mut(index) {
                *entry = None;
            }
            self.steps.push(Step::Drop(index));
        }
    }

    fn leave(&mut self, lane: Lane) {
        let Some(Some(sequence)) = self.sequences.get_mut(lane.0) else { return };
        let Some(place) = sequence.place.take() else { return };
        let slot = self
            .sets
            .get_mut(place.set)
            .and_then(Option::as_mut)
            .and_then(|set| set.slots.get_mut(place.slot));
        if let Some(slot) = slot {
            *slot = None;
        }
    }

    fn gather_all(&mut self, feeds: &[(Lane, usize)]) {
        let mut light: Vec<(usize, Lane)> = Vec::with_capacity(feeds.len());
        for &(lane, adding) in feeds {
            let shape = self.place(lane).and_then(|place| self.shape(place.set));
            if let (Some(shape), true) = (shape, adding <= HEAVY) {
                light.push((shape.rows, lane));
            }
        }
        light.sort_unstable_by_key(|&(rows, lane)| (rows, lane.0));
        let widest = self.widest;
        for bucket in light.chunk_by(|a, b| a.0 == b.0) {
            let Some(&(rows, _)) = bucket.first() else { continue };
            for group in bucket.chunks(widest) {
                let lanes: Vec<Lane> = group.iter().map(|&(_, lane)| lane).collect();
                self.gather(rows, &lanes);
            }
        }
    }

    /// Puts a group into one set once that has become worth its copies.
    fn gather(&mut self, rows: usize, group: &[Lane]) {
        let mut touched: Vec<usize> = group.iter().filter_map(|&lane| Some(self.place(lane)?.set)).collect();
        touched.sort_unstable();
        touched.dedup();
        let lanes = group.len().next_power_of_two();
        let stay: f64 =
            touched.iter().filter_map(|&set| self.shape(set)).map(|shape| cost(shape.lanes)).sum();
        let saving = stay - cost(lanes);
        let key = rows.trailing_zeros() as usize;
        let Some(regret) = self.regret.get_mut(key) else { return };
        if saving <= 0.0 {
            return;
        }
        *regret += saving;
        let wanted = SetShape { rows, lanes };
        let target = touched.into_iter().find(|&set| self.home(set, wanted, group));
        let moving = group.iter().filter(|&&lane| self.place(lane).map(|place| place.set) != target);
        let price: f64 = moving.map(|&lane| 0.3 + self.len(lane) as f64 / 1024.0).sum();
        if self.regret.get(key).is_none_or(|&regret| regret < price) {
            return;
        }
        if let Some(regret) = self.regret.get_mut(key) {
            *regret = 0.0;
        }
        let set = target.unwrap_or_else(|| self.free_set(wanted));
        for &lane in group {
            if self.place(lane).is_none_or(|place| place.set != set) {
                self.move_into(lane, set);
            }
        }
    }

    /// Whether a set has the wanted shape and holds nobody but the group.
    fn home(&self, set: usize, wanted: SetShape, group: &[Lane]) -> bool {
        self.shape(set) == Some(wanted) && self.slots(set).iter().flatten().all(|lane| group.contains(lane))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Carries the steps out on rows that are numbers, and checks that nothing is read or written out of place.
    #[derive(Default)]
    struct Rows(Vec<Option<(SetShape, Vec<Vec<u64>>)>>);

    impl Rows {
        fn apply(&mut self, layout: &mut Layout) {
            let mut steps = Vec::new();
            layout.take_steps(&mut steps);
            for step in steps {
                match step {
                    Step::Create(set, shape) => {
                        self.0.resize(self.0.len().max(set + 1), None);
                        assert!(self.0[set].is_none(), "set {set} is made twice");
                        self.0[set] = Some((shape, vec![vec![0; shape.rows]; shape.lanes]));
                    }
                    Step::Drop(set) => assert!(self.0[set].take().is_some(), "set {set} is dropped twice"),
                    Step::Copy { from, to, rows } => {
                        let copied = self.slot(from)[..rows].to_vec();
                        self.slot(to)[..rows].copy_from_slice(&copied);
                    }
                }
            }
        }

        fn slot(&mut self, place: Place) -> &mut Vec<u64> {
            &mut self.0[place.set].as_mut().expect("the set is there").1[place.slot]
        }
    }

    fn feed(layout: &mut Layout, rows: &mut Rows, feeds: &[(Lane, usize)]) {
        layout.prepare(feeds).unwrap();
        rows.apply(layout);
        for &(lane, adding) in feeds {
            let (place, len) = (layout.place(lane).unwrap(), layout.len(lane));
            assert!(len + adding + SPARE <= layout.shape(place.set).unwrap().rows, "no room for padding");
            for row in len..len + adding {
                rows.slot(place)[row] = lane.0 as u64 * 100_000 + row as u64;
            }
            layout.set_len(lane, len + adding);
        }
    }

    fn check(layout: &Layout, rows: &mut Rows, lane: Lane) {
        for row in 0..layout.len(lane) {
            assert_eq!(rows.slot(layout.place(lane).unwrap())[row], lane.0 as u64 * 100_000 + row as u64);
        }
    }

    #[test]
    fn one_sequence_never_moves_but_to_grow() {
        let (mut layout, mut rows) = (Layout::new(4, 2048, 16), Rows::default());
        let lane = layout.reserve().unwrap();
        feed(&mut layout, &mut rows, &[(lane, 100)]);
        let mut moves = 0;
        for _ in 0..1_900 {
            let before = layout.place(lane);
            feed(&mut layout, &mut rows, &[(lane, 1)]);
            moves += usize::from(layout.place(lane) != before);
        }
        assert_eq!(moves, 3, "256 rows, 512, 1024, 2048");
        check(&layout, &mut rows, lane);
    }

    #[test]
    fn sequences_that_run_together_end_in_one_set_and_those_that_run_alone_leave_it() {
        let (mut layout, mut rows) = (Layout::new(4, 2048, 16), Rows::default());
        let lanes: Vec<Lane> = (0..4).map(|_| layout.reserve().unwrap()).collect();
        let together: Vec<(Lane, usize)> = lanes.iter().map(|&lane| (lane, 1)).collect();
        for _ in 0..20 {
            feed(&mut layout, &mut rows, &together);
        }
        let sets: Vec<usize> = lanes.iter().map(|&lane| layout.place(lane).unwrap().set).collect();
        assert!(sets.iter().all(|&set| set == sets[0]), "{sets:?}");
        for _ in 0..20 {
            feed(&mut layout, &mut rows, &[(lanes[0], 1), (lanes[1], 1)]);
        }
        let place = layout.place(lanes[0]).unwrap();
        assert_eq!(layout.shape(place.set).unwrap().lanes, 2);
        for lane in lanes {
            check(&layout, &mut rows, lane);
        }
    }

    #[test]
    fn prefill_runs_in_a_set_of_its_own() {
        let (mut layout, mut rows) = (Layout::new(4, 2048, 16), Rows::default());
        let (a, b) = (layout.reserve().unwrap(), layout.reserve().unwrap());
        for _ in 0..20 {
            feed(&mut layout, &mut rows, &[(a, 1), (b, 1)]);
        }
        assert_eq!(layout.place(a).unwrap().set, layout.place(b).unwrap().set);
        feed(&mut layout, &mut rows, &[(a, 1), (b, 100)]);
        assert_ne!(layout.place(a).unwrap().set, layout.place(b).unwrap().set);
        check(&layout, &mut rows, b);
    }

    #[test]
    fn a_feed_beyond_the_context_is_refused_and_changes_nothing() {
        let mut layout = Layout::new(1, 64, 16);
        let lane = layout.reserve().unwrap();
        assert!(layout.reserve().is_none());
        assert!(matches!(layout.prepare(&[(lane, 65)]), Err(ModelError::Full { wanted: 65, context: 64 })));
        assert!(layout.place(lane).is_none());
        assert!(layout.prepare(&[(Lane(7), 1)]).is_err());
    }

    #[test]
    fn any_order_of_work_keeps_every_row() {
        let (mut layout, mut rows) = (Layout::new(12, 1024, 8), Rows::default());
        let mut live: Vec<Lane> = Vec::new();
        let mut state = 7_u64;
        let mut next = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % below
        };
        for _ in 0..3_000 {
            match next(12) {
                0 => live.extend(layout.reserve()),
                1 if !live.is_empty() => layout.release(live.swap_remove(next(live.len()))),
                2 if !live.is_empty() => {
                    let lane = live[next(live.len())];
                    let len = next(layout.len(lane) + 1);
                    layout.set_len(lane, len);
                }
                _ => {
                    let mut feeds: Vec<(Lane, usize)> = Vec::new();
                    for &lane in &live {
                        let adding = [0, 1, 1, 1, 3, 9, 60][next(7)];
                        if adding > 0 && layout.len(lane) + adding <= 1024 {
                            feeds.push((lane, adding));
                        }
                    }
                    feed(&mut layout, &mut rows, &feeds);
                }
            }
            for &lane in &live {
                check(&layout, &mut rows, lane);
            }
        }
        assert!(rows.0.iter().flatten().count() <= 12 + KEPT_EMPTY);
    }
}
