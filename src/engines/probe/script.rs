//! The calls of a probe, the most important first, so that its limits cut off the least important
//! ones.

use std::collections::VecDeque;

use super::prospect::MAX_GAMMA;
use crate::{Engine, Noise};
use foretell_core::words::VerifyMethod;

/// Numbers of draft nodes that are timed.
const GAMMAS: [usize; 4] = [0, 2, 4, MAX_GAMMA];
/// Minimum tokens of the short context: engines with blocks of 16 cache two of them.
const SHORT: usize = 34;
/// Approximate number of tokens of the long context.
const LONG: usize = 1_000;
/// Tokens reserved for the growth of a context, and for a draft after it.
const SLACK: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProbeContext {
    Short,
    Long,
}

/// One call of the probe, by its purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Task {
    /// A scored draft, and then the same draft, to see the rows after a cached prefix.
    Same {
        repeat: bool,
    },
    /// The first round with a text that the engine has not seen.
    Cold(ProbeContext),
    /// A round on a separate connection.
    Fresh(ProbeContext),
    /// A round that only fills the caches of the slots.
    Warm {
        method: VerifyMethod,
        context: ProbeContext,
        nodes: usize,
    },
    Round {
        method: VerifyMethod,
        context: ProbeContext,
        nodes: usize,
    },
    /// A plain request, streamed to its end or aborted early.
    Plain {
        context: ProbeContext,
        leaves: bool,
    },
    /// A plain request that is not streamed: of one token, or of several.
    Unstreamed {
        context: ProbeContext,
        one: bool,
    },
    /// The round after a stream that was aborted early.
    After(ProbeContext),
    /// A seeded plain request from the start or from a cut.
    Seeded {
        seed: usize,
        cut: usize,
    },
}

impl Task {
    /// The verification method of its calls; plain requests have the engine's first one.
    pub(super) fn method(&self, engine: &Engine) -> Option<VerifyMethod> {
        match self {
            Self::Same { .. } => Some(VerifyMethod::Score),
            Self::Warm { method, .. } | Self::Round { method, .. } => Some(*method),
            Self::Cold(_)
            | Self::Fresh(_)
            | Self::After(_)
            | Self::Plain { .. }
            | Self::Unstreamed { .. }
            | Self::Seeded { .. } => engine.methods.first().copied(),
        }
    }

    pub(super) fn nodes(&self) -> usize {
        match self {
            Self::Same { .. } => 2,
            Self::Warm { nodes, .. } | Self::Round { nodes, .. } => *nodes,
            Self::Cold(_)
            | Self::Fresh(_)
            | Self::After(_)
            | Self::Plain { .. }
            | Self::Unstreamed { .. }
            | Self::Seeded { .. } => 0,
        }
    }

    pub(super) fn is_fresh(&self) -> bool {
        matches!(self, Self::Fresh(_))
    }

    fn context(&self) -> ProbeContext {
        match self {
            Self::Same { .. } | Self::Seeded { .. } => ProbeContext::Short,
            Self::Cold(context)
            | Self::Fresh(context)
            | Self::After(context)
            | Self::Warm { context, .. }
            | Self::Round { context, .. }
            | Self::Unstreamed { context, .. }
            | Self::Plain { context, .. } => *context,
        }
    }

    /// True if it needs the same context as the task before it.
    fn stays(&self) -> bool {
        matches!(self, Self::Same { .. } | Self::Seeded { .. })
    }
}

/// The tasks of one probe, and the growth of its contexts.
pub(super) struct Script {
    tasks: VecDeque<Task>,
    /// Lengths of the contexts at the start, tokens; there may be no long one.
    short: usize,
    long: Option<usize>,
    /// Tokens by which the short and the long context have grown.
    grown: [usize; 2],
}

impl Script {
    /// The tasks of a complete probe, for an engine with a context of `room` tokens.
    pub(super) fn new(engine: &Engine, room: usize) -> Self {
        let mut script = Self::empty(engine, room);
        if script.short + SLACK <= room {
            script.tasks = tasks(engine, script.long.is_some());
        }
        script
    }

    /// Four calls on four connections, to detect more than one engine.
    pub(super) fn of_one(engine: &Engine, room: usize, long: bool) -> Self {
        let mut script = Self::empty(engine, room);
        let context = if long && script.long.is_some() { ProbeContext::Long } else { ProbeContext::Short };
        if script.short + SLACK <= room {
            script.tasks =
                [Task::Cold(context), Task::Fresh(context), Task::Fresh(context), Task::Fresh(context)]
                    .into();
        }
        script
    }

    fn empty(engine: &Engine, room: usize) -> Self {
        let short = placed(SHORT, engine);
        let long = placed(LONG.min(room.saturating_sub(SLACK + engine.cache.block)), engine);
        let long = (long > 2 * short && long + SLACK <= room).then_some(long);
        Self { tasks: VecDeque::new(), short, long, grown: [0; 2] }
    }

    pub(super) fn next(&mut self) -> Option<Task> {
        self.tasks.pop_front()
    }

    /// Requeues the task as the first.
    pub(super) fn repeat(&mut self, task: Task) {
        self.tasks.push_front(task);
    }

    /// Tokens of the context of a task; the next task with the same context gets one more.
    pub(super) fn length(&mut self, task: &Task) -> Option<usize> {
        let [short, long] = &mut self.grown;
        let (base, grown) = match task.context() {
            ProbeContext::Short => (self.short, short),
            ProbeContext::Long => (self.long?, long),
        };
        let length = base + *grown;
        *grown += usize::from(!task.stays());
        Some(length)
    }
}

/// The smallest length from `least` on that lies half way between two blocks, as a context does on
/// average: an engine recomputes the tokens after the last full block.
fn placed(least: usize, engine: &Engine) -> usize {
    let block = engine.cache.block.max(1);
    let offset = block / 2;
    let blocks = least.saturating_sub(offset).div_ceil(block);
    blocks * block + offset
}

fn tasks(engine: &Engine, long: bool) -> VecDeque<Task> {
    let mut tasks = VecDeque::new();
    let Some(&first) = engine.methods.first() else { return tasks };
    if engine.methods.contains(&VerifyMethod::Score) && engine.quirks().probe.rows_may_change {
        tasks.extend([Task::Same { repeat: false }, Task::Same { repeat: true }]);
    }
    let main = if long { ProbeContext::Long } else { ProbeContext::Short };
    // Slots are filled one by one, which takes long with a long context: the short one comes first.
    let order = if engine.quirks().probe.fills_slots {
        [ProbeContext::Short, main]
    } else {
        [main, ProbeContext::Short]
    };
    let seeded = engine.noise == Noise::Call && engine.quirks().probe.places_noise;
    for (turn, context) in order.into_iter().enumerate().take(if long { 2 } else { 1 }) {
        if context == main {
            tasks.push_back(Task::Cold(context));
        }
        tasks.extend(rounds(engine, first, context));
        tasks.extend(plain_tasks(engine, context, context == main));
        if context == main && engine.quirks().segment.is_none() {
            tasks.push_back(Task::After(context));
        }
        for &method in engine.methods.iter().skip(1) {
            if turn == 0 {
                tasks.extend(rounds(engine, method, context));
            }
        }
    }
    if seeded {
        tasks.extend([(0, 0), (1, 0), (0, 1), (0, 4), (0, 8)].map(|(seed, cut)| Task::Seeded { seed, cut }));
    }
    let [_, second] = order;
    if long {
        for &method in engine.methods.iter().skip(1) {
            tasks.extend(rounds(engine, method, second));
        }
    }
    // A second time, if calls remain: the shorter of two times is the more accurate one.
    let contexts = order.into_iter().take(if long { 2 } else { 1 });
    tasks.extend(contexts.flat_map(|context| {
        let rounds = GAMMAS.map(|nodes| Task::Round { method: first, context, nodes });
        rounds.into_iter().chain(plain_tasks(engine, context, false))
    }));
    tasks
}

/// The timed rounds of a verification method.
fn rounds(engine: &Engine, method: VerifyMethod, context: ProbeContext) -> Vec<Task> {
    let slots = engine.quirks().probe.fills_slots && method == VerifyMethod::FanOut;
    let warm = slots.then_some(Task::Warm { method, context, nodes: MAX_GAMMA });
    warm.into_iter().chain(GAMMAS.map(|nodes| Task::Round { method, context, nodes })).collect()
}

/// The plain requests that time a decode step: a stream, or two unstreamed answers, whose
/// difference counts.
fn plain_tasks(engine: &Engine, context: ProbeContext, leaves: bool) -> Vec<Task> {
    if engine.quirks().segment.is_none() {
        return vec![Task::Plain { context, leaves }];
    }
    [true, false].map(|one| Task::Unstreamed { context, one }).to_vec()
}
