//! How likely a drafted token is accepted, given that everything before it was.
//!
//! The simplest honest form: decayed counts per (temperature, source, bucket of its feature, position), each
//! cell leaning on the one a position earlier until it has seen enough itself. Observations are censored at
//! the first rejection: what would have happened after it is unknown. Each request shifts the shared
//! estimate by one number per source, its own log-odds: text that is easier or harder than the usual.

use serde::{Deserialize, Serialize};

use super::alarm::Watch;
use crate::draft::{Company, DrafterId, Features, Source, Vote};

/// First draft tokens, real and virtual, that the acceptance gate judges by, as sessions do.
const REFUSED_OF: f64 = 200.0;
/// Positions told apart; deeper ones share the last.
const POSITIONS: usize = 8;
/// Buckets of the feature; 0 means unknown.
const BUCKETS: usize = 6;
/// Weight of the prior of a cell, in observations.
const PRIOR: f64 = 2.0;
/// Decay of a cell per observation: half-life about 700.
const KEEP: f64 = 0.999;

/// Temperature bucket: acceptance falls with temperature.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Heat {
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

impl Heat {
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

    /// The bucket of the same temperature where drafts are judged by a lossy rule, which relaxes nothing at temperature 0.
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
    pub const COUNT: usize = 7;

    /// Its place among the buckets.
    pub const fn index(self) -> usize {
        match self {
            Self::Greedy => 0,
            Self::Low => 1,
            Self::Mid => 2,
            Self::High => 3,
            Self::LowRelaxed => 4,
            Self::MidRelaxed => 5,
            Self::HighRelaxed => 6,
        }
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
}

/// Cells of one drafter, at all temperatures.
const ROW: usize = Heat::COUNT * BUCKETS * POSITIONS * Company::COUNT;

/// The counts of an epoch, shared by its sessions.
#[derive(Debug, Serialize, Deserialize)]
#[serde(try_from = "Saved")]
pub struct Survival {
    /// Rows of cells by [`DrafterId::row`], as many as were needed so far.
    cells: Vec<Cell>,
    /// Raises the alarm where acceptance collapses.
    pub watch: Watch,
}

/// As it stands in a snapshot, which another version may have written.
#[derive(Deserialize)]
struct Saved {
    cells: Vec<Cell>,
    watch: Watch,
}

impl TryFrom<Saved> for Survival {
    type Error = String;

    fn try_from(Saved { cells, watch }: Saved) -> Result<Self, String> {
        if cells.len().is_multiple_of(ROW) {
            return Ok(Self { cells, watch });
        }
        Err(format!("{} counts of accepted drafts, this version has {ROW} for each drafter", cells.len()))
    }
}

impl Default for Survival {
    fn default() -> Self {
        Self { cells: vec![Cell::default(); Source::ALL.len() * ROW], watch: Watch::default() }
    }
}

impl Survival {
    /// Notes whether a token was accepted that this vote proposed in this company and whose ancestors were all accepted.
    pub fn observe(&mut self, heat: Heat, vote: Vote, company: Company, position: usize, accepted: bool) {
        let drafter = vote.drafter;
        let bucket = bucket(drafter.source, vote.features);
        if position == 0 {
            self.watch.observe(heat, drafter, accepted);
        }
        self.add(place(heat, drafter, bucket, position) + company.index(), accepted);
        if drafter.source == Source::Model && (bucket != 0 || company != Company::Alone) {
            self.add(place(heat, drafter, 0, position), accepted);
        }
    }

    /// Probability that a token with this vote is accepted at `position` (from 0), given that its ancestors are.
    pub fn conditional(&self, heat: Heat, vote: Vote, company: Company, position: usize) -> f64 {
        let alone = self.alone(heat, vote, position);
        if company == Company::Alone {
            return alone;
        }
        let at = place(heat, vote.drafter, bucket(vote.drafter.source, vote.features), position);
        self.cells.get(at + company.index()).copied().unwrap_or_default().posterior(alone)
    }

    fn alone(&self, heat: Heat, vote: Vote, position: usize) -> f64 {
        let drafter = vote.drafter;
        let bucket = bucket(drafter.source, vote.features);
        if drafter.source == Source::Model && bucket != 0 {
            let any = self.along(heat, drafter, 0, position);
            return self.cell(heat, drafter, bucket, position).posterior(any);
        }
        self.along(heat, drafter, bucket, position)
    }

    /// The chance of each token of a draft of so many that this drafter makes alone, that it and all before it are accepted;
    /// `adjust` turns what is known of all requests into what is known of this one.
    pub fn chain(
        &self,
        heat: Heat,
        drafter: DrafterId,
        tokens: usize,
        adjust: impl Fn(f64) -> f64,
    ) -> Vec<f64> {
        let vote = Vote::new(drafter, Features::default());
        let mut alive = 1.0;
        let next = |depth| {
            alive *= adjust(self.conditional(heat, vote, Company::Alone, depth));
            alive
        };
        (0..tokens).map(next).collect()
    }

    /// Decayed number of first tokens of this drafter seen at this temperature.
    pub fn evidence(&self, heat: Heat, drafter: DrafterId) -> f64 {
        self.first_tokens(heat, drafter).1
    }

    /// Accepted and tried first tokens of a drafter at a temperature, decayed.
    pub fn first_tokens(&self, heat: Heat, drafter: DrafterId) -> (f64, f64) {
        // Of a model, bucket 0 has all of them.
        let (buckets, companies) =
            if drafter.source == Source::Model { (0..1, 0..1) } else { (0..BUCKETS, 0..Company::COUNT) };
        let places = buckets.flat_map(|bucket| {
            let first = place(heat, drafter, bucket, 0);
            companies.clone().map(move |company| first + company)
        });
        let cells = places.filter_map(|place| self.cells.get(place));
        cells.fold((0.0, 0.0), |sum, cell| (sum.0 + cell.accepted, sum.1 + cell.tried))
    }

    /// Whether of so many first tokens of a drafter hardly any was accepted: less than the share `least`.
    pub fn is_refused(&self, heat: Heat, drafter: DrafterId, least: f64) -> bool {
        let (accepted, tried) = self.first_tokens(heat, drafter);
        tried >= REFUSED_OF && accepted < least * tried
    }

    /// Whether at some temperature the first tokens of all these drafters are refused, and at none those of one are accepted.
    pub fn are_refused(&self, drafters: &[DrafterId], least: f64) -> bool {
        let mut refused = false;
        for heat in Heat::ALL {
            let told = drafters.iter().filter(|drafter| self.evidence(heat, **drafter) >= REFUSED_OF);
            for drafter in told {
                if !self.is_refused(heat, *drafter, least) {
                    return false;
                }
                refused = true;
            }
        }
        refused
    }

    fn along(&self, heat: Heat, drafter: DrafterId, bucket: usize, position: usize) -> f64 {
        let first = base(drafter.source, bucket);
        (0..=position.min(POSITIONS - 1))
            .fold(first, |prior, at| self.cell(heat, drafter, bucket, at).posterior(prior))
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

    fn cell(&self, heat: Heat, drafter: DrafterId, bucket: usize, position: usize) -> Cell {
        self.cells.get(place(heat, drafter, bucket, position)).copied().unwrap_or_default()
    }
}

/// The first of the cells of a place: where nobody else says anything; those of the other companies follow, which lean on it.
fn place(heat: Heat, drafter: DrafterId, bucket: usize, position: usize) -> usize {
    let cell = (drafter.row() * Heat::COUNT + heat.index()) * BUCKETS + bucket.min(BUCKETS - 1);
    (cell * POSITIONS + position.min(POSITIONS - 1)) * Company::COUNT
}

/// The bucket of the feature that predicts the acceptance of a source best.
fn bucket(source: Source, features: Features) -> usize {
    match source {
        Source::PromptLookup | Source::Prediction => by_length(features.match_len),
        // What was seen only once says little by its share, so that the length of the match decides.
        Source::Suffix => match features.share {
            share if share < 0.3 => 0,
            share if share < 0.6 => 1,
            share if share < 0.9 => 2,
            _ => by_length(features.match_len).clamp(3, 5),
        },
        // A phrase; a skeleton that several shapes agree on; the only one that is left.
        Source::Phrasebook => match features.share {
            share if share <= 0.0 => 0,
            share if share < 1.0 => 1,
            _ => 2,
        },
        // Behind its token alone, whatever stood before that.
        Source::Recycling => match features.share {
            share if share < 0.04 => 0,
            share if share < 0.1 => 1,
            share if share < 0.3 => 2,
            share if share < 0.6 => 3,
            share if share < 0.9 => 4,
            _ => 5,
        },
        Source::Model => match features.margin {
            margin if margin <= 0.0 => 0,
            margin if margin < 0.5 => 1,
            margin if margin < 1.5 => 2,
            margin if margin < 3.0 => 3,
            margin if margin < 6.0 => 4,
            _ => 5,
        },
    }
}

fn by_length(match_len: u32) -> usize {
    match match_len {
        0 => 0,
        1..=2 => 1,
        3..=4 => 2,
        5..=8 => 3,
        9..=16 => 4,
        _ => 5,
    }
}

/// Acceptance of a first token before any was seen.
fn base(source: Source, bucket: usize) -> f64 {
    let of = |buckets: [f64; BUCKETS]| buckets.get(bucket).copied().unwrap_or(0.5);
    match source {
        Source::PromptLookup | Source::Prediction => of([0.5, 0.3, 0.45, 0.6, 0.75, 0.85]),
        Source::Suffix => of([0.15, 0.4, 0.65, 0.7, 0.75, 0.85]),
        Source::Phrasebook => 0.7,
        Source::Recycling => of([0.02, 0.05, 0.15, 0.5, 0.6, 0.75]),
        Source::Model => 0.5,
    }
}

/// How much easier or harder than the shared estimate this request is, per source.
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
    /// Decay per observation: half-life about 23, so that a change of text shows within a few rounds.
    const KEEP: f64 = 0.97;
    /// Observations that weigh as much as the shared estimate.
    const PRIOR: f64 = 6.0;

    /// Notes whether a token was accepted, and the probability of that by the shared counts.
    pub fn observe(&mut self, drafter: DrafterId, expected: f64, accepted: bool) {
        if let Some(tally) = self.sources.get_mut(drafter.source.index()) {
            let hit = f64::from(u8::from(accepted));
            tally.accepted = tally.accepted * Self::KEEP + hit;
            tally.rejected = tally.rejected * Self::KEEP + 1.0 - hit;
            tally.expected_accepted = tally.expected_accepted * Self::KEEP + expected;
            tally.expected_rejected = tally.expected_rejected * Self::KEEP + 1.0 - expected;
        }
    }

    /// The shared estimate shifted by this request's own odds.
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
    fn counts_win_over_the_prior_and_deeper_positions_lean_on_the_one_before() {
        let mut survival = Survival::default();
        let vote = vote(Source::PromptLookup, 8);
        for _ in 0..100 {
            survival.observe(Heat::Greedy, vote, Company::Alone, 0, true);
        }
        assert!(survival.conditional(Heat::Greedy, vote, Company::Alone, 0) > 0.97);
        assert!(survival.conditional(Heat::Greedy, vote, Company::Alone, 3) > 0.9);
        assert!((survival.conditional(Heat::High, vote, Company::Alone, 0) - 0.6).abs() < 1e-9);
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
    fn a_request_of_its_own_kind_is_recognised_within_two_dozen_tokens() {
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
