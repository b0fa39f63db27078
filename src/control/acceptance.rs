//! Acceptance of draft tokens, by evidence (drafter, temperature, feature) and position.
//!
//! Where little was seen, the estimate of a position shrinks towards that of
//! the position before it, and that of the first one towards the drafter's prior. One factor a row
//! says how much easier or harder its text is than usual.

/// Positions that are counted separately; later ones count as the last of these.
const POSITIONS: usize = 8;
/// Weight of what a position shrinks to, in tokens.
const SHRINK: f64 = 2.0;
/// Share of a count that remains after each token of the same position.
const KEEP: f64 = 0.999;
/// The same for a row's factor, after each of its tokens.
const KEEP_ROW: f64 = 0.97;
/// Weight of an ordinary row, in tokens.
const ORDINARY: f64 = 6.0;
/// Probabilities stay within this distance of 0 and 1.
const EDGE: f64 = 0.005;

/// The evidence that predicts the acceptance of a draft token: drafter, range of temperatures and
/// bucket of its feature, as one small number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Evidence(pub u16);

/// Tokens that were accepted, of those that were decided.
#[derive(Clone, Copy, Debug, Default)]
struct Count {
    accepted: f64,
    decided: f64,
}

impl Count {
    fn note(&mut self, accepted: bool, keep: f64) {
        self.accepted = self.accepted * keep + f64::from(u8::from(accepted));
        self.decided = self.decided * keep + 1.0;
    }
}

/// Acceptance of the tokens of all rows.
#[derive(Clone, Debug, Default)]
pub struct Acceptance {
    /// By number of the evidence.
    counts: Vec<[Count; POSITIONS]>,
}

/// How one row differs from the others.
#[derive(Clone, Copy, Debug, Default)]
pub struct RowFactor {
    count: Count,
    /// Accepted tokens that were expected of the same drafts.
    expected: f64,
}

impl Acceptance {
    /// Probability that a token at `position` (from 0) is accepted if all before it are, in an
    /// ordinary row. `prior`: that of a first token with this evidence.
    pub fn ordinary(&self, evidence: Evidence, position: usize, prior: f64) -> f64 {
        let Some(counts) = self.counts.get(usize::from(evidence.0)) else {
            return prior.clamp(EDGE, 1.0 - EDGE);
        };
        let estimate = counts
            .iter()
            .take(position.min(POSITIONS - 1) + 1)
            .fold(prior, |above, count| (count.accepted + SHRINK * above) / (count.decided + SHRINK));
        estimate.clamp(EDGE, 1.0 - EDGE)
    }

    /// The same in this row.
    pub fn in_row(&self, row: &RowFactor, evidence: Evidence, position: usize, prior: f64) -> f64 {
        row.applied(self.ordinary(evidence, position, prior))
    }

    /// Notes that a token was accepted, or was the first of its draft that was not.
    pub fn note(&mut self, row: &mut RowFactor, evidence: Evidence, position: usize, prior: f64, hit: bool) {
        let expected = self.ordinary(evidence, position, prior);
        row.count.note(hit, KEEP_ROW);
        row.expected = row.expected * KEEP_ROW + expected;
        let index = usize::from(evidence.0);
        if self.counts.len() <= index {
            self.counts.resize(index + 1, Default::default());
        }
        let counts = self.counts.get_mut(index);
        if let Some(count) = counts.and_then(|counts| counts.get_mut(position.min(POSITIONS - 1))) {
            count.note(hit, KEEP);
        }
    }
}

impl RowFactor {
    /// A probability of an ordinary row, in this row: its odds, times those by which the row's
    /// tokens were accepted more often than expected.
    fn applied(&self, ordinary: f64) -> f64 {
        let Count { accepted, decided } = self.count;
        let up = ordinary * (accepted + ORDINARY) / (self.expected + ORDINARY);
        let down = (1.0 - ordinary) * (decided - accepted + ORDINARY) / (decided - self.expected + ORDINARY);
        (up / (up + down)).clamp(EDGE, 1.0 - EDGE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const EVIDENCE: Evidence = Evidence(20);

    #[test]
    fn it_begins_at_the_prior_and_follows_what_is_seen() {
        let (mut acceptance, mut row) = (Acceptance::default(), RowFactor::default());
        assert!((acceptance.ordinary(EVIDENCE, 5, 0.7) - 0.7).abs() < 1e-12);
        for n in 0..400 {
            acceptance.note(&mut row, EVIDENCE, 0, 0.7, n % 4 == 0);
        }
        assert!((acceptance.ordinary(EVIDENCE, 0, 0.7) - 0.25).abs() < 0.02);
        // A later position has not been seen: it is taken for the one before it.
        assert!((acceptance.ordinary(EVIDENCE, 6, 0.7) - 0.25).abs() < 0.02);
        assert!((acceptance.ordinary(Evidence(21), 0, 0.7) - 0.7).abs() < 1e-12);
    }

    #[test]
    fn an_easy_row_is_expected_to_stay_easy() {
        let mut acceptance = Acceptance::default();
        let mut others = RowFactor::default();
        (0..200).for_each(|n| acceptance.note(&mut others, EVIDENCE, 0, 0.5, n % 2 == 0));
        let mut easy = RowFactor::default();
        (0..20).for_each(|_| acceptance.note(&mut easy, EVIDENCE, 0, 0.5, true));
        let new = RowFactor::default();
        let of = |row: &RowFactor| acceptance.in_row(row, EVIDENCE, 0, 0.5);
        assert!(of(&easy) > of(&new) + 0.15 && (of(&new) - of(&others)).abs() < 0.1);
    }

    proptest! {
        #[test]
        fn it_is_always_a_probability(hits in proptest::collection::vec(any::<bool>(), 0..300), prior in 0.0..=1.0_f64) {
            let (mut acceptance, mut row) = (Acceptance::default(), RowFactor::default());
            for (n, hit) in hits.into_iter().enumerate() {
                acceptance.note(&mut row, EVIDENCE, n % 12, prior, hit);
                let p = acceptance.in_row(&row, EVIDENCE, n % 9, prior);
                prop_assert!((EDGE..=1.0 - EDGE).contains(&p), "{}", p);
            }
        }
    }
}
