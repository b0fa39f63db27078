//! The drafter's thread: takes what is asked, and steps all that is open in one run at a time.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, Sender};

use tokio::sync::oneshot;

use super::{DraftFault, Drafted, Noise, Seat};
use crate::openai::Sampling;
use crate::runtime::forward::{Feed, Forward, Lane, Logits, ModelError, Rows};
use crate::runtime::sampler::Sampler;
use crate::units::TokenId;

/// Most tokens of one text in one run, so that a long prompt does not hold up the drafts of the others.
const CHUNK: usize = 128;

/// What a seat asks.
#[derive(Clone, Copy, Debug)]
pub(super) enum Want {
    /// So many tokens after the text.
    Draft { gamma: usize },
    /// The choice at every place of the text from this one on.
    Shadow { from: usize },
}

/// A question that is being worked on.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) seat: usize,
    /// The text, and what was drafted after it.
    pub(super) text: Vec<TokenId>,
    pub(super) prompt_len: usize,
    pub(super) want: Want,
    pub(super) reply: oneshot::Sender<Result<Vec<Drafted>, DraftFault>>,
}

#[derive(Debug)]
pub(super) enum Command {
    /// A session asks for a seat.
    Seat { noise: Noise, commands: Sender<Command>, reply: oneshot::Sender<Option<Seat>> },
    /// A session has given its seat up.
    Leave(usize),
    /// A session asks for a draft or a shadow pass.
    Work(Work),
}

/// What the thread keeps of a seat.
struct Taken {
    lane: Lane,
    /// The tokens in the cache.
    cached: Vec<TokenId>,
    sampler: Sampler,
}

struct Open {
    work: Work,
    chosen: Vec<Drafted>,
}

struct Worker {
    model: Box<dyn Forward>,
    /// By number. A number is never used twice, so that a late goodbye cannot free another's seat.
    seats: HashMap<usize, Taken>,
    next: usize,
    open: Vec<Open>,
}

/// Works until nobody can ask any more.
pub(super) fn run(model: Box<dyn Forward>, inbox: &Receiver<Command>) {
    let mut worker = Worker { model, seats: HashMap::new(), next: 0, open: Vec::new() };
    loop {
        if worker.open.is_empty() {
            match inbox.recv() {
                Ok(command) => worker.take(command),
                Err(_) => return,
            }
        }
        while let Ok(command) = inbox.try_recv() {
            worker.take(command);
        }
        worker.open.retain(|open| !open.work.reply.is_closed());
        worker.step();
    }
}

impl Worker {
    fn take(&mut self, command: Command) {
        match command {
            Command::Seat { noise, commands, reply } => {
                let seat = self.sit(&noise).map(|number| Seat { number, commands });
                if let Err(Some(unwanted)) = reply.send(seat) {
                    self.leave(unwanted.number);
                }
            }
            Command::Leave(seat) => self.leave(seat),
            Command::Work(work) => self.begin(work),
        }
    }

    fn sit(&mut self, noise: &Noise) -> Option<usize> {
        let lane = self.model.reserve()?;
        let temperature = if noise.seed.is_some() { noise.sampling.temperature } else { 0.0 };
        let sampling = Sampling { temperature, ..noise.sampling.clone() };
        let sampler = Sampler::new(sampling, noise.seed.unwrap_or(0), noise.choice)
            .with_ends(self.model.config().eos.clone());
        let number = self.next;
        self.next += 1;
        self.seats.insert(number, Taken { lane, cached: Vec::new(), sampler });
        Some(number)
    }

    fn leave(&mut self, seat: usize) {
        self.open.retain(|open| open.work.seat != seat);
        if let Some(taken) = self.seats.remove(&seat) {
            self.model.release(taken.lane);
        }
    }

    /// Rolls the seat back to what its cache and the text share, short of the first row that is wanted.
    fn begin(&mut self, work: Work) {
        self.open.retain(|open| open.work.seat != work.seat);
        if let Err(fault) = check(&work, self.model.config().context) {
            let _ = work.reply.send(Err(fault));
            return;
        }
        if let Want::Draft { gamma: 0 } = work.want {
            let _ = work.reply.send(Ok(Vec::new()));
            return;
        }
        let Some(taken) = self.seats.get_mut(&work.seat) else { return };
        let first = match work.want {
            Want::Draft { .. } => work.text.len(),
            Want::Shadow { from } => from,
        };
        let shared =
            taken.cached.iter().zip(&work.text).take_while(|(cached, token)| cached == token).count();
        let kept = shared.min(first.saturating_sub(1));
        taken.cached.truncate(kept);
        self.model.rewind(taken.lane, kept);
        self.open.push(Open { work, chosen: Vec::new() });
    }

    /// One run of the model over everything that is open.
    fn step(&mut self) {
        let mut feeds = Vec::with_capacity(self.open.len());
        for open in &self.open {
            let Some(taken) = self.seats.get(&open.work.seat) else { continue };
            let left = open.work.text.get(taken.cached.len()..).unwrap_or(&[]);
            let tokens = left.get(..CHUNK).unwrap_or(left);
            feeds.push(Feed {
                lane: taken.lane,
                tokens,
                parents: None,
                rows: open.rows(taken.cached.len(), tokens.len()),
            });
        }
        if feeds.is_empty() {
            return;
        }
        match self.model.run(&feeds) {
            Ok(logits) => self.advance(&logits),
            Err(error) => self.give_up(&error),
        }
    }

    fn advance(&mut self, logits: &Logits) {
        let (context, eos) = (self.model.config().context, self.model.config().eos.clone());
        let seats = &mut self.seats;
        let mut index = 0;
        // In the order of the feeds; a seat cannot leave during a run.
        self.open.retain_mut(|open| {
            let Some(taken) = seats.get_mut(&open.work.seat) else { return false };
            let done = open.take_rows(taken, logits, index, context, &eos);
            index += 1;
            !done
        });
    }

    /// The model failed: what its cache holds is not to be trusted.
    fn give_up(&mut self, error: &ModelError) {
        for open in self.open.drain(..) {
            if let Some(taken) = self.seats.get_mut(&open.work.seat) {
                taken.cached.clear();
                self.model.rewind(taken.lane, 0);
            }
            let _ = open.work.reply.send(Err(DraftFault::Model(error.to_string())));
        }
    }
}

fn check(work: &Work, context: usize) -> Result<(), DraftFault> {
    let len = work.text.len();
    if len == 0 || work.prompt_len > len {
        return Err(DraftFault::Invalid(format!(
            "a text of {len} tokens, of which {} are prompt",
            work.prompt_len
        )));
    }
    if len > context {
        return Err(DraftFault::TooLong { len, context });
    }
    match work.want {
        Want::Shadow { from } if from == 0 || from < work.prompt_len || from > len => {
            Err(DraftFault::Invalid(format!("no output place {from} in a text of {len} tokens")))
        }
        Want::Shadow { .. } | Want::Draft { .. } => Ok(()),
    }
}

impl Open {
    /// Which rows are wanted of a feed of so many tokens after so many that are cached.
    fn rows(&self, cached: usize, feeding: usize) -> Rows {
        let end = cached + feeding;
        match self.work.want {
            Want::Draft { .. } if end < self.work.text.len() => Rows::None,
            Want::Draft { .. } => Rows::Last,
            // The choice at a place is the row of the token before it.
            Want::Shadow { from } if end < from => Rows::None,
            Want::Shadow { from } => Rows::From((from - 1).saturating_sub(cached)),
        }
    }

    /// Takes the rows of its feed; answers and says so once it is done.
    fn take_rows(
        &mut self,
        taken: &mut Taken,
        logits: &Logits,
        feed: usize,
        context: usize,
        eos: &[TokenId],
    ) -> bool {
        let before = taken.cached.len();
        let end = (before + CHUNK).min(self.work.text.len());
        taken.cached.extend(self.work.text.get(before..end).unwrap_or(&[]));
        let first = match self.rows(before, end - before) {
            Rows::None => return false,
            Rows::Last => end - 1,
            Rows::From(skipped) => before + skipped,
        };
        for (row, place) in (first + 1..=end).enumerate() {
            let Some(logits) = logits.row(feed, row) else { break };
            let (prompt, output) =
                self.work.text.split_at_checked(self.work.prompt_len).unwrap_or((&[], &[]));
            let output = output.get(..place - self.work.prompt_len).unwrap_or(output);
            let token = taken.sampler.pick(logits, prompt, output).token;
            self.chosen.push((token, margin(logits, token)));
        }
        self.finish(end, context, eos)
    }

    fn finish(&mut self, end: usize, context: usize, eos: &[TokenId]) -> bool {
        let done = match self.work.want {
            Want::Shadow { .. } => end == self.work.text.len(),
            Want::Draft { gamma } => {
                let last = self.chosen.last().map(|&(token, _)| token);
                let full = self.work.text.len() == context;
                let ended = last.is_none_or(|token| eos.contains(&token));
                self.work.text.extend(last);
                self.chosen.len() >= gamma || full || ended
            }
        };
        if done {
            let (reply, _) = oneshot::channel();
            let reply = std::mem::replace(&mut self.work.reply, reply);
            let _ = reply.send(Ok(std::mem::take(&mut self.chosen)));
        }
        done
    }
}

/// By how much a token's logit exceeds the best of the others.
fn margin(logits: &[f32], token: TokenId) -> f32 {
    let index = token as usize;
    let (before, rest) = logits.split_at_checked(index).unwrap_or((logits, &[]));
    let Some((own, after)) = rest.split_first() else { return 0.0 };
    own - most(before).max(most(after))
}

/// The greatest of many. In lanes of their own and by comparison, which compilers turn into vector code.
fn most(values: &[f32]) -> f32 {
    let greater = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; 16];
    let (chunks, tail) = values.as_chunks::<16>();
    for chunk in chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane = greater(*lane, value);
        }
    }
    lanes.iter().chain(tail).copied().fold(f32::NEG_INFINITY, greater)
}
