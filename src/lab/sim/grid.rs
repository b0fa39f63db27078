//! Known costs: compares the controller with the best fixed gamma on servers whose costs are simple
//! and known.
//!
//! Every cell is one paced server, one kind of text and one set of drafters, served to one client
//! in the same order of requests: decoded plainly, with every fixed gamma, and with the
//! controller's decisions. Each play starts with a controller that knows nothing. The first
//! requests show the cost of learning, the rest show its result.

use std::fmt::Write;
use std::sync::{Arc, Mutex};

use indicatif::ProgressBar;
use serde::Deserialize;

use super::drafter::DrafterSpec;
use super::engine::EngineSpec;
use super::permit::{self, Permit, Refused};
use super::pool;
use super::record::Record;
use super::source::Script;
use super::traffic::Stream;
use super::workloads::{self, Workload};
use super::world::{Broken, Mode, Net, Setup, World};
use foretell_core::control::regret_budget::{OVERDRAFT, REFILL, TOKENS};
use foretell_core::words::VerifyMethod;
use foretell_onnx::pace::curve::Steps;

/// Cost of a verify request in plain steps: without a draft, and for every drafted token.
pub const COSTS: [(f64, f64); 5] = [(1.1, 0.005), (1.35, 0.01), (1.35, 0.025), (1.5, 0.1), (4.0, 0.4)];
/// Seconds of a plain step.
pub const STEPS: [f64; 2] = [0.020, 0.060];
pub const GAMMAS: [usize; 5] = [2, 4, 8, 16, 31];

/// Minimum speed of the controller as a multiple of that of the best fixed gamma, after the first
/// requests.
const MIN_REACHED: f64 = 0.95;
/// Minimum speed of the controller as a multiple of plain decoding, from the first request on.
const MIN_SPEED: f64 = 0.98;
/// The same after the first requests.
const MIN_SPEED_LATER: f64 = 0.983;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Drafters {
    Lookup,
    /// `prompt_lookup` and `suffix`.
    Lookups,
    Model,
    /// `prompt_lookup` and a model.
    #[default]
    Both,
}

impl Drafters {
    /// Every set.
    pub const ALL: [Self; 4] = [Self::Lookup, Self::Lookups, Self::Model, Self::Both];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Lookup => "lookup",
            Self::Lookups => "lookups",
            Self::Model => "model",
            Self::Both => "both",
        }
    }

    const fn has_model(self) -> bool {
        matches!(self, Self::Model | Self::Both)
    }

    /// Their kinds, in the words of a policy.
    pub const fn kinds(self) -> &'static [&'static str] {
        match self {
            Self::Lookup => &[permit::PROMPT_LOOKUP],
            Self::Lookups => &[permit::PROMPT_LOOKUP, permit::SUFFIX],
            Self::Model => &[permit::MODEL_DRAFTER],
            Self::Both => &[permit::PROMPT_LOOKUP, permit::MODEL_DRAFTER],
        }
    }

    /// The permit of a session with them.
    ///
    /// # Errors
    /// A policy that is refused; this one is valid.
    pub fn permit(self) -> Result<Permit, Refused> {
        permit::of("policy", &permit::policy(self.kinds()), &[VerifyMethod::Tree], 1 << 20)
    }
}

/// Number of requests of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Requests while learning.
    pub first: usize,
    /// Requests after that, of which there are more until they have `tokens` output tokens.
    pub rest: usize,
    pub tokens: usize,
}

impl Size {
    /// Ten for learning, twenty that are judged. Of fewer than 2,000 tokens `MIN_SPEED_LATER`
    /// would leave less than what one trial may lose.
    pub const USUAL: Self = Self { first: 10, rest: 20, tokens: 2_000 };
}

/// One server with one kind of text and one set of drafters.
#[derive(Clone, Debug)]
pub struct Cell<'a> {
    pub paced: Steps,
    pub workload: &'a Workload,
    pub drafters: Drafters,
    pub permit: Permit,
}

/// Tokens per second as multiples of plain decoding.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Speed {
    /// While learning.
    pub first: f64,
    pub rest: f64,
}

/// Result of a cell.
#[derive(Clone, Debug)]
pub struct Outcome<'a> {
    pub cell: Cell<'a>,
    /// With the controller's decisions.
    pub auto: Speed,
    /// With every one of [`GAMMAS`].
    pub fixed: Vec<Speed>,
    /// Output tokens of the first requests.
    pub tokens: usize,
}

impl Outcome<'_> {
    /// The best of the fixed gammas after the first requests, and its speed; plain decoding counts
    /// as gamma 0.
    pub fn best(&self) -> (usize, f64) {
        let fixed = GAMMAS.into_iter().zip(self.fixed.iter().map(|speed| speed.rest));
        std::iter::once((0, 1.0))
            .chain(fixed)
            .fold((0, 1.0), |best, one| if one.1 > best.1 { one } else { best })
    }

    /// True if its texts are those of a real model.
    fn is_real(&self) -> bool {
        workloads::REAL.contains(&&*self.cell.workload.name)
    }

    /// The controller's speed ÷ that of the best fixed gamma, after the first requests.
    pub fn reached(&self) -> f64 {
        self.auto.rest / self.best().1
    }

    /// The controller's speed ÷ that of the best fixed gamma while it learns.
    pub fn reached_first(&self) -> f64 {
        self.auto.first / self.fixed.iter().map(|speed| speed.first).fold(1.0, f64::max)
    }

    /// True if the controller is slower than `MIN_REACHED` of the best fixed gamma, or ever slower
    /// than `MIN_SPEED` of plain decoding. While it learns it may lose the regret budget and its
    /// overdraft, which is more than `MIN_SPEED` leaves of fewer than 1,200 tokens.
    pub fn falls_short(&self) -> bool {
        let Speed { first, rest } = self.auto;
        let lost = (1.0 + OVERDRAFT) * TOKENS / self.tokens as f64;
        let allowed = 1.0 / (1.0 + REFILL + lost);
        self.reached() < MIN_REACHED || first < MIN_SPEED.min(allowed) || rest < MIN_SPEED_LATER
    }
}

pub fn servers() -> Vec<Steps> {
    let of = |(base, node), step: f64| Steps { step, base, node, growth: 0.0, prompt: step / 200.0 };
    STEPS.into_iter().flat_map(|step| COSTS.into_iter().map(move |costs| of(costs, step))).collect()
}

/// Every cell of these servers and workloads; a model drafts only where its choices are recorded.
///
/// # Errors
/// A policy that is refused; those used here are valid.
pub fn cells<'a>(servers: &[Steps], workloads: &'a [Workload]) -> Result<Vec<Cell<'a>>, Refused> {
    let permits = Drafters::ALL.map(|drafters| drafters.permit().map(|permit| (drafters, permit)));
    let permits: Vec<(Drafters, Permit)> = permits.into_iter().collect::<Result<_, _>>()?;
    let mut cells = Vec::new();
    for &paced in servers {
        for workload in workloads {
            let with = |(drafters, permit): &(Drafters, Permit)| Cell {
                paced,
                workload,
                drafters: *drafters,
                permit: permit.clone(),
            };
            let recorded = workload.scripts.iter().all(|script| script.has_model());
            let drafts = |drafters: Drafters| recorded || !drafters.has_model();
            cells.extend(permits.iter().filter(|(drafters, _)| drafts(*drafters)).map(with));
        }
    }
    Ok(cells)
}

impl<'a> Cell<'a> {
    fn setup(&self, mode: Mode, size: Size) -> Setup {
        let mut tokens = 0;
        let wanted = |&(number, script): &(usize, &Arc<Script>)| {
            let wanted = number < size.first + size.rest || tokens < size.tokens;
            tokens += if number < size.first { 0 } else { script.output.len() };
            wanted
        };
        let scripts = self.workload.scripts.iter().cycle().enumerate();
        let requests = scripts.take_while(wanted).map(|(_, script)| Arc::clone(script)).collect();
        Setup {
            drafter: Some(DrafterSpec::BUNDLED),
            net: Net::usual(),
            mode,
            ..Setup::plain(
                EngineSpec::paced(self.paced),
                self.permit.clone(),
                vec![Stream::one_client(requests)],
            )
        }
    }

    /// Seconds of the first requests and of the rest.
    ///
    /// # Errors
    /// See [`World::play`].
    pub fn play(&self, mode: Mode, size: Size) -> Result<(f64, f64), Broken> {
        let Record { served, .. } = World::play(self.setup(mode, size))?;
        let seconds =
            |served: &[super::record::Served]| served.iter().map(super::record::Served::seconds).sum();
        let (first, rest) = served.split_at(size.first.min(served.len()));
        Ok((seconds(first), seconds(rest)))
    }

    /// Plays all settings. `plain_run` is the time of plain decoding.
    fn outcome(&self, plain_run: (f64, f64), size: Size) -> Result<Outcome<'a>, Broken> {
        let speed = |mode| {
            self.play(mode, size)
                .map(|took| Speed { first: plain_run.0 / took.0, rest: plain_run.1 / took.1 })
        };
        let auto = speed(Mode::Auto)?;
        let fixed = GAMMAS.into_iter().map(|gamma| speed(Mode::Fixed(gamma))).collect::<Result<_, _>>()?;
        let first = self.workload.scripts.iter().cycle().take(size.first);
        let tokens = first.map(|script| script.output.len()).sum();
        Ok(Outcome { cell: self.clone(), auto, fixed, tokens })
    }

    /// The cell's name: costs, step in milliseconds, text and drafters.
    pub fn name(&self) -> String {
        let Steps { step, base, node, .. } = self.paced;
        let (text, drafters) = (&self.workload.name, self.drafters.name());
        format!("{base:>4} {node:>5} {:>3.0} {text:<15} {drafters:<7}", step * 1e3)
    }
}

/// Plays cells on all processors, and gives their outcomes in order; `progress` counts them.
///
/// # Errors
/// See [`World::play`].
pub fn play<'a>(cells: &[Cell<'a>], size: Size, progress: &ProgressBar) -> Result<Vec<Outcome<'a>>, Broken> {
    progress.set_length(cells.len() as u64);
    let plain_runs: Mutex<Vec<PlainRun>> = Mutex::default();
    let outcomes = pool::each(cells.len(), |number| {
        let cell = cells.get(number)?;
        let outcome = plain_run(cell, size, &plain_runs).and_then(|plain_run| cell.outcome(plain_run, size));
        progress.inc(1);
        Some(outcome)
    });
    progress.finish_and_clear();
    outcomes.into_iter().flatten().collect()
}

/// Time of plain decoding on a server with this step, for this text. It has no draft and no verify
/// request, so it is the same for all verification costs and drafters.
struct PlainRun {
    step: f64,
    text: String,
    took: (f64, f64),
}

fn plain_run(cell: &Cell<'_>, size: Size, plain_runs: &Mutex<Vec<PlainRun>>) -> Result<(f64, f64), Broken> {
    let same = |plain_run: &&PlainRun| {
        plain_run.text == cell.workload.name && (plain_run.step - cell.paced.step).abs() < 1e-12
    };
    let known = plain_runs
        .lock()
        .ok()
        .and_then(|plain_runs| plain_runs.iter().find(same).map(|plain_run| plain_run.took));
    if let Some(took) = known {
        return Ok(took);
    }
    let took = cell.play(Mode::Plain, size)?;
    if let Ok(mut plain_runs) = plain_runs.lock() {
        plain_runs.push(PlainRun { step: cell.paced.step, text: cell.workload.name.clone(), took });
    }
    Ok(took)
}

/// The outcomes as a table, with a summary at its end.
pub fn table(outcomes: &[Outcome<'_>]) -> String {
    let mut text = String::from(
        "tokens/s as multiples of plain decoding: first requests | rest; fixed gammas: rest; reached: auto ÷ best fixed, rest\n\
         base  node  ms text            drafts    auto first  rest    g=2   g=4   g=8  g=16  g=31    best reached\n",
    );
    for outcome in outcomes {
        let Speed { first, rest } = outcome.auto;
        let _ = write!(text, "{}      {first:>6.3} {rest:>5.3} ", outcome.cell.name());
        for fixed in &outcome.fixed {
            let _ = write!(text, " {:>5.2}", fixed.rest);
        }
        let (gamma, _) = outcome.best();
        let reached = outcome.reached();
        let mark = if outcome.falls_short() { " <" } else { "" };
        let _ = writeln!(text, "   {gamma:>4}   {reached:>5.3}{mark}");
    }
    for (prefix, real) in [("", false), ("real texts, ", true)] {
        for drafters in Drafters::ALL {
            let of = outcomes.iter().filter(|one| one.cell.drafters == drafters && one.is_real() == real);
            text.push_str(&summary(&format!("{prefix}{}", drafters.name()), &of.collect::<Vec<_>>()));
        }
    }
    text.push_str(&summary("all", &outcomes.iter().collect::<Vec<_>>()));
    text
}

fn summary(name: &str, outcomes: &[&Outcome<'_>]) -> String {
    if outcomes.is_empty() {
        return String::new();
    }
    let least =
        |of: &dyn Fn(&Outcome<'_>) -> f64| outcomes.iter().map(|one| of(one)).fold(f64::MAX, f64::min);
    let mean = |of: &dyn Fn(&Outcome<'_>) -> f64| {
        (outcomes.iter().map(|one| of(one).ln()).sum::<f64>() / outcomes.len() as f64).exp()
    };
    let short = outcomes.iter().filter(|outcome| outcome.reached() < MIN_REACHED).count();
    format!(
        "{name}: {} cells, reached: geometric mean {:.3}, least {:.3}, below {MIN_REACHED} in {short} (first requests: {:.3}, \
         {:.3}); least speed: first {:.3}, rest {:.3}\n",
        outcomes.len(),
        mean(&|one| one.reached()),
        least(&|one| one.reached()),
        mean(&|one| one.reached_first()),
        least(&|one| one.reached_first()),
        least(&|one| one.auto.first),
        least(&|one| one.auto.rest),
    )
}
