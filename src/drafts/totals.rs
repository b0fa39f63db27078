//! What the steps of engines have done, summed up.

use std::ops::AddAssign;

use foretell_control::cost::StepCost;

/// Positions of a draft that are counted separately; later ones count as the last of these.
const POSITIONS: usize = 32;

/// Sums over the steps of one engine, or of several.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Totals {
    pub steps: Steps,
    /// Draft tokens that the engine verified, and those that it accepted.
    pub drafted: PerPosition,
    pub accepted: PerPosition,
    /// Answers that came too late for it.
    pub late: u64,
    /// Microseconds that it waited for answers.
    pub waited: u64,
    /// Seconds of engine steps that drafts saved against plain steps, and that they lost.
    pub saved: f64,
    pub wasted: f64,
    /// Rows at the last step.
    pub rows: usize,
    /// Cost of a step with so many rows; `None` if it is not known, and in a sum over engines.
    pub cost: Option<StepCost>,
}

/// Steps of an engine, by the drafts that it got for them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Steps {
    /// Answered with draft tokens.
    pub drafted: u64,
    /// Answered with none.
    pub plain: u64,
    /// Not requested: nothing was to be drafted, or answers had been late.
    pub skipped: u64,
}

/// Counts of draft tokens by their position in the draft.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PerPosition([u64; POSITIONS]);

impl Totals {
    /// Adds what another engine has done.
    pub fn add(&mut self, other: &Self) {
        self.steps.drafted += other.steps.drafted;
        self.steps.plain += other.steps.plain;
        self.steps.skipped += other.steps.skipped;
        self.drafted += other.drafted;
        self.accepted += other.accepted;
        self.late += other.late;
        self.waited += other.waited;
        self.saved += other.saved;
        self.wasted += other.wasted;
        self.rows += other.rows;
        self.cost = None;
    }
}

impl Steps {
    /// All answers.
    pub fn answered(&self) -> u64 {
        self.drafted + self.plain
    }
}

impl PerPosition {
    /// Counts the first tokens of a draft.
    pub(crate) fn count(&mut self, tokens: u32) {
        for position in 0..tokens as usize {
            if let Some(count) = self.0.get_mut(position.min(POSITIONS - 1)) {
                *count += 1;
            }
        }
    }

    /// Tokens at all positions.
    pub fn sum(&self) -> u64 {
        self.0.iter().sum()
    }

    /// The positions that were reached, from 0, with their counts.
    pub fn reached(&self) -> impl Iterator<Item = (usize, u64)> {
        self.0.iter().copied().enumerate().take_while(|(_, count)| *count > 0)
    }
}

impl AddAssign for PerPosition {
    fn add_assign(&mut self, other: Self) {
        self.0.iter_mut().zip(other.0).for_each(|(count, more)| *count += more);
    }
}
