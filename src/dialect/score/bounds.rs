//! Probabilities between bounds, where an engine may keep or drop a token that lies at an edge of its truncation.
//!
//! A draw needs to know every token that may come. A lossy accept rule that keeps the draft token needs less: the least that
//! its probability may be. Both sides of an edge are followed: what is kept for certain, and what may be kept.

use super::{EDGE, TIE};
use crate::openai::Sampling;
use crate::units::TokenId;
use crate::words::{Dist, Row};

/// What can be said of a place that [`row`](super::row) leaves undecided: the tokens that are kept for certain, with the least
/// that their probabilities may be, and how much larger they may be. `None` at temperature 0, and where the likeliest token
/// is special or not certain to be kept. `top` is as `row` takes it.
pub(super) fn bounded(top: &[(TokenId, f64)], sampling: &Sampling, special: &[TokenId]) -> Option<Row> {
    let mut top = top.to_vec();
    top.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    top.dedup_by_key(|entry| entry.0);
    let places = nucleus(&truncated(&top, sampling)?, sampling.top_p);
    let (least, greatest) = (sum(&places, |place| place.sure), sum(&places, |place| place.maybe));
    let first = places.first().filter(|place| place.sure && !special.contains(&place.token));
    first?;
    let listed = places.iter().filter(|place| place.sure && !special.contains(&place.token));
    let top = listed.map(|place| (place.token, place.weight / greatest)).collect();
    let dist = Dist { top, complete: false, slack: greatest / least - 1.0 };
    Some(Row { dist: Some(dist), ..Row::default() })
}

/// A listed token and whether it is kept.
#[derive(Clone, Copy)]
struct Place {
    token: TokenId,
    /// Its probability ÷ that of the likeliest token, after temperature.
    weight: f64,
    /// It is kept for certain.
    sure: bool,
    /// It may be kept.
    maybe: bool,
}

fn sum(places: &[Place], counts: impl Fn(&Place) -> bool) -> f64 {
    places.iter().filter(|place| counts(place)).map(|place| place.weight).sum()
}

/// What top-k and min-p keep. `None` where tokens that are not listed may be kept: those level with the last of top-k, which
/// some engines keep all of.
fn truncated(top: &[(TokenId, f64)], sampling: &Sampling) -> Option<Vec<Place>> {
    let keep = sampling.top_k? as usize;
    let (most, edge) = (top.first()?.1, top.get(keep)?.1);
    let tied = top.get(keep.checked_sub(1)?)?.1 - edge <= TIE;
    let unlisted = tied && edge - top.last()?.1 <= TIE;
    if sampling.temperature <= 0.0 || unlisted {
        return None;
    }
    let floor = EDGE * sampling.min_p.max(EDGE);
    let place = |(index, &(token, logprob)): (usize, &(TokenId, f64))| {
        let weight = ((logprob - most) / sampling.temperature).exp();
        let level = tied && (edge - logprob).abs() <= TIE;
        Place {
            token,
            weight,
            sure: index < keep && logprob - edge > TIE && weight > sampling.min_p + floor,
            maybe: (index < keep || level) && weight > sampling.min_p - floor,
        }
    };
    Some(top.iter().enumerate().map(place).collect())
}

/// What top-p keeps of them: a token is kept where the share of those before it is below `top_p`. Of equal tokens at its
/// edge engines keep different ones.
fn nucleus(places: &[Place], top_p: f64) -> Vec<Place> {
    if top_p >= 1.0 {
        return places.to_vec();
    }
    let (least, greatest) = (sum(places, |place| place.sure), sum(places, |place| place.maybe));
    let before = |index: usize| places.iter().take(index).map(|place| place.weight).sum::<f64>();
    let weight = |index: usize| places.get(index).map_or(0.0, |place| place.weight);
    let level = |a: f64, b: f64| (a - b).abs() <= TIE * a.max(b);
    let inside = |index: usize| before(index) / least < top_p - EDGE;
    // Of a run of equal tokens that the edge goes through, none is certain.
    let at_edge = |index: usize| {
        let run = (index + 1..places.len()).take_while(|&other| level(weight(index), weight(other)));
        run.last().is_some_and(|last| !inside(last))
    };
    let kept = |(index, place): (usize, &Place)| Place {
        sure: place.sure && inside(index) && !at_edge(index),
        maybe: place.maybe
            && (before(index) / greatest < top_p + EDGE
                || (0..index).any(|above| {
                    level(weight(above), place.weight) && before(above) / greatest < top_p + EDGE
                })),
        ..*place
    };
    places.iter().enumerate().map(kept).collect()
}

#[cfg(test)]
mod tests {
    use super::super::row;
    use super::*;

    fn sampling(temperature: f64, top_k: u32, top_p: f64) -> Sampling {
        Sampling { temperature, top_k: Some(top_k), top_p, ..Sampling::default() }
    }

    /// Of every law that an engine may take it for, which keeps or drops what lies at an edge, the probabilities lie between
    /// the bounds.
    #[test]
    fn what_is_left_undecided_is_known_between_bounds() {
        let logprobs = |weights: &[f64]| -> Vec<(TokenId, f64)> {
            let sum: f64 = weights.iter().sum();
            (0..).zip(weights.iter().map(|weight| (weight / sum).ln())).collect()
        };
        let p = |kept: &[f64], at: usize| kept[at] / kept.iter().sum::<f64>();
        // A tie at the edge of top-k: the third or the fourth is kept.
        let dist = bounded(&logprobs(&[4.0, 3.0, 1.0, 1.0, 0.5]), &sampling(1.0, 3, 1.0), &[])
            .unwrap()
            .dist
            .unwrap();
        let tokens: Vec<TokenId> = dist.top.iter().map(|entry| entry.0).collect();
        assert_eq!((tokens, dist.complete), (vec![0, 1], false));
        for at in [0, 1] {
            let own = p(&[4.0, 3.0, 1.0], at);
            assert!(dist.top[at].1 <= own && own <= dist.top[at].1 * (1.0 + dist.slack), "{at}");
        }
        // The nucleus of 0.7 ends exactly at the second: with the third, or without.
        let edge = logprobs(&[4.0, 3.0, 2.0, 1.0]);
        assert_eq!(row(&edge, &sampling(1.0, 3, 7.0 / 9.0), &[]), None);
        let dist = bounded(&edge, &sampling(1.0, 3, 7.0 / 9.0), &[]).unwrap().dist.unwrap();
        assert_eq!(dist.top.len(), 2);
        for kept in [&[4.0, 3.0][..], &[4.0, 3.0, 2.0]] {
            let own = p(kept, 0);
            assert!(
                dist.top[0].1 <= own + 1e-12 && own <= dist.top[0].1 * (1.0 + dist.slack) + 1e-12,
                "{kept:?}"
            );
        }
        // Of three equal tokens two fit: any of them may be the one that is dropped.
        let run = logprobs(&[4.0, 2.0, 2.0, 2.0, 0.5]);
        let dist = bounded(&run, &sampling(1.0, 4, 0.75), &[]).unwrap().dist.unwrap();
        assert_eq!(dist.top.iter().map(|entry| entry.0).collect::<Vec<_>>(), [0]);
        for kept in [&[4.0, 2.0, 2.0][..], &[4.0, 2.0], &[4.0, 2.0, 2.0, 2.0]] {
            let own = p(kept, 0);
            assert!(
                dist.top[0].1 <= own + 1e-12 && own <= dist.top[0].1 * (1.0 + dist.slack) + 1e-12,
                "{kept:?}"
            );
        }
        // One that may end the text is listed nowhere, and the others are known.
        let special = bounded(&edge, &sampling(1.0, 3, 1.0), &[1]).unwrap().dist.unwrap();
        assert_eq!(special.top.iter().map(|entry| entry.0).collect::<Vec<_>>(), [0, 2]);
        assert!((special.top[0].1 - 4.0 / 9.0).abs() < 1e-12 && special.slack.abs() < 1e-12);
        assert_eq!(
            bounded(&edge, &sampling(1.0, 3, 1.0), &[0]),
            None,
            "how likely the likeliest is must be known"
        );
        assert_eq!(bounded(&edge, &sampling(0.0, 3, 1.0), &[]), None);
    }
}
