//! The calls of a probe, in order: what matters most comes first, so that bounds cut off what matters least.

use std::collections::VecDeque;

use super::Dialect;
use crate::control::prospect::GAMMA_MOST;
use crate::dialect::{Engine, Noise};
use crate::words::Plan;

/// Numbers of draft nodes that are timed.
const GAMMAS: [usize; 4] = [0, 2, 4, GAMMA_MOST];
/// Least tokens of the short context: engines with blocks of 16 cache two of them.
const SHORT: usize = 34;
/// About the number of tokens of the long context.
const LONG: usize = 1_000;
/// Tokens by which a context may grow, and a draft beyond it.
const SLACK: usize = 64;

/// One of the two contexts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Short,
    Long,
}

/// One call of the probe and what it is to show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Task {
    /// A scored draft, and then the same again, to see the rows under a cached prefix.
    Same { again: bool },
    /// The first round over a text that was never seen.
    Cold(Place),
    /// A round on a connection of its own.
    Fresh(Place),
    /// A round that only fills the caches of slots.
    Warm { plan: Plan, place: Place, nodes: usize },
    /// A round that is timed.
    Round { plan: Plan, place: Place, nodes: usize },
    /// A ride, to its end or left early.
    Ride { place: Place, leaves: bool },
    /// A ride that comes whole: of one token, or of some.
    Whole { place: Place, one: bool },
    /// The round after a ride that was left.
    After(Place),
    /// A seeded ride from the start or from a cut.
    Seeded { seed: usize, cut: usize },
}

impl Task {
    /// The plan of its calls; rides have that of the rounds beside them.
    pub(super) fn plan(&self, engine: &Engine) -> Option<Plan> {
        match self {
            Self::Same { .. } => Some(Plan::Score),
            Self::Warm { plan, .. } | Self::Round { plan, .. } => Some(*plan),
            Self::Cold(_)
            | Self::Fresh(_)
            | Self::After(_)
            | Self::Ride { .. }
            | Self::Whole { .. }
            | Self::Seeded { .. } => engine.plans.first().copied(),
        }
    }

    pub(super) fn nodes(&self) -> usize {
        match self {
            Self::Same { .. } => 2,
            Self::Warm { nodes, .. } | Self::Round { nodes, .. } => *nodes,
            Self::Cold(_)
            | Self::Fresh(_)
            | Self::After(_)
            | Self::Ride { .. }
            | Self::Whole { .. }
            | Self::Seeded { .. } => 0,
        }
    }

    pub(super) fn is_fresh(&self) -> bool {
        matches!(self, Self::Fresh(_))
    }

    fn place(&self) -> Place {
        match self {
            Self::Same { .. } | Self::Seeded { .. } => Place::Short,
            Self::Cold(place)
            | Self::Fresh(place)
            | Self::After(place)
            | Self::Warm { place, .. }
            | Self::Round { place, .. }
            | Self::Whole { place, .. }
            | Self::Ride { place, .. } => *place,
        }
    }

    /// Whether it needs the same context as the task before it.
    fn stays(&self) -> bool {
        matches!(self, Self::Same { .. } | Self::Seeded { .. })
    }
}

/// The tasks of one probe, and how far its contexts have grown.
pub(super) struct Script {
    tasks: VecDeque<Task>,
    /// Lengths of the contexts at the start, tokens; there may be no long one.
    short: usize,
    long: Option<usize>,
    /// Tokens by which the short and the long context have grown.
    grown: [usize; 2],
}

impl Script {
    /// The tasks of a whole probe, for an engine that takes `room` tokens.
    pub(super) fn new(engine: &Engine, room: usize) -> Self {
        let mut script = Self::empty(engine, room);
        if script.short + SLACK <= room {
            script.tasks = tasks(engine, script.long.is_some());
        }
        script
    }

    /// Four calls on four connections, to see whether a single engine answers.
    pub(super) fn of_one(engine: &Engine, room: usize, long: bool) -> Self {
        let mut script = Self::empty(engine, room);
        let place = if long && script.long.is_some() { Place::Long } else { Place::Short };
        if script.short + SLACK <= room {
            script.tasks =
                [Task::Cold(place), Task::Fresh(place), Task::Fresh(place), Task::Fresh(place)].into();
        }
        script
    }

    fn empty(engine: &Engine, room: usize) -> Self {
        let short = placed(SHORT, engine);
        let long = placed(LONG.min(room.saturating_sub(SLACK + engine.block)), engine);
        let long = (long > 2 * short && long + SLACK <= room).then_some(long);
        Self { tasks: VecDeque::new(), short, long, grown: [0; 2] }
    }

    pub(super) fn next(&mut self) -> Option<Task> {
        self.tasks.pop_front()
    }

    /// The task is done once more, next.
    pub(super) fn again(&mut self, task: Task) {
        self.tasks.push_front(task);
    }

    /// Tokens of the context of a task; the next task of the same place gets one more.
    pub(super) fn length(&mut self, task: &Task) -> Option<usize> {
        let [short, long] = &mut self.grown;
        let (base, grown) = match task.place() {
            Place::Short => (self.short, short),
            Place::Long => (self.long?, long),
        };
        let length = base + *grown;
        *grown += usize::from(!task.stays());
        Some(length)
    }
}

/// The least length from `least` on that lies half way between two blocks, as a context does on average: an
/// engine computes anew what lies behind the last whole one.
fn placed(least: usize, engine: &Engine) -> usize {
    let block = engine.block.max(1);
    let offset = block / 2;
    let blocks = least.saturating_sub(offset).div_ceil(block);
    blocks * block + offset
}

fn tasks(engine: &Engine, long: bool) -> VecDeque<Task> {
    let mut tasks = VecDeque::new();
    let Some(&first) = engine.plans.first() else { return tasks };
    if engine.plans.contains(&Plan::Score) && engine.dialect == Dialect::Vllm {
        tasks.extend([Task::Same { again: false }, Task::Same { again: true }]);
    }
    let main = if long { Place::Long } else { Place::Short };
    // Slots are warmed one by one, which takes long with a long context: the short one comes first.
    let order = if engine.dialect == Dialect::LlamaCpp { [Place::Short, main] } else { [main, Place::Short] };
    let seeded = engine.noise == Noise::Call && may_be_placed(engine.dialect);
    for (turn, place) in order.into_iter().enumerate().take(if long { 2 } else { 1 }) {
        if place == main {
            tasks.push_back(Task::Cold(place));
        }
        tasks.extend(rounds(engine, first, place));
        tasks.extend(rides(engine, place, place == main));
        if place == main && engine.segment.is_none() {
            tasks.push_back(Task::After(place));
        }
        for &plan in engine.plans.iter().skip(1) {
            if turn == 0 {
                tasks.extend(rounds(engine, plan, place));
            }
        }
    }
    if seeded {
        tasks.extend([(0, 0), (1, 0), (0, 1), (0, 4), (0, 8)].map(|(seed, cut)| Task::Seeded { seed, cut }));
    }
    let [_, second] = order;
    for &plan in engine.plans.iter().skip(1).filter(|_| long) {
        tasks.extend(rounds(engine, plan, second));
    }
    // Once more, where calls are left: the shorter of two times is the more accurate one.
    let again = order.into_iter().take(if long { 2 } else { 1 });
    tasks.extend(again.flat_map(|place| {
        let rounds = GAMMAS.map(|nodes| Task::Round { plan: first, place, nodes });
        rounds.into_iter().chain(rides(engine, place, false))
    }));
    tasks
}

/// The timed rounds of a plan.
fn rounds(engine: &Engine, plan: Plan, place: Place) -> Vec<Task> {
    let slots = engine.dialect == Dialect::LlamaCpp && plan == Plan::FanOut;
    let warm = slots.then_some(Task::Warm { plan, place, nodes: GAMMA_MOST });
    warm.into_iter().chain(GAMMAS.map(|nodes| Task::Round { plan, place, nodes })).collect()
}

/// The rides that time a plain step: a stream, or two answers that come whole, whose difference counts.
fn rides(engine: &Engine, place: Place, leaves: bool) -> Vec<Task> {
    if engine.segment.is_none() {
        return vec![Task::Ride { place, leaves }];
    }
    [true, false].map(|one| Task::Whole { place, one }).to_vec()
}

/// Whether the noise of a seeded request may be a function of the place in some version or setting.
const fn may_be_placed(dialect: Dialect) -> bool {
    match dialect {
        Dialect::Vllm | Dialect::Sglang | Dialect::TrtLlm | Dialect::Lmdeploy => true,
        Dialect::Onnx
        | Dialect::LlamaCpp
        | Dialect::Tgi
        | Dialect::Triton
        | Dialect::OpenAi
        | Dialect::Ollama
        | Dialect::Mlx => false,
    }
}
