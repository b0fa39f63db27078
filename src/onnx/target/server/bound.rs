//! Grammars of requests: what they allow is found here, apart from the network and from the model.

use std::sync::Arc;

use super::App;
use crate::grammar::{self, Bound, Grammars, Next, Place, Stop};
use crate::target::errors::Refusal;
use crate::target::fields::invalid;
use crate::target::wire::VerifyAsk;
use foretell_core::units::TokenId;
use foretell_engines::openai::{Grammar, Sampling};

impl App {
    /// Works on the grammar of a request on a thread of its own; `None` if it has none.
    fn with_grammar<T: Send + 'static>(
        &self,
        sampling: &Sampling,
        act: impl FnOnce(&Grammars, &Grammar, &Stop) -> Result<T, String> + Send + 'static,
    ) -> Result<Option<T>, Refusal> {
        let Some(grammar) = sampling.grammar.clone() else { return Ok(None) };
        let (config, parameter) = (self.engine.config(), grammar.parameter);
        let grammars = self.grammars.get_or_init(|| {
            let tokenizer = self.words.tokenizer().ok_or("the model has no tokenizer")?;
            Grammars::new(tokenizer, config.vocabulary, &config.eos).map(Arc::new)
        });
        let done =
            grammars.clone().and_then(|grammars| grammar::apart(move |stop| act(&grammars, &grammar, stop)));
        done.map(Some).map_err(|why| invalid(parameter, why))
    }

    /// The places after these outputs in the text of the request's grammar, and what may follow
    /// there; `None` if it has none.
    pub(super) fn places(
        &self,
        sampling: &Sampling,
        outputs: Vec<Vec<TokenId>>,
    ) -> Result<Option<Vec<(Place, Next)>>, Refusal> {
        self.with_grammar(sampling, move |grammars, grammar, stop| {
            // Outputs behind the first are those of a fan-out, from which no later request goes on.
            let place = |(index, output): (usize, Vec<TokenId>)| {
                let mut place = grammars.place(grammar, &output, index == 0, stop)?;
                let next = place.next(stop)?;
                Ok((place, next))
            };
            outputs.into_iter().enumerate().map(place).collect()
        })
    }

    /// The tokens that the grammar of a verify request allows behind its context and each node of
    /// its draft; `None` if it has none.
    pub(super) fn behind(&self, ask: &VerifyAsk) -> Result<Option<Vec<Result<Next, String>>>, Refusal> {
        if ask.sampling.grammar.is_none() {
            return Ok(None);
        }
        let (output, tokens, parents) = (ask.output().to_vec(), ask.tokens.clone(), ask.parents.clone());
        self.with_grammar(&ask.sampling, move |grammars, grammar, stop| {
            let place = grammars.place(grammar, &output, true, stop)?;
            Ok(grammar::behind(place, &tokens, &parents, stop))
        })
    }

    /// The grammar of an output that grows by up to `max_tokens`.
    pub(super) fn bound(&self, place: &Place, next: &Next, max_tokens: usize) -> Result<Bound, Refusal> {
        if max_tokens <= 1 {
            return Ok(Bound::last(next.clone()));
        }
        let engine = self.engine.clone();
        let wake = move || {
            engine.submit(Vec::new());
        };
        Bound::new(next.clone(), place.clone(), wake).map_err(Refusal::Fault)
    }
}
