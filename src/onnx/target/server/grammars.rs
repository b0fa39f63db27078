//! Grammars of requests: what they allow is found here, on a separate thread.

use std::sync::Arc;

use super::App;
use crate::grammar::{self, Constraint, GrammarPosition, Grammars, Next, Stop};
use crate::target::errors::Refusal;
use crate::target::fields::invalid;
use crate::target::wire::VerifyRequest;
use foretell_core::units::TokenId;
use foretell_wire::openai::{Grammar, Sampling};

impl App {
    /// Works on the grammar of a request on a separate thread; `None` if it has none.
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
        let done = grammars
            .clone()
            .and_then(|grammars| grammar::run_on_thread(move |stop| act(&grammars, &grammar, stop)));
        done.map(Some).map_err(|why| invalid(parameter, why))
    }

    /// The positions after these outputs in the text of the request's grammar, and what may follow
    /// there; `None` if it has none.
    pub(super) fn positions(
        &self,
        sampling: &Sampling,
        outputs: Vec<Vec<TokenId>>,
    ) -> Result<Option<Vec<(GrammarPosition, Next)>>, Refusal> {
        self.with_grammar(sampling, move |grammars, grammar, stop| {
            // Outputs behind the first are those of a fan-out, from which no later request goes on.
            let position = |(index, output): (usize, Vec<TokenId>)| {
                let mut position = grammars.position_after(grammar, &output, index == 0, stop)?;
                let next = position.next(stop)?;
                Ok((position, next))
            };
            outputs.into_iter().enumerate().map(position).collect()
        })
    }

    /// The tokens that the grammar of a verify request allows behind its context and each node of
    /// its draft; `None` if it has none.
    pub(super) fn behind(
        &self,
        request: &VerifyRequest,
    ) -> Result<Option<Vec<Result<Next, String>>>, Refusal> {
        if request.sampling.grammar.is_none() {
            return Ok(None);
        }
        let (output, tokens, parents) =
            (request.output().to_vec(), request.tokens.clone(), request.parents.clone());
        self.with_grammar(&request.sampling, move |grammars, grammar, stop| {
            let position = grammars.position_after(grammar, &output, true, stop)?;
            Ok(grammar::behind(position, &tokens, &parents, stop))
        })
    }

    /// The grammar of an output that grows by up to `max_tokens`.
    pub(super) fn constraint(
        &self,
        position: &GrammarPosition,
        next: &Next,
        max_tokens: usize,
    ) -> Result<Constraint, Refusal> {
        if max_tokens <= 1 {
            return Ok(Constraint::last(next.clone()));
        }
        let engine = self.engine.clone();
        let wake = move || {
            engine.submit(Vec::new());
        };
        Constraint::new(next.clone(), position.clone(), wake).map_err(Refusal::Fault)
    }
}
