//! The drafter's thread: takes requests, and steps all open ones in one run at a time.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender};

use tokio::sync::oneshot;

use super::{DraftFault, Drafted, DrafterSlot, Noise, Order};
use crate::forward::{Feed, Forward, Lane, Logits, ModelConfig, ModelError, Rows};
use crate::sampler::{History, Sampler, largest};
use foretell_core::draft::{Stop, chance_by_entropy, chance_by_margin};
use foretell_core::units::TokenId;
use foretell_core::words::TokenContext;
use foretell_wire::openai::Sampling;

/// Maximum number of tokens of one text in one run, so that a long prompt does not delay the drafts
/// of others.
const CHUNK: usize = 128;

/// Kind of request to a slot.
#[derive(Clone, Copy, Debug)]
pub(super) enum Task {
    /// Tokens after the text.
    Draft(Order),
    /// The choice at every position of the text from index `from` on.
    Shadow { from: usize },
}

/// A request that is being worked on.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) slot: usize,
    /// The text.
    pub(super) token_context: TokenContext,
    pub(super) want: Task,
    pub(super) reply: oneshot::Sender<Result<Vec<Drafted>, DraftFault>>,
    /// Counts the request as waiting until dropped.
    pub(super) _waits: Waits,
}

/// Sends commands to the thread, and counts the waiting requests.
#[derive(Clone, Debug)]
pub(super) struct CommandQueue {
    commands: Sender<Command>,
    waiting: Arc<AtomicUsize>,
}

/// A request that waits, or is worked on.
#[derive(Debug)]
pub(super) struct Waits(Arc<AtomicUsize>);

impl Drop for Waits {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl CommandQueue {
    pub(super) fn new(commands: Sender<Command>) -> Self {
        Self { commands, waiting: Arc::default() }
    }

    /// Sends a command; an error if the thread has ended.
    pub(super) fn send(&self, command: Command) -> Result<(), DraftFault> {
        self.commands.send(command).map_err(|_| DraftFault::Stopped)
    }

    /// Counts a request.
    pub(super) fn waits(&self) -> Waits {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        Waits(Arc::clone(&self.waiting))
    }

    /// Requests that wait or are worked on.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }
}

#[derive(Debug)]
pub(super) enum Command {
    /// A session requests a slot.
    DrafterSlot {
        noise: Noise,
        /// See [`super::DrafterService::bounded`].
        end: TokenId,
        commands: CommandQueue,
        reply: oneshot::Sender<Option<DrafterSlot>>,
    },
    /// A session has released its slot.
    Leave(usize),
    /// A session requests a draft or a shadow pass.
    Work(Work),
}

/// The thread's state of a slot.
struct SlotState {
    lane: Lane,
    /// The text of the last request, and the tokens drafted after it.
    text: Vec<TokenId>,
    /// Number of its first tokens that are in the cache.
    cached: usize,
    sampler: Sampler,
    end: TokenId,
}

/// A request under way.
struct Open {
    work: Work,
    /// Tokens of the text in the request; the drafted tokens follow them.
    text_len: usize,
    chosen: Vec<Drafted>,
    /// The penalties' state as of the last choice; `None` before the first one. The text only grows
    /// while the request is open.
    history: Option<History>,
    /// Rule that ends the draft early; `None`: it does not end early.
    stop: Option<Stop>,
}

struct Worker {
    model: Box<dyn Forward>,
    /// Slots by number. A number is never used twice, so that a late `Leave` cannot free another
    /// session's slot.
    slots: HashMap<usize, SlotState>,
    next: usize,
    open: Vec<Open>,
}

/// Works until every handle and slot is dropped.
pub(super) fn run(model: Box<dyn Forward>, inbox: &Receiver<Command>) {
    let mut worker = Worker { model, slots: HashMap::new(), next: 0, open: Vec::new() };
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
            Command::DrafterSlot { noise, end, commands, reply } => {
                let taken = self.assign_slot(&noise, end);
                let slot = taken.map(|number| DrafterSlot { number, commands });
                if let Err(Some(unwanted)) = reply.send(slot) {
                    self.release_slot(unwanted.number);
                }
            }
            Command::Leave(slot) => self.release_slot(slot),
            Command::Work(work) => self.begin(work),
        }
    }

    fn assign_slot(&mut self, noise: &Noise, end: TokenId) -> Option<usize> {
        let lane = self.model.reserve()?;
        let temperature = if noise.seed.is_some() { noise.sampling.temperature } else { 0.0 };
        let sampling = Sampling { temperature, ..noise.sampling.clone() };
        let ends = self.model.config().eos.clone();
        let sampler = Sampler::new(sampling, noise.seed.unwrap_or(0), noise.choice).with_ends(ends);
        let number = self.next;
        self.next += 1;
        let taken = SlotState { lane, text: Vec::new(), cached: 0, sampler, end };
        self.slots.insert(number, taken);
        Some(number)
    }

    fn release_slot(&mut self, slot: usize) {
        self.open.retain(|open| open.work.slot != slot);
        if let Some(taken) = self.slots.remove(&slot) {
            self.model.release(taken.lane);
        }
    }

    /// Rolls the slot back to the common prefix of its cache and the text, short of the first row
    /// that is wanted. A request that nobody waits for any more changes nothing.
    fn begin(&mut self, work: Work) {
        if work.reply.is_closed() {
            return;
        }
        self.open.retain(|open| open.work.slot != work.slot);
        if let Err(fault) = check(&work, self.model.config()) {
            let _ = work.reply.send(Err(fault));
            return;
        }
        if let Task::Draft(Order { gamma: 0, .. }) = work.want {
            let _ = work.reply.send(Ok(Vec::new()));
            return;
        }
        let Some(taken) = self.slots.get_mut(&work.slot) else { return };
        let text_len = work.token_context.len();
        let first = match work.want {
            Task::Draft(_) => text_len,
            Task::Shadow { from } => from,
        };
        taken.follow(&work.token_context);
        taken.cached = taken.cached.min(first.saturating_sub(1));
        self.model.rewind(taken.lane, taken.cached);
        let min_survival = match work.want {
            Task::Draft(order) => order.min_survival,
            Task::Shadow { .. } => 0.0,
        };
        let stop = (min_survival > 0.0).then(|| Stop::new(min_survival));
        self.open.push(Open { work, text_len, chosen: Vec::new(), history: None, stop });
    }

    /// One run of the model over all open requests.
    fn step(&mut self) {
        let mut feeds = Vec::with_capacity(self.open.len());
        for open in &self.open {
            let Some(taken) = self.slots.get(&open.work.slot) else { continue };
            let uncached = taken.text.get(taken.cached..).unwrap_or(&[]);
            let tokens = uncached.get(..CHUNK).unwrap_or(uncached);
            feeds.push(Feed {
                lane: taken.lane,
                tokens,
                parents: None,
                rows: open.rows(taken.cached, tokens.len()),
                draft: None,
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
        let slots = &mut self.slots;
        let mut index = 0;
        // In the order of the feeds; a slot cannot leave during a run.
        self.open.retain_mut(|open| {
            let Some(taken) = slots.get_mut(&open.work.slot) else { return false };
            let done = open.take_rows(taken, logits, index, context, &eos);
            index += 1;
            !done
        });
    }

    /// The model failed: the content of its cache cannot be trusted.
    fn give_up(&mut self, error: &ModelError) {
        for open in self.open.drain(..) {
            if let Some(taken) = self.slots.get_mut(&open.work.slot) {
                taken.cached = 0;
                self.model.rewind(taken.lane, 0);
            }
            let _ = open.work.reply.send(Err(DraftFault::Model(error.to_string())));
        }
    }
}

fn check(work: &Work, config: &ModelConfig) -> Result<(), DraftFault> {
    let (len, context) = (work.token_context.len(), config.context);
    if len == 0 {
        return Err(DraftFault::Invalid("an empty text".to_owned()));
    }
    if len > context {
        return Err(DraftFault::TooLong { len, context });
    }
    // A target may have more tokens than a drafter of the same tokenizer; such an id would fail the
    // drafts of all sessions in the run.
    if let Some(token) = work.token_context.tokens().find(|&token| token as usize >= config.vocabulary) {
        return Err(DraftFault::Invalid(format!(
            "no token {token} in a vocabulary of {}",
            config.vocabulary
        )));
    }
    match work.want {
        Task::Shadow { from } if from == 0 || from > len => {
            Err(DraftFault::Invalid(format!("no output position {from} in a text of {len} tokens")))
        }
        Task::Shadow { .. } | Task::Draft(_) => Ok(()),
    }
}

impl SlotState {
    /// Takes the text of a request; the prefix it shares with the last one stays in the cache.
    fn follow(&mut self, token_context: &TokenContext) {
        let prompt = token_context.prompt();
        let same = |a: &[TokenId], b: &[TokenId]| a.iter().zip(b).take_while(|(a, b)| a == b).count();
        let shared = match self.text.strip_prefix(prompt) {
            Some(rest) => prompt.len() + same(rest, token_context.output()),
            None => same(&self.text, prompt),
        };
        self.text.truncate(shared);
        self.text.extend(token_context.tokens().skip(shared));
        self.cached = self.cached.min(shared);
    }
}

impl Open {
    /// The rows that are wanted of a feed of `feeding` tokens after `cached` cached ones.
    fn rows(&self, cached: usize, feeding: usize) -> Rows {
        let end = cached + feeding;
        match self.work.want {
            Task::Draft(_) if end < self.text_len + self.chosen.len() => Rows::None,
            Task::Draft(_) => Rows::Last,
            // The choice at a position is the row of the token before it.
            Task::Shadow { from } if end < from => Rows::None,
            Task::Shadow { from } => Rows::From((from - 1).saturating_sub(cached)),
        }
    }

    /// Takes the rows of its feed. Returns true once the request is answered.
    fn take_rows(
        &mut self,
        taken: &mut SlotState,
        logits: &Logits,
        feed: usize,
        context: usize,
        eos: &[TokenId],
    ) -> bool {
        let before = taken.cached;
        let end = (before + CHUNK).min(taken.text.len());
        taken.cached = end;
        let first = match self.rows(before, end - before) {
            Rows::None => return false,
            Rows::Last => end - 1,
            Rows::From(skipped) => before + skipped,
        };
        for (row, position) in (first + 1..=end).enumerate() {
            let Some(logits) = logits.row(feed, row) else { break };
            let Some(choice) = self.choose(taken, position, logits) else { return self.answer() };
            self.chosen.push(choice);
        }
        self.finish(taken, context, eos)
    }

    /// The choice at a position of the text.
    fn choose(&mut self, taken: &SlotState, position: usize, logits: &[f32]) -> Option<Drafted> {
        let prompt = self.work.token_context.prompt();
        let output = taken.text.get(prompt.len()..position).unwrap_or(&[]);
        let history = grown(self.history.take(), &taken.sampler, prompt, output.iter().copied());
        let logits = logits.get(..taken.end as usize).unwrap_or(logits);
        let choice = self.pick(&taken.sampler, &history, logits);
        self.history = Some(history);
        choice
    }

    /// The slot's choice. `None` where the draft ends before that position because the distribution
    /// is too uncertain.
    fn pick(&mut self, sampler: &Sampler, token_context: &History, logits: &[f32]) -> Option<Drafted> {
        let processed = sampler.process(logits, token_context);
        // Nothing is drawn: the likeliest token, which is assumed to be the target's likeliest,
        // too.
        let likeliest = processed.likeliest().map(|token| (token, margin(logits, token)));
        if let Some(stop) = &mut self.stop {
            let chance = likeliest.map_or_else(
                || chance_by_entropy(processed.entropy()),
                |(_, margin)| chance_by_margin(margin.into()),
            );
            if !stop.goes_on(chance) {
                return None;
            }
        }
        likeliest.or_else(|| {
            let token = processed.draw();
            Some((token, margin(logits, token)))
        })
    }

    fn finish(&mut self, taken: &mut SlotState, context: usize, eos: &[TokenId]) -> bool {
        let done = match self.work.want {
            Task::Shadow { .. } => taken.cached == self.text_len,
            Task::Draft(Order { gamma, .. }) => {
                let last = self.chosen.last().map(|&(token, _)| token);
                let full = taken.text.len() == context;
                let ended = last.is_none_or(|token| eos.contains(&token));
                taken.text.extend(last);
                self.chosen.len() >= gamma || full || ended
            }
        };
        done && self.answer()
    }

    /// Answers the request; always true (done).
    fn answer(&mut self) -> bool {
        let (reply, _) = oneshot::channel();
        let reply = std::mem::replace(&mut self.work.reply, reply);
        let _ = reply.send(Ok(std::mem::take(&mut self.chosen)));
        true
    }
}

/// The penalties' state behind `output`, of which `before` has the beginning.
fn grown(
    before: Option<History>,
    sampler: &Sampler,
    prompt: &[TokenId],
    output: impl Iterator<Item = TokenId>,
) -> History {
    let mut history = before.unwrap_or_else(|| sampler.history(prompt, &[]));
    let counted = (history.position() as usize).saturating_sub(prompt.len());
    for token in output.skip(counted) {
        history.push(token);
    }
    history
}

/// The amount by which a token's logit exceeds the best of the others.
fn margin(logits: &[f32], token: TokenId) -> f32 {
    let index = token as usize;
    let (before, rest) = logits.split_at_checked(index).unwrap_or((logits, &[]));
    let Some((chosen, after)) = rest.split_first() else { return 0.0 };
    chosen - largest(before).max(largest(after))
}
