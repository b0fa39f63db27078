//! The probability that a drafted token is accepted, given that all tokens before it were.
//!
//! Decayed counts per (temperature, source, bucket of its feature, position); each cell has the one
//! a position earlier as its prior until it has enough observations. Observations are
//! censored at the first rejection: the acceptance of the tokens after it is unknown. Each request
//! shifts the shared estimate by one number per source, its log-odds, for text that is easier
//! or harder than usual.

use serde::{Deserialize, Serialize};

use std::collections::BTreeMap;

use super::shared::Sum;
use crate::draft::{Agreement, BUCKETS, DrafterId, Features, Source, Vote};

/// Minimum first draft tokens, real and virtual, for the acceptance gate, as in sessions.
const REFUSED_OF: f64 = 200.0;
/// Positions with separate cells; deeper ones share the last.
const POSITIONS: usize = 8;
/// Weight of the prior of a cell, in observations.
const PRIOR: f64 = 2.0;
/// Decay of a cell per observation: half-life about 700.
const KEEP: f64 = 0.999;
/// Observations of a cell that has had very many.
const MEMORY: f64 = 1.0 / (1.0 - KEEP);

/// Temperature bucket: acceptance falls with temperature.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum TemperatureBucket {
    /// Temperature 0.
    Greedy,
    /// Above 0, up to 0.5.
    Low,
    /// Above 0.5, up to 0.9.
    Mid,
    /// Above 0.9.
    High,
    /// Above 0, up to 0.5, judged by a lossy rule, which accepts more.
    LowRelaxed,
    /// Above 0.5, up to 0.9, judged by a lossy rule.
    MidRelaxed,
    /// Above 0.9, judged by a lossy rule.
    HighRelaxed,
}

impl TemperatureBucket {
    /// Every bucket.
    pub const ALL: [Self; 7] = [
        Self::Greedy,
        Self::Low,
        Self::Mid,
        Self::High,
        Self::LowRelaxed,
        Self::MidRelaxed,
        Self::HighRelaxed,
    ];

    /// The bucket of a temperature.
    pub fn of(temperature: f64) -> Self {
        if temperature <= 0.0 {
            Self::Greedy
        } else if temperature <= 0.5 {
            Self::Low
        } else if temperature <= 0.9 {
            Self::Mid
        } else {
            Self::High
        }
    }

    /// The bucket of the same temperature where drafts are judged by a lossy rule, which relaxes
    /// nothing at temperature 0.
    #[must_use]
    pub const fn relaxed(self) -> Self {
        match self {
            Self::Greedy => Self::Greedy,
            Self::Low | Self::LowRelaxed => Self::LowRelaxed,
            Self::Mid | Self::MidRelaxed => Self::MidRelaxed,
            Self::High | Self::HighRelaxed => Self::HighRelaxed,
        }
    }

    /// Number of buckets.
    pub const COUNT: usize = Self::ALL.len();

    /// Its index in [`Self::ALL`].
    pub const fn index(self) -> usize {
        self as usize
    }
}

/// Decayed counts of tokens that were tried and accepted.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Cell {
    accepted: f64,
    tried: f64,
}

impl Cell {
    fn posterior(self, prior: f64) -> f64 {
        (self.accepted + PRIOR * prior) / (self.tried + PRIOR)
    }

    /// These counts, and those of others for the part of the memory that they leave free.
    fn filled(self, lent: Sum) -> Self {
        let Sum(accepted, tried) = lent.within(MEMORY - self.tried);
        Self { accepted: self.accepted + accepted, tried: self.tried + tried }
    }
}

/// Cells of one drafter, at all temperatures.
const ROW: usize = TemperatureBucket::COUNT * BUCKETS * POSITIONS * Agreement::COUNT;

/// Decayed counts of draft tokens that were tried and accepted, by drafter, temperature bucket,
/// feature bucket, position and agreement; shared by the sessions of an engine start.
#[derive(Debug, Serialize, Deserialize)]
#[serde(try_from = "Saved")]
pub struct Survival {
    /// Rows of cells by [`DrafterId::row`], as many as were needed so far.
    cells: Vec<Cell>,
    /// Counts of others by the same index, as far as there are any.
    #[serde(skip)]
    lent: Vec<Sum>,
}

/// The form in a snapshot, which another version may have written.
#[derive(Deserialize)]
struct Saved {
    cells: Vec<Cell>,
}

impl TryFrom<Saved> for Survival {
    type Error = String;

    fn try_from(Saved { cells }: Saved) -> Result<Self, String> {
        if cells.len().is_multiple_of(ROW) {
            return Ok(Self { cells, lent: Vec::new() });
        }
        Err(format!("{} counts of accepted drafts, this version has {ROW} for each drafter", cells.len()))
    }
}

impl Default for Survival {
    fn default() -> Self {
        let cells = vec![Cell::default(); Source::ALL.len() * ROW];
        Self { cells, lent: Vec::new() }
    }
}

impl Survival {
    /// Notes if a token at `position` (from 0) was accepted that this vote proposed in this company
    /// and whose ancestors were all accepted.
    pub fn observe(
        &mut self,
        temperature_bucket: TemperatureBucket,
        vote: Vote,
        company: Agreement,
        position: usize,
        accepted: bool,
    ) {
        let drafter = vote.drafter;
        let bucket = drafter.source.bucket(vote.features);
        self.add(cell_index(temperature_bucket, drafter, bucket, position) + company.index(), accepted);
        if drafter.source == Source::Model && (bucket != 0 || company != Agreement::Alone) {
            self.add(cell_index(temperature_bucket, drafter, 0, position), accepted);
        }
    }

    /// As [`Self::observe`], and learns in which way this request differs from the others.
    pub fn learn(
        &mut self,
        tuning: &mut Tuning,
        temperature_bucket: TemperatureBucket,
        vote: Vote,
        company: Agreement,
        position: usize,
        accepted: bool,
    ) {
        let expected = self.conditional(temperature_bucket, vote, company, position);
        self.observe(temperature_bucket, vote, company, position, accepted);
        tuning.observe(vote.drafter, expected, accepted);
    }

    /// Probability, 0 to 1, that a token with this vote is accepted at `position` (from 0), given
    /// that its ancestors are.
    pub fn conditional(
        &self,
        temperature_bucket: TemperatureBucket,
        vote: Vote,
        company: Agreement,
        position: usize,
    ) -> f64 {
        let alone = self.alone(temperature_bucket, vote, position);
        if company == Agreement::Alone {
            return alone;
        }
        let at =
            cell_index(temperature_bucket, vote.drafter, vote.drafter.source.bucket(vote.features), position);
        self.at(at + company.index()).posterior(alone)
    }

    fn alone(&self, temperature_bucket: TemperatureBucket, vote: Vote, position: usize) -> f64 {
        let drafter = vote.drafter;
        let bucket = drafter.source.bucket(vote.features);
        if drafter.source == Source::Model && bucket != 0 {
            let any = self.along(temperature_bucket, drafter, 0, position);
            return self.cell(temperature_bucket, drafter, bucket, position).posterior(any);
        }
        self.along(temperature_bucket, drafter, bucket, position)
    }

    /// The survival probability of each token of a draft of `tokens` tokens that this drafter makes
    /// alone, indexed by position: that it and all before it are accepted. `adjust` turns the
    /// estimate over all requests into the estimate for this one.
    pub fn chain(
        &self,
        temperature_bucket: TemperatureBucket,
        drafter: DrafterId,
        tokens: usize,
        adjust: impl Fn(f64) -> f64,
    ) -> Vec<f64> {
        let vote = Vote::new(drafter, Features::default());
        let mut alive = 1.0;
        let next = |depth| {
            alive *= adjust(self.conditional(temperature_bucket, vote, Agreement::Alone, depth));
            alive
        };
        (0..tokens).map(next).collect()
    }

    /// Share of a drafter's tokens that were accepted where all before them were, whatever their
    /// evidence, by position; as many as were tried.
    pub fn accepted(&self, temperature_bucket: TemperatureBucket, drafter: DrafterId) -> Vec<f64> {
        let share = |position| {
            let (accepted, tried) = self.tried(temperature_bucket, drafter, position);
            (tried >= 1.0).then(|| accepted / tried)
        };
        (0..POSITIONS).map_while(share).collect()
    }

    /// Decayed number of first tokens of this drafter seen at this temperature.
    pub fn evidence(&self, temperature_bucket: TemperatureBucket, drafter: DrafterId) -> f64 {
        self.first_tokens(temperature_bucket, drafter).1
    }

    /// Accepted and tried first tokens of a drafter at a temperature, decayed.
    pub fn first_tokens(&self, temperature_bucket: TemperatureBucket, drafter: DrafterId) -> (f64, f64) {
        self.tried(temperature_bucket, drafter, 0)
    }

    /// Accepted and tried tokens of a drafter at a temperature and a position, decayed.
    fn tried(
        &self,
        temperature_bucket: TemperatureBucket,
        drafter: DrafterId,
        position: usize,
    ) -> (f64, f64) {
        // For a model, bucket 0 has all of them.
        let (buckets, companies) =
            if drafter.source == Source::Model { (0..1, 0..1) } else { (0..BUCKETS, 0..Agreement::COUNT) };
        let positions = buckets.flat_map(|bucket| {
            let first = cell_index(temperature_bucket, drafter, bucket, position);
            companies.clone().map(move |company| first + company)
        });
        let cells = positions.map(|cell_index| self.at(cell_index));
        cells.fold((0.0, 0.0), |sum, cell| (sum.0 + cell.accepted, sum.1 + cell.tried))
    }

    /// True if at least 200 first tokens of a drafter, decayed, were tried and a share below
    /// `least` (0 to 1) was accepted.
    fn is_refused(&self, temperature_bucket: TemperatureBucket, drafter: DrafterId, least: f64) -> bool {
        let (accepted, tried) = self.first_tokens(temperature_bucket, drafter);
        tried >= REFUSED_OF && accepted < least * tried
    }

    /// True if there are drafters here, and each is refused at its temperature: of at least 200
    /// first tokens, a share below `least` (0 to 1) was accepted.
    pub fn all_refused(
        &self,
        mut drafters: impl ExactSizeIterator<Item = (TemperatureBucket, DrafterId)>,
        least: f64,
    ) -> bool {
        drafters.len() > 0 && drafters.all(|(bucket, drafter)| self.is_refused(bucket, drafter, least))
    }

    /// True if some of these drafters were tried often enough at some temperature, and all of those
    /// are refused there, as by [`Self::all_refused`].
    pub fn are_refused(&self, drafters: &[DrafterId], least: f64) -> bool {
        let mut refused = false;
        for temperature_bucket in TemperatureBucket::ALL {
            let evident =
                drafters.iter().filter(|drafter| self.evidence(temperature_bucket, **drafter) >= REFUSED_OF);
            for drafter in evident {
                if !self.is_refused(temperature_bucket, *drafter, least) {
                    return false;
                }
                refused = true;
            }
        }
        refused
    }

    fn along(
        &self,
        temperature_bucket: TemperatureBucket,
        drafter: DrafterId,
        bucket: usize,
        position: usize,
    ) -> f64 {
        let first = base(drafter.source, bucket);
        (0..=position.min(POSITIONS - 1))
            .fold(first, |prior, at| self.cell(temperature_bucket, drafter, bucket, at).posterior(prior))
    }

    fn add(&mut self, at: usize, accepted: bool) {
        if at >= self.cells.len() {
            self.cells.resize((at / ROW + 1) * ROW, Cell::default());
        }
        if let Some(cell) = self.cells.get_mut(at) {
            cell.accepted = cell.accepted * KEEP + f64::from(u8::from(accepted));
            cell.tried = cell.tried * KEEP + 1.0;
        }
    }

    fn cell(
        &self,
        temperature_bucket: TemperatureBucket,
        drafter: DrafterId,
        bucket: usize,
        position: usize,
    ) -> Cell {
        self.at(cell_index(temperature_bucket, drafter, bucket, position))
    }

    fn at(&self, index: usize) -> Cell {
        let local = self.cells.get(index).copied().unwrap_or_default();
        self.lent.get(index).map_or(local, |lent| local.filled(*lent))
    }

    /// The local counts of a drafter, by index in its row.
    pub(super) fn shared(&self, drafter: DrafterId) -> BTreeMap<usize, Sum> {
        let row = self.cells.chunks(ROW).nth(drafter.row()).unwrap_or_default();
        let tried = row.iter().enumerate().filter(|(_, cell)| cell.tried > 1e-3);
        tried.map(|(at, cell)| (at, Sum(cell.accepted, cell.tried))).collect()
    }

    /// Counts of others in the order of the cells. Those that cannot be are ignored.
    pub(super) fn table(rows: &[(DrafterId, &BTreeMap<usize, Sum>)]) -> Vec<Sum> {
        let last = rows.iter().map(|(drafter, _)| drafter.row() + 1).max().unwrap_or(0);
        let mut table = vec![Sum::default(); last * ROW];
        for (drafter, cells) in rows {
            for (at, sum) in cells.iter().filter(|(at, sum)| **at < ROW && sum.0 <= sum.1) {
                if let Some(cell) = table.get_mut(drafter.row() * ROW + at) {
                    *cell = *sum;
                }
            }
        }
        table
    }

    /// Replaces the counts of others.
    pub(super) fn lend(&mut self, table: Vec<Sum>) {
        self.lent = table;
    }
}

/// Index of the first cell of a position, for a drafter alone; the cells of the other companies
/// follow, with this one as their prior.
fn cell_index(
    temperature_bucket: TemperatureBucket,
    drafter: DrafterId,
    bucket: usize,
    position: usize,
) -> usize {
    let cell = (drafter.row() * TemperatureBucket::COUNT + temperature_bucket.index()) * BUCKETS
        + bucket.min(BUCKETS - 1);
    (cell * POSITIONS + position.min(POSITIONS - 1)) * Agreement::COUNT
}

/// Acceptance of a first token before any was observed.
fn base(source: Source, bucket: usize) -> f64 {
    source.prior().get(bucket).copied().unwrap_or(0.5)
}

/// One request's acceptance, compared with the shared estimate, per source.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tuning {
    sources: [Tally; Source::ALL.len()],
}

#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    accepted: f64,
    rejected: f64,
    expected_accepted: f64,
    expected_rejected: f64,
}

impl Tuning {
    /// Decay per observation: half-life about 23, so that a change of text shows within a few
    /// rounds.
    const KEEP: f64 = 0.97;
    /// Observations that weigh as much as the shared estimate.
    const PRIOR: f64 = 6.0;

    /// Notes if a token was accepted, and the probability of that by the shared counts.
    pub fn observe(&mut self, drafter: DrafterId, expected: f64, accepted: bool) {
        if let Some(tally) = self.sources.get_mut(drafter.source.index()) {
            let hit = f64::from(u8::from(accepted));
            tally.accepted = tally.accepted * Self::KEEP + hit;
            tally.rejected = tally.rejected * Self::KEEP + 1.0 - hit;
            tally.expected_accepted = tally.expected_accepted * Self::KEEP + expected;
            tally.expected_rejected = tally.expected_rejected * Self::KEEP + 1.0 - expected;
        }
    }

    /// The shared estimate, its odds multiplied by (accepted ÷ expected accepted) ÷ (rejected ÷
    /// expected rejected) over this request's tokens; 0.005 to 0.995.
    pub fn adjust(&self, drafter: DrafterId, estimate: f64) -> f64 {
        let tally = self.sources.get(drafter.source.index()).copied().unwrap_or_default();
        let up = (tally.accepted + Self::PRIOR) / (tally.expected_accepted + Self::PRIOR);
        let down = (tally.rejected + Self::PRIOR) / (tally.expected_rejected + Self::PRIOR);
        let yes = estimate * up;
        let no = (1.0 - estimate) * down;
        (yes / (yes + no).max(f64::MIN_POSITIVE)).clamp(0.005, 0.995)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vote(source: Source, match_len: u32) -> Vote {
        Vote::new(source, Features::matched(match_len))
    }

    #[test]
    fn counts_win_over_the_prior_and_deeper_positions_start_from_the_one_before() {
        let mut survival = Survival::default();
        let vote = vote(Source::PromptLookup, 8);
        for _ in 0..100 {
            survival.observe(TemperatureBucket::Greedy, vote, Agreement::Alone, 0, true);
        }
        assert!(survival.conditional(TemperatureBucket::Greedy, vote, Agreement::Alone, 0) > 0.97);
        assert!(survival.conditional(TemperatureBucket::Greedy, vote, Agreement::Alone, 3) > 0.9);
        assert!(
            (survival.conditional(TemperatureBucket::High, vote, Agreement::Alone, 0) - 0.6).abs() < 1e-9
        );
    }

    #[test]
    fn counts_of_another_version_are_refused() {
        let mut saved = serde_json::to_value(Survival::default()).unwrap();
        assert!(serde_json::from_value::<Survival>(saved.clone()).is_ok());
        saved["cells"].as_array_mut().unwrap().pop();
        let refused = serde_json::from_value::<Survival>(saved).unwrap_err().to_string();
        assert!(refused.contains("counts of accepted drafts"), "{refused}");
    }

    #[test]
    fn an_unusual_request_is_recognised_within_two_dozen_tokens() {
        let mut tuning = Tuning::default();
        for _ in 0..24 {
            tuning.observe(Source::PromptLookup.into(), 0.8, false);
        }
        assert!(tuning.adjust(Source::PromptLookup.into(), 0.8) < 0.4);
        for _ in 0..30 {
            tuning.observe(Source::PromptLookup.into(), 0.8, true);
        }
        assert!(tuning.adjust(Source::PromptLookup.into(), 0.8) > 0.6);
        assert!((Tuning::default().adjust(DrafterId::model(0), 0.5) - 0.5).abs() < 1e-9);
    }
}
