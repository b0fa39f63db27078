//! The slots: each holds the tokens of its last task, and a new task goes to the slot with the
//! longest common prefix.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::TokenId;
use parking_lot::Mutex;
use tokio::sync::Notify;

/// A slot matches a prompt if they share more than this part of the prompt.
const SIMILARITY: f64 = 0.10;

#[derive(Clone, Debug, Default)]
pub struct Slot {
    pub tokens: Vec<TokenId>,
    pub busy: bool,
    /// Time of its last release; 0 for never.
    pub last_used: u64,
}

#[derive(Default)]
struct State {
    slots: Vec<Slot>,
    /// Prompts in host memory.
    host: Vec<Vec<TokenId>>,
    clock: u64,
}

pub struct Slots {
    state: Mutex<State>,
    freed: Notify,
    cache_idle: bool,
    /// Tasks that wait for a slot.
    pub deferred: AtomicUsize,
    /// Slot states copied to host memory or back.
    pub copies: AtomicUsize,
}

/// Requirements of a task.
pub struct Task<'a> {
    pub prompt: &'a [TokenId],
    /// The requested slot, if any.
    pub slot: Option<usize>,
    /// Slots for children, in addition to its own.
    pub children: usize,
    pub reuse: bool,
}

/// Slots of a task, its own first, and the cached part of its prompt.
#[derive(Clone, Debug)]
pub struct Taken {
    pub slots: Vec<usize>,
    pub cached: usize,
}

impl Slots {
    pub fn new(count: usize, cache_idle: bool) -> Self {
        let state = State { slots: vec![Slot::default(); count], ..State::default() };
        Self {
            state: Mutex::new(state),
            freed: Notify::new(),
            cache_idle,
            deferred: AtomicUsize::new(0),
            copies: AtomicUsize::new(0),
        }
    }

    pub fn list(&self) -> Vec<Slot> {
        self.state.lock().slots.clone()
    }

    pub fn clear(&self) {
        let mut state = self.state.lock();
        state.host.clear();
        state.slots.iter_mut().for_each(|slot| *slot = Slot { busy: slot.busy, ..Slot::default() });
    }

    /// Waits for a free slot.
    pub async fn take(&self, task: &Task<'_>) -> Taken {
        loop {
            let freed = self.freed.notified();
            if let Some(taken) = self.try_take(task) {
                return taken;
            }
            freed.await;
        }
    }

    pub fn try_take(&self, task: &Task<'_>) -> Option<Taken> {
        let mut state = self.state.lock();
        let free = state.slots.iter().filter(|slot| !slot.busy).count();
        if free < 1 + task.children {
            return None;
        }
        let own = self.choose(&mut state, task)?;
        let shared = common(&state.slots[own].tokens, task.prompt);
        let cached = if task.reuse { shared.min(task.prompt.len().saturating_sub(1)) } else { 0 };
        state.slots[own].busy = true;
        let others = (0..state.slots.len()).filter(|&at| !state.slots[at].busy).take(task.children);
        let taken: Vec<usize> = std::iter::once(own).chain(others.collect::<Vec<_>>()).collect();
        for &at in &taken {
            state.slots[at].busy = true;
            state.slots[at].tokens = task.prompt.to_vec();
        }
        self.put_idle_away(&mut state);
        Some(Taken { slots: taken, cached })
    }

    fn choose(&self, state: &mut State, task: &Task<'_>) -> Option<usize> {
        if let Some(wanted) = task.slot {
            let wanted = wanted % state.slots.len();
            return (!state.slots[wanted].busy).then_some(wanted);
        }
        let likeness =
            |slot: &Slot| common(&slot.tokens, task.prompt) as f64 / task.prompt.len().max(1) as f64;
        let mut best = None;
        for (at, slot) in
            state.slots.iter().enumerate().filter(|(_, slot)| !slot.busy && !slot.tokens.is_empty())
        {
            let own = likeness(slot);
            if own > SIMILARITY && best.is_none_or(|(_, most)| own > most) {
                best = Some((at, own));
            }
        }
        if let Some((at, _)) = best {
            let tokens = &state.slots[at].tokens;
            if common(tokens, task.prompt) * 2 < tokens.len() {
                self.exchange(state, at, task.prompt);
            }
            return Some(at);
        }
        let mut oldest: Option<usize> = None;
        for at in (0..state.slots.len()).filter(|&at| !state.slots[at].busy) {
            if oldest.is_none_or(|oldest| state.slots[at].last_used <= state.slots[oldest].last_used) {
                oldest = Some(at);
            }
        }
        self.exchange(state, oldest?, task.prompt);
        oldest
    }

    /// Saves a slot's state and loads a state closer to the prompt, if host memory has one.
    fn exchange(&self, state: &mut State, at: usize, prompt: &[TokenId]) {
        self.save(state, at);
        let own = state.slots[at].tokens.clone();
        let kept = |tokens: &[TokenId]| common(tokens, prompt) as f64 / tokens.len().max(1) as f64;
        let mut best = (if own.is_empty() { -1.0 } else { kept(&own) }, common(&own, prompt) as i64, None);
        if own.is_empty() {
            best.1 = 0;
        }
        for (entry, tokens) in state.host.iter().enumerate() {
            let (keep, shared) = (kept(tokens), common(tokens, prompt) as i64);
            if keep >= 0.25 && keep > best.0 && shared > best.1 {
                best = (keep, shared, Some(entry));
            }
        }
        if let Some(entry) = best.2 {
            state.slots[at].tokens = state.host.remove(entry);
            self.copies.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn save(&self, state: &mut State, at: usize) {
        let tokens = state.slots[at].tokens.clone();
        if tokens.is_empty() || state.host.iter().any(|held| held.starts_with(&tokens)) {
            return;
        }
        state.host.retain(|held| !tokens.starts_with(held));
        state.host.push(tokens);
        self.copies.fetch_add(1, Ordering::SeqCst);
    }

    /// Copies idle slots to host memory and clears them.
    fn put_idle_away(&self, state: &mut State) {
        if !self.cache_idle {
            return;
        }
        for at in (0..state.slots.len()).filter(|&at| !state.slots[at].busy).collect::<Vec<_>>() {
            self.save(state, at);
            state.slots[at].tokens.clear();
        }
    }

    fn release(&self, at: usize, tokens: &[TokenId]) {
        let mut state = self.state.lock();
        state.clock += 1;
        let clock = state.clock;
        state.slots[at] = Slot { tokens: tokens.to_vec(), busy: false, last_used: clock };
        drop(state);
        self.freed.notify_waiters();
    }
}

/// A slot in use; released with its tokens on drop.
pub struct Held {
    pub slots: Arc<Slots>,
    pub at: usize,
    pub tokens: Vec<TokenId>,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.slots.release(self.at, &self.tokens);
    }
}

/// Counts tasks as deferred until they start.
pub struct Deferred<'a>(&'a Slots, usize);

impl<'a> Deferred<'a> {
    pub fn new(slots: &'a Slots, tasks: usize) -> Self {
        slots.deferred.fetch_add(tasks, Ordering::SeqCst);
        Self(slots, tasks)
    }

    pub fn launched(&mut self, tasks: usize) {
        self.0.deferred.fetch_sub(tasks, Ordering::SeqCst);
        self.1 -= tasks;
    }
}

impl Drop for Deferred<'_> {
    fn drop(&mut self) {
        self.0.deferred.fetch_sub(self.1, Ordering::SeqCst);
    }
}

fn common(a: &[TokenId], b: &[TokenId]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
