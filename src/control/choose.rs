//! The choice: which draft tokens of all rows go into the next step.
//!
//! A step decodes one token of each row, and verifies draft tokens besides, for which every row
//! waits. So tokens are taken for as long as that raises the geometric mean of the rows' speeds: a
//! token that is likely in one row goes before one that is unlikely in another, and a row that
//! copies does not make those slow that have no draft, as it would if tokens per second of the step
//! were all that counts.

use super::cost::StepCost;

/// The draft of one row.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// Survival of each of its tokens, 0 to 1, never rising.
    pub survival: &'a [f64],
    /// This many tokens are taken, whatever they cost; `None`: those that pay.
    pub forced: Option<usize>,
}

/// The lengths that are chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// Draft tokens of each candidate, in order.
    pub lengths: Vec<usize>,
    /// Expected geometric mean of the rows' speeds ÷ that of the step without drafts; 1 without
    /// drafts.
    pub gain: f64,
}

/// Chooses for a step of `rows` rows, of which some have a draft. Nothing is drafted unless that is
/// expected to be worth `least` times the plain step.
pub fn allocate(rows: usize, candidates: &[Candidate<'_>], cost: &StepCost, least: f64) -> Choice {
    let mut lengths: Vec<usize> = candidates.iter().map(forced).collect();
    let forced: usize = lengths.iter().sum();
    // Logarithms of speeds, times the number of rows.
    let slower = |drafted: usize| rows as f64 * (cost.at(drafted) / cost.plain).ln();
    let mut value =
        candidates.iter().zip(&lengths).map(|(row, &length)| expected(row, length).ln()).sum::<f64>();
    let free = candidates.iter().enumerate().filter(|(_, candidate)| candidate.forced.is_none());
    let mut order: Vec<(f64, usize)> =
        free.flat_map(|(index, row)| faster(row).map(move |by| (by, index))).collect();
    // Stable, so that the tokens of a draft stay in their order.
    order.sort_by(|one, other| other.0.total_cmp(&one.0));
    let mut best = (value - slower(forced), 0);
    for (taken, (by, _)) in order.iter().enumerate() {
        value += by;
        let now = value - slower(forced + taken + 1);
        if now > best.0 {
            best = (now, taken + 1);
        }
    }
    let gain = (best.0 / rows.max(1) as f64).exp();
    if gain < least && forced == 0 {
        return Choice { lengths: vec![0; candidates.len()], gain: 1.0 };
    }
    for (_, index) in order.iter().take(best.1) {
        if let Some(length) = lengths.get_mut(*index) {
            *length += 1;
        }
    }
    Choice { lengths, gain }
}

fn forced(candidate: &Candidate<'_>) -> usize {
    candidate.forced.map_or(0, |forced| forced.min(candidate.survival.len()))
}

/// Tokens that a row is expected to yield with so many draft tokens.
fn expected(row: &Candidate<'_>, length: usize) -> f64 {
    1.0 + row.survival.iter().take(length).sum::<f64>()
}

/// By how much each token of a draft makes its row faster, as a logarithm: never rising.
fn faster(row: &Candidate<'_>) -> impl Iterator<Item = f64> {
    row.survival.iter().scan(1.0, |tokens, survival| {
        let before = *tokens;
        *tokens += survival;
        Some((*tokens / before).ln())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const COST: StepCost = StepCost { plain: 0.02, any: 0.001, token: 0.001 };

    fn free(survival: &[f64]) -> Candidate<'_> {
        Candidate { survival, forced: None }
    }

    #[test]
    fn a_sure_draft_is_taken_and_an_unlikely_one_is_not() {
        let choice = allocate(1, &[free(&[0.9, 0.8, 0.7])], &COST, 1.0);
        assert_eq!(choice.lengths, [3]);
        assert!((choice.gain - 3.4 / (0.024 / 0.02)).abs() < 1e-9, "{choice:?}");
        assert_eq!(allocate(1, &[free(&[0.04, 0.01])], &COST, 1.0).lengths, [0]);
        assert_eq!(allocate(1, &[], &COST, 1.0).lengths, [0; 0]);
    }

    #[test]
    fn the_likeliest_tokens_of_all_rows_go_first_and_none_makes_the_others_slow() {
        let dear = StepCost { token: 0.006, ..COST };
        let choice = allocate(2, &[free(&[0.95, 0.9]), free(&[0.5, 0.2])], &dear, 1.0);
        assert_eq!(choice.lengths, [2, 1]);
        // One row of eight copies: the others wait for each of its tokens.
        let copies = |rows| allocate(rows, &[free(&[1.0; 8])], &StepCost { any: 0.0, ..COST }, 1.0).lengths;
        assert_eq!((copies(1), copies(8)), (vec![8], vec![2]));
        let mut unmeasured = crate::cost::StepCosts::default();
        unmeasured.note(16, 0, 0.02);
        let sixteen = allocate(16, &[free(&[0.9, 0.8]); 16], &unmeasured.of(16).unwrap(), 1.03);
        assert!(sixteen.lengths.iter().sum::<usize>() >= 16, "large batches are tried: {sixteen:?}");
        // The more rows share a step, the dearer is a token in it.
        let choice = allocate(12, &[free(&[0.9, 0.6])], &StepCost { any: 0.0, ..COST }, 1.0);
        assert_eq!(choice.lengths, [1]);
    }

    #[test]
    fn what_must_be_drafted_is_and_what_hardly_pays_is_not() {
        let forced = Candidate { survival: &[0.1, 0.0, 0.0], forced: Some(2) };
        assert_eq!(allocate(1, &[forced], &COST, 1.02).lengths, [2]);
        assert_eq!(allocate(1, &[free(&[0.11])], &COST, 1.02).lengths, [0]);
        assert_eq!(allocate(1, &[free(&[0.11])], &COST, 1.0).lengths, [1]);
    }

    /// Logarithm of the product of the rows' speeds.
    fn speed(rows: usize, drafts: &[Vec<f64>], lengths: &[usize]) -> f64 {
        let faster = drafts.iter().zip(lengths).map(|(draft, &length)| expected(&free(draft), length).ln());
        faster.sum::<f64>() - rows as f64 * COST.at(lengths.iter().sum()).ln()
    }

    proptest! {
        #[test]
        fn no_other_lengths_are_faster(
            drafts in proptest::collection::vec(proptest::collection::vec(0.0..1.0_f64, 0..4), 1..4),
            others in 0usize..4,
        ) {
            let drafts: Vec<Vec<f64>> = drafts
                .into_iter()
                .map(|draft| draft.iter().scan(1.0, |s, p| { *s *= p; Some(*s) }).collect())
                .collect();
            let rows = drafts.len() + others;
            let candidates: Vec<_> = drafts.iter().map(|draft| free(draft)).collect();
            let chosen = speed(rows, &drafts, &allocate(rows, &candidates, &COST, 1.0).lengths);
            let mut lengths = vec![0; drafts.len()];
            loop {
                prop_assert!(speed(rows, &drafts, &lengths) <= chosen + 1e-6);
                let Some(at) = (0..lengths.len()).find(|&at| lengths[at] < drafts[at].len()) else { break };
                lengths[at] += 1;
                lengths[..at].fill(0);
            }
        }
    }
}
