//! A sampled draft: a lone chain of which every token was drawn from a known distribution.
//!
//! It is a type of its own and no [`Tree`](super::Tree), so that it can be neither merged nor cut: a tree's nodes may be
//! moved, doubled up and left out by anything that is known of them, their tokens included. What a drawn token may be used
//! for is less: whether its place is verified may depend on the tokens before it and on the distribution that it was drawn
//! from, never on the token itself. So only who draws the chain ends it ([`Sampled::push`] takes one place after the
//! other), and who has got it verifies all of it or, for a reason that is no part of it, none.

use crate::units::TokenId;
use crate::words::Law;

/// A chain whose tokens were drawn, each from its own distribution, given those before it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sampled {
    chain: Vec<TokenId>,
    q: Vec<Law>,
}

impl Sampled {
    /// Draws the next token from `q` by `uniform`, in (0, 1), and returns it.
    pub fn push(&mut self, q: Law, uniform: f64) -> TokenId {
        let token = q.draw(uniform);
        self.chain.push(token);
        self.q.push(q);
        token
    }

    /// A chain that was drawn elsewhere. `None` if there is not one distribution for each token, or a token could not have
    /// been drawn from its own.
    pub fn drawn(chain: Vec<TokenId>, q: Vec<Law>) -> Option<Self> {
        let drawable = chain.iter().zip(&q).all(|(&token, q)| q.of(token) > 0.0);
        (chain.len() == q.len() && drawable).then_some(Self { chain, q })
    }

    /// The tokens.
    pub fn chain(&self) -> &[TokenId] {
        &self.chain
    }

    /// The distribution of each token.
    pub fn q(&self) -> &[Law] {
        &self.q
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_holds_what_its_laws_can_draw() {
        let law = |weights: &[(TokenId, f64)]| Law::new(weights.to_vec()).expect("a law");
        let mut sampled = Sampled::default();
        assert_eq!(sampled.push(law(&[(1, 0.5), (2, 0.5)]), 0.7), 2);
        assert_eq!(sampled.push(law(&[(5, 1.0)]), 0.7), 5);
        let again = Sampled::drawn(sampled.chain().to_vec(), sampled.q().to_vec());
        assert_eq!(again.as_ref(), Some(&sampled));
        assert_eq!(Sampled::drawn(vec![2, 4], sampled.q().to_vec()), None, "4 is not in its law");
        assert_eq!(Sampled::drawn(vec![2], sampled.q().to_vec()), None, "one law too many");
    }
}
