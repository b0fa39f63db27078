//! What calls cost, in seconds: measured, weighed, never assumed where a measurement is at hand.
//!
//! The pace of riding is kept by how many requests the engine computes at once; the time of a verify call by the plan
//! that was really used, the size of the context, that crowd and the number of draft nodes. Rest makes all of it less
//! certain and forgets none of it, and calls that lost are remembered as well and as long as calls that won.

mod ahead;
mod drafts;
mod joint;
mod pace;
mod table;

use serde::{Deserialize, Serialize};

use std::sync::Arc;

pub use ahead::Turn;
use ahead::{Offer, Overlap};
use drafts::Drafts;
use joint::Joint;
pub use pace::SIZES as CROWDS;
use pace::{Crowd, Pace};
pub use table::{CONTEXTS, NODES_MAX};
use table::{Place, Verify};

use super::belief::Belief;
use super::prospect::Prior;
use crate::units::Tick;
use crate::words::Plan;

/// Seconds of leaping, in ridden tokens, after which the pace of riding is measured again ...
const PACE_OLD: f64 = 1200.0;
/// ... or, where measuring it has been given up, is tried again ...
const PACE_GIVEN_UP: f64 = 100.0;
/// ... and the ridden tokens that it is measured over.
const PACE_OVER: usize = 4;
/// Times as many tokens are ridden in vain, beside verify calls that do not end, before that is given up.
const BESIDE: usize = 32;
/// Weight of what a probe has found, in measurements.
const PRIOR_WEIGHT: f64 = 0.5;
/// Least slope of the verify table before two points are known, in ride tokens per node.
const SLOPE: f64 = 0.02;
/// What a node of a draft is taken to cost before any call was measured, in ride tokens.
const NODE: f64 = 0.06;
/// Guessed time of a token of the model drafter before any was timed, in ride tokens.
const DRAFT: f64 = 0.15;
/// A first call that takes so many times what was expected is not explained by the switch.
const DEAR: f64 = 6.0;
/// Times what was expected that a call counts at most beside others: one hiccup is not a trend.
const OUTLIER: f64 = 3.0;
/// Seconds without a verify call after which hope for a lower cost is half of what it may become.
const HOPE: f64 = 600.0;
/// Draft nodes of a first round: what a call costs is found out by steps.
const REACH_FIRST: usize = 4;

/// What the cost of a round depends on besides its draft and the crowd.
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
}

/// What else was going on at a verify call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Beside {
    /// Draft nodes that our calls had on average that were under way with it, itself included.
    pub nodes: f64,
    /// Tokens that the model drafter computed for it, before it began.
    pub modelled: usize,
}

/// What an expected cost rests on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Basis {
    /// Nothing: a round is taken to cost a little more than a step.
    #[default]
    Guess,
    /// What a probe has found.
    Probe,
    /// Calls of sessions.
    Measured,
}

impl Basis {
    /// The name in the admin API and in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Guess => "guess",
            Self::Probe => "probe",
            Self::Measured => "measured",
        }
    }
}

/// The measured costs of one replica.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Costs {
    /// How many requests the engine computes at present, and whether some of them ride beside one that leaps.
    #[serde(skip)]
    crowd: Crowd,
    #[serde(skip)]
    riders: bool,
    /// Some of the requests are of others.
    #[serde(skip)]
    foreign: bool,
    /// Share of verify calls beside which others rode, by crowd.
    company: [Belief; pace::SIZES],
    pace: Pace,
    verify: Verify,
    /// What a node adds to all our calls together, and what a drafted token takes from the wait for the engine.
    nodes: Joint,
    wait: Joint,
    /// Share of the calls of each plan that decided nothing, by [`Plan::index`].
    undecided: [Belief; Plan::ALL.len()],
    /// Rounds that overlap.
    #[serde(skip)]
    overlap: Overlap,
    /// Times of the model drafters.
    drafts: Drafts,
    /// Extra seconds of going from ride to leap, and back, by crowd.
    switch_in: [Belief; pace::SIZES],
    switch_out: [Belief; pace::SIZES],
    /// Seconds of leaping since the pace of riding was measured, in ridden tokens, by crowd.
    leapt: [f64; pace::SIZES],
    /// Times in a row that measuring a pace was given up: each waits twice as long.
    #[serde(skip)]
    given_up: u32,
    /// Ridden tokens since the pace was last found old, by crowd.
    ridden: [usize; pace::SIZES],
    /// What a probe has found; used where nothing is measured.
    #[serde(skip)]
    prior: Option<Arc<Prior>>,
}

impl Costs {
    /// Takes what a probe has found, unless it has been taken already.
    pub fn take_prior(&mut self, prior: &Arc<Prior>) {
        if self.prior.as_ref().is_some_and(|known| Arc::ptr_eq(known, prior)) {
            return;
        }
        self.prior = Some(Arc::clone(prior));
        let token = self.ride_token_expected();
        self.verify.take_prior(prior, token, Tick::default());
    }

    /// Makes `now` the origin of time: everything is as certain as it is now.
    pub fn age(&mut self, now: Tick) {
        self.pace.age(now);
        self.verify.age(now);
        self.drafts.age(now);
        let by_crowd = self.switch_in.iter_mut().chain(&mut self.switch_out).chain(&mut self.company);
        self.undecided.iter_mut().chain(by_crowd).for_each(|belief| belief.age(now));
    }

    /// Sets how many requests the engine computes at once from now on, and whether there are riders beside one that leaps,
    /// and requests of others.
    pub fn crowded(&mut self, requests: usize, riders: bool, foreign: bool) {
        (self.crowd, self.riders, self.foreign) = (Crowd::of(requests), riders, foreign);
    }

    /// The size of the crowd at present, below [`CROWDS`].
    pub fn crowd_size(&self) -> usize {
        self.crowd.index()
    }

    /// Notes that a ride brought `tokens` tokens `seconds` after the ones before.
    pub fn rode(&mut self, seconds: f64, tokens: usize, now: Tick) {
        if self.pace_is_old() && self.ridden.get(self.crowd.index()) == Some(&0) {
            self.pace.loosen(self.crowd);
        }
        self.pace.rode(self.crowd, seconds, tokens, now);
        self.ridden_while_old(tokens, PACE_OVER);
    }

    /// Notes that a ride brought `tokens` tokens beside verify calls of others: their pace says nothing, but what is waited
    /// for does not come if it goes on like that.
    pub fn rode_beside(&mut self, tokens: usize) {
        self.ridden_while_old(tokens, PACE_OVER * BESIDE);
    }

    fn ridden_while_old(&mut self, tokens: usize, enough: usize) {
        let (old, known) = (self.pace_is_old(), self.pace.token_of(self.crowd).is_some());
        let at = self.crowd.index();
        if let (Some(leapt), Some(ridden)) = (self.leapt.get_mut(at), self.ridden.get_mut(at)) {
            *ridden = if old { *ridden + tokens } else { 0 };
            if *ridden >= enough {
                self.given_up = if known { 0 } else { (self.given_up + 1).min(10) };
                (*leapt, *ridden) =
                    (if known { 0.0 } else { -PACE_GIVEN_UP * f64::from(1 << self.given_up) }, 0);
            }
        }
    }

    /// Notes seconds of leaping: the pace of riding gets older.
    pub fn leapt(&mut self, seconds: f64) {
        let token = self.ride_token_expected();
        if let Some(leapt) = self.leapt.get_mut(self.crowd.index()) {
            *leapt += seconds / token;
        }
    }

    /// Whether the pace of riding is to be measured again, at the next ride.
    pub fn pace_is_old(&self) -> bool {
        self.leapt_here() >= self.pace_old()
    }

    /// Whether that is so overdue that a leap is worth leaving for it.
    pub fn pace_is_overdue(&self) -> bool {
        self.leapt_here() >= 4.0 * self.pace_old().max(PACE_GIVEN_UP)
    }

    /// How much leaping, in ridden tokens, makes the pace old: none where it was never measured in such a crowd. What a
    /// smaller crowd's pace says would make every round look lost.
    fn pace_old(&self) -> f64 {
        if self.pace.token_of(self.crowd).is_some() { PACE_OLD } else { 0.0 }
    }

    fn leapt_here(&self) -> f64 {
        self.leapt.get(self.crowd.index()).copied().unwrap_or(0.0)
    }

    /// Notes a verify call in the middle of leaping.
    pub fn verified(&mut self, way: Way, nodes: usize, seconds: f64, now: Tick) {
        let token = self.ride_token_expected();
        self.verify.observe(self.place(way), nodes, seconds, token, now);
        let riders = f64::from(u8::from(self.riders));
        if let Some(company) = self.company.get_mut(self.crowd.index()) {
            company.count(riders, now);
        }
    }

    /// Notes a verify call in the middle of leaping that had another one under way beside it.
    pub fn overlapped(&mut self, way: Way, nodes: usize, seconds: f64, turn: Turn, now: Tick) {
        self.overlap.observe(turn, seconds / self.verify(way, nodes).max(1e-9), now);
    }

    /// Whether it pays to send a call before the one is answered that it rests on, where that comes true with probability
    /// `alive`.
    pub fn ahead_pays(&self, way: Way, nodes: usize, alive: f64) -> bool {
        let seconds = self.verify(way, nodes);
        let idle = (self.verify(way, 0) - self.ride_token_expected()).max(0.0);
        nodes > 0 && self.overlap.pays(&Offer { alive, seconds, idle })
    }

    /// Whether it pays to let the model drafter draft for the next round, beside a call with so many nodes, where that fits
    /// with probability `alive` and then saves `waited` seconds.
    pub fn sketch_pays(&self, way: Way, nodes: usize, alive: f64, waited: f64) -> bool {
        self.overlap.sketch_pays(alive, waited / self.verify(way, nodes).max(1e-9))
    }

    /// Notes whether a call of a plan decided anything.
    pub fn decided(&mut self, plan: Plan, anything: bool, now: Tick) {
        if let Some(share) = self.undecided.get_mut(plan.index()) {
            share.count(f64::from(u8::from(!anything)), now);
        }
    }

    /// Notes the first verify call after a ride: what it took beyond what was expected is the cost of switching. It says
    /// little of calls in the middle of leaping, so a streak must go on to measure one; but one that takes longer than any
    /// switch is itself that dear, for instance because it reads the whole context.
    pub fn entered(&mut self, way: Way, nodes: usize, seconds: f64, now: Tick) {
        let expected = self.call(way, nodes);
        if !self.verify_measured(way) && seconds > DEAR * expected {
            return self.verified(way, nodes, seconds - expected, now);
        }
        let extra = (seconds - expected).max(0.0);
        let token = self.ride_token_expected();
        if let Some(belief) = self.switch_in.get_mut(self.crowd.index()) {
            belief.observe_of(extra, token, now);
        }
    }

    /// Notes the first token of a ride that followed a leap, `seconds` after it was asked for.
    pub fn left(&mut self, seconds: f64, now: Tick) {
        let belief = self.switch_out.get_mut(self.crowd.index());
        if let Some((token, belief)) = self.pace.token(self.crowd).zip(belief) {
            belief.observe_of((seconds - token).max(0.0), token, now);
        }
    }

    /// Notes a draft of the model drafter with this number ([`crate::control::Control::model`]).
    pub fn drafted(&mut self, model: u8, tokens: usize, seconds: f64, now: Tick) {
        self.drafts.drafted(model, tokens, seconds, now);
    }

    /// Notes a shadow pass of a model drafter. `read`: it had read the prompt before.
    pub fn shadowed(&mut self, model: u8, seconds: f64, read: bool, now: Tick) {
        self.drafts.shadowed(model, seconds, read, now);
    }

    /// Seconds per ridden token; `None` before four were timed.
    pub fn ride_token(&self) -> Option<f64> {
        self.pace.token(self.crowd)
    }

    /// Expected seconds until a round with `nodes` draft nodes is verified: its call, and as often as that decides
    /// nothing another one by the fallback.
    pub fn verify(&self, way: Way, nodes: usize) -> f64 {
        let undecided = self.undecided.get(way.plan.index()).and_then(Belief::known).unwrap_or(0.0);
        let again = way.fallback.filter(|_| undecided > 0.0);
        let again = again.map_or(0.0, |plan| undecided * self.call(Way::by(plan, way.context), nodes));
        self.call(way, nodes) + again
    }

    /// Expected seconds of one verify call. What was measured in another crowd is scaled by the paces of both.
    fn call(&self, way: Way, nodes: usize) -> f64 {
        self.call_beside(way, nodes, self.riders)
    }

    /// As [`Self::call`], in the given company.
    fn call_beside(&self, way: Way, nodes: usize, riders: bool) -> f64 {
        let token = self.ride_token_expected();
        let place = Place::new(way.plan, way.context, self.crowd, riders);
        let known = self.verify.seconds(place, nodes, token);
        let wait = if riders { token } else { 0.0 };
        let Some((seconds, crowd)) = known else { return self.guess(nodes) + wait };
        let paces = self.pace.token_of(self.crowd).zip(self.pace.token_of(crowd));
        seconds * paces.filter(|_| crowd != self.crowd).map_or(1.0, |(here, there)| here / there)
    }

    /// Notes what else was going on at a verify call in the middle of leaping.
    pub fn shared(&mut self, way: Way, nodes: usize, seconds: f64, beside: Beside) {
        let expected = self.verify(way, nodes);
        let seconds = seconds.min(OUTLIER * expected);
        self.nodes.observe(self.crowd, beside.nodes, seconds);
        self.wait.observe(self.crowd, beside.modelled as f64, seconds - expected);
    }

    /// What every call of ours takes longer if each has one node more, seconds; `None` where that is not known yet.
    pub fn per_node_of_all(&self) -> Option<f64> {
        Some(self.nodes.slope(self.crowd)?.max(0.0))
    }

    /// Seconds that a token of the model drafter saves of the wait for the engine, because it is drafted while the engine computes
    /// for others, and those that calls were measured to be shorter by for it.
    pub fn saved_by_drafting(&self, model: u8) -> (f64, f64) {
        let Some(slope) = self.wait.slope(self.crowd).filter(|_| self.crowd != Crowd::default()) else {
            return (0.0, 0.0);
        };
        let saved = (-slope).clamp(0.0, self.draft_token(model));
        (saved, saved * self.wait.mean(self.crowd))
    }

    /// What each node of a draft adds to a call, seconds, as measured; 0 where that is not known yet.
    pub fn per_node(&self, way: Way) -> f64 {
        self.verify.slope(self.place(way)).unwrap_or(0.0)
    }

    /// What a call is taken to cost where nothing was measured.
    fn guess(&self, nodes: usize) -> f64 {
        self.ride_token_expected() * (1.05 + NODE * nodes as f64)
    }

    /// What a call will cost a session that begins to leap, as low as it may be. Sessions that ride side by side judge
    /// alike, so that those that can leap begin together, and beside leapers no call waits for a step that is under way:
    /// whether riders stay is taken from what was seen. And what was measured long ago may be nearer to a guess than to its
    /// mean, so that a cost that was high once is tried again some day.
    pub fn hopeful(&self, way: Way, nodes: usize, now: Tick) -> f64 {
        let stay = self.company.get(self.crowd.index()).and_then(Belief::known).unwrap_or(0.0);
        let (beside, among) = (self.call_beside(way, nodes, true), self.call_beside(way, nodes, false));
        let mean = if self.riders && !self.foreign {
            stay * beside + (1.0 - stay) * among
        } else {
            self.verify(way, nodes)
        };
        let rest = self.verify.rest(self.place(way), now);
        mean + (self.guess(nodes) - mean).min(0.0) * rest / (rest + HOPE)
    }

    /// Most draft nodes whose cost can be told from what was measured: twice as many as the largest draft so far.
    pub fn reach(&self, way: Way) -> usize {
        self.verify.reach(self.place(way)).map_or(REACH_FIRST, |reach| (2 * reach).max(REACH_FIRST))
    }

    /// What the expected cost of calls by this way rests on.
    pub fn basis(&self, way: Way) -> Basis {
        match self.verify.reach(self.place(way)) {
            None => Basis::Guess,
            Some(_) if self.verify.is_measured(self.place(way)) => Basis::Measured,
            Some(_) => Basis::Probe,
        }
    }

    /// Whether a call of this plan with a context of this size in this crowd was measured, by a session or a probe.
    pub fn verify_measured(&self, way: Way) -> bool {
        self.verify.is_known(self.place(way))
    }

    fn place(&self, way: Way) -> Place {
        Place::new(way.plan, way.context, self.crowd, self.riders)
    }

    /// Expected seconds per token of a model drafter. Before that is measured, a guess that no shadow pass
    /// contradicts: reading a few tokens at once takes no less than saying one.
    pub fn draft_token(&self, model: u8) -> f64 {
        let (times, guess) = (self.drafts.of(model), || self.ride_token_expected() * DRAFT);
        times.token.known().unwrap_or_else(|| times.chunk.known().unwrap_or(f64::MAX).min(guess()))
    }

    /// Expected seconds of a pass in which a model drafter reads the prompt; `None` before the first.
    pub fn reading(&self, model: u8) -> Option<f64> {
        self.drafts.of(model).reading.known()
    }

    /// Expected seconds of a shadow pass of a model drafter; `None` before the first.
    pub fn shadow_pass(&self, model: u8) -> Option<f64> {
        self.drafts.of(model).shadow.known()
    }

    /// Expected extra seconds of going from ride to leap.
    pub fn switch_in(&self) -> f64 {
        self.switch(&self.switch_in, self.prior.as_ref().and_then(|prior| prior.switch_in))
    }

    /// Expected extra seconds of going from leap to ride.
    pub fn switch_out(&self) -> f64 {
        self.switch(&self.switch_out, self.prior.as_ref().and_then(|prior| prior.switch_out))
    }

    /// What was measured in this crowd, else in the nearest smaller one: a queue that a large crowd has says nothing of a
    /// small one. Else what a probe has found, else a ridden token.
    fn switch(&self, measured: &[Belief], prior: Option<f64>) -> f64 {
        let mut smaller = measured.iter().take(self.crowd.index() + 1).rev();
        smaller.find_map(Belief::known).or(prior).unwrap_or_else(|| self.ride_token_expected())
    }

    /// Whether cancelling a ride takes so long that rides should be asked for in bounded pieces.
    pub fn cancels_slowly(&self) -> bool {
        let cancel = self.prior.as_ref().and_then(|prior| prior.cancel);
        cancel.is_some_and(|cancel| cancel > 3.0 * self.ride_token_expected())
    }

    /// Seconds per ridden token, measured here or by a probe, or a guess before anything is known.
    pub fn ride_token_expected(&self) -> f64 {
        let prior = || self.prior.as_ref()?.token;
        self.ride_token().or_else(prior).unwrap_or(0.02)
    }
}

#[cfg(test)]
mod tests;
