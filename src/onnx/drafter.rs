//! The model drafter as a service: many sessions draft from one small model, stepped in one batch.
//!
//! The model runs on a separate thread, so a hang or a crash costs drafts and never a request: a
//! session that no longer waits drops the future and decodes plainly. A session takes a
//! [`DrafterSlot`]; its draft stays in the cache, so that the next draft feeds only the tokens
//! after the common prefix. A request whose future was dropped is abandoned before the next run of
//! the model, and the tokens that the model has read for it stay in the cache.

mod worker;

use std::path::Path;
use std::sync::mpsc;
use std::thread;

use tokio::sync::oneshot;

use super::forward::{Forward, ModelConfig};
use super::open::{OpenError, Options, open};
use foretell_core::units::TokenId;
use foretell_core::words::TokenContext;
use foretell_wire::openai::Sampling;
use worker::{Command, CommandQueue, Task, Work};

/// A drafted token, and the amount by which its logit exceeds the best of the others. Negative
/// where the noise chose a token that was not the most probable one.
pub type Drafted = (TokenId, f32);

/// Length of a draft.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Order {
    /// Maximum number of tokens.
    pub gamma: usize,
    /// The draft ends where its survival probability, as far as the model can estimate it, is below
    /// this ([`Stop`](foretell_core::draft::Stop)).
    pub min_survival: f64,
}

impl From<usize> for Order {
    /// This many tokens, as the slot chooses, however unsure the model is.
    fn from(gamma: usize) -> Self {
        Self { gamma, min_survival: 0.0 }
    }
}

/// Reason for the lack of a draft.
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
        /// Maximum number of tokens in a context.
        context: usize,
    },
    /// The request is invalid: an empty text, or a position outside of it.
    #[error("{0}")]
    Invalid(String),
    /// A run of the model failed.
    #[error("the drafter failed: {0}")]
    Model(String),
}

/// How a slot chooses tokens: as the target will, with the same noise, to maximize agreement.
#[derive(Clone, Debug)]
pub struct Noise {
    /// The seed of the target's noise, if it is known. Without it the slot is greedy.
    pub seed: Option<u64>,
    /// Index of the choice within its prompt.
    pub choice: u32,
    /// The target's sampling.
    pub sampling: Sampling,
}

/// Time limit of a first draft, with the model and device warm or not.
const TRY_OUT_TIMEOUT: std::time::Duration = std::time::Duration::from_mins(1);

/// A handle to the running service; the thread ends with the last handle and slot.
#[derive(Clone, Debug)]
pub struct DrafterService {
    commands: CommandQueue,
    config: ModelConfig,
    /// One more than the largest id of its vocabulary that it drafts.
    end: TokenId,
}

/// One session's lane in the drafter's cache; returned when dropped.
#[derive(Debug)]
pub struct DrafterSlot {
    number: usize,
    commands: CommandQueue,
}

impl DrafterService {
    /// Loads a model folder, an export of Foretell or of another tool, and starts its thread.
    ///
    /// # Errors
    /// See [`open`].
    pub fn start(folder: &Path, options: &Options) -> Result<Self, OpenError> {
        Ok(Self::start_with(open(folder, options)?.model))
    }

    /// Starts the thread of a model that is loaded.
    pub fn start_with(model: Box<dyn Forward>) -> Self {
        let (commands, inbox) = mpsc::channel();
        let config = model.config().clone();
        let spawned =
            thread::Builder::new().name("drafter".to_owned()).spawn(move || worker::run(model, &inbox));
        if let Err(error) = spawned {
            // The inbox was dropped with the closure: every call now answers `Stopped`.
            tracing::error!(%error, "the drafter's thread cannot be started");
        }
        let end = TokenId::try_from(config.vocabulary).unwrap_or(TokenId::MAX);
        Self { commands: CommandQueue::new(commands), config, end }
    }

    /// Drafts only ids below `end`: the rows of a model may be longer than its vocabulary
    /// (padding), and a target may end at an id that it does not know.
    #[must_use]
    pub fn bounded(self, end: TokenId) -> Self {
        Self { end: self.end.min(end), ..self }
    }

    /// Requests that wait for the model, or that it works on.
    pub fn waiting(&self) -> usize {
        self.commands.waiting()
    }

    /// Properties of the drafter's model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Drafts one token after the model's first one and discards it, to test that the model runs.
    /// Blocks for at most a minute; must not be called where a runtime does not allow
    /// blocking.
    ///
    /// # Errors
    /// It has stopped or cannot be run.
    pub fn try_out(&self) -> Result<(), DraftFault> {
        let (reply, answer) = oneshot::channel();
        let noise = Noise { seed: None, choice: 0, sampling: Sampling::default() };
        let slot = Command::DrafterSlot { noise, end: self.end, commands: self.commands.clone(), reply };
        self.commands.send(slot)?;
        let slot = within(answer).flatten().ok_or(DraftFault::Stopped)?;
        let (reply, answer) = oneshot::channel();
        let work = Work {
            slot: slot.number,
            token_context: TokenContext::new(&[0], &[]),
            want: Task::Draft(1.into()),
            reply,
            _waits: self.commands.waits(),
        };
        self.commands.send(Command::Work(work))?;
        within(answer).ok_or(DraftFault::Stopped)?.map(|_| ())
    }

    /// A slot for a session; `None` if all are taken or the service has stopped.
    pub async fn slot(&self, noise: Noise) -> Option<DrafterSlot> {
        let (reply, answer) = oneshot::channel();
        let (end, commands) = (self.end, self.commands.clone());
        self.commands.send(Command::DrafterSlot { noise, end, commands, reply }).ok()?;
        answer.await.ok().flatten()
    }
}

/// The answer, if it arrives in time.
fn within<T>(mut answer: oneshot::Receiver<T>) -> Option<T> {
    let begun = std::time::Instant::now();
    loop {
        match answer.try_recv() {
            Ok(answer) => return Some(answer),
            Err(oneshot::error::TryRecvError::Empty) if begun.elapsed() < TRY_OUT_TIMEOUT => {
                thread::sleep(std::time::Duration::from_millis(2));
            }
            Err(_) => return None,
        }
    }
}

impl DrafterSlot {
    /// Up to `gamma` tokens that may follow `token_context`. Fewer where the text ends or the
    /// drafter's context is full.
    ///
    /// Of two concurrent requests only the later one is answered.
    pub async fn draft(&self, token_context: TokenContext, gamma: usize) -> Result<Vec<Drafted>, DraftFault> {
        self.order(token_context, gamma.into()).await
    }

    /// As [`Self::draft`], with the order's settings.
    pub async fn order(&self, token_context: TokenContext, order: Order) -> Result<Vec<Drafted>, DraftFault> {
        self.request(token_context, Task::Draft(order)).await
    }

    /// The drafter's choice at every position from output token `from` of `token_context` to the
    /// one after its end, each given the tokens before it. One pass; there must be a token before
    /// `from`.
    pub async fn shadow(&self, token_context: TokenContext, from: usize) -> Result<Vec<TokenId>, DraftFault> {
        let from = token_context.prompt().len() + from;
        let chosen = self.request(token_context, Task::Shadow { from }).await?;
        Ok(chosen.into_iter().map(|(token, _)| token).collect())
    }

    async fn request(&self, token_context: TokenContext, want: Task) -> Result<Vec<Drafted>, DraftFault> {
        let (reply, answer) = oneshot::channel();
        let work = Work { slot: self.number, token_context, want, reply, _waits: self.commands.waits() };
        self.commands.send(Command::Work(work))?;
        answer.await.map_err(|_| DraftFault::Stopped)?
    }
}

impl Drop for DrafterSlot {
    fn drop(&mut self) {
        // The send fails only if the thread has ended, and then there is nothing to give back.
        let _ = self.commands.send(Command::Leave(self.number));
    }
}

#[cfg(test)]
mod tests;
