//! Accepting a sampled draft: the ratio test and block verification.
//!
//! A chain x was drawn from laws q, and the target's laws p at its places are known as a whole. Sample and match would keep
//! x_j with probability Σ p·q; what is here keeps it with up to Σ min(p, q), and what it puts in place of a refused token
//! makes up for it, so that the text has the target's law (Leviathan et al., arXiv 2211.17192; for blocks Sun et al.,
//! arXiv 2403.10444, optimal among all that look at the drafted path alone).
//!
//! * **Ratio**: x_j is kept with probability min(1, p_j(x_j) / q_j(x_j)), one after the other; at the first that is not,
//!   a token of the residual max(0, p_j − q_j), renormalised, comes in its place.
//! * **Block**: with P_0 = 1 and P_i = min(1, P_{i−1} · p_i(x_i) / q_i(x_i)), the longest run i of which a coin says so is
//!   kept, which falls with h_i = S_i / (S_i + 1 − P_i), S_i = Σ max(0, P_i · p_{i+1} − q_{i+1}), and with h_γ = P_γ for
//!   the whole chain; then comes a token of the residual max(0, P_i · p_{i+1} − q_{i+1}), renormalised.
//!
//! Either way a token of p_{γ+1} follows a chain that is kept as a whole, if that law is known.
//!
//! What it rests on: (1) each x_j was drawn from q_j itself, and that there is a place j depends on x_<j and q_j alone, as
//! does which laws of the target are known ([`Sampled`] says how); (2) no two rounds share a draw: coins, residuals and the
//! draws of the chain are new for every round, for a block's coins behind the run that is kept have been looked at, and so
//! has, through P, every token of its chain; (3) the token behind the run is drawn from the law that is given here and from
//! nothing else: a sample of the target's own at that place would be a second try.

use crate::draft::Sampled;
use crate::units::TokenId;
use crate::words::Law;

/// How a sampled chain is verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Test {
    /// Token by token.
    Ratio,
    /// The chain as a whole: keeps at least as much as the ratio test.
    Block,
}

/// What verifying a sampled chain brought.
#[derive(Clone, Debug, PartialEq)]
pub struct Kept {
    /// How many tokens of the chain are kept, from the first on.
    pub run: usize,
    /// What the token behind them is to be drawn from; `None` where the target's law there is not known, so that the place
    /// stays open.
    pub next: Option<Law>,
}

/// Verifies a chain by the target's laws: `p[j]` follows the first `j` tokens of the chain. From the first law that is
/// missing on, the chain is not used. `coin` says whether a chance of this probability comes true, once for each place of
/// the chain at most, by a draw that no other place and no other round has.
pub fn verify(test: Test, draft: &Sampled, p: &[Law], mut coin: impl FnMut(usize, f64) -> bool) -> Kept {
    let places: Vec<Place<'_>> =
        draft.chain().iter().zip(draft.q()).zip(p).map(|((&token, q), p)| Place { token, q, p }).collect();
    let (run, weight) = match test {
        Test::Ratio => (ratio(&places, &mut coin), 1.0),
        Test::Block => block(&places, &mut coin),
    };
    let next = match places.get(run) {
        Some(refused) => Some(refused.residual(weight)),
        None => p.get(run).cloned(),
    };
    Kept { run, next }
}

/// A place of the chain whose laws are both known.
struct Place<'a> {
    token: TokenId,
    q: &'a Law,
    p: &'a Law,
}

impl Place<'_> {
    /// p(x) / q(x) of the drawn token, which q can draw.
    fn ratio(&self) -> f64 {
        self.p.of(self.token) / self.q.of(self.token)
    }

    /// What comes in the token's place. Where p exceeds q nowhere, to rounding, no token is ever refused; then it is p.
    fn residual(&self, weight: f64) -> Law {
        Law::new(self.p.excess(weight, self.q)).unwrap_or_else(|| self.p.clone())
    }
}

/// The length of the run that the ratio test keeps.
fn ratio(places: &[Place<'_>], coin: &mut impl FnMut(usize, f64) -> bool) -> usize {
    places.iter().enumerate().take_while(|(at, place)| coin(*at, place.ratio().min(1.0))).count()
}

/// The length i of the run that block verification keeps, and P_i. Every coin is its own, so the first that falls well from
/// the end on tells the longest run.
fn block(places: &[Place<'_>], coin: &mut impl FnMut(usize, f64) -> bool) -> (usize, f64) {
    let mut weights = Vec::with_capacity(places.len());
    let mut weight = 1.0_f64;
    for place in places {
        weight = (weight * place.ratio()).min(1.0);
        weights.push(weight);
    }
    for (at, &weight) in weights.iter().enumerate().rev() {
        let keep = places.get(at + 1).map_or(weight, |next| kept_before(next, weight));
        if coin(at, keep) {
            return (at + 1, weight);
        }
    }
    (0, 1.0)
}

/// h_i for P_i = `weight`, before the place `next`.
fn kept_before(next: &Place<'_>, weight: f64) -> f64 {
    let beyond: f64 = next.p.excess(weight, next.q).iter().map(|entry| entry.1).sum();
    let all = beyond + 1.0 - weight;
    // P = 1 and p = q: the coin of the next place always falls well, and this one is not looked at.
    if all > 0.0 { beyond / all } else { 1.0 }
}
