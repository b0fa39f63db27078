//! The choice: which draft tokens of all rows go into the next step.
//!
//! A step decodes one token of each row, and verifies draft tokens besides. The tokens of all
//! drafts are taken in order of their survival (the probability that they and all before them are
//! accepted), for as long as that raises the tokens per second of the step. So a token that is
//! likely in one row goes before one that is unlikely in another, and no row
//! has a length that others do not matter to.

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
    /// Expected tokens per second ÷ those of the step without drafts; 1 without drafts.
    pub gain: f64,
}

/// Chooses for a step of `rows` rows, of which some have a draft. Nothing is drafted unless that is
/// expected to be worth `least` times the plain step.
pub fn allocate(rows: usize, candidates: &[Candidate<'_>], cost: &StepCost, least: f64) -> Choice {
    let mut lengths: Vec<usize> = candidates.iter().map(forced).collect();
    let forced: usize = lengths.iter().sum();
    let plain = rows as f64 / cost.plain;
    let mut tokens = rows as f64 + candidates.iter().zip(&lengths).map(expected).sum::<f64>();
    let free = candidates.iter().enumerate().filter(|(_, candidate)| candidate.forced.is_none());
    let mut order: Vec<(f64, usize)> =
        free.flat_map(|(index, candidate)| candidate.survival.iter().map(move |&s| (s, index))).collect();
    // Stable, so that the tokens of a draft stay in their order.
    order.sort_by(|one, other| other.0.total_cmp(&one.0));
    let mut best = (tokens / cost.at(forced), 0);
    for (taken, (survival, _)) in order.iter().enumerate() {
        tokens += survival;
        let rate = tokens / cost.at(forced + taken + 1);
        if rate > best.0 {
            best = (rate, taken + 1);
        }
        // Less likely ones cannot pay either, once one does not pay its cost.
        if *survival < rate * cost.token {
            break;
        }
    }
    let gain = best.0 / plain;
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

fn expected((candidate, &length): (&Candidate<'_>, &usize)) -> f64 {
    candidate.survival.iter().take(length).sum()
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
    fn the_likeliest_tokens_of_all_rows_go_first() {
        let dear = StepCost { token: 0.006, ..COST };
        let choice = allocate(2, &[free(&[0.95, 0.9]), free(&[0.5, 0.2])], &dear, 1.0);
        assert_eq!(choice.lengths, [2, 0]);
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

    fn rate(rows: usize, drafts: &[Vec<f64>], lengths: &[usize]) -> f64 {
        let tokens: f64 = drafts.iter().zip(lengths).map(|(d, &n)| d[..n].iter().sum::<f64>()).sum();
        (rows as f64 + tokens) / COST.at(lengths.iter().sum())
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
            let chosen = rate(rows, &drafts, &allocate(rows, &candidates, &COST, 1.0).lengths);
            let mut lengths = vec![0; drafts.len()];
            loop {
                prop_assert!(rate(rows, &drafts, &lengths) <= chosen + 1e-6);
                let Some(at) = (0..lengths.len()).find(|&at| lengths[at] < drafts[at].len()) else { break };
                lengths[at] += 1;
                lengths[..at].fill(0);
            }
        }
    }
}
