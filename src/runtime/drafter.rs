//! The model drafter as a service: many sessions draft from one small model, stepped in one batch.
//!
//! The model lives on a thread of its own, so a hang or a crash of it costs drafts and never a request: a session
//! that will not wait any longer drops the future, and rides. A session takes a [`Seat`]; what it drafted is kept in
//! the cache, so that the next draft feeds only what is new since the common prefix. A question whose future was
//! dropped is given up before the next run of the model, and what the model had read for it stays in the cache.

mod worker;

use std::sync::{Arc, mpsc};
use std::thread;

use tokio::sync::oneshot;

use super::forward::{Forward, ModelConfig};
use crate::draft::Sampled;
use crate::openai::Sampling;
use crate::text::translate::Common;
use crate::units::TokenId;
use crate::words::Past;
use worker::{Command, Desk, Want, Work};

/// A drafted token, and by how much its logit exceeds the best of the others. Negative where the noise chose
/// a token that was not the most probable one.
pub type Drafted = (TokenId, f32);

/// What was chosen for a question.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chosen {
    /// The tokens in order.
    pub tokens: Vec<Drafted>,
    /// The same with the laws that they were drawn from, where they were drawn.
    pub drawn: Sampled,
}

/// How long a draft is to be, and how its tokens are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Order {
    /// Most tokens.
    pub gamma: usize,
    /// The tokens are drawn from the seat's laws by draws of this seed, which no other question has; `None`: as the seat
    /// chooses.
    pub draws: Option<u64>,
    /// The draft ends where it survives with a smaller chance than this, as far as the model can tell ([`Stop`](crate::draft::Stop)).
    pub least: f64,
}

impl From<usize> for Order {
    /// So many tokens, as the seat chooses, however unsure it is.
    fn from(gamma: usize) -> Self {
        Self { gamma, draws: None, least: 0.0 }
    }
}

/// Why there is no draft.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DraftFault {
    /// The thread of the model has ended.
    #[error("the drafter has stopped")]
    Stopped,
    /// The text is longer than the drafter's context.
    #[error("{len} tokens do not fit into the drafter's context of {context}")]
    TooLong {
        /// Tokens of the text.
        len: usize,
        /// Most tokens of a context.
        context: usize,
    },
    /// The question is invalid: an empty text, or a place outside of it.
    #[error("{0}")]
    Invalid(String),
    /// A run of the model failed.
    #[error("the drafter failed: {0}")]
    Model(String),
}

/// How a seat chooses tokens: as the target will, with the same noise, so that they agree as often as they can.
#[derive(Clone, Debug)]
pub struct Noise {
    /// The seed of the target's noise, if it is known. Without it the seat is greedy.
    pub seed: Option<u64>,
    /// Index of the choice within its prompt.
    pub choice: u32,
    /// The target's sampling.
    pub sampling: Sampling,
}

/// In whose tokens a seat drafts.
#[derive(Clone, Debug, Default)]
pub enum Voice {
    /// In the model's own.
    #[default]
    Own,
    /// In the target's: the model chooses among the tokens that both have, with the target's noise where the seed is known.
    Common(Arc<Common>),
}

/// The past in the target's tokens, for a seat that speaks them ([`Voice::Common`]).
#[derive(Clone, Debug)]
pub struct Spoken {
    /// Prompt and output.
    pub past: Past,
    /// For each place that is asked for, how many of these tokens stand before it.
    pub before: Vec<usize>,
}

/// How long a first draft may take, model and device warm or not.
pub const TRIED_WITHIN: std::time::Duration = std::time::Duration::from_mins(1);

/// A handle to the running service; the thread ends with the last handle and seat.
#[derive(Clone, Debug)]
pub struct DrafterService {
    commands: Desk,
    config: ModelConfig,
}

/// One session's place in the drafter's cache; given back when dropped.
#[derive(Debug)]
pub struct Seat {
    number: usize,
    commands: Desk,
}

impl DrafterService {
    /// Loads a model folder, our own export or another tool's, and starts its thread.
    ///
    /// # Errors
    /// See [`open`](super::open::open).
    #[cfg(feature = "onnx")]
    pub fn start(
        folder: &std::path::Path,
        options: &super::open::Options,
    ) -> Result<Self, super::open::OpenError> {
        Ok(Self::start_with(super::open::open(folder, options)?))
    }

    /// Starts the thread of a model that is loaded.
    pub fn start_with(model: Box<dyn Forward>) -> Self {
        let (commands, inbox) = mpsc::channel();
        let config = model.config().clone();
        let spawned =
            thread::Builder::new().name("drafter".to_owned()).spawn(move || worker::run(model, &inbox));
        if let Err(error) = spawned {
            // The inbox went with the closure: every call now answers `Stopped`.
            tracing::error!(%error, "the drafter's thread cannot be started");
        }
        Self { commands: Desk::new(commands), config }
    }

    /// Questions that wait for the model, or that it works on.
    pub fn waiting(&self) -> usize {
        self.commands.waiting()
    }

    /// What is known of the drafter's model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Drafts one token behind the model's first one and throws it away: whether the model runs. Blocks for at most
    /// [`TRIED_WITHIN`]; must not be called where a runtime does not allow that.
    ///
    /// # Errors
    /// It has stopped or cannot be run.
    pub fn try_out(&self) -> Result<(), DraftFault> {
        let (reply, answer) = oneshot::channel();
        let noise = Noise { seed: None, choice: 0, sampling: Sampling::default() };
        let seat =
            Command::Seat { noise, voice: Voice::Own, spare: false, commands: self.commands.clone(), reply };
        self.commands.send(seat)?;
        let seat = within(answer).flatten().ok_or(DraftFault::Stopped)?;
        let (reply, answer) = oneshot::channel();
        let work = Work {
            seat: seat.number,
            past: Past::new(&[0], &[]),
            spoken: None,
            want: Want::Draft(1.into()),
            reply,
            _waits: self.commands.waits(),
        };
        self.commands.send(Command::Work(work))?;
        within(answer).ok_or(DraftFault::Stopped)?.map(|_| ())
    }

    /// A seat for a session that drafts in the model's own tokens; `None` if all are taken or the service has stopped.
    pub async fn seat(&self, noise: Noise) -> Option<Seat> {
        self.seat_speaking(noise, Voice::Own, false).await
    }

    /// As [`Self::seat`], in the tokens of `voice`; `spare`: only if another seat is free beside it.
    pub async fn seat_speaking(&self, noise: Noise, voice: Voice, spare: bool) -> Option<Seat> {
        let (reply, answer) = oneshot::channel();
        let seat = Command::Seat { noise, voice, spare, commands: self.commands.clone(), reply };
        self.commands.send(seat).ok()?;
        answer.await.ok().flatten()
    }
}

/// The answer, if it comes in time.
fn within<T>(mut answer: oneshot::Receiver<T>) -> Option<T> {
    let begun = std::time::Instant::now();
    loop {
        match answer.try_recv() {
            Ok(answer) => return Some(answer),
            Err(oneshot::error::TryRecvError::Empty) if begun.elapsed() < TRIED_WITHIN => {
                thread::sleep(std::time::Duration::from_millis(2));
            }
            Err(_) => return None,
        }
    }
}

impl Seat {
    /// Up to `gamma` tokens that may follow `past`. Fewer where the text ends or the drafter's context is full.
    ///
    /// Of two questions at a time the later one is answered.
    pub async fn draft(&self, past: Past, gamma: usize) -> Result<Vec<Drafted>, DraftFault> {
        Ok(self.order(past, None, gamma.into()).await?.tokens)
    }

    /// As [`Self::draft`], in the order's way. With `spoken` the seat speaks the target's tokens, which the answer is made
    /// of; `past` is in the model's own.
    pub async fn order(&self, past: Past, spoken: Option<Past>, order: Order) -> Result<Chosen, DraftFault> {
        let spoken = spoken.map(|past| Spoken { before: vec![past.len()], past });
        self.ask(past, spoken, Want::Draft(order)).await
    }

    /// The drafter's own choice at every place from output token `from` of `past` to the one behind its end, each
    /// given the tokens before it. One pass; there must be a token before `from`.
    pub async fn shadow(&self, past: Past, from: usize) -> Result<Vec<TokenId>, DraftFault> {
        let from = past.prompt().len() + from;
        let chosen = self.ask(past, None, Want::Shadow { from }).await?;
        Ok(chosen.tokens.into_iter().map(|(token, _)| token).collect())
    }

    /// As [`Self::shadow`] for a seat that speaks the target's tokens, which the answer is made of.
    pub async fn shadow_common(
        &self,
        past: Past,
        spoken: Spoken,
        from: usize,
    ) -> Result<Vec<TokenId>, DraftFault> {
        let from = past.prompt().len() + from;
        let chosen = self.ask(past, Some(spoken), Want::Shadow { from }).await?;
        Ok(chosen.tokens.into_iter().map(|(token, _)| token).collect())
    }

    async fn ask(&self, past: Past, spoken: Option<Spoken>, want: Want) -> Result<Chosen, DraftFault> {
        let (reply, answer) = oneshot::channel();
        let work = Work { seat: self.number, past, spoken, want, reply, _waits: self.commands.waits() };
        self.commands.send(Command::Work(work))?;
        answer.await.map_err(|_| DraftFault::Stopped)?
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        // Nobody listens once the thread has ended, and then nothing is left to give back.
        let _ = self.commands.send(Command::Leave(self.number));
    }
}

#[cfg(test)]
mod tests;
