//! Evaluation of every model drafter of a policy on the text of an answer that has been served.
//!
//! Its result decides which of them drafts for later requests ([`foretell_core::control::hedge`]).
//! It runs after the answer, on slots that no session needs, and takes at most 1 % of the time that
//! answers take, so that no request waits for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::OnceCell;

use super::drafters::SessionModel;
use super::drafting::{DrafterQuery, DrafterRequest};
use crate::clock::Clock;
use crate::observe::{EvaluationEnd, Observer};
use foretell_core::control::{Control, EvaluatedText};
use foretell_core::draft::Draft;
use foretell_core::session::Event;
use foretell_core::units::TokenId;
use foretell_core::words::TokenContext;
use foretell_engines::openai::Sampling;
use foretell_onnx::drafter::{Noise, Order};

/// Maximum share of the time of answers that evaluations may take.
const SHARE: f64 = 0.01;
/// Maximum number of last output tokens on which models are evaluated.
const EVALUATED_TOKENS: usize = 256;
/// Minimum number of output tokens for an evaluation.
const MIN_EVALUATED_TOKENS: usize = 16;
/// Maximum number of last prompt tokens, and of first output tokens, that are read for it.
const READ: usize = 1024;
/// Tokens of the draft from which a model's seconds per token are measured.
const TIMED: usize = 8;
/// Maximum time for a model to answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Time budget of evaluations, of which one runs at a time.
#[derive(Debug, Default)]
pub struct Share(Mutex<Spent>);

#[derive(Debug, Default)]
struct Spent {
    /// Seconds that may be spent.
    earned: f64,
    /// Seconds that the last evaluation took.
    last: f64,
    busy: bool,
}

impl Share {
    /// Adds to the budget for an answer that took this many seconds. Returns the turn of an
    /// evaluation, if one may begin now.
    fn earn(self: &Arc<Self>, seconds: f64) -> Option<Turn> {
        let mut spent = self.0.lock();
        // The budget is capped, so that unused time does not allow many evaluations in a row.
        spent.earned = (spent.earned + SHARE * seconds).min(2.0 * spent.last.max(0.1));
        let may = !spent.busy && spent.earned >= spent.last;
        spent.busy |= may;
        may.then(|| Turn { share: Arc::clone(self), begun: Instant::now() })
    }

    fn spend(&self, seconds: f64) {
        let mut spent = self.0.lock();
        spent.earned -= seconds;
        (spent.last, spent.busy) = (seconds, false);
    }
}

/// The turn of an evaluation. It ends on drop, whatever the result.
struct Turn {
    share: Arc<Share>,
    begun: Instant,
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.share.spend(self.begun.elapsed().as_secs_f64());
    }
}

/// The evaluation that may follow a request.
pub struct DrafterEvaluation {
    /// The evaluated text, still without results.
    pub evaluated: EvaluatedText,
    /// The models of the policy, by their numbers.
    pub models: Vec<(u8, SessionModel)>,
    /// The control state that is updated by it.
    pub control: Arc<Control>,
    /// Sampling parameters of the models.
    pub sampling: Sampling,
    /// Counts it.
    pub observer: Arc<Observer>,
    /// The time budget.
    pub share: Arc<Share>,
    /// The clock of the control.
    pub clock: Clock,
    /// When the request began.
    pub begun: Instant,
}

impl DrafterEvaluation {
    /// Evaluates the models on the text of the request, if it is long enough and the time budget
    /// allows it.
    pub fn hold(mut self, prompt: &[TokenId], output: &[TokenId]) {
        let output = output.get(..READ).unwrap_or(output);
        if prompt.is_empty() || output.len() < MIN_EVALUATED_TOKENS {
            return;
        }
        let Some(turn) = self.share.earn(self.begun.elapsed().as_secs_f64()) else { return };
        self.evaluated.way.context = prompt.len() + output.len();
        let token_context =
            TokenContext::new(prompt.get(prompt.len().saturating_sub(READ)..).unwrap_or(prompt), output);
        tokio::spawn(async move {
            let result = self.evaluate(token_context).await;
            self.observer.metrics().evaluated(result);
            drop(turn);
        });
    }

    async fn evaluate(&self, token_context: TokenContext) -> EvaluationEnd {
        let mut evaluated = self.evaluated.clone();
        for (number, session_model) in &self.models {
            let answer =
                tokio::time::timeout(PATIENCE, self.ask(*number, session_model, &token_context)).await;
            match answer {
                Ok(Ok(hits)) => evaluated.hits.push((*number, hits)),
                Ok(Err(result)) => return result,
                Err(_) => return EvaluationEnd::Late,
            }
        }
        let losses = self.control.with(|learnt| learnt.evaluate(&evaluated));
        let names = self.models.iter().map(|(_, session_model)| session_model.name.as_str());
        let told: Vec<(&str, f64)> = names.zip(losses.iter().map(|(_, loss)| *loss)).collect();
        tracing::debug!(bucket = ?evaluated.bucket, losses = ?told, "models evaluated: time per token as a share of plain decoding");
        EvaluationEnd::Evaluated
    }

    /// True for each token of the evaluated text that a model would have drafted. Also measures its
    /// seconds per token.
    async fn ask(
        &self,
        number: u8,
        session_model: &SessionModel,
        token_context: &TokenContext,
    ) -> Result<Vec<bool>, EvaluationEnd> {
        let asked = DrafterQuery::to_spare(session_model);
        let (drafter_slot, from) =
            (OnceCell::new(), token_context.output().len().saturating_sub(EVALUATED_TOKENS));
        let noise = Noise { seed: self.sampling.seed, choice: 0, sampling: self.sampling.clone() };
        let ask =
            |question| asked.clone().answer(&drafter_slot, noise.clone(), token_context.clone(), question);
        let said = ask(DrafterRequest::Shadow { from }).await.map_err(EvaluationEnd::from)?;
        let begun = Instant::now();
        let draft = ask(DrafterRequest::Draft(Order::from(TIMED))).await.map_err(EvaluationEnd::from)?;
        if let Event::Draft(Draft::Tree(chain)) = draft
            && !chain.is_empty()
        {
            let (seconds, now) = (begun.elapsed().as_secs_f64(), self.clock.now());
            self.control.with(|learnt| learnt.costs.drafted(number, chain.len(), seconds, now));
        }
        let Event::Shadow(choices) = said else { return Err(EvaluationEnd::Fault) };
        let evaluated = token_context.output().get(from..).unwrap_or_default();
        Ok(choices.iter().zip(evaluated).map(|(choice, token)| *choice == Some(*token)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn evaluations_take_one_percent_of_the_time_one_at_a_time() {
        let share = Arc::new(Share::default());
        let turn = share.earn(0.5).expect("what it takes is not known yet");
        assert!(share.earn(900.0).is_none(), "one is under way");
        drop(turn);
        assert!(share.earn(900.0).is_some(), "it is over");
        share.spend(0.3);
        let mut answers = 0;
        while share.earn(2.0).is_none() {
            answers += 1;
        }
        assert!((14..=30).contains(&answers), "{answers} answers of 2 s for an evaluation of 0.3 s");
    }
}
