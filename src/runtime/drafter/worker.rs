//! The drafter's thread: takes questions, and steps all that are open in one run at a time.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender};

use tokio::sync::oneshot;

use super::{Chosen, DraftFault, Drafted, Noise, Order, Seat, Spoken, Voice};
use crate::draft::{Stop, chance_by_entropy, chance_by_margin};
use crate::openai::Sampling;
use crate::runtime::forward::{Feed, Forward, Lane, Logits, ModelError, Rows};
use crate::runtime::sampler::{History, Sampler};
use crate::units::{Dice, TokenId};
use crate::words::Past;

/// Most tokens of one text in one run, so that a long prompt does not hold up the drafts of the others.
const CHUNK: usize = 128;

/// A question of a seat.
#[derive(Clone, Copy, Debug)]
pub(super) enum Want {
    /// Tokens after the text.
    Draft(Order),
    /// The choice at every place of the text from index `from` on.
    Shadow { from: usize },
}

/// A question that is being worked on.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) seat: usize,
    /// The text in the model's own tokens.
    pub(super) past: Past,
    /// The text in the target's, for a seat that speaks those.
    pub(super) spoken: Option<Spoken>,
    pub(super) want: Want,
    pub(super) reply: oneshot::Sender<Result<Chosen, DraftFault>>,
    /// Counts it until it is dropped.
    pub(super) _waits: Waits,
}

/// Where commands are handed in, and the number of questions that wait.
#[derive(Clone, Debug)]
pub(super) struct Desk {
    commands: Sender<Command>,
    waiting: Arc<AtomicUsize>,
}

/// A question that waits, or is worked on.
#[derive(Debug)]
pub(super) struct Waits(Arc<AtomicUsize>);

impl Drop for Waits {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Desk {
    pub(super) fn new(commands: Sender<Command>) -> Self {
        Self { commands, waiting: Arc::default() }
    }

    /// Hands in a command; an error if the thread has ended.
    pub(super) fn send(&self, command: Command) -> Result<(), DraftFault> {
        self.commands.send(command).map_err(|_| DraftFault::Stopped)
    }

    /// Counts a question.
    pub(super) fn waits(&self) -> Waits {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        Waits(Arc::clone(&self.waiting))
    }

    /// Questions that wait or are worked on.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }
}

#[derive(Debug)]
pub(super) enum Command {
    /// A session asks for a seat. `spare`: it takes none if that were the last one.
    Seat { noise: Noise, voice: Voice, spare: bool, commands: Desk, reply: oneshot::Sender<Option<Seat>> },
    /// A session has given its seat up.
    Leave(usize),
    /// A session asks for a draft or a shadow pass.
    Work(Work),
}

/// What the thread keeps of a seat.
struct Taken {
    lane: Lane,
    /// The text of the last question, and what was drafted after it.
    text: Vec<TokenId>,
    /// How many of its first tokens are in the cache.
    cached: usize,
    sampler: Sampler,
    voice: Voice,
    /// A row of logits in the target's tokens.
    row: Vec<f32>,
}

/// A question under way.
struct Open {
    work: Work,
    /// Tokens of the text that was asked about; what was drafted follows them.
    asked: usize,
    chosen: Chosen,
    /// Where the draft ends early; `None` where it does not.
    stop: Option<Stop>,
}

struct Worker {
    model: Box<dyn Forward>,
    /// By number. A number is never used twice, so that a late `Leave` cannot free another session's seat.
    seats: HashMap<usize, Taken>,
    next: usize,
    open: Vec<Open>,
}

/// Works until every handle and seat is dropped.
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
            Command::Seat { noise, voice, spare, commands, reply } => {
                let taken = if spare && !self.has_two() { None } else { self.sit(&noise, voice) };
                let seat = taken.map(|number| Seat { number, commands });
                if let Err(Some(unwanted)) = reply.send(seat) {
                    self.leave(unwanted.number);
                }
            }
            Command::Leave(seat) => self.leave(seat),
            Command::Work(work) => self.begin(work),
        }
    }

    fn sit(&mut self, noise: &Noise, voice: Voice) -> Option<usize> {
        let lane = self.model.reserve()?;
        let temperature = if noise.seed.is_some() { noise.sampling.temperature } else { 0.0 };
        let sampling = Sampling { temperature, ..noise.sampling.clone() };
        let eos = &self.model.config().eos;
        let ends = match &voice {
            Voice::Own => eos.clone(),
            Voice::Common(common) => eos.iter().filter_map(|&end| common.target(end)).collect(),
        };
        let sampler = Sampler::new(sampling, noise.seed.unwrap_or(0), noise.choice).with_ends(ends);
        let number = self.next;
        self.next += 1;
        let taken = Taken { lane, text: Vec::new(), cached: 0, sampler, voice, row: Vec::new() };
        self.seats.insert(number, taken);
        Some(number)
    }

    /// Whether two seats are free.
    fn has_two(&mut self) -> bool {
        let lanes: Vec<Lane> = (0..2).map_while(|_| self.model.reserve()).collect();
        let two = lanes.len() == 2;
        for lane in lanes {
            self.model.release(lane);
        }
        two
    }

    fn leave(&mut self, seat: usize) {
        self.open.retain(|open| open.work.seat != seat);
        if let Some(taken) = self.seats.remove(&seat) {
            self.model.release(taken.lane);
        }
    }

    /// Rolls the seat back to what its cache and the text share, short of the first row that is wanted. A question
    /// that nobody waits for any more changes nothing.
    fn begin(&mut self, work: Work) {
        if work.reply.is_closed() {
            return;
        }
        self.open.retain(|open| open.work.seat != work.seat);
        if let Err(fault) = check(&work, self.model.config().context) {
            let _ = work.reply.send(Err(fault));
            return;
        }
        if let Want::Draft(Order { gamma: 0, .. }) = work.want {
            let _ = work.reply.send(Ok(Chosen::default()));
            return;
        }
        let Some(taken) = self.seats.get_mut(&work.seat) else { return };
        let asked = work.past.len();
        let first = match work.want {
            Want::Draft(_) => asked,
            Want::Shadow { from } => from,
        };
        taken.follow(&work.past);
        taken.cached = taken.cached.min(first.saturating_sub(1));
        self.model.rewind(taken.lane, taken.cached);
        let least = match work.want {
            Want::Draft(order) => order.least,
            Want::Shadow { .. } => 0.0,
        };
        let stop = (least > 0.0).then(|| Stop::new(least));
        self.open.push(Open { work, asked, chosen: Chosen::default(), stop });
    }

    /// One run of the model over everything that is open.
    fn step(&mut self) {
        let mut feeds = Vec::with_capacity(self.open.len());
        for open in &self.open {
            let Some(taken) = self.seats.get(&open.work.seat) else { continue };
            let left = taken.text.get(taken.cached..).unwrap_or(&[]);
            let tokens = left.get(..CHUNK).unwrap_or(left);
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
                taken.cached = 0;
                self.model.rewind(taken.lane, 0);
            }
            let _ = open.work.reply.send(Err(DraftFault::Model(error.to_string())));
        }
    }
}

fn check(work: &Work, context: usize) -> Result<(), DraftFault> {
    let len = work.past.len();
    if len == 0 {
        return Err(DraftFault::Invalid("an empty text".to_owned()));
    }
    if len > context {
        return Err(DraftFault::TooLong { len, context });
    }
    match work.want {
        Want::Shadow { from } if from == 0 || from > len => {
            Err(DraftFault::Invalid(format!("no output place {from} in a text of {len} tokens")))
        }
        Want::Shadow { .. } | Want::Draft(_) => Ok(()),
    }
}

impl Taken {
    /// Takes the text of a question; what it shares with the last one stays in the cache.
    fn follow(&mut self, past: &Past) {
        let prompt = past.prompt();
        let same = |a: &[TokenId], b: &[TokenId]| a.iter().zip(b).take_while(|(a, b)| a == b).count();
        let shared = match self.text.strip_prefix(prompt) {
            Some(rest) => prompt.len() + same(rest, past.output()),
            None => same(&self.text, prompt),
        };
        self.text.truncate(shared);
        self.text.extend(past.tokens().skip(shared));
        self.cached = self.cached.min(shared);
    }

    /// A token that was chosen, in the model's own tokens.
    fn own(&self, token: TokenId) -> Option<TokenId> {
        match &self.voice {
            Voice::Own => Some(token),
            Voice::Common(common) => common.drafter(token),
        }
    }
}

impl Open {
    /// Which rows are wanted of a feed of so many tokens after so many that are cached.
    fn rows(&self, cached: usize, feeding: usize) -> Rows {
        let end = cached + feeding;
        match self.work.want {
            Want::Draft(_) if end < self.asked + self.chosen.tokens.len() => Rows::None,
            Want::Draft(_) => Rows::Last,
            // The choice at a place is the row of the token before it.
            Want::Shadow { from } if end < from => Rows::None,
            Want::Shadow { from } => Rows::From((from - 1).saturating_sub(cached)),
        }
    }

    /// Takes the rows of its feed. Once the question is answered, returns true.
    fn take_rows(
        &mut self,
        taken: &mut Taken,
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
        for (row, place) in (first + 1..=end).enumerate() {
            let Some(logits) = logits.row(feed, row) else { break };
            let choice = match &self.work.spoken {
                Some(_) => self.speak(taken, logits),
                None => self.choose(taken, place, logits),
            };
            let Some(choice) = choice else { return self.answer() };
            self.chosen.tokens.push(choice);
        }
        self.finish(taken, context, eos)
    }

    /// The choice at a place of the text, in the model's own tokens.
    fn choose(&mut self, taken: &Taken, place: usize, logits: &[f32]) -> Option<Drafted> {
        let prompt = self.work.past.prompt();
        let output = taken.text.get(prompt.len()..place).unwrap_or(&[]);
        let history = taken.sampler.history(prompt, output);
        self.pick(&taken.sampler, &history, logits)
    }

    /// The choice among the common tokens, in the target's, at the next place that is asked for.
    fn speak(&mut self, taken: &mut Taken, logits: &[f32]) -> Option<Drafted> {
        let (Voice::Common(common), Some(spoken)) = (&taken.voice, &self.work.spoken) else {
            return self.choose(taken, 0, logits);
        };
        common.row(logits, &mut taken.row);
        let prompt = spoken.past.prompt();
        let drafts = matches!(self.work.want, Want::Draft(_));
        let place = if drafts { 0 } else { self.chosen.tokens.len() };
        let before = spoken.before.get(place).map_or(0, |before| before.saturating_sub(prompt.len()));
        let mut output = spoken.past.output().get(..before).unwrap_or(spoken.past.output()).to_vec();
        if drafts {
            output.extend(self.chosen.tokens.iter().map(|&(token, _)| token));
        }
        let history = taken.sampler.history(prompt, &output);
        self.pick(&taken.sampler, &history, &taken.row)
    }

    /// The seat's own choice, or a token drawn from its law: by the order's draw of this place of the draft. `None` where the
    /// draft ends before that, for what the law is.
    fn pick(&mut self, sampler: &Sampler, past: &History, logits: &[f32]) -> Option<Drafted> {
        let processed = sampler.process(logits, past);
        let draws = matches!(self.work.want, Want::Draft(Order { draws: Some(_), .. }));
        // Nothing is drawn: the likeliest token, which the target is taken to like best, too.
        let likeliest = processed.likeliest().filter(|_| !draws).map(|token| (token, margin(logits, token)));
        if let Some(stop) = &mut self.stop {
            let chance = likeliest.map_or_else(
                || chance_by_entropy(processed.entropy()),
                |(_, margin)| chance_by_margin(margin.into()),
            );
            if !stop.goes_on(chance) {
                return None;
            }
        }
        if likeliest.is_some() {
            return likeliest;
        }
        let drawn = match self.work.want {
            Want::Draft(Order { draws: Some(seed), .. }) => processed.law().map(|law| {
                let place = self.chosen.drawn.chain().len();
                self.chosen.drawn.push(law, Dice::at(seed, place))
            }),
            Want::Draft(_) | Want::Shadow { .. } => None,
        };
        let token = drawn.unwrap_or_else(|| processed.draw());
        Some((token, margin(logits, token)))
    }

    fn finish(&mut self, taken: &mut Taken, context: usize, eos: &[TokenId]) -> bool {
        let done = match self.work.want {
            Want::Shadow { .. } => taken.cached == self.asked,
            Want::Draft(Order { gamma, .. }) => {
                let last = self.chosen.tokens.last().and_then(|&(token, _)| taken.own(token));
                let full = taken.text.len() == context;
                let ended = last.is_none_or(|token| eos.contains(&token));
                taken.text.extend(last);
                self.chosen.tokens.len() >= gamma || full || ended
            }
        };
        done && self.answer()
    }

    /// Answers the question; true, for it is done.
    fn answer(&mut self) -> bool {
        let (reply, _) = oneshot::channel();
        let reply = std::mem::replace(&mut self.work.reply, reply);
        let _ = reply.send(Ok(std::mem::take(&mut self.chosen)));
        true
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
