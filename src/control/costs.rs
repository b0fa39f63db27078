//! What calls cost, in seconds: measured, decayed, never assumed where a measurement is at hand.
//!
//! Time per ridden token is (last − first) / (n − 1) over every stretch of riding, so the wait for a first
//! token never counts. The time of a verify call is booked to the plan that was really used, the size of the
//! context and the number of draft nodes. What has not been measured for a while is forgotten, so that a bad moment
//! does not close the door for good; every trial that loses doubles that while, so that a bad backend is not tried
//! for ever.

mod table;

use std::sync::Arc;

pub use table::{CONTEXTS, NODES_MAX};
use table::{Place, Verify};

use super::prospect::Prior;
use crate::units::Tick;
use crate::words::Plan;

/// Observations that a mean remembers: it adapts within a handful.
const MEMORY: f64 = 8.0;
/// An observation counts at most this multiple of a settled mean: one hiccup is not a trend.
const OUTLIER: f64 = 3.0;
/// A gap counts at most as so many tokens more than it brought: bursts are normal, a stalled network is not
/// the pace of the engine.
const PAUSE_TOKENS: f64 = 24.0;
/// Seconds without a verify call after which measurements are forgotten ...
const FORGET: f64 = 30.0;
/// ... and the most seconds, after trials that lost: each doubles the time.
const FORGET_MOST: f64 = 960.0;
/// Leapt tokens after which the pace of riding is measured again ...
const PACE_OLD: f64 = 1_000.0;
/// ... and the ridden tokens that it is measured over.
const PACE_OVER: f64 = 16.0;
/// Weight of what a probe has found, in measurements.
const PRIOR_WEIGHT: f64 = 0.5;
/// Slope of the verify table before two points are known, in ride tokens per node.
const SLOPE: f64 = 0.06;

/// Guessed time of a token of the model drafter before any was timed, in ride tokens.
const DRAFT: f64 = 0.15;

/// A mean that forgets, in seconds or as a share; `weight` is the number of observations, at most [`MEMORY`].
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    value: f64,
    weight: f64,
}

impl Mean {
    fn observe(&mut self, seconds: f64) {
        if !seconds.is_finite() || seconds < 0.0 {
            return;
        }
        let seconds = if self.weight >= 3.0 { seconds.min(self.value * OUTLIER) } else { seconds };
        self.weight = (self.weight + 1.0).min(MEMORY);
        self.value += (seconds - self.value) / self.weight.max(1.0);
    }

    /// As [`Self::observe`], for a share, which has no outliers.
    fn count(&mut self, value: f64) {
        self.weight = (self.weight + 1.0).min(MEMORY);
        self.value += (value - self.value) / self.weight;
    }

    fn known(self) -> Option<f64> {
        (self.weight >= 0.5).then_some(self.value)
    }
}

/// What the cost of a round depends on besides its draft.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    /// How the draft is verified.
    pub plan: Plan,
    /// The plan that is used after it where it decides nothing; `None` if there is none.
    pub fallback: Option<Plan>,
    /// Tokens of the context.
    pub context: usize,
}

impl Way {
    /// By this plan alone.
    pub const fn by(plan: Plan, context: usize) -> Self {
        Self { plan, fallback: None, context }
    }

    fn place(self) -> Place {
        Place::new(self.plan, self.context)
    }
}

/// The measured costs of one replica.
#[derive(Debug)]
pub struct Costs {
    /// Decayed sums of the seconds and tokens of riding.
    ride_seconds: f64,
    ride_tokens: f64,
    verify: Verify,
    /// Share of the calls of each plan that decided nothing, by [`Plan::index`].
    undecided: [Mean; Plan::ALL.len()],
    /// Seconds per token of the model drafter.
    draft: Mean,
    /// Seconds of a shadow pass.
    shadow: Mean,
    /// Seconds of shadow passes of a drafter that had read the prompt before; never forgotten, it is a bound only.
    chunk: Mean,
    /// Extra seconds of going from ride to leap, and back.
    switch_in: Mean,
    switch_out: Mean,
    /// Seconds that a cancelled call takes to be gone.
    cancel: Mean,
    /// When a verify call was noted last.
    touched: Tick,
    /// Seconds for which unused measurements are kept.
    forget: f64,
    /// Leapt tokens that riding has not yet made up for, and whether the pace is due.
    leapt: f64,
    pace_old: bool,
    /// What a probe has found; used where nothing is measured.
    prior: Option<Arc<Prior>>,
}

impl Default for Costs {
    fn default() -> Self {
        Self {
            ride_seconds: 0.0,
            ride_tokens: 0.0,
            verify: Verify::default(),
            undecided: [Mean::default(); Plan::ALL.len()],
            draft: Mean::default(),
            shadow: Mean::default(),
            chunk: Mean::default(),
            switch_in: Mean::default(),
            switch_out: Mean::default(),
            cancel: Mean::default(),
            touched: Tick::default(),
            forget: FORGET,
            leapt: 0.0,
            pace_old: false,
            prior: None,
        }
    }
}

impl Costs {
    /// Takes what a probe has found, unless it has been taken already.
    pub fn take_prior(&mut self, prior: &Arc<Prior>) {
        if self.prior.as_ref().is_some_and(|known| Arc::ptr_eq(known, prior)) {
            return;
        }
        self.prior = Some(Arc::clone(prior));
        let slope = self.ride_token_expected() * SLOPE;
        self.verify.take_prior(prior, slope);
    }

    /// Notes that a ride brought `tokens` tokens `seconds` after the ones before.
    pub fn rode(&mut self, seconds: f64, tokens: usize) {
        if tokens == 0 || !seconds.is_finite() {
            return;
        }
        let tokens = tokens as f64;
        let seconds = match self.ride_token() {
            Some(mean) if self.ride_tokens >= 8.0 => seconds.min(mean * (tokens + PAUSE_TOKENS)),
            _ => seconds,
        };
        let keep = 0.98_f64.powf(tokens.min(64.0));
        self.ride_seconds = self.ride_seconds * keep + seconds;
        self.ride_tokens = self.ride_tokens * keep + tokens;
        self.leapt = (self.leapt - tokens * PACE_OLD / PACE_OVER).max(0.0);
        self.pace_old &= self.leapt > 0.0;
    }

    /// Notes tokens that came by leaping: the pace of riding gets older.
    pub fn leapt(&mut self, tokens: usize) {
        self.leapt += tokens as f64;
        self.pace_old |= self.leapt >= PACE_OLD;
    }

    /// Whether the pace of riding is to be measured again.
    pub fn pace_is_old(&self) -> bool {
        self.pace_old
    }

    /// Notes how a stretch of leaping ended: what was learnt from one that lost is kept for longer.
    pub fn streak_ended(&mut self, lost: bool) {
        self.forget = if lost { (self.forget * 2.0).min(FORGET_MOST) } else { FORGET };
    }

    /// Notes a verify call in the middle of leaping.
    pub fn verified(&mut self, way: Way, nodes: usize, seconds: f64, now: Tick) {
        self.fade(now);
        self.touched = now;
        let slope = self.ride_token_expected() * SLOPE;
        self.verify.observe(way.place(), nodes, seconds, slope, now, self.forget);
    }

    /// Notes whether a call of a plan decided anything.
    pub fn decided(&mut self, plan: Plan, anything: bool) {
        if let Some(share) = self.undecided.get_mut(plan.index()) {
            share.count(f64::from(u8::from(!anything)));
        }
    }

    /// Notes the first verify call after a ride: what it took beyond the table is the cost of switching.
    /// Before the table knows anything, it is taken for a verify call like any other.
    pub fn entered(&mut self, way: Way, nodes: usize, seconds: f64, now: Tick) {
        if self.verify_measured(way) {
            let extra = (seconds - self.call(way, nodes)).max(0.0);
            self.switch_in.observe(extra);
        } else {
            let assumed = (seconds - self.switch_in()).max(seconds * 0.5);
            self.verified(way, nodes, assumed, now);
        }
    }

    /// Notes the first token of a ride that followed a leap, `seconds` after it was asked for.
    pub fn left(&mut self, seconds: f64) {
        if let Some(token) = self.ride_token() {
            self.switch_out.observe((seconds - token).max(0.0));
        }
    }

    /// Notes a draft of the model drafter.
    pub fn drafted(&mut self, tokens: usize, seconds: f64) {
        self.draft.observe(seconds / tokens.max(1) as f64);
    }

    /// Notes a shadow pass of the model drafter. `read`: it had read the prompt before.
    pub fn shadowed(&mut self, seconds: f64, read: bool) {
        self.shadow.observe(seconds);
        if read {
            self.chunk.observe(seconds);
        }
    }

    /// Notes after how many seconds a cancelled call was gone.
    pub fn cancelled(&mut self, seconds: f64, _now: Tick) {
        self.cancel.observe(seconds);
    }

    /// Forgets measurements that no call has refreshed for long. Cheap; called at every decision.
    pub fn fade(&mut self, now: Tick) {
        if self.verify.is_measured() && now.seconds_since(self.touched) >= self.forget {
            let slope = self.ride_token_expected() * SLOPE;
            self.verify.forget(slope);
            self.draft = Mean::default();
            self.switch_in = Mean::default();
            self.switch_out = Mean::default();
        }
    }

    /// Seconds per ridden token; `None` before four were timed.
    pub fn ride_token(&self) -> Option<f64> {
        (self.ride_tokens >= 4.0).then(|| (self.ride_seconds / self.ride_tokens).max(1e-7))
    }

    /// Expected seconds until a round with `nodes` draft nodes is verified: its call, and as often as that decides
    /// nothing another one by the fallback.
    pub fn verify(&self, way: Way, nodes: usize) -> f64 {
        let undecided = self.undecided.get(way.plan.index()).and_then(|share| share.known()).unwrap_or(0.0);
        let again = way.fallback.filter(|_| undecided > 0.0);
        let again = again.map_or(0.0, |plan| undecided * self.call(Way::by(plan, way.context), nodes));
        self.call(way, nodes) + again
    }

    /// Expected seconds of one verify call.
    fn call(&self, way: Way, nodes: usize) -> f64 {
        let guess = || self.ride_token_expected() * (1.05 + SLOPE * nodes as f64);
        self.verify.seconds(way.place(), nodes).unwrap_or_else(guess)
    }

    /// Whether a call of this plan with a context of this size was measured, by a session or a probe.
    pub fn verify_measured(&self, way: Way) -> bool {
        self.verify.is_known(way.place())
    }

    /// Expected seconds per token of the model drafter. Before that is measured, a guess that no shadow pass
    /// contradicts: reading a few tokens at once takes no less than saying one.
    pub fn draft_token(&self) -> f64 {
        let guess = || self.ride_token_expected() * DRAFT;
        self.draft.known().unwrap_or_else(|| self.chunk.known().unwrap_or(f64::MAX).min(guess()))
    }

    /// Measured seconds per token of the model drafter; `None` before the first draft.
    pub fn draft_token_measured(&self) -> Option<f64> {
        self.draft.known()
    }

    /// Expected seconds of a shadow pass; `None` before the first.
    pub fn shadow_pass(&self) -> Option<f64> {
        self.shadow.known()
    }

    /// Expected extra seconds of going from ride to leap.
    pub fn switch_in(&self) -> f64 {
        let prior = || self.prior.as_ref()?.switch_in;
        self.switch_in.known().or_else(prior).unwrap_or_else(|| self.ride_token_expected())
    }

    /// Expected extra seconds of going from leap to ride.
    pub fn switch_out(&self) -> f64 {
        let prior = || self.prior.as_ref()?.switch_out;
        self.switch_out.known().or_else(prior).unwrap_or_else(|| self.ride_token_expected())
    }

    /// Whether cancelling a ride takes so long that rides should be asked for in bounded pieces.
    pub fn cancels_slowly(&self) -> bool {
        let prior = || self.prior.as_ref()?.cancel;
        self.cancel.known().or_else(prior).is_some_and(|cancel| cancel > 3.0 * self.ride_token_expected())
    }

    /// Seconds per ridden token, measured here or by a probe, or a guess before anything is known.
    pub fn ride_token_expected(&self) -> f64 {
        let prior = || self.prior.as_ref()?.token;
        self.ride_token().or_else(prior).unwrap_or(0.02)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::prospect::Curve;

    const TREE: Way = Way::by(Plan::Tree, 40);
    const SCORE: Way = Way::by(Plan::Score, 40);

    fn riding_at(token: f64) -> Costs {
        let mut costs = Costs::default();
        (0..20).for_each(|_| costs.rode(token, 1));
        costs
    }

    #[test]
    fn tokens_that_come_in_bursts_are_timed_as_last_less_first_over_n_less_one() {
        let mut costs = Costs::default();
        for _ in 0..40 {
            costs.rode(0.040, 1);
            costs.rode(0.0, 3);
        }
        let token = costs.ride_token().expect("timed");
        assert!((token - 0.010).abs() < 0.001, "{token}");
    }

    #[test]
    fn the_table_is_monotone_and_interpolates() {
        let mut costs = riding_at(0.010);
        for _ in 0..10 {
            costs.verified(TREE, 1, 0.011, Tick(0));
            costs.verified(TREE, 5, 0.015, Tick(0));
            costs.verified(TREE, 3, 0.010, Tick(0));
        }
        assert!((costs.verify(TREE, 5) - 0.015).abs() < 1e-9);
        assert!((costs.verify(TREE, 4) - 0.01275).abs() < 1e-9, "{}", costs.verify(TREE, 4));
        assert!((0..NODES_MAX).all(|n| costs.verify(TREE, n) <= costs.verify(TREE, n + 1) + 1e-12));
    }

    #[test]
    fn a_changed_cost_is_learnt_within_a_handful_of_rounds() {
        let mut costs = riding_at(0.010);
        (0..20).for_each(|_| costs.verified(TREE, 4, 0.012, Tick(0)));
        (0..10).for_each(|_| costs.verified(TREE, 4, 0.030, Tick(0)));
        assert!(costs.verify(TREE, 4) > 0.024, "{}", costs.verify(TREE, 4));
    }

    #[test]
    fn what_is_not_used_is_forgotten_later_after_every_trial_that_lost() {
        let after = |seconds: u64| Tick(seconds * 1_000_000);
        let mut costs = riding_at(0.010);
        costs.verified(TREE, 4, 0.9, after(0));
        costs.fade(after(29));
        assert!(costs.verify(TREE, 4) > 0.5);
        costs.fade(after(31));
        assert!(costs.verify(TREE, 4) < 0.02 && !costs.verify_measured(TREE));
        costs.verified(TREE, 4, 0.9, after(31));
        costs.streak_ended(true);
        costs.fade(after(80));
        assert!(costs.verify_measured(TREE));
        costs.fade(after(92));
        assert!(!costs.verify_measured(TREE));
    }

    fn probed() -> Arc<Prior> {
        let mut prior = Prior { switch_in: Some(0.03), token: Some(0.01), ..Prior::default() };
        let points = vec![(0, 0.010), (4, 0.014), (8, 0.018)];
        prior.verify[Plan::Score.index()] = vec![Curve { context: 40, points }];
        Arc::new(prior)
    }

    #[test]
    fn what_a_probe_found_holds_until_something_is_measured_and_again_when_that_is_forgotten() {
        let after = |seconds: u64| Tick(seconds * 1_000_000);
        let mut costs = riding_at(0.010);
        costs.take_prior(&probed());
        assert!(costs.verify_measured(SCORE) && !costs.verify_measured(Way::by(Plan::FanOut, 40)));
        assert!((costs.verify(SCORE, 6) - 0.016).abs() < 1e-9);
        assert!((costs.switch_in() - 0.03).abs() < 1e-9);
        (0..8).for_each(|_| costs.verified(SCORE, 4, 0.028, after(0)));
        assert!((costs.verify(SCORE, 4) - 0.028).abs() < 1e-9);
        // Twice the prior there, so twice the prior elsewhere.
        assert!((costs.verify(SCORE, 8) - 0.036).abs() < 1e-9, "{}", costs.verify(SCORE, 8));
        costs.fade(after(31));
        assert!((costs.verify(SCORE, 4) - 0.014).abs() < 1e-9);
    }

    #[test]
    fn contexts_of_another_size_have_costs_of_their_own_and_begin_with_the_nearest() {
        let (short, long) = (Way::by(Plan::Score, 40), Way::by(Plan::Score, 1_000));
        let mut costs = riding_at(0.010);
        (0..8).for_each(|_| costs.verified(short, 4, 0.012, Tick(0)));
        assert!((costs.verify(long, 4) - 0.012).abs() < 1e-9, "nothing else is known");
        assert!(costs.verify_measured(short) && !costs.verify_measured(long));
        (0..8).for_each(|_| costs.verified(long, 4, 0.036, Tick(0)));
        assert!((costs.verify(short, 4) - 0.012).abs() < 1e-9);
        assert!((costs.verify(long, 4) - 0.036).abs() < 1e-9);
        let (one, three) = (costs.verify(short, 8), costs.verify(long, 8));
        assert!(
            (three / one - 3.0).abs() < 0.1,
            "three times the cost there, so three times elsewhere: {one} {three}"
        );
    }

    #[test]
    fn a_probe_of_two_contexts_is_believed_at_each() {
        let curve = |context, seconds| Curve { context, points: vec![(0, seconds), (8, seconds * 2.0)] };
        let mut prior = Prior { token: Some(0.01), ..Prior::default() };
        prior.verify[Plan::Score.index()] = vec![curve(40, 0.010), curve(1_000, 0.030)];
        let mut costs = Costs::default();
        costs.take_prior(&Arc::new(prior));
        let at = |context| costs.verify(Way::by(Plan::Score, context), 8);
        assert!(
            (at(40) - 0.020).abs() < 1e-9
                && (at(1_000) - 0.060).abs() < 1e-9
                && (at(9_000) - 0.060).abs() < 1e-9
        );
    }

    #[test]
    fn a_plan_that_leaves_half_undecided_costs_half_a_call_of_its_fallback_more() {
        let way = Way { fallback: Some(Plan::FanOut), ..SCORE };
        let mut costs = riding_at(0.010);
        costs.verified(SCORE, 4, 0.012, Tick(0));
        costs.verified(Way::by(Plan::FanOut, 40), 4, 0.050, Tick(0));
        assert!((costs.verify(way, 4) - 0.012).abs() < 1e-9, "no call was seen to decide nothing");
        (0..100).for_each(|round| costs.decided(Plan::Score, round % 2 == 0));
        assert!((costs.verify(way, 4) - 0.037).abs() < 0.005, "{}", costs.verify(way, 4));
        assert!((costs.verify(SCORE, 4) - 0.012).abs() < 1e-9, "without a fallback the round is over");
    }

    #[test]
    fn a_prior_does_not_make_what_was_measured_fade() {
        let mut costs = riding_at(0.010);
        costs.take_prior(&probed());
        costs.drafted(1, 0.002);
        costs.fade(Tick(100_000_000));
        assert_eq!(costs.draft_token_measured(), Some(0.002));
    }

    #[test]
    fn a_drafter_that_reads_fast_is_not_taken_for_slow() {
        let mut costs = riding_at(0.1);
        assert!((costs.draft_token() - 0.015).abs() < 1e-9, "a guess");
        costs.shadowed(0.2, false);
        assert!((costs.draft_token() - 0.015).abs() < 1e-9, "that pass read the prompt");
        costs.shadowed(0.002, true);
        assert!((costs.draft_token() - 0.002).abs() < 1e-9);
        costs.drafted(4, 0.012);
        assert!((costs.draft_token() - 0.003).abs() < 1e-9, "measured");
    }

    #[test]
    fn after_a_thousand_leapt_tokens_sixteen_are_ridden() {
        let mut costs = riding_at(0.010);
        costs.leapt(999);
        assert!(!costs.pace_is_old());
        costs.leapt(1);
        (0..15).for_each(|_| costs.rode(0.010, 1));
        assert!(costs.pace_is_old());
        costs.rode(0.010, 1);
        assert!(!costs.pace_is_old());
    }
}
