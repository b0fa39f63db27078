//! Measurements and conclusions of a probe from the answers.

use super::prospect::{Measured, Timed};
use super::script::Task;
use super::{Cache, Findings, SEEDED};
use crate::{Engine, Noise};
use foretell_core::units::TokenId;
use foretell_core::words::VerifyMethod;

/// A call with a cached prefix takes at most this share of the first one's time.
const WARM: f64 = 0.6;
/// A call that takes at least this share has found nothing cached.
const COLD: f64 = 0.85;
/// Times below this, in seconds, are too noisy to compare.
const FELT: f64 = 0.002;
/// Calls on separate connections that must find the text cached.
const FRESH: usize = 3;
const TOO_FEW: &str = "stopped because too few of its calls were answered";
/// Tokens within which two seeds must differ; otherwise the text is too certain to judge the noise.
const PART: usize = 3;

/// A round with a text that the engine has seen.
struct RepeatedRound {
    method: VerifyMethod,
    nodes: usize,
    fresh: bool,
    seconds: f64,
    /// Cached and all prompt tokens of it; `None` if the engine does not report them.
    cached: Option<(usize, usize)>,
}

#[derive(Default)]
pub(super) struct Learning {
    of_one: bool,
    measured: Measured,
    /// Tokens and seconds of the first call over a text.
    cold: Option<(usize, f64)>,
    repeated: Vec<RepeatedRound>,
    /// Context and seconds of the last plain request that was not streamed and returned one token.
    one: Option<(usize, f64)>,
    /// Seconds of the round after a stream that was aborted early.
    after: Option<f64>,
    /// Output of the uncut run with the first seed.
    uncut: Option<Vec<TokenId>>,
    /// Output of the uncut run with the second seed.
    other: Option<Vec<TokenId>>,
    /// For each continued seeded run: true if it gave the rest of the uncut one.
    continued: Vec<bool>,
    cache: Cache,
    several_engines: bool,
    unchecked: Option<String>,
    /// Reason why it ended before its script.
    stopped: Option<String>,
    removed: Vec<(VerifyMethod, String)>,
    notes: Vec<String>,
}

impl Learning {
    pub(super) fn new(of_one: bool) -> Self {
        Self { of_one, ..Self::default() }
    }

    pub(super) fn note(&mut self, what: &str) {
        self.notes.push(what.to_owned());
    }

    /// Records that it ends before its script.
    pub(super) fn stop(&mut self, why: &str) {
        self.note(why);
        self.stopped = Some(why.to_owned());
    }

    pub(super) fn remove(&mut self, method: VerifyMethod, why: &str) {
        self.measured.verify.retain(|timed| timed.method != method);
        self.removed.push((method, why.to_owned()));
    }

    pub(super) fn round(
        &mut self,
        task: &Task,
        method: VerifyMethod,
        context: usize,
        nodes: usize,
        seconds: f64,
        computed: Option<u32>,
    ) {
        let all = method.prompt_tokens(context, nodes);
        let cached = computed.map(|computed| (all.saturating_sub(computed as usize), all));
        let repeated = |fresh| RepeatedRound { method, nodes, fresh, seconds, cached };
        match task {
            Task::Cold(_) => self.cold = Some((context, seconds)),
            Task::Fresh(_) => self.repeated.push(repeated(true)),
            Task::After(_) => self.after = Some(seconds),
            Task::Round { .. } => {
                self.measured.verify.push(Timed { method, context, nodes, seconds, computed });
                if self.cold.is_some_and(|(first, _)| context > first) {
                    self.repeated.push(repeated(false));
                }
            }
            Task::Same { .. }
            | Task::Warm { .. }
            | Task::Plain { .. }
            | Task::Unstreamed { .. }
            | Task::Seeded { .. } => {}
        }
    }

    pub(super) fn plain_request(&mut self, context: usize, tokens: &[(f64, Vec<TokenId>)]) {
        let [(first, brought), rest @ ..] = tokens else { return };
        let Some((last, _)) = rest.last() else {
            return self.unstreamed_answer(context, *first, brought.len());
        };
        let count: usize = rest.iter().map(|(_, tokens)| tokens.len()).sum();
        let token = (last - first) / count.max(1) as f64;
        self.measured.token.push((context, token));
        self.measured.switch_out.get_or_insert((first - token).max(0.0));
    }

    /// A plain request that was not streamed, of one token or, after that, of several.
    fn unstreamed_answer(&mut self, context: usize, seconds: f64, tokens: usize) {
        if tokens == 1 {
            self.one = Some((context, seconds));
        } else if let Some((_, one)) = self.one.take() {
            let token = ((seconds - one) / (tokens - 1) as f64).max(0.0);
            self.measured.token.push((context, token));
            self.measured.switch_out.get_or_insert((one - token).max(0.0));
        }
    }

    /// The output from which a seeded run continues at `cut`.
    pub(super) fn seeded(&self, cut: usize) -> Option<Vec<TokenId>> {
        if cut == 0 {
            return Some(Vec::new());
        }
        self.uncut.as_ref()?.get(..cut).map(<[TokenId]>::to_vec)
    }

    pub(super) fn seeded_run(&mut self, seed: usize, cut: usize, run: Vec<TokenId>) {
        match (seed, cut) {
            (0, 0) => self.uncut = Some(run),
            (_, 0) => self.other = Some(run),
            (_, cut) => {
                let rest = self.uncut.as_ref().and_then(|uncut| uncut.get(cut..));
                self.continued.push(rest.is_some_and(|rest| rest == run.as_slice()));
            }
        }
    }

    /// Writes the conclusions into the engine's description.
    pub(super) fn conclude(&mut self, engine: &mut Engine) {
        self.conclude_cache();
        engine.cache.works = self.cache.works.or(engine.cache.works);
        self.conclude_methods(engine);
        if self.is_placed() {
            engine.noise = Noise::Position;
        } else if !self.continued.is_empty() && self.continued.iter().all(|same| *same) {
            self.note("seeds: the text was too certain to find the inputs of the noise");
        }
        let round = |timed: &&RepeatedRound| timed.nodes == 0 && !timed.fresh;
        let usual =
            self.repeated.iter().filter(round).map(|repeated| repeated.seconds).fold(f64::MAX, f64::min);
        let extra = if usual < f64::MAX { self.after.map(|after| (after - usual).max(0.0)) } else { None };
        self.measured.switch_in = extra;
        self.measured.cancel = extra;
    }

    /// True if every cut of a seeded run continued as the uncut one, while another seed soon gave
    /// another text.
    fn is_placed(&self) -> bool {
        let (Some(uncut), Some(other)) = (&self.uncut, &self.other) else { return false };
        let parted = uncut.get(..PART).zip(other.get(..PART)).is_some_and(|(one, other)| one != other);
        let full = uncut.len() == SEEDED as usize;
        parted && full && self.continued.len() >= 3 && self.continued.iter().all(|same| *same)
    }

    fn conclude_cache(&mut self) {
        let counts: Vec<usize> =
            self.repeated.iter().filter_map(|repeated| Some(repeated.cached?.0)).collect();
        let warm =
            self.repeated.iter().filter(|repeated| repeated.nodes == 0).map(|repeated| repeated.seconds);
        let warm = warm.min_by(f64::total_cmp);
        let cold = self.cold.map(|(_, seconds)| seconds);
        let by_time = |seconds: f64| match cold {
            Some(cold) if cold >= FELT && seconds <= cold * WARM => Some(true),
            Some(cold) if cold >= FELT && seconds >= cold * COLD => Some(false),
            _ => None,
        };
        let works = if counts.is_empty() {
            warm.and_then(by_time)
        } else {
            Some(counts.iter().any(|&cached| cached > 0))
        };
        let shows = |repeated: &RepeatedRound| match repeated.cached {
            Some((cached, _)) => cached > 0,
            None => by_time(repeated.seconds) == Some(true),
        };
        let fresh: Vec<bool> = self.repeated.iter().filter(|repeated| repeated.fresh).map(shows).collect();
        let mixed = counts.contains(&0) && counts.iter().any(|&cached| cached > 0);
        self.cache = Cache { works, reported: !counts.is_empty(), cold, warm };
        self.several_engines = mixed || (!self.of_one && fresh.contains(&false));
        // Too few answers show nothing, least of all several engines.
        let open = !self.of_one && !self.several_engines && fresh.len() < FRESH;
        self.unchecked = open.then(|| self.stopped.take().unwrap_or_else(|| TOO_FEW.to_owned()));
    }

    /// Removes verification methods for which the engine computes every prompt anew.
    fn conclude_methods(&mut self, engine: &mut Engine) {
        let anew = |repeated: &&RepeatedRound| {
            let much = repeated.cached.is_some_and(|(cached, all)| 2 * cached < all);
            repeated.nodes >= 2 && !repeated.fresh && much
        };
        let last = self.repeated.iter().rev().find(|repeated| repeated.method == VerifyMethod::FanOut);
        if let Some(why) = engine.quirks().cache_setting
            && last.as_ref().is_some_and(anew)
        {
            for method in std::mem::take(&mut engine.methods) {
                self.remove(method, why);
            }
        }
    }

    pub(super) fn findings(self, engine: Engine, calls: u32) -> Findings {
        Findings {
            engine,
            measured: self.measured,
            cache: self.cache,
            several_engines: self.several_engines,
            unchecked: self.unchecked,
            removed: self.removed,
            notes: self.notes,
            calls,
        }
    }
}
