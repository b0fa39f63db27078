//! Reconstructs the distribution of a position from log-probabilities, where the engine reports
//! those and draws no sample.
//!
//! It is reconstructed only if that is exact, which is judged from the probabilities alone. The
//! session draws from it; an undecided position is passed to another verification method, whose
//! sample is then the only one ever drawn there.

mod bounds;

use self::bounds::bounded;
use super::Engine;
use foretell_core::units::TokenId;
use foretell_core::words::Row;
use foretell_wire::openai::Sampling;

/// Log-probabilities closer than this count as equal.
const TIE: f64 = 1e-6;
/// A cumulative probability this close to the edge of the nucleus is undecided.
const EDGE: f64 = 1e-5;

/// Number of the most probable tokens that must be listed so that positions of this request may be
/// decided; `None` if no number suffices. `most` is the longest list that the engine returns.
///
/// With a `top_k` below it all positions are, but ties; without, or with a larger one, those at
/// which `top_p` or `min_p` leaves listed tokens only.
pub fn width(sampling: &Sampling, most: usize) -> Option<usize> {
    if sampling.plainly_greedy() {
        return (most >= 2).then_some(2);
    }
    if sampling.penalizes() || !sampling.logit_bias.is_empty() || sampling.temperature <= 0.0 {
        return None;
    }
    // One more than are retained, to detect a tie at the edge.
    let all = sampling.top_k.map(|k| k as usize + 1).filter(|width| *width <= most);
    let closes = sampling.min_p > 0.0 || (sampling.top_p < 1.0 && sampling.temperature <= 1.0);
    all.or((closes && most >= 2).then_some(most))
}

/// The target's row at a position: the token that it takes, or the distribution that it draws from;
/// `None` if that cannot be reconstructed. `top` holds the most probable tokens with their raw
/// log-probabilities, in any order: the first `width` (see [`width`]), or the complete vocabulary
/// if that is smaller, and possibly more. A token of `special` must not be decided here, because
/// only the engine knows whether it ends the text: above T = 0 a position at which such a token may
/// be drawn stays undecided, whatever the draw would be, and with `min_tokens`, which bars them
/// before the others are truncated, each position that lists one.
pub fn row(top: &[(TokenId, f64)], width: usize, sampling: &Sampling, special: &[TokenId]) -> Option<Row> {
    let top = ranked(top);
    let is_special = |token: &TokenId| special.contains(token);
    if sampling.plainly_greedy() {
        let [first, second, ..] = top.as_slice() else { return None };
        let clear = first.1 - second.1 > TIE && !is_special(&first.0);
        return clear.then(|| Row::of(first.0));
    }
    let (weights, unlisted) = weights(&top, width, sampling)?;
    let candidates = nucleus(&weights, unlisted, sampling.top_p)?;
    let drawn = if sampling.min_tokens > 0 { &top } else { &candidates };
    if drawn.iter().any(|entry| is_special(&entry.0)) {
        return None;
    }
    let total: f64 = candidates.iter().map(|entry| entry.1).sum();
    Some(Row::undrawn(candidates.into_iter().map(|(token, weight)| (token, weight / total)).collect()))
}

/// The rows of a scored chain up to the first undecided position, one per draft node; if all are
/// decided, then `bonus`, which the engine has sampled. `listed` lists each position's tokens with
/// their log-probabilities, as many as [`width`] says for an engine that lists `most`. `bounds`: an
/// undecided position still gets a row if its probabilities are known between bounds.
pub fn rows(
    engine: &Engine,
    sampling: &Sampling,
    most: usize,
    listed: impl Iterator<Item = Vec<(TokenId, f64)>>,
    bounds: bool,
    bonus: Row,
) -> Vec<Row> {
    let mut rows = Vec::new();
    let Some(width) = width(sampling, most) else { return rows };
    let listed: Vec<_> = listed.collect();
    // One list of logits shows that the others are no log-probabilities either (vLLM's
    // `--logprobs-mode raw_logits` and `processed_logits`).
    let logits = listed.iter().any(|top| total(top) > 1.0 + EDGE);
    if logits && sampling.temperature > 0.0 && sampling.top_k.is_none_or(|k| k as usize >= width) {
        return rows;
    }
    for top in listed {
        // The bounds count special tokens, which `min_tokens` may bar.
        let between = || {
            let applies = bounds && sampling.min_tokens == 0;
            if applies { bounded(&top, width, sampling, &engine.tokens.may_end) } else { None }
        };
        let Some(row) = row(&top, width, sampling, &engine.tokens.may_end).or_else(between) else {
            return rows;
        };
        rows.push(row);
    }
    rows.push(bonus);
    rows
}

/// A list, the likeliest token first, each token once.
fn ranked(top: &[(TokenId, f64)]) -> Vec<(TokenId, f64)> {
    let mut top = top.to_vec();
    top.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    top.dedup_by_key(|entry| entry.0);
    top
}

/// Weights after temperature, min-p and top-k, the most probable first; the first has weight one.
/// With them the greatest weight of all tokens together that these keep and that are not listed.
fn weights(top: &[(TokenId, f64)], width: usize, sampling: &Sampling) -> Option<(Vec<(TokenId, f64)>, f64)> {
    let listed_k = sampling.top_k.map(|k| k as usize).filter(|k| *k < width);
    let candidates = if let Some(k) = listed_k {
        let (candidates, edge) = (top.get(..k)?, top.get(k)?);
        if candidates.last()?.1 - edge.1 <= TIE {
            return None;
        }
        candidates
    } else {
        top.get(..width).unwrap_or(top)
    };
    let most = candidates.first()?.1;
    let weight = |logprob: f64| ((logprob - most) / sampling.temperature).exp();
    let mut weights: Vec<_> = candidates.iter().map(|&(token, logprob)| (token, weight(logprob))).collect();
    let at_edge = |weight: f64| (weight - sampling.min_p).abs() < EDGE * sampling.min_p;
    if weights.iter().any(|entry| at_edge(entry.1)) {
        return None;
    }
    weights.retain(|entry| entry.1 >= sampling.min_p);
    let closed = listed_k.is_some() || weights.len() < candidates.len();
    let unlisted = if closed { 0.0 } else { unlisted(candidates, sampling.temperature)? };
    Some((weights, unlisted))
}

/// The greatest weight of all tokens together that are not among the listed, the likeliest of all.
/// Each has p ≤ p_last, so with T ≤ 1 its weight (p / p_first)^(1/T) is at most p / p_first ·
/// (p_last / p_first)^(1/T − 1). `None` where the list has logits instead of log-probabilities.
fn unlisted(listed: &[(TokenId, f64)], temperature: f64) -> Option<f64> {
    let (first, last) = (listed.first()?.1, listed.last()?.1);
    let sum = total(listed);
    if sum > 1.0 + EDGE {
        return None;
    }
    let each = ((last - first) * (1.0 / temperature - 1.0)).exp();
    let all = (1.0 - sum + EDGE) / first.exp() * each;
    Some(if temperature <= 1.0 { all } else { f64::INFINITY })
}

/// The probability of these tokens together.
fn total(listed: &[(TokenId, f64)]) -> f64 {
    listed.iter().map(|entry| entry.1.exp()).sum()
}

/// The smallest head of the list whose share reaches `top_p`; `None` if rounding, a tie or the
/// weight of unlisted tokens leaves its end undecided.
fn nucleus(weights: &[(TokenId, f64)], unlisted: f64, top_p: f64) -> Option<Vec<(TokenId, f64)>> {
    if top_p >= 1.0 {
        return (unlisted <= 0.0).then(|| weights.to_vec());
    }
    let total: f64 = weights.iter().map(|entry| entry.1).sum();
    let mut before = 0.0;
    let mut candidates = Vec::new();
    for (index, &(token, weight)) in weights.iter().enumerate() {
        let (least, greatest) = (before / (total + unlisted), before / total);
        let closed = least >= top_p + EDGE;
        if !closed && greatest > top_p - EDGE {
            return None;
        }
        if closed {
            let last: &(TokenId, f64) = candidates.last()?;
            // Equal tokens at the edge: engines differ in which of them they retain.
            return ((last.1 - weight).abs() > TIE * last.1).then_some(candidates);
        }
        before += weight;
        candidates.push((token, weight));
        debug_assert!(candidates.len() == index + 1);
    }
    (unlisted <= 0.0).then_some(candidates)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampling(temperature: f64, top_k: u32, top_p: f64) -> Sampling {
        Sampling { temperature, top_k: Some(top_k), top_p, ..Sampling::default() }
    }

    fn plain(top: &[(TokenId, f64)], sampling: &Sampling) -> Option<Row> {
        row(top, width(sampling, 20).unwrap(), sampling, &[])
    }

    #[test]
    fn the_most_probable_is_taken_unless_it_is_a_tie() {
        let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
        assert_eq!(plain(&[(4, -2.0), (7, -0.5)], &greedy), Some(Row::of(7)));
        assert_eq!(plain(&[(4, -0.5), (7, -0.5)], &greedy), None);
        assert_eq!(plain(&[(4, -0.5)], &greedy), None, "alone it proves nothing");
        assert_eq!(width(&greedy, 20), Some(2));
    }

    #[test]
    fn without_the_whole_kept_set_nothing_is_decided() {
        let open = |temperature, top_p| Sampling { temperature, top_p, ..Sampling::default() };
        assert_eq!(width(&open(0.8, 1.0), 20), None);
        assert_eq!(width(&open(1.2, 0.9), 20), None);
        assert_eq!(width(&sampling(0.8, 20, 1.0), 20), None);
        assert_eq!(width(&open(0.8, 0.9), 20), Some(20));
        assert_eq!(width(&sampling(0.8, 20, 0.9), 20), Some(20));
        assert_eq!(width(&sampling(0.8, 3, 1.0), 20), Some(4));
        assert_eq!(plain(&[(1, -1.0), (2, -2.0)], &sampling(0.8, 3, 1.0)), None);
        let tie = [(1, -1.0), (2, -2.0), (3, -2.0)];
        assert_eq!(plain(&tie, &sampling(0.8, 2, 1.0)), None, "a tie at the edge of top-k");
    }

    #[test]
    fn a_position_with_a_special_token_is_left_undecided() {
        let top = [(1, -0.2), (0, -2.0), (3, -6.0)];
        let sampling = sampling(1.0, 2, 1.0);
        assert_eq!(row(&top, 3, &sampling, &[0]), None);
        assert!(row(&top, 3, &sampling, &[3]).is_some(), "one that is not kept does not matter");
        let barred = Sampling { min_tokens: 9, ..sampling };
        assert_eq!(row(&top, 3, &barred, &[3]), None, "without it others may be kept");
        let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
        let taken = row(&top, 2, &greedy, &[0]);
        assert_eq!(taken, Some(Row::of(1)), "a special token that is not taken does not matter");
        assert_eq!(row(&top, 2, &greedy, &[1]), None);
    }

    /// For all orders of four logits, with ties: a row that is decided is the token that the engine
    /// takes, whether or not it bars the tokens that end the text.
    #[test]
    fn min_tokens_change_no_decided_row() {
        const ENDS: [TokenId; 2] = [0, 3];
        let greedy = Sampling { temperature: 0.0, min_tokens: 9, ..Sampling::default() };
        let mut decided = 0;
        for code in 0..4_u32.pow(4) {
            let logit = |token: TokenId| -f64::from(code / 4_u32.pow(token) % 4);
            let mut top: Vec<(TokenId, f64)> = (0..4).map(|token| (token, logit(token))).collect();
            top.sort_by(|a, b| b.1.total_cmp(&a.1));
            top.truncate(2);
            let Some(Row { sample: Some(taken), .. }) = row(&top, 2, &greedy, &ENDS) else { continue };
            decided += 1;
            for barred in [&[][..], &ENDS] {
                let allowed = (0..4).filter(|token| !barred.contains(token));
                let below = allowed.filter(|&token| token != taken && logit(token) < logit(taken)).count();
                assert_eq!(below, 3 - barred.len(), "{top:?}: {taken} alone is the best");
            }
        }
        assert_eq!(decided, 72, "half of the orders with a single best token");
    }

    /// For all orders of six logits: where a list of three decides a nucleus or min-p, the row is
    /// the distribution that the engine draws from, which knows all six.
    #[test]
    fn a_list_of_the_likeliest_decides_as_the_whole_vocabulary_does() {
        let kinds = [
            (1.0, None, 0.7, 0.0),
            (0.5, None, 0.9, 0.0),
            (0.7, Some(5), 0.8, 0.0),
            (1.3, None, 1.0, 0.2),
            (0.8, Some(4), 0.9, 0.1),
            (0.6, None, 0.95, 0.05),
        ];
        let (mut decided, mut all) = (0, 0);
        for code in 0..4_u32.pow(6) {
            let logit = |token: u32| -1.3 * f64::from(code / 4_u32.pow(token) % 4);
            let sum: f64 = (0..6).map(|token| logit(token).exp()).sum();
            let mut top: Vec<(TokenId, f64)> = (0..6).map(|token| (token, logit(token) - sum.ln())).collect();
            top.sort_by(|a, b| b.1.total_cmp(&a.1));
            for (temperature, top_k, top_p, min_p) in kinds {
                let sampling = Sampling { temperature, top_p, top_k, min_p, ..Sampling::default() };
                all += 1;
                let list = |len: usize| top.get(..len).unwrap_or_default();
                let few = row(list(3), 3, &sampling, &[]);
                // A drafted token is listed wherever it is.
                let drafted = [list(3), &top[5..]].concat();
                assert_eq!(row(&drafted, 3, &sampling, &[]), few, "{top:?} {sampling:?}");
                let Some(few) = few.map(|row| row.dist.unwrap()) else { continue };
                decided += 1;
                let whole = of_all(&top, &sampling);
                assert_eq!(few.top.len(), whole.len(), "{top:?} {sampling:?}");
                for (listed, known) in few.top.iter().zip(&whole) {
                    assert!(
                        listed.0 == known.0 && (listed.1 - known.1).abs() < 1e-12,
                        "{top:?} {sampling:?}"
                    );
                }
            }
        }
        assert!(decided * 4 > all, "{decided} of {all}");
    }

    /// The distribution after min-p, top-k and the nucleus of a whole vocabulary, the likeliest
    /// first, as vLLM makes it (0.32, `v1/sample/ops/topk_topp_sampler.py`).
    fn of_all(top: &[(TokenId, f64)], sampling: &Sampling) -> Vec<(TokenId, f64)> {
        let weight = |logprob: f64| ((logprob - top[0].1) / sampling.temperature).exp();
        let mut candidates: Vec<_> = top.iter().map(|&(token, logprob)| (token, weight(logprob))).collect();
        candidates.retain(|entry| entry.1 >= sampling.min_p);
        candidates.truncate(sampling.top_k.unwrap_or(u32::MAX) as usize);
        let total: f64 = candidates.iter().map(|entry| entry.1).sum();
        let mut before = 0.0;
        candidates.retain(|entry| {
            let k = before / total < sampling.top_p;
            before += entry.1;
            k
        });
        let total: f64 = candidates.iter().map(|entry| entry.1).sum();
        candidates.into_iter().map(|(token, weight)| (token, weight / total)).collect()
    }

    #[test]
    fn logits_are_no_log_probabilities() {
        let nucleus = Sampling { temperature: 0.7, top_p: 0.5, ..Sampling::default() };
        assert!(row(&[(1, -0.1), (2, -3.0), (3, -4.0)], 3, &nucleus, &[]).is_some());
        assert_eq!(row(&[(1, 2.9), (2, 0.0), (3, -1.0)], 3, &nucleus, &[]), None);
    }

    #[test]
    fn the_distribution_is_the_processed_one() {
        let top: Vec<(TokenId, f64)> = [0.4_f64, 0.3, 0.15, 0.1, 0.05]
            .iter()
            .enumerate()
            .map(|(token, p)| (token as TokenId, p.ln()))
            .collect();
        // Top-k 4 at T = 0.5 squares: .16 .09 .0225 .01 of .2825; top-p 0.85 keeps the first two.
        let Some(Row { sample: None, dist: Some(dist), .. }) = plain(&top, &sampling(0.5, 4, 0.85)) else {
            panic!("a distribution")
        };
        let tokens: Vec<TokenId> = dist.top.iter().map(|entry| entry.0).collect();
        assert_eq!((tokens, dist.complete), (vec![0, 1], true));
        assert!((dist.top[0].1 - 0.64).abs() < 1e-12 && (dist.top[1].1 - 0.36).abs() < 1e-12);
    }
}
