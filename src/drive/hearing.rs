//! Hearing every model drafter of a policy on a passage of a text that has been served.
//!
//! It tells which of them should draft for the next request ([`crate::control::hedge`]). It comes after the answer, on seats
//! that no session wants, and within a hundredth of the time that answers take, so that no request waits for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::OnceCell;

use super::drafters::Speaker;
use super::drafting::{Asked, Question};
use crate::clock::Clock;
use crate::control::{Control, Passage};
use crate::draft::Draft;
use crate::observe::{HearingEnd, Observer};
use crate::openai::Sampling;
use crate::runtime::drafter::{Noise, Order};
use crate::session::Event;
use crate::units::TokenId;
use crate::words::Past;

/// Share of the time of answers that hearings may take.
const SHARE: f64 = 0.01;
/// Last tokens of an output that models are heard on, and fewest that are worth it.
const PASSAGE: usize = 256;
const PASSAGE_LEAST: usize = 16;
/// Last tokens of a prompt, and first ones of an output, that are read for it.
const READ: usize = 1024;
/// Tokens of the draft that shows what a model takes for one.
const TIMED: usize = 8;
/// Longest time for a model to answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// What hearings may take of the time, and whether one is under way. There is one at a time.
#[derive(Debug, Default)]
pub struct Share(Mutex<Spent>);

#[derive(Debug, Default)]
struct Spent {
    /// Seconds that may be spent.
    earned: f64,
    /// Seconds that the last hearing took.
    last: f64,
    busy: bool,
}

impl Share {
    /// Earns from an answer that took so many seconds. The turn of a hearing, if one may begin now.
    fn earn(self: &Arc<Self>, seconds: f64) -> Option<Turn> {
        let mut spent = self.0.lock();
        // What a quiet time leaves over does not allow for many hearings at once.
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

/// The turn of a hearing. It ends when this is dropped, however the hearing does.
struct Turn {
    share: Arc<Share>,
    begun: Instant,
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.share.spend(self.begun.elapsed().as_secs_f64());
    }
}

/// The hearing that a request may end with.
pub struct Hearing {
    /// What is known before its text is: everything but what was heard.
    pub passage: Passage,
    /// The models of the policy, by their numbers.
    pub models: Vec<(u8, Speaker)>,
    /// What learns from it.
    pub control: Arc<Control>,
    /// The sampling by which the models choose.
    pub sampling: Sampling,
    /// Counts it.
    pub observer: Arc<Observer>,
    /// The time that it may take.
    pub share: Arc<Share>,
    /// The clock of the control.
    pub clock: Clock,
    /// When the request began.
    pub begun: Instant,
}

impl Hearing {
    /// Hears the models on the text of the request, if it is long enough and there is time for it.
    pub fn hold(mut self, prompt: &[TokenId], output: &[TokenId]) {
        let output = output.get(..READ).unwrap_or(output);
        if prompt.is_empty() || output.len() < PASSAGE_LEAST {
            return;
        }
        let Some(turn) = self.share.earn(self.begun.elapsed().as_secs_f64()) else { return };
        self.passage.way.context = prompt.len() + output.len();
        let past = Past::new(prompt.get(prompt.len().saturating_sub(READ)..).unwrap_or(prompt), output);
        tokio::spawn(async move {
            let result = self.hear(past).await;
            self.observer.metrics().heard(result);
            drop(turn);
        });
    }

    async fn hear(&self, past: Past) -> HearingEnd {
        let mut passage = self.passage.clone();
        for (number, speaker) in &self.models {
            let answer = tokio::time::timeout(PATIENCE, self.ask(*number, speaker, &past)).await;
            match answer {
                Ok(Ok(hits)) => passage.heard.push((*number, hits)),
                Ok(Err(result)) => return result,
                Err(_) => return HearingEnd::Late,
            }
        }
        let losses = self.control.with(|learnt| learnt.hear(&passage));
        let names = self.models.iter().map(|(_, speaker)| speaker.name.as_str());
        let told: Vec<(&str, f64)> = names.zip(losses.iter().map(|(_, loss)| *loss)).collect();
        tracing::debug!(heat = ?passage.heat, losses = ?told, "models heard: time per token as a share of riding");
        HearingEnd::Heard
    }

    /// Whether a model would have drafted each token of the passage. Its time per token is learnt on the way.
    async fn ask(&self, number: u8, speaker: &Speaker, past: &Past) -> Result<Vec<bool>, HearingEnd> {
        let asked = Asked::to_spare(speaker);
        let (seat, from) = (OnceCell::new(), past.output().len().saturating_sub(PASSAGE));
        let noise = Noise { seed: self.sampling.seed, choice: 0, sampling: self.sampling.clone() };
        let ask = |question| asked.clone().answer(&seat, noise.clone(), past.clone(), question);
        let said = ask(Question::Shadow { from }).await.map_err(HearingEnd::from)?;
        let begun = Instant::now();
        let draft = ask(Question::Draft(Order::from(TIMED))).await.map_err(HearingEnd::from)?;
        if let Event::Draft(Draft::Tree(chain)) = draft
            && !chain.is_empty()
        {
            let (seconds, now) = (begun.elapsed().as_secs_f64(), self.clock.now());
            self.control.with(|learnt| learnt.costs.drafted(number, chain.len(), seconds, now));
        }
        let Event::Shadow(choices) = said else { return Err(HearingEnd::Fault) };
        let passage = past.output().get(from..).unwrap_or_default();
        Ok(choices.iter().zip(passage).map(|(choice, token)| *choice == Some(*token)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hearings_take_a_hundredth_of_the_time_and_one_comes_after_the_other() {
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
        assert!((14..=30).contains(&answers), "{answers} answers of 2 s for a hearing of 0.3 s");
    }
}
