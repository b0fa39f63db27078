//! Deciding a position from its log-probabilities, where the engine tells those and draws no sample.
//!
//! A position is decided only if the processed distribution can be rebuilt from what is told, and that is
//! judged from the probabilities alone, before a random number is drawn: what is left undecided is taken by
//! another plan, whose sample is then the only one ever drawn there.

use super::{Engine, Round};
use crate::openai::Sampling;
use crate::units::TokenId;
use crate::words::Row;

/// Two log-probabilities closer than this are told apart by nobody.
const TIE: f64 = 1e-6;
/// Cumulated probability this close to the edge of the nucleus leaves open which side it is on.
const EDGE: f64 = 1e-5;

/// How many of the most probable tokens must be told so that this request can be decided; `None` if no number
/// would do. `most` is what the engine tells at most.
pub fn width(sampling: &Sampling, most: usize) -> Option<usize> {
    if sampling.plainly_greedy() {
        return (most >= 2).then_some(2);
    }
    let penalized = sampling.counts_output() || !is_one(sampling.repetition_penalty);
    if penalized || !sampling.logit_bias.is_empty() || sampling.temperature <= 0.0 {
        return None;
    }
    // One more than are kept, to see that the edge is not a tie.
    let width = sampling.top_k? as usize + 1;
    (width <= most).then_some(width)
}

/// The token that the target takes at this place. `top` holds the most probable tokens with their raw
/// log-probabilities, at least [`width`] of them unless the vocabulary is smaller, in any order; `draw` is
/// uniform in (0, 1) and used by this place alone.
pub fn decide(top: &[(TokenId, f64)], sampling: &Sampling, draw: f64) -> Option<TokenId> {
    let mut top = top.to_vec();
    top.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    top.dedup_by_key(|entry| entry.0);
    if sampling.plainly_greedy() {
        let [first, second, ..] = top.as_slice() else { return None };
        return (first.1 - second.1 > TIE).then_some(first.0);
    }
    let kept = nucleus(&weights(&top, sampling)?, sampling.top_p)?;
    let total: f64 = kept.iter().map(|entry| entry.1).sum();
    let mut left = draw * total;
    for &(token, weight) in &kept {
        left -= weight;
        if left <= 0.0 {
            return Some(token);
        }
    }
    kept.last().map(|entry| entry.0)
}

/// As [`decide`], where a token of `special` must not be decided here, because only the engine knows whether it
/// ends the text. Above T = 0 a place at which such a token may be drawn is left undecided whatever is drawn:
/// discarding a sample because of what it is would change how often it comes.
pub fn decide_text(
    top: &[(TokenId, f64)],
    sampling: &Sampling,
    draw: f64,
    special: &[TokenId],
) -> Option<TokenId> {
    let is_special = |token: &TokenId| special.contains(token);
    if !sampling.plainly_greedy() && top.iter().any(|entry| is_special(&entry.0)) {
        return None;
    }
    decide(top, sampling, draw).filter(|token| !is_special(token))
}

/// The rows of a scored chain: what its places are decided to be, up to the first that is left open; behind the
/// last of them `bonus`, which the engine has sampled. `told` has each place's tokens with their log-probabilities.
pub fn rows(
    engine: &Engine,
    round: &Round<'_>,
    told: impl Iterator<Item = Vec<(TokenId, f64)>>,
    bonus: Row,
) -> Vec<Row> {
    let mut rows = Vec::new();
    for (index, top) in told.enumerate() {
        let draw = draw(round.dice, round.context.len() + index);
        let Some(sample) = decide_text(&top, round.sampling, draw, &engine.special) else { return rows };
        rows.push(Row::of(sample));
    }
    rows.push(bonus);
    rows
}

/// Weights after temperature, min-p and top-k, the most probable first; the first has weight one.
fn weights(top: &[(TokenId, f64)], sampling: &Sampling) -> Option<Vec<(TokenId, f64)>> {
    let keep = sampling.top_k? as usize;
    let (kept, edge) = (top.get(..keep)?, top.get(keep)?);
    if kept.last()?.1 - edge.1 <= TIE {
        return None;
    }
    let most = kept.first()?.1;
    let weight = |logprob: f64| ((logprob - most) / sampling.temperature).exp();
    let weights: Vec<_> = kept.iter().map(|&(token, logprob)| (token, weight(logprob))).collect();
    if weights.iter().any(|entry| (entry.1 - sampling.min_p).abs() < EDGE * sampling.min_p.max(EDGE)) {
        return None;
    }
    Some(weights.into_iter().filter(|entry| entry.1 >= sampling.min_p).collect())
}

/// The smallest head of the list whose share reaches `top_p`.
fn nucleus(weights: &[(TokenId, f64)], top_p: f64) -> Option<Vec<(TokenId, f64)>> {
    if top_p >= 1.0 {
        return Some(weights.to_vec());
    }
    let total: f64 = weights.iter().map(|entry| entry.1).sum();
    let mut before = 0.0;
    let mut kept = Vec::new();
    for (index, &(token, weight)) in weights.iter().enumerate() {
        let share = before / total;
        if (share - top_p).abs() < EDGE {
            return None;
        }
        if share >= top_p {
            let last: &(TokenId, f64) = kept.last()?;
            // Equal tokens at the edge: engines differ in which of them they keep.
            return ((last.1 - weight).abs() > TIE * last.1).then_some(kept);
        }
        before += weight;
        kept.push((token, weight));
        debug_assert!(kept.len() == index + 1);
    }
    Some(kept)
}

#[expect(clippy::float_cmp, reason = "a penalty of exactly one is none")]
fn is_one(value: f64) -> bool {
    value == 1.0
}

/// The draw of one place: uniform in (0, 1), a function of the session's dice and the absolute position.
pub fn draw(dice: u64, position: usize) -> f64 {
    // SplitMix64 (Steele, Lea, Flood 2014) of the pair.
    let mut z = dice ^ (position as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(17);
    for (shift, factor) in [(30, 0xBF58_476D_1CE4_E5B9_u64), (27, 0x94D0_49BB_1331_11EB)] {
        z = (z ^ (z >> shift)).wrapping_mul(factor);
    }
    z ^= z >> 31;
    ((z >> 12) as f64 + 0.5) * 2.0_f64.powi(-52)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampling(temperature: f64, top_k: u32, top_p: f64) -> Sampling {
        Sampling { temperature, top_k: Some(top_k), top_p, ..Sampling::default() }
    }

    #[test]
    fn the_most_probable_is_taken_unless_it_is_a_tie() {
        let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
        assert_eq!(decide(&[(4, -2.0), (7, -0.5)], &greedy, 0.5), Some(7));
        assert_eq!(decide(&[(4, -0.5), (7, -0.5)], &greedy, 0.5), None);
        assert_eq!(decide(&[(4, -0.5)], &greedy, 0.5), None, "alone it proves nothing");
        assert_eq!(width(&greedy, 20), Some(2));
    }

    #[test]
    fn without_the_whole_kept_set_nothing_is_decided() {
        let open = Sampling { temperature: 0.8, top_p: 0.9, ..Sampling::default() };
        assert_eq!(width(&open, 20), None);
        assert_eq!(width(&sampling(0.8, 20, 1.0), 20), None);
        assert_eq!(width(&sampling(0.8, 3, 1.0), 20), Some(4));
        assert_eq!(decide(&[(1, -1.0), (2, -2.0)], &sampling(0.8, 3, 1.0), 0.5), None);
        let tie = [(1, -1.0), (2, -2.0), (3, -2.0)];
        assert_eq!(decide(&tie, &sampling(0.8, 2, 1.0), 0.5), None, "a tie at the edge of top-k");
    }

    #[test]
    fn what_may_be_special_is_left_out_whatever_is_drawn() {
        let top = [(1, -0.2), (0, -2.0), (3, -6.0)];
        let sampling = sampling(1.0, 2, 1.0);
        for draw in [0.1, 0.5, 0.99] {
            assert_eq!(decide_text(&top, &sampling, draw, &[0]), None);
            assert!(decide_text(&top, &sampling, draw, &[7]).is_some());
        }
        let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
        assert_eq!(
            decide_text(&top, &greedy, 0.5, &[0]),
            Some(1),
            "one that is not taken is in nobody's way"
        );
        assert_eq!(decide_text(&top, &greedy, 0.5, &[1]), None);
    }

    #[test]
    fn draws_follow_the_processed_distribution() {
        let top: Vec<(TokenId, f64)> = [0.4_f64, 0.3, 0.15, 0.1, 0.05]
            .iter()
            .enumerate()
            .map(|(token, p)| (token as TokenId, p.ln()))
            .collect();
        // Top-k 4 at T = 0.5 squares: .16 .09 .0225 .01 of .2825; top-p 0.85 keeps the first two.
        let sampling = sampling(0.5, 4, 0.85);
        let n = 200_000;
        let first = (0..n).filter(|&i| decide(&top, &sampling, draw(9, i)) == Some(0)).count();
        let share = first as f64 / n as f64;
        assert!((share - 0.64).abs() < 0.005, "{share}");
        assert!((0..1000).all(|i| decide(&top, &sampling, draw(7, i)).is_some_and(|token| token < 2)));
    }

    #[test]
    fn draws_of_places_are_uniform_and_independent_of_neighbours() {
        let n = 100_000;
        let draws: Vec<f64> = (0..n).map(|i| draw(3, i)).collect();
        let mean = draws.iter().sum::<f64>() / n as f64;
        let pairs = draws.windows(2).map(|pair| (pair[0] - 0.5) * (pair[1] - 0.5)).sum::<f64>() / n as f64;
        assert!((mean - 0.5).abs() < 0.005 && pairs.abs() < 0.002, "{mean} {pairs}");
    }
}
