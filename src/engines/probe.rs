//! Probes an engine: the verification methods that work, and the time of each call.
//!
//! PURE and sans-IO: [`Prober::next`] returns the calls to send, [`Prober::take`] learns from the
//! answers; the caller only sends and measures time. Every call is one that the dialect builds for
//! a real request, so it is as safe as that request; and no call is repeated after one went
//! unanswered.

mod learn;
pub mod prospect;
mod script;

use std::time::Duration;

use super::{Call, Context, Engine, RequestKind, Round, RowShape, VerifyRequest};
use foretell_core::draft::{Features, Source, Tree};
use foretell_core::units::{Tick, TokenId};
use foretell_core::words::VerifyMethod;
use foretell_wire::openai::{Event, Sampling, SamplingField, SetFields};

use learn::Learning;
use prospect::Measured;
use script::{Script, Task};

/// Maximum tokens of real text that a probe uses.
pub const TEXT: usize = 1_280;
/// Tokens of a seeded run.
const SEEDED: u32 = 12;
const SEEDS: [u64; 2] = [20_011, 70_843];
/// Token events after which a stream is aborted.
const LEAVE: usize = 6;
/// Tokens requested by a plain request whose stream is aborted early.
const PLAIN_TOKENS: u32 = 64;
/// Tokens of an unstreamed plain request, for engines that do not stream by ids.
const UNSTREAMED_TOKENS: u32 = 8;
const OUT_OF_TIME: &str = "stopped when its time was up";
/// The possible causes if the very first call with log-probabilities got no valid answer.
const FIRST_LOGPROBS: &str = "its first call with logprobs got no valid answer: either it compiles for that call, which takes some \
     seconds once, or no C++ compiler works there and the call has crashed it (\"InvalidCxxCompiler\" or \"C++ \
     compile error\" in its log)";
/// Refusals after which a verification method is given up.
const REFUSALS: u32 = 2;
/// Number of a method's undecided answers after which the next one counts as a refusal.
const CHANCES: u32 = 3;

#[derive(Clone, Debug)]
pub struct Bounds {
    /// Maximum calls of one probe.
    pub calls: u32,
    /// Time after which no call begins.
    pub until: Tick,
    /// Maximum bytes of a round's requests.
    pub bytes_max: usize,
    /// Maximum context of a verify request, tokens.
    pub context_max: usize,
    /// The verification methods that the operator allows.
    pub allow: Vec<VerifyMethod>,
}

/// The next calls to make.
#[derive(Clone, Debug, PartialEq)]
pub enum ProbeStep {
    /// Make all these calls at once, and time them from the first byte sent to the last byte read.
    Round {
        /// Calls to be made at once.
        calls: Vec<Call>,
        /// On a connection that was never used before.
        fresh: bool,
    },
    /// Read the stream, and close it after `leave` events that carry tokens.
    Plain {
        call: Call,
        /// Events with tokens after which to close the stream.
        leave: usize,
    },
}

#[derive(Clone, Debug, PartialEq)]
pub enum ProbeAnswer {
    /// The answers to a round, in the order of its calls.
    Round {
        /// Bodies of the answers, in the order of the calls.
        bodies: Vec<Vec<u8>>,
        /// Seconds that the round took.
        seconds: f64,
    },
    /// The events of a plain request, with the seconds since it was sent.
    Plain(Vec<(f64, Event)>),
    /// An answer of another status than 200, and its body.
    Refused(u16, Vec<u8>),
    /// No answer before the probe's time was up.
    Late,
    /// The call failed: no answer, or it broke off.
    Silence,
}

/// State of the prefix cache, and the measurements behind it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cache {
    /// True if it works; `None` if that is unclear.
    pub works: Option<bool>,
    /// The engine reports how many tokens of a prompt were cached.
    pub reported: bool,
    /// Seconds of the first call with a long prompt; `None` if not measured.
    pub cold: Option<f64>,
    /// Seconds of the repeated call; `None` if not measured.
    pub warm: Option<f64>,
}

/// The results of a probe.
#[derive(Clone, Debug, PartialEq)]
pub struct Findings {
    /// The engine as it is now known: without verification methods that do not work, with rows and
    /// noise as measured.
    pub engine: Engine,
    /// Measured call times, seconds.
    pub measured: Measured,
    /// Findings about the engine's prefix cache.
    pub cache: Cache,
    /// More than one engine seems to answer: a text that was sent was not found cached.
    pub several_engines: bool,
    /// Reason why it is not known how many engines answer, after a probe for that; `None` if it is.
    pub unchecked: Option<String>,
    /// Verification methods that were given up, with the reason.
    pub removed: Vec<(VerifyMethod, String)>,
    pub notes: Vec<String>,
    /// Number of calls made.
    pub calls: u32,
}

/// The step under way.
struct Pending {
    task: Task,
    context: Vec<TokenId>,
    draft: Tree,
    request: VerifyRequest,
}

pub struct Prober {
    engine: Engine,
    bounds: Bounds,
    text: Vec<TokenId>,
    script: Script,
    learning: Learning,
    pending: Option<Pending>,
    calls: u32,
    refusals: [u32; VerifyMethod::ALL.len()],
    /// Undecided answers.
    chances: [u32; VerifyMethod::ALL.len()],
    over: bool,
}

impl Prober {
    /// A probe of `engine` with token ids of real text (about [`TEXT`] of them) that it has not
    /// seen before.
    pub fn new(engine: Engine, text: Vec<TokenId>, bounds: Bounds) -> Self {
        Self::with(engine, text, bounds, true, Script::new)
    }

    /// A probe only for a single engine behind the address, by four calls on four connections: the
    /// text of the first must be cached for the others. `long`: a text long enough to show in the
    /// times of the calls, for an engine that does not report what was cached.
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
        engine.methods.retain(|method| bounds.allow.contains(method));
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
            refusals: [0; VerifyMethod::ALL.len()],
            chances: [0; VerifyMethod::ALL.len()],
            over: false,
        }
    }

    /// Allows it this much more time.
    pub fn postpone(&mut self, by: Duration) {
        self.bounds.until = self.bounds.until.after(by);
    }

    /// The next step; `None` when all is known, or a limit is reached.
    pub fn next(&mut self, now: Tick) -> Option<ProbeStep> {
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
                ProbeStep::Round { calls, .. } => calls.len() as u32,
                ProbeStep::Plain { .. } => 1,
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
        self.learning.stop(why);
    }

    fn step(&mut self, task: Task) -> Option<ProbeStep> {
        let context = self.text.get(..self.script.length(&task)?)?.to_vec();
        let step = match task {
            Task::Plain { .. } | Task::Unstreamed { .. } | Task::Seeded { .. } => {
                self.plain_request(task, context)?
            }
            _ => self.round(task, context)?,
        };
        Some(step)
    }

    fn round(&mut self, task: Task, context: Vec<TokenId>) -> Option<ProbeStep> {
        let (method, nodes) = (task.method(&self.engine)?, task.nodes());
        if !self.engine.methods.contains(&method) {
            return None;
        }
        let draft = self.draft(context.len(), nodes);
        let sampling = greedy();
        let round = round(&self.engine, &context, &draft, &sampling, method);
        let request = self.engine.verify(&round, self.bounds.bytes_max).ok()?;
        let calls = request.calls.clone();
        self.pending = Some(Pending { task, context, draft, request });
        Some(ProbeStep::Round { calls, fresh: task.is_fresh() })
    }

    fn plain_request(&mut self, task: Task, context: Vec<TokenId>) -> Option<ProbeStep> {
        let (output, sampling, tokens, leave) = match task {
            Task::Seeded { seed, cut } => {
                let output = self.learning.seeded(cut)?;
                let sampling = Sampling { temperature: 1.5, seed: SEEDS.get(seed).copied(), ..greedy() };
                (output, sampling, SEEDED.saturating_sub(cut as u32), usize::MAX)
            }
            Task::Plain { leaves: false, .. } => (Vec::new(), greedy(), LEAVE as u32, usize::MAX),
            Task::Unstreamed { one, .. } => {
                (Vec::new(), greedy(), if one { 1 } else { UNSTREAMED_TOKENS }, usize::MAX)
            }
            _ => (Vec::new(), greedy(), PLAIN_TOKENS, LEAVE),
        };
        let sampling = Sampling { ignore_eos: true, ..sampling };
        let at = Context::new(&self.engine.model, &context, &output);
        let call = self.engine.plain_request(&at, &sampling, tokens);
        let request = VerifyRequest::default();
        self.pending = Some(Pending { task, context, draft: Tree::default(), request });
        Some(ProbeStep::Plain { call, leave })
    }

    /// A chain that differs from the text's continuation, so that none of it is cached when the
    /// context grows.
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
    pub fn take(&mut self, answer: ProbeAnswer) {
        let Some(pending) = self.pending.take() else { return };
        let failed =
            matches!(answer, ProbeAnswer::Late | ProbeAnswer::Silence | ProbeAnswer::Refused(500..=599, _));
        if failed && matches!(pending.task, Task::Same { repeat: false }) {
            self.learning.note(FIRST_LOGPROBS);
        }
        match answer {
            ProbeAnswer::Round { bodies, seconds } => self.rounded(&pending, &bodies, seconds),
            ProbeAnswer::Plain(events) => self.timed(&pending, &events),
            ProbeAnswer::Refused(status @ (429 | 503), _) => {
                self.stop(&format!("stopped because the server answered {status}: it is busy"));
            }
            ProbeAnswer::Refused(status, body) if self.is_chance(&pending, status, &body) => {
                self.script.repeat(pending.task);
            }
            ProbeAnswer::Refused(status, _) => {
                self.refused(&pending, &format!("the server answers {status} to it"));
            }
            ProbeAnswer::Late => self.stop(OUT_OF_TIME),
            ProbeAnswer::Silence => self.stop("stopped because a call was not answered in time"),
        }
    }

    fn rounded(&mut self, pending: &Pending, bodies: &[Vec<u8>], seconds: f64) {
        let Some(method) = pending.task.method(&self.engine) else { return };
        let sampling = greedy();
        let round = round(&self.engine, &pending.context, &pending.draft, &sampling, method);
        let result = match self.engine.result(&round, &pending.request, bodies) {
            Ok(result) => result,
            Err(unreadable) => {
                return self.refused(pending, &format!("its answer cannot be read: {unreadable}"));
            }
        };
        if result.computed.is_some() {
            self.engine.cache.reports_hits = true;
        }
        if let (Task::Same { repeat: true }, [body]) = (pending.task, bodies)
            && let Some(rows) = RowShape::of(pending.context.len() + pending.draft.len(), body)
        {
            self.engine.cache.rows = rows;
        }
        self.learning.round(
            &pending.task,
            method,
            pending.context.len(),
            pending.request.nodes,
            seconds,
            result.computed,
        );
    }

    fn timed(&mut self, pending: &Pending, events: &[(f64, Event)]) {
        let read = |(at, event): &(f64, Event)| {
            let chunk = self.engine.chunk(RequestKind::Later, event).ok()?;
            (!chunk.tokens.is_empty()).then_some((*at, chunk.tokens))
        };
        let tokens: Vec<(f64, Vec<TokenId>)> = events.iter().filter_map(read).collect();
        match pending.task {
            Task::Seeded { seed, cut } => {
                let run = tokens.into_iter().flat_map(|(_, tokens)| tokens).collect();
                self.learning.seeded_run(seed, cut, run);
            }
            _ => self.learning.plain_request(pending.context.len(), &tokens),
        }
    }

    /// The verification method of a round; `None` for a plain request.
    fn method_of(&self, pending: &Pending) -> Option<VerifyMethod> {
        match pending.task {
            Task::Plain { .. } | Task::Unstreamed { .. } | Task::Seeded { .. } => None,
            _ => pending.task.method(&self.engine),
        }
    }

    /// True if a refusal only means that this one call could not be decided, so that the next may
    /// be. Counts such refusals.
    fn is_chance(&mut self, pending: &Pending, status: u16, body: &[u8]) -> bool {
        let Some(method) = self.method_of(pending) else { return false };
        let Some(chances) = self.chances.get_mut(method.index()) else { return false };
        let chance = *chances < CHANCES && self.engine.is_undecided(method, status, body);
        *chances += u32::from(chance);
        chance
    }

    fn refused(&mut self, pending: &Pending, why: &str) {
        let Some(method) = self.method_of(pending) else {
            return self.learning.note(&format!("a plain request by token ids failed: {why}"));
        };
        let Some(refusals) = self.refusals.get_mut(method.index()) else { return };
        *refusals += 1;
        // A failure after a cached prefix recurs whenever one is cached.
        if *refusals >= REFUSALS || matches!(pending.task, Task::Same { repeat: true }) {
            self.engine.methods.retain(|other| *other != method);
            self.learning.remove(method, why);
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
    method: VerifyMethod,
) -> Round<'a> {
    let context = Context::new(&engine.model, context, &[]);
    Round { context, draft, sampling, method, weighs: false }
}

/// Greedy sampling with every field set, so that the server's defaults do not matter.
fn greedy() -> Sampling {
    let set_by_client = SamplingField::ALL.into_iter().fold(SetFields::default(), SetFields::with);
    Sampling { temperature: 0.0, set_by_client, ..Sampling::default() }
}

#[cfg(test)]
mod tests;
