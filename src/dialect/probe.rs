//! Finding out by asking what an engine can do and what it costs.
//!
//! PURE and sans-IO: [`Prober::next`] says what to send, [`Prober::take`] learns from what came back; whoever
//! drives it only sends and times. Every call is one that the dialect builds for a real request, so what is
//! safe there is safe here; and no call is ever made twice with the same words after one went unanswered.

mod learn;
mod script;

use serde_json::Value;

use super::{Asked, Call, Context, Dialect, Engine, RideKind, Round};
use crate::control::prospect::Measured;
use crate::draft::{Features, Source, Tree};
use crate::openai::{Said, Sampling, SamplingField};
use crate::units::{Tick, TokenId};
use crate::words::Plan;

use learn::Learning;
use script::{Script, Task};

/// Most tokens of real text that a probe uses.
pub const TEXT: usize = 1_280;
/// Tokens of a seeded run.
const SEEDED: u32 = 12;
/// The seeds of the seeded runs.
const SEEDS: [u64; 2] = [20_011, 70_843];
/// Token events after which a ride is left.
const LEAVE: usize = 6;
/// Tokens that a ride is asked for which is left early.
const RIDE: u32 = 64;
/// Tokens of a ride that comes whole, for engines that do not stream by ids.
const WHOLE: u32 = 8;
const OUT_OF_TIME: &str = "stopped when its time was up";
/// The possible causes where the first call with log-probabilities of all got no good answer.
const FIRST_LOGPROBS: &str = "its first call with logprobs got no good answer: either it compiles for that call, which takes some \
     seconds once, or no C++ compiler works there and the call has ended it (\"InvalidCxxCompiler\" or \"C++ compile \
     error\" in its log)";
/// Refusals after which a plan is given up.
const REFUSALS: u32 = 2;
/// Answers by chance that show nothing after which a plan's next one counts as a refusal.
const CHANCES: u32 = 3;

/// Bounds of a probe.
#[derive(Clone, Debug)]
pub struct Bounds {
    /// Most calls of one probe.
    pub calls: u32,
    /// No call begins after this.
    pub until: Tick,
    /// Most bytes of a round's requests.
    pub bytes_max: usize,
    /// Longest context of a verify call, tokens.
    pub context_max: usize,
    /// The plans that the operator allows.
    pub allow: Vec<Plan>,
}

/// The next calls to make.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Make all these calls at once, and time them from the first byte sent to the last byte read.
    Round {
        /// Calls to be made at once.
        calls: Vec<Call>,
        /// On a connection that was never used before.
        fresh: bool,
    },
    /// Stream, and hang up after so many events that carry tokens.
    Ride {
        /// The call to be made.
        call: Call,
        /// Events with tokens after which to hang up.
        leave: usize,
    },
}

/// Outcome of a step.
#[derive(Clone, Debug, PartialEq)]
pub enum Heard {
    /// The answers to a round, in the order of its calls.
    Round {
        /// Bodies of the answers, in the order of the calls.
        bodies: Vec<Vec<u8>>,
        /// Seconds that the round took.
        seconds: f64,
    },
    /// The events of a ride, with the seconds since it was asked for.
    Ride(Vec<(f64, Value)>),
    /// An answer of another status than 200, and its body.
    Refused(u16, Vec<u8>),
    /// No answer before the probe's time was up.
    Late,
    /// The call failed: no answer, or it broke off.
    Silence,
}

/// Whether the prefix cache works, and how that is known.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cache {
    /// Whether it works; `None` if that is unclear.
    pub works: Option<bool>,
    /// The engine reports how many tokens of a prompt were cached.
    pub told: bool,
    /// Seconds of the first call with a long prompt; `None` if not measured.
    pub cold: Option<f64>,
    /// Seconds of the same call again; `None` if not measured.
    pub warm: Option<f64>,
}

/// The results of a probe.
#[derive(Clone, Debug, PartialEq)]
pub struct Findings {
    /// The engine as it is now known: without plans that do not work, with rows and noise as measured.
    pub engine: Engine,
    /// Measured call times, seconds.
    pub measured: Measured,
    /// What was seen of the engine's prefix cache.
    pub cache: Cache,
    /// More than one engine seems to answer, or it could not be shown that it is one.
    pub balanced: bool,
    /// Plans that were given up, and why.
    pub removed: Vec<(Plan, String)>,
    /// Notes for the operator.
    pub notes: Vec<String>,
    /// Number of calls made.
    pub calls: u32,
}

/// The step under way.
struct Pending {
    task: Task,
    context: Vec<TokenId>,
    draft: Tree,
    asked: Asked,
}

/// The probe of one engine.
pub struct Prober {
    engine: Engine,
    bounds: Bounds,
    text: Vec<TokenId>,
    script: Script,
    learning: Learning,
    pending: Option<Pending>,
    calls: u32,
    refusals: [u32; Plan::ALL.len()],
    /// Answers that showed nothing.
    chances: [u32; Plan::ALL.len()],
    over: bool,
}

impl Prober {
    /// A probe of `engine` with token ids of real text (about [`TEXT`] of them) that it has not seen before.
    pub fn new(engine: Engine, text: Vec<TokenId>, bounds: Bounds) -> Self {
        Self::with(engine, text, bounds, true, Script::new)
    }

    /// A probe of nothing but whether a single engine answers, by four calls on four connections: the text of the first
    /// must be cached for the others. `long`: a text long enough to show in the times of the calls, for an engine that
    /// does not report what was cached.
    pub fn of_one(engine: Engine, text: Vec<TokenId>, bounds: Bounds, long: bool) -> Self {
        Self::with(engine, text, bounds, false, |engine, room| Script::of_one(engine, room, long))
    }

    fn with(
        mut engine: Engine,
        text: Vec<TokenId>,
        bounds: Bounds,
        one: bool,
        script: impl FnOnce(&Engine, usize) -> Script,
    ) -> Self {
        engine.plans.retain(|plan| bounds.allow.contains(plan));
        let room = engine.context.unwrap_or(usize::MAX).min(bounds.context_max).min(text.len());
        let script = script(&engine, room);
        Self {
            engine,
            bounds,
            text,
            script,
            learning: Learning::new(one),
            pending: None,
            calls: 0,
            refusals: [0; Plan::ALL.len()],
            chances: [0; Plan::ALL.len()],
            over: false,
        }
    }

    /// The next step; `None` when all is known, or a bound is reached.
    pub fn next(&mut self, now: Tick) -> Option<Step> {
        loop {
            if self.over {
                return None;
            }
            let task = self.script.next()?;
            if now >= self.bounds.until {
                self.stop(OUT_OF_TIME);
                return None;
            }
            let Some(step) = self.step(task) else { continue };
            let calls = match &step {
                Step::Round { calls, .. } => calls.len() as u32,
                Step::Ride { .. } => 1,
            };
            if self.calls + calls > self.bounds.calls {
                self.pending = None;
                self.stop("stopped when its calls were used up");
                return None;
            }
            self.calls += calls;
            return Some(step);
        }
    }

    fn stop(&mut self, why: &str) {
        self.over = true;
        self.learning.note(why);
    }

    fn step(&mut self, task: Task) -> Option<Step> {
        let context = self.text.get(..self.script.length(&task)?)?.to_vec();
        let step = match task {
            Task::Ride { .. } | Task::Whole { .. } | Task::Seeded { .. } => self.ride(task, context)?,
            _ => self.round(task, context)?,
        };
        Some(step)
    }

    fn round(&mut self, task: Task, context: Vec<TokenId>) -> Option<Step> {
        let (plan, nodes) = (task.plan(&self.engine)?, task.nodes());
        if !self.engine.plans.contains(&plan) {
            return None;
        }
        let draft = self.draft(context.len(), nodes);
        let sampling = greedy();
        let round = round(&self.engine, &context, &draft, &sampling, plan);
        let asked = self.engine.verify(&round, self.bounds.bytes_max).ok()?;
        let calls = asked.calls.clone();
        self.pending = Some(Pending { task, context, draft, asked });
        Some(Step::Round { calls, fresh: task.is_fresh() })
    }

    fn ride(&mut self, task: Task, context: Vec<TokenId>) -> Option<Step> {
        let (output, sampling, tokens, leave) = match task {
            Task::Seeded { seed, cut } => {
                let output = self.learning.seeded(cut)?;
                let sampling = Sampling { temperature: 1.5, seed: SEEDS.get(seed).copied(), ..greedy() };
                (output, sampling, SEEDED.saturating_sub(cut as u32), usize::MAX)
            }
            Task::Ride { leaves: false, .. } => (Vec::new(), greedy(), LEAVE as u32, usize::MAX),
            Task::Whole { one, .. } => (Vec::new(), greedy(), if one { 1 } else { WHOLE }, usize::MAX),
            _ => (Vec::new(), greedy(), RIDE, LEAVE),
        };
        let sampling = Sampling { ignore_eos: true, ..sampling };
        let at = Context::new(&self.engine.model, &context, &output);
        let call = self.engine.ride(&at, &sampling, tokens);
        let asked = Asked { calls: Vec::new(), nodes: 0 };
        self.pending = Some(Pending { task, context, draft: Tree::default(), asked });
        Some(Step::Ride { call, leave })
    }

    /// A chain that does not go on as the text does, so that nothing of it is cached when the context grows.
    fn draft(&self, at: usize, nodes: usize) -> Tree {
        let count = self.text.len().max(1);
        let mut tokens: Vec<TokenId> =
            (0..nodes).filter_map(|node| self.text.get((at * 31 + node * 17 + 5) % count).copied()).collect();
        let next = self.text.get(at);
        if let Some(first) = tokens.first_mut()
            && next.is_none_or(|next| next == first)
            && let Some(other) = self.text.iter().find(|&token| token != first)
        {
            *first = *other;
        }
        Tree::chain(&tokens, Source::PromptLookup, Features::default())
    }

    /// Learns from the answer to the last step.
    pub fn take(&mut self, heard: Heard) {
        let Some(pending) = self.pending.take() else { return };
        let failed = matches!(heard, Heard::Late | Heard::Silence | Heard::Refused(500..=599, _));
        if failed && matches!(pending.task, Task::Same { again: false }) {
            self.learning.note(FIRST_LOGPROBS);
        }
        match heard {
            Heard::Round { bodies, seconds } => self.rounded(&pending, &bodies, seconds),
            Heard::Ride(events) => self.ridden(&pending, &events),
            Heard::Refused(status @ (429 | 503), _) => {
                self.stop(&format!("stopped because the server answered {status}: it is busy"));
            }
            Heard::Refused(status, body) if self.is_chance(&pending, status, &body) => {
                self.script.again(pending.task);
            }
            Heard::Refused(status, _) => {
                self.refused(&pending, &format!("the server answers {status} to it"));
            }
            Heard::Late => self.stop(OUT_OF_TIME),
            Heard::Silence => self.stop("stopped because a call was not answered in time"),
        }
    }

    fn rounded(&mut self, pending: &Pending, bodies: &[Vec<u8>], seconds: f64) {
        let Some(plan) = pending.task.plan(&self.engine) else { return };
        let sampling = greedy();
        let round = round(&self.engine, &pending.context, &pending.draft, &sampling, plan);
        let verdict = match self.engine.verdict(&round, &pending.asked, bodies) {
            Ok(verdict) => verdict,
            Err(unreadable) => {
                return self.refused(pending, &format!("its answer cannot be read: {unreadable}"));
            }
        };
        if verdict.computed.is_some() {
            self.engine.tells_cached = true;
        }
        if let (Task::Same { again: true }, [body]) = (pending.task, bodies)
            && let Some(rows) =
                self.engine.dialect.codec().rows(pending.context.len() + pending.draft.len(), body)
        {
            self.engine.rows = rows;
        }
        self.learning.round(
            &pending.task,
            plan,
            pending.context.len(),
            pending.asked.nodes,
            seconds,
            verdict.computed,
        );
    }

    fn ridden(&mut self, pending: &Pending, events: &[(f64, Value)]) {
        let read = |(at, event): &(f64, Value)| {
            let chunk = self.engine.chunk(RideKind::Later, event).ok()?;
            (!chunk.tokens.is_empty()).then_some((*at, chunk.tokens))
        };
        let tokens: Vec<(f64, Vec<TokenId>)> = events.iter().filter_map(read).collect();
        match pending.task {
            Task::Seeded { seed, cut } => {
                let run = tokens.into_iter().flat_map(|(_, tokens)| tokens).collect();
                self.learning.seeded_run(seed, cut, run);
            }
            _ => self.learning.ride(pending.context.len(), &tokens),
        }
    }

    /// The plan by which a round was asked; `None` for a ride.
    fn plan_of(&self, pending: &Pending) -> Option<Plan> {
        match pending.task {
            Task::Ride { .. } | Task::Whole { .. } | Task::Seeded { .. } => None,
            _ => pending.task.plan(&self.engine),
        }
    }

    /// Whether a refusal only means that this one call could not be decided, so that the next may be. It counts.
    fn is_chance(&mut self, pending: &Pending, status: u16, body: &[u8]) -> bool {
        let Some(plan) = self.plan_of(pending) else { return false };
        let Some(chances) = self.chances.get_mut(plan.index()) else { return false };
        let chance = *chances < CHANCES && self.engine.dialect.codec().tells_nothing(plan, status, body);
        *chances += u32::from(chance);
        chance
    }

    fn refused(&mut self, pending: &Pending, why: &str) {
        let Some(plan) = self.plan_of(pending) else {
            return self.learning.note(&format!("a ride by token ids failed: {why}"));
        };
        let Some(refusals) = self.refusals.get_mut(plan.index()) else { return };
        *refusals += 1;
        // A failure over a cached prefix happens whenever one is cached.
        if *refusals >= REFUSALS || matches!(pending.task, Task::Same { again: true }) {
            self.engine.plans.retain(|other| *other != plan);
            self.learning.remove(plan, why);
        }
    }

    /// The results so far.
    pub fn findings(mut self) -> Findings {
        self.learning.conclude(&mut self.engine);
        self.learning.findings(self.engine, self.calls)
    }
}

fn round<'a>(
    engine: &'a Engine,
    context: &'a [TokenId],
    draft: &'a Tree,
    sampling: &'a Sampling,
    plan: Plan,
) -> Round<'a> {
    let context = Context::new(&engine.model, context, &[]);
    Round { context, draft, sampling, plan, weighs: false }
}

/// Greedy sampling with every field set, so that the server's defaults do not matter.
fn greedy() -> Sampling {
    let said = SamplingField::ALL.into_iter().fold(Said::default(), Said::with);
    Sampling { temperature: 0.0, said, ..Sampling::default() }
}

#[cfg(test)]
mod tests;
