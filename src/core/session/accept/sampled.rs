//! Acceptance of a sampled draft: block verification.
//!
//! A chain x was drawn from distributions q, and the target's distributions p at its positions are
//! known completely. Sample and match would keep x_1 with probability Σ p·q; this keeps it with Σ
//! min(p, q) or more, and compensates by the replacement of a rejected token, so that the text has
//! the target's distribution (Sun et al., arXiv 2403.10444, optimal among all tests that use the
//! drafted path alone).
//!
//! With P_0 = 1 and P_i = min(1, P_{i−1} · p_i(x_i) / q_i(x_i)), the longest run i whose coin
//! succeeds is kept. The coin succeeds with h_i = S_i / (S_i + 1 − P_i), S_i = Σ max(0, P_i ·
//! p_{i+1} − q_{i+1}), and with h_γ = P_γ for the whole chain; then follows a token of the residual
//! max(0, P_i · p_{i+1} − q_{i+1}), renormalised. A token of p_{γ+1} follows a chain that is kept
//! as a whole, if that distribution is known.
//!
//! Preconditions: (1) each x_j was drawn from q_j itself, and the existence of a position j depends
//! on x_<j and q_j alone, as does the set of known target distributions (see [`Sampled`]); (2) no
//! two rounds share a draw: coins, residuals and the draws of the chain are new for every round,
//! because the coins of a block behind the kept run have been read, and so has, through P, every
//! token of its chain; (3) the token behind the run is drawn from the distribution that is returned
//! here and from nothing else: a sample of the target's own at that position would be a second try.

use crate::draft::Sampled;
use crate::units::TokenId;
use crate::words::Distribution;

/// The result of verifying a sampled chain.
#[derive(Clone, Debug, PartialEq)]
pub struct Kept {
    /// Number of tokens of the chain that are kept, from the first on.
    pub run: usize,
    /// The distribution of the token behind them; `None` where the target's distribution there is
    /// not known, so that the position stays undecided.
    pub next: Option<Distribution>,
}

/// Verifies a chain by the target's distributions: `p[j]` follows the first `j` tokens of the
/// chain. From the first missing distribution on, the chain is not used. `coin` returns true with
/// the given probability, at most once for each position of the chain, by a draw that no other
/// position and no other round has.
pub fn verify(draft: &Sampled, p: &[Distribution], mut coin: impl FnMut(usize, f64) -> bool) -> Kept {
    let positions: Vec<TestedPosition<'_>> = draft
        .chain()
        .iter()
        .zip(draft.q())
        .zip(p)
        .map(|((&token, q), p)| TestedPosition { token, q, p })
        .collect();
    let (run, weight) = block(&positions, &mut coin);
    let next = match positions.get(run) {
        Some(refused) => Some(refused.residual(weight)),
        None => p.get(run).cloned(),
    };
    Kept { run, next }
}

/// A position of the chain whose distributions are both known.
struct TestedPosition<'a> {
    token: TokenId,
    q: &'a Distribution,
    p: &'a Distribution,
}

impl TestedPosition<'_> {
    /// p(x) / q(x) of the drawn token, which q can draw.
    fn ratio(&self) -> f64 {
        self.p.of(self.token) / self.q.of(self.token)
    }

    /// The distribution of the token's replacement. Where p exceeds q nowhere, to rounding, no
    /// token is ever rejected; then it is p.
    fn residual(&self, weight: f64) -> Distribution {
        Distribution::new(self.p.excess(weight, self.q)).unwrap_or_else(|| self.p.clone())
    }
}

/// The length i of the run that block verification keeps, and P_i. The coins are independent, so
/// the first success from the end on gives the longest run.
fn block(positions: &[TestedPosition<'_>], coin: &mut impl FnMut(usize, f64) -> bool) -> (usize, f64) {
    let mut weights = Vec::with_capacity(positions.len());
    let mut weight = 1.0_f64;
    for position in positions {
        weight = (weight * position.ratio()).min(1.0);
        weights.push(weight);
    }
    for (at, &weight) in weights.iter().enumerate().rev() {
        let keep = positions.get(at + 1).map_or(weight, |next| kept_before(next, weight));
        if coin(at, keep) {
            return (at + 1, weight);
        }
    }
    (0, 1.0)
}

/// h_i for P_i = `weight`, before the position `next`.
fn kept_before(next: &TestedPosition<'_>, weight: f64) -> f64 {
    let beyond: f64 = next.p.excess(weight, next.q).iter().map(|entry| entry.1).sum();
    let all = beyond + 1.0 - weight;
    // P = 1 and p = q: the coin of the next position always succeeds, and this one is not read.
    if all > 0.0 { beyond / all } else { 1.0 }
}
