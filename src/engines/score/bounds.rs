//! Bounds of probabilities, where an engine may retain or drop a token at an edge of its
//! truncation.
//!
//! A draw needs the probability of every possible token. A lossy accept rule that accepts the draft
//! token needs less: a lower bound of its probability. Two sets are computed at every edge: the
//! tokens that are certainly retained, and those that may be retained.

use super::{EDGE, TIE};
use foretell_core::units::TokenId;
use foretell_core::words::{Dist, Row};
use foretell_wire::openai::Sampling;

/// The bounds for a position that [`row`](super::row) leaves undecided: the tokens that are
/// certainly retained, each with the lower bound of its probability, and `slack`, by which the
/// upper bound exceeds it. `None` at temperature 0, and where the likeliest token is special or not
/// certainly retained, and where not all tokens are listed that top-k retains. `top` and `width`
/// are as `row` takes them.
pub(super) fn bounded(
    top: &[(TokenId, f64)],
    width: usize,
    sampling: &Sampling,
    special: &[TokenId],
) -> Option<Row> {
    sampling.top_k.filter(|k| (*k as usize) < width)?;
    let mut top = top.to_vec();
    top.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    top.dedup_by_key(|entry| entry.0);
    let entries = nucleus(&truncated(&top, width, sampling)?, sampling.top_p);
    let (least, greatest) = (sum(&entries, |entry| entry.sure), sum(&entries, |entry| entry.maybe));
    let first = entries.first().filter(|entry| entry.sure && !special.contains(&entry.token));
    first?;
    let listed = entries.iter().filter(|entry| entry.sure && !special.contains(&entry.token));
    let top = listed.map(|entry| (entry.token, entry.weight / greatest)).collect();
    let dist = Dist { top, complete: false, slack: greatest / least - 1.0 };
    Some(Row { dist: Some(dist), ..Row::default() })
}

/// A listed token, its weight, and its membership in the two sets.
#[derive(Clone, Copy)]
struct ListedToken {
    token: TokenId,
    /// Its probability ÷ that of the likeliest token, after temperature.
    weight: f64,
    /// It is certainly retained.
    sure: bool,
    /// It may be retained.
    maybe: bool,
}

fn sum(entries: &[ListedToken], counts: impl Fn(&ListedToken) -> bool) -> f64 {
    entries.iter().filter(|entry| counts(entry)).map(|entry| entry.weight).sum()
}

/// The tokens that top-k and min-p retain. `None` where tokens that are not listed may be retained:
/// those that tie with the last of top-k, all of which some engines retain.
fn truncated(top: &[(TokenId, f64)], width: usize, sampling: &Sampling) -> Option<Vec<ListedToken>> {
    let k = sampling.top_k? as usize;
    let (most, edge) = (top.first()?.1, top.get(k)?.1);
    let tied = top.get(k.checked_sub(1)?)?.1 - edge <= TIE;
    // A drafted token is listed wherever it is.
    let unlisted = tied && edge - top.get(width - 1)?.1 <= TIE;
    if sampling.temperature <= 0.0 || unlisted {
        return None;
    }
    let floor = EDGE * sampling.min_p.max(EDGE);
    let entry = |(index, &(token, logprob)): (usize, &(TokenId, f64))| {
        let weight = ((logprob - most) / sampling.temperature).exp();
        let level = tied && (edge - logprob).abs() <= TIE;
        ListedToken {
            token,
            weight,
            sure: index < k && logprob - edge > TIE && weight > sampling.min_p + floor,
            maybe: (index < k || level) && weight > sampling.min_p - floor,
        }
    };
    Some(top.iter().enumerate().map(entry).collect())
}

/// The tokens that top-p retains of them: a token is retained where the share of those before it is
/// below `top_p`. Engines differ in which of equal tokens at the edge they retain.
fn nucleus(entries: &[ListedToken], top_p: f64) -> Vec<ListedToken> {
    if top_p >= 1.0 {
        return entries.to_vec();
    }
    let (least, greatest) = (sum(entries, |entry| entry.sure), sum(entries, |entry| entry.maybe));
    let before = |index: usize| entries.iter().take(index).map(|entry| entry.weight).sum::<f64>();
    let weight = |index: usize| entries.get(index).map_or(0.0, |entry| entry.weight);
    let level = |a: f64, b: f64| (a - b).abs() <= TIE * a.max(b);
    let inside = |index: usize| before(index) / least < top_p - EDGE;
    // Where the edge lies within a run of equal tokens, none of them is certain.
    let at_edge = |index: usize| {
        let run = (index + 1..entries.len()).take_while(|&other| level(weight(index), weight(other)));
        run.last().is_some_and(|last| !inside(last))
    };
    let candidate = |(index, entry): (usize, &ListedToken)| ListedToken {
        sure: entry.sure && inside(index) && !at_edge(index),
        maybe: entry.maybe
            && (before(index) / greatest < top_p + EDGE
                || (0..index).any(|above| {
                    level(weight(above), entry.weight) && before(above) / greatest < top_p + EDGE
                })),
        ..*entry
    };
    entries.iter().enumerate().map(candidate).collect()
}

#[cfg(test)]
mod tests {
    use super::super::row;
    use super::*;

    fn sampling(temperature: f64, top_k: u32, top_p: f64) -> Sampling {
        Sampling { temperature, top_k: Some(top_k), top_p, ..Sampling::default() }
    }

    /// For every distribution that an engine may use, with the tokens at an edge kept or dropped,
    /// the probabilities lie between the bounds.
    #[test]
    fn an_undecided_position_is_known_between_bounds() {
        let logprobs = |weights: &[f64]| -> Vec<(TokenId, f64)> {
            let sum: f64 = weights.iter().sum();
            (0..).zip(weights.iter().map(|weight| (weight / sum).ln())).collect()
        };
        let p = |candidate: &[f64], at: usize| candidate[at] / candidate.iter().sum::<f64>();
        // A tie at the edge of top-k: the third or the fourth is kept.
        let dist = bounded(&logprobs(&[4.0, 3.0, 1.0, 1.0, 0.5]), 5, &sampling(1.0, 3, 1.0), &[])
            .unwrap()
            .dist
            .unwrap();
        let tokens: Vec<TokenId> = dist.top.iter().map(|entry| entry.0).collect();
        assert_eq!((tokens, dist.complete), (vec![0, 1], false));
        for at in [0, 1] {
            let own = p(&[4.0, 3.0, 1.0], at);
            assert!(dist.top[at].1 <= own && own <= dist.top[at].1 * (1.0 + dist.slack), "{at}");
        }
        let tied = logprobs(&[4.0, 3.0, 1.0, 1.0, 0.5]);
        assert_eq!(
            bounded(&tied, 4, &sampling(1.0, 3, 1.0), &[]),
            None,
            "the last is the drafted: others may tie"
        );
        // The nucleus of 0.7 ends exactly at the second: with the third, or without.
        let edge = logprobs(&[4.0, 3.0, 2.0, 1.0]);
        assert_eq!(row(&edge, 4, &sampling(1.0, 3, 7.0 / 9.0), &[]), None);
        let dist = bounded(&edge, 4, &sampling(1.0, 3, 7.0 / 9.0), &[]).unwrap().dist.unwrap();
        assert_eq!(dist.top.len(), 2);
        for candidate in [&[4.0, 3.0][..], &[4.0, 3.0, 2.0]] {
            let own = p(candidate, 0);
            assert!(
                dist.top[0].1 <= own + 1e-12 && own <= dist.top[0].1 * (1.0 + dist.slack) + 1e-12,
                "{candidate:?}"
            );
        }
        // Of three equal tokens two fit: any of them may be the one that is dropped.
        let run = logprobs(&[4.0, 2.0, 2.0, 2.0, 0.5]);
        let dist = bounded(&run, 5, &sampling(1.0, 4, 0.75), &[]).unwrap().dist.unwrap();
        assert_eq!(dist.top.iter().map(|entry| entry.0).collect::<Vec<_>>(), [0]);
        for candidate in [&[4.0, 2.0, 2.0][..], &[4.0, 2.0], &[4.0, 2.0, 2.0, 2.0]] {
            let own = p(candidate, 0);
            assert!(
                dist.top[0].1 <= own + 1e-12 && own <= dist.top[0].1 * (1.0 + dist.slack) + 1e-12,
                "{candidate:?}"
            );
        }
        // One that may end the text is listed nowhere, and the others are known.
        let special = bounded(&edge, 4, &sampling(1.0, 3, 1.0), &[1]).unwrap().dist.unwrap();
        assert_eq!(special.top.iter().map(|entry| entry.0).collect::<Vec<_>>(), [0, 2]);
        assert!((special.top[0].1 - 4.0 / 9.0).abs() < 1e-12 && special.slack.abs() < 1e-12);
        assert_eq!(
            bounded(&edge, 4, &sampling(1.0, 3, 1.0), &[0]),
            None,
            "how likely the likeliest is must be known"
        );
        assert_eq!(bounded(&edge, 4, &sampling(0.0, 3, 1.0), &[]), None);
    }
}
