//! The grammar of one output that grows: the thread that follows it through its grammar.

use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::time::{Duration, Instant};

use super::limits::{FAILED, TIMEOUT, TOO_LARGE, spawn};
use super::{GrammarPosition, Next, Stop};
use foretell_core::units::TokenId;

/// Maximum time that an output spends in its grammar: this, and as much more for each token. A
/// usual grammar takes a tenth of a millisecond a token.
const OUTPUT: Duration = Duration::from_secs(10);
const TOKEN: Duration = Duration::from_millis(5);

/// The tokens that may follow an output.
#[derive(Debug)]
pub struct Constraint {
    /// `None` until the grammar has determined it.
    next: Option<Result<Next, String>>,
    /// Follows the output; `None` if that gets no longer than by a token.
    walker: Option<Walker>,
}

impl Constraint {
    /// Behind an output that ends with the next token.
    pub const fn last(next: Next) -> Self {
        Self { next: Some(Ok(next)), walker: None }
    }

    /// At a position where this may follow. `wake` is called when the grammar has determined what
    /// may follow a token.
    ///
    /// # Errors
    /// The system cannot create a thread.
    pub fn new(
        next: Next,
        position: GrammarPosition,
        wake: impl Fn() + Send + 'static,
    ) -> Result<Self, String> {
        Ok(Self { next: Some(Ok(next)), walker: Some(Walker::start(position, wake)?) })
    }

    /// True if it is known what may follow, or that the grammar has failed.
    pub fn is_known(&mut self) -> bool {
        if let (None, Some(walker)) = (&self.next, &mut self.walker) {
            self.next = walker.next();
        }
        self.next.is_some()
    }

    /// The tokens that may follow.
    ///
    /// # Errors
    /// The grammar needs more than its limits allow, or it is not known yet.
    pub fn take(&mut self) -> Result<Next, String> {
        self.next.take().unwrap_or_else(|| Err(FAILED.to_owned()))
    }

    pub fn push(&mut self, token: TokenId) {
        self.next = None;
        if let Some(walker) = &mut self.walker {
            walker.request(token);
        }
    }
}

#[derive(Debug)]
struct Walker {
    tokens: Sender<TokenId>,
    nexts: Receiver<Result<Next, String>>,
    requested: Instant,
    stop: Stop,
}

impl Walker {
    fn start(mut position: GrammarPosition, wake: impl Fn() + Send + 'static) -> Result<Self, String> {
        let ((tokens, requests), (answers, nexts)) = (channel(), channel());
        let (stop, mut time) = (Stop::default(), OUTPUT);
        let theirs = stop.clone();
        spawn(move || {
            while let Ok(token) = requests.recv() {
                let begun = Instant::now();
                let next = position.follow(token, &theirs);
                let rest = (time + TOKEN).checked_sub(begun.elapsed());
                time = rest.unwrap_or_default();
                let next = if rest.is_some() { next } else { Err(TOO_LARGE.to_owned()) };
                if answers.send(next).is_err() {
                    return;
                }
                wake();
            }
        })?;
        Ok(Self { tokens, nexts, requested: Instant::now(), stop })
    }

    fn request(&mut self, token: TokenId) {
        self.requested = Instant::now();
        // A thread that has ended is noticed when its answer is read.
        let _ = self.tokens.send(token);
    }

    /// The answer to [`Self::request`]; `None` if it has not come yet.
    fn next(&mut self) -> Option<Result<Next, String>> {
        match self.nexts.try_recv() {
            Ok(next) => Some(next),
            Err(TryRecvError::Empty) if self.requested.elapsed() < TIMEOUT => None,
            Err(TryRecvError::Empty) => Some(Err(TOO_LARGE.to_owned())),
            Err(TryRecvError::Disconnected) => Some(Err(FAILED.to_owned())),
        }
    }
}

impl Drop for Walker {
    fn drop(&mut self) {
        self.stop.set();
    }
}
