//! How likely a drafted token is accepted, given that everything before it was.
//!
//! The simplest honest form: decayed counts per (temperature, source, bucket of its feature, position), each
//! cell leaning on the one a position earlier until it has seen enough itself. Observations are censored at
//! the first rejection: what would have happened after it is unknown. Each request shifts the shared
//! estimate by one number per source, its own log-odds: text that is easier or harder than the usual.

use serde::{Deserialize, Serialize};

use super::alarm::Watch;
use crate::draft::{Company, Features, Source, Vote};

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

/// The counts of an epoch, shared by its sessions.
#[derive(Debug, Serialize, Deserialize)]
#[serde(try_from = "Saved")]
pub struct Survival {
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
        let wanted = Self::default().cells.len();
        if cells.len() == wanted {
            return Ok(Self { cells, watch });
        }
        Err(format!("{} counts of accepted drafts, this version has {wanted}", cells.len()))
    }
}

impl Default for Survival {
    fn default() -> Self {
        let cells =
            vec![Cell::default(); Heat::COUNT * Source::ALL.len() * BUCKETS * POSITIONS * Company::COUNT];
        Self { cells, watch: Watch::default() }
    }
}

impl Survival {
    /// Notes whether a token was accepted that this vote proposed in this company and whose ancestors were all accepted.
    pub fn observe(&mut self, heat: Heat, vote: Vote, company: Company, position: usize, accepted: bool) {
        let source = vote.drafter.source;
        let bucket = bucket(source, vote.features);
        if position == 0 {
            self.watch.observe(heat, source, accepted);
        }
        self.add(place(heat, source, bucket, position) + company.index(), accepted);
        if source == Source::Model && (bucket != 0 || company != Company::Alone) {
            self.add(place(heat, source, 0, position), accepted);
        }
    }

    /// Probability that a token with this vote is accepted at `position` (from 0), given that its ancestors are.
    pub fn conditional(&self, heat: Heat, vote: Vote, company: Company, position: usize) -> f64 {
        let alone = self.alone(heat, vote, position);
        if company == Company::Alone {
            return alone;
        }
        let at = place(heat, vote.drafter.source, bucket(vote.drafter.source, vote.features), position);
        self.cells.get(at + company.index()).copied().unwrap_or_default().posterior(alone)
    }

    fn alone(&self, heat: Heat, vote: Vote, position: usize) -> f64 {
        let source = vote.drafter.source;
        let bucket = bucket(source, vote.features);
        if source == Source::Model && bucket != 0 {
            let any = self.along(heat, source, 0, position);
            return self.cell(heat, source, bucket, position).posterior(any);
        }
        self.along(heat, source, bucket, position)
    }

    /// Decayed number of first tokens of this source seen at this temperature.
    pub fn evidence(&self, heat: Heat, source: Source) -> f64 {
        self.first_tokens(heat, source).1
    }

    /// Accepted and tried first tokens of a source at a temperature, decayed.
    pub fn first_tokens(&self, heat: Heat, source: Source) -> (f64, f64) {
        // Of a model, bucket 0 has all of them.
        let (buckets, companies) =
            if source == Source::Model { (0..1, 0..1) } else { (0..BUCKETS, 0..Company::COUNT) };
        let places = buckets.flat_map(|bucket| {
            let first = place(heat, source, bucket, 0);
            companies.clone().map(move |company| first + company)
        });
        let cells = places.filter_map(|place| self.cells.get(place));
        cells.fold((0.0, 0.0), |sum, cell| (sum.0 + cell.accepted, sum.1 + cell.tried))
    }

    /// Whether of so many first tokens of a source hardly any was accepted: less than the share `least`.
    pub fn is_refused(&self, heat: Heat, source: Source, least: f64) -> bool {
        let (accepted, tried) = self.first_tokens(heat, source);
        tried >= REFUSED_OF && accepted < least * tried
    }

    /// Whether at some temperature the first tokens of all these sources are refused, and at none those of one are accepted.
    pub fn are_refused(&self, sources: &[Source], least: f64) -> bool {
        let mut refused = false;
        for heat in Heat::ALL {
            let told = sources.iter().filter(|source| self.evidence(heat, **source) >= REFUSED_OF);
            for source in told {
                if !self.is_refused(heat, *source, least) {
                    return false;
                }
                refused = true;
            }
        }
        refused
    }

    fn along(&self, heat: Heat, source: Source, bucket: usize, position: usize) -> f64 {
        (0..=position.min(POSITIONS - 1))
            .fold(base(source, bucket), |prior, at| self.cell(heat, source, bucket, at).posterior(prior))
    }

    fn add(&mut self, at: usize, accepted: bool) {
        if let Some(cell) = self.cells.get_mut(at) {
            cell.accepted = cell.accepted * KEEP + f64::from(u8::from(accepted));
            cell.tried = cell.tried * KEEP + 1.0;
        }
    }

    fn cell(&self, heat: Heat, source: Source, bucket: usize, position: usize) -> Cell {
        self.cells.get(place(heat, source, bucket, position)).copied().unwrap_or_default()
    }
}

/// The first of the cells of a place: where nobody else says anything; those of the other companies follow, which lean on it.
fn place(heat: Heat, source: Source, bucket: usize, position: usize) -> usize {
    let cell = (heat.index() * Source::ALL.len() + source.index()) * BUCKETS + bucket.min(BUCKETS - 1);
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
        Source::Phrasebook => 0,
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
    pub fn observe(&mut self, source: Source, expected: f64, accepted: bool) {
        if let Some(tally) = self.sources.get_mut(source.index()) {
            let hit = f64::from(u8::from(accepted));
            tally.accepted = tally.accepted * Self::KEEP + hit;
            tally.rejected = tally.rejected * Self::KEEP + 1.0 - hit;
            tally.expected_accepted = tally.expected_accepted * Self::KEEP + expected;
            tally.expected_rejected = tally.expected_rejected * Self::KEEP + 1.0 - expected;
        }
    }

    /// The shared estimate shifted by this request's own odds.
    pub fn adjust(&self, source: Source, estimate: f64) -> f64 {
        let tally = self.sources.get(source.index()).copied().unwrap_or_default();
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
            tuning.observe(Source::PromptLookup, 0.8, false);
        }
        assert!(tuning.adjust(Source::PromptLookup, 0.8) < 0.4);
        for _ in 0..30 {
            tuning.observe(Source::PromptLookup, 0.8, true);
        }
        assert!(tuning.adjust(Source::PromptLookup, 0.8) > 0.6);
        assert!((Tuning::default().adjust(Source::Model, 0.5) - 0.5).abs() < 1e-9);
    }
}
