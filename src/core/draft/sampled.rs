//! A sampled draft: a single chain whose tokens were each drawn from a known distribution.
//!
//! It is a type of its own and no [`Tree`](super::Tree), so that it can be neither merged nor cut:
//! a tree's nodes may be moved, merged and dropped by any of their properties, their tokens
//! included. A drawn token allows less: whether its position is verified may depend on the tokens
//! before it and on the distribution that it was drawn from, never on the token itself. So only the
//! code that draws the chain ends it ([`Sampled::push`] adds one position after the other), and the
//! receiver verifies all of it or, for a reason independent of it, none.

use crate::units::TokenId;
use crate::words::Distribution;

/// A chain whose tokens were drawn, each from its own distribution, given those before it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sampled {
    chain: Vec<TokenId>,
    q: Vec<Distribution>,
}

impl Sampled {
    /// Draws the next token from `q` by `uniform`, in (0, 1), and returns it.
    pub fn push(&mut self, q: Distribution, uniform: f64) -> TokenId {
        let token = q.draw(uniform);
        self.chain.push(token);
        self.q.push(q);
        token
    }

    /// A chain that was drawn elsewhere. `None` if there is not one distribution for each token, or
    /// a token could not have been drawn from its own.
    pub fn drawn(chain: Vec<TokenId>, q: Vec<Distribution>) -> Option<Self> {
        let drawable = chain.iter().zip(&q).all(|(&token, q)| q.of(token) > 0.0);
        (chain.len() == q.len() && drawable).then_some(Self { chain, q })
    }

    /// The tokens, in the order of their positions.
    pub fn chain(&self) -> &[TokenId] {
        &self.chain
    }

    /// The distribution that each token was drawn from, indexed as [`Self::chain`].
    pub fn q(&self) -> &[Distribution] {
        &self.q
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_holds_tokens_that_its_distributions_can_draw() {
        let distribution =
            |weights: &[(TokenId, f64)]| Distribution::new(weights.to_vec()).expect("a distribution");
        let mut sampled = Sampled::default();
        assert_eq!(sampled.push(distribution(&[(1, 0.5), (2, 0.5)]), 0.7), 2);
        assert_eq!(sampled.push(distribution(&[(5, 1.0)]), 0.7), 5);
        let again = Sampled::drawn(sampled.chain().to_vec(), sampled.q().to_vec());
        assert_eq!(again.as_ref(), Some(&sampled));
        assert_eq!(Sampled::drawn(vec![2, 4], sampled.q().to_vec()), None, "4 is not in its distribution");
        assert_eq!(Sampled::drawn(vec![2], sampled.q().to_vec()), None, "one distribution too many");
    }
}
