//! Adaptive control: survival probabilities of drafts, costs of requests, and the choice between
//! speculation and plain decoding.
//!
//! PURE. One [`Control`] per engine start, shared by all its sessions behind a short lock: sessions
//! note their measurements and ask for predictions. New measurements weigh more than old ones, so a
//! wrong estimate is corrected within a handful of rounds; the total cost of wrong estimates is
//! bounded by a [`RegretBudget`].

pub mod budget;
pub mod chooser;
pub mod costs;
pub mod drift;
pub mod forecast;
pub mod gates;
pub mod groups;
pub mod learnt_costs;
mod mean;
pub mod pairs;
pub mod prior;
pub mod round_costs;
pub mod rounds;
pub mod shared;
pub mod state;
pub mod survival;
pub mod tolerance;

pub use budget::Budget;
pub use chooser::{MARGIN, Outlook, Quote, best_cut};
pub use costs::{Basis, Costs, Disturbance, Shared, SharedCosts, VerifyLine, Way};
pub use drift::DriftPrices;
pub use forecast::{Forecast, Prospective, forecast};
pub use foretell_control::regret_budget::{self, RegretBudget};
pub use learnt_costs::LearntCosts;
pub use prior::{Prior, Probed};
pub use round_costs::RoundCosts;
pub use rounds::{Round, Rounds, Sums, Value};
pub use shared::SharedModel;
pub use state::{Awaited, Class, Concurrency, EngineStartState, ReplicaState};
pub use survival::{Survival, TemperatureBucket, Tuning};
pub use tolerance::Tolerance;

use std::collections::VecDeque;
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use self::gates::Signal;
use crate::units::Tick;
use crate::words::VerifyMethod;

/// Measurements of verify requests that show what a draft token takes from others.
const MEASURED: f64 = 8.0;
/// Draft tokens of the first verify requests beyond those that have to be accepted to pay for an
/// empty one: what they lose at any cost must leave some of the regret budget.
const FIRST: f64 = 5.0;
/// Draft tokens that one request may have whatever first tokens are delayed by.
const FEW: usize = 4;
/// Most that a request may take of the draft tokens allowed in flight, in equal parts of them.
const PARTS: f64 = 2.0;

/// The state of a replica and of its engine start, which sessions read and write.
#[derive(Debug)]
pub struct Measurements<'a> {
    /// Survival probabilities of drafted tokens.
    pub survival: &'a mut Survival,
    /// Costs of requests.
    pub costs: &'a mut Costs,
    /// Seconds that speculation may still lose.
    pub regret_budget: &'a mut RegretBudget,
    /// The requests that the engine computes.
    pub concurrency: &'a mut Concurrency,
    /// Seconds that rejected draft tokens may still take while requests of others are in flight.
    pub budget: &'a mut Budget,
    /// Rounds by class of requests.
    pub classes: &'a mut state::Classes,
    /// Prices of drift.
    pub drift: &'a mut DriftPrices,
    length: &'a mut state::Length,
}

impl Measurements<'_> {
    /// Sets the share of the free sequences, 0 to 1, that verify requests by fan-out may take.
    pub fn allow_slots(&mut self, share: f64) {
        self.concurrency.allow(share);
    }

    /// Applies a change of the concurrency: one request of ours more or less, or a load report of
    /// the engine ([`Self::set_signal`]).
    fn concurrency_changes(&mut self, change: impl FnOnce(&mut Concurrency)) {
        change(self.concurrency);
        self.costs.set_concurrency(self.concurrency.requests());
    }

    /// Takes a load report of the engine.
    pub fn set_signal(&mut self, signal: &Signal) {
        self.concurrency_changes(|concurrency| concurrency.set_signal(signal));
    }

    /// The load with which a verify request is expected to share the engine.
    pub fn shares(&self) -> Shared {
        let others = self.concurrency.others() > 0;
        let usual = self.costs.shares();
        Shared { waits: if others { 1.0 } else { usual.waits }, ..usual }
    }

    /// Seconds that all requests of others together lose by each draft token of a verify request:
    /// its computation. The wait for the running step and the network is lost by ours alone. 0
    /// before it is measured: a trial measures it.
    pub fn lost_by_others(&self, way: Way) -> f64 {
        let line = self.costs.line(way);
        if line.weight < MEASURED { 0.0 } else { self.concurrency.others() as f64 * line.node }
    }

    /// Draft tokens that a verify request may have for its cost: of one that is alone, at first not
    /// many; of one that takes a sequence for each, a few until some were measured.
    pub fn tried(&self, way: Way) -> usize {
        let line = self.costs.line(way);
        match way.method {
            VerifyMethod::FanOut if line.weight < MEASURED => FEW,
            _ if line.weight < 1.0 && self.concurrency.requests() == 1 => {
                (line.base / self.costs.plain_token_expected() + FIRST) as usize
            }
            _ => usize::MAX,
        }
    }

    /// Notes that `rejected` tokens of a verify request came to nothing.
    pub fn rejected(&mut self, way: Way, rejected: usize) {
        let line = self.costs.line(way);
        if self.concurrency.others() > 0 && line.weight >= MEASURED {
            self.budget.wasted(rejected as f64 * line.node);
        }
    }

    /// Seconds that our other requests lose all together by each draft token of a verify request.
    pub fn lost_by_ours(&self, way: Way) -> f64 {
        self.concurrency.ours().saturating_sub(1) as f64 * self.costs.line(way).concurrent
    }

    /// Draft tokens that one more verify request may have, so that all of ours in flight delay
    /// first tokens by no more than our share of what `ratio` allows: the greatest ratio of their
    /// times with and without drafts. None takes more than two requests' part of that, which would
    /// leave others plain. One request may always have a few: else their delay would never be
    /// remeasured.
    pub fn nodes_allowed(&self, ratio: f64) -> usize {
        let (ours, all) = (self.concurrency.ours().max(1) as f64, self.concurrency.requests() as f64);
        let node = if ours > 1.0 { self.costs.concurrent() } else { 0.0 };
        let room = self.costs.room(ratio, ours / all.max(ours), node);
        let drafted = self.concurrency.drafted();
        let nodes = ((room - drafted as f64).min(PARTS * room / ours) - 1.0).max(0.0) as usize;
        if drafted == 0 { nodes.max(FEW) } else { nodes }
    }

    /// Notes `tokens` plain tokens that came `seconds` after the ones before.
    pub fn note_plain(&mut self, seconds: f64, tokens: usize, now: Tick) {
        let reading = self.concurrency.read_within(seconds, now);
        let by = Disturbance {
            reading: reading || self.concurrency.continued_within(seconds, now),
            shared: !self.concurrency.all_plain(),
            resumed: false,
        };
        self.costs.note_plain(seconds, tokens, self.concurrency.ours(), by);
        // Plain decoding is slower with concurrent verify requests; speculation has to beat the
        // pace that it has without them.
        if !self.concurrency.all_plain() {
            let seconds = self.without_reading(seconds, self.plain_seconds(tokens as f64), now);
            self.book(tokens as f64, seconds, true);
        }
        self.passed(seconds);
    }

    /// Notes the first `tokens` of a plain request after a round, `seconds` after it was sent: one,
    /// or all of an unstreamed answer. `chosen`: as in [`Self::note_round`]. Returns the
    /// plain tokens won, negative if lost.
    pub fn plain_resumed(&mut self, seconds: f64, tokens: usize, chosen: bool, now: Tick) -> f64 {
        let reading = self.concurrency.read_within(seconds, now);
        let by = Disturbance { reading, shared: !self.concurrency.all_plain(), resumed: true };
        self.costs.note_plain(seconds, tokens, self.concurrency.ours(), by);
        self.continued(seconds, tokens, chosen, now)
    }

    /// As [`Self::plain_resumed`], of a plain request that continues another one.
    pub fn continued(&mut self, seconds: f64, tokens: usize, chosen: bool, now: Tick) -> f64 {
        let booked = self.without_reading(seconds, self.plain_seconds(tokens as f64), now);
        let won = self.book(tokens as f64, booked, chosen);
        self.passed(seconds);
        won
    }

    /// `seconds` until `now` without those in which the engine read prompts of ours, for which
    /// plain decoding would have waited, too; at least `expected`.
    pub fn without_reading(&self, seconds: f64, expected: f64, now: Tick) -> f64 {
        let prompts = self.concurrency.prompts_within(seconds, now) as f64;
        (seconds - prompts * self.costs.prompt()).max(expected.min(seconds))
    }

    /// Seconds that `tokens` plain tokens take; 0 before that was measured.
    pub fn plain_seconds(&self, tokens: f64) -> f64 {
        self.costs.plain_token().map_or(0.0, |token| tokens * token)
    }

    /// Notes a round that yielded `tokens` in `seconds`, by which requests of others lose `lost`
    /// seconds all together. `chosen`: the controller chose its draft; what a length that the
    /// operator has fixed loses is not booked. Returns the plain tokens won, negative if lost.
    pub fn note_round(&mut self, tokens: usize, seconds: f64, lost: f64, chosen: bool) -> f64 {
        self.passed(seconds);
        self.book(tokens as f64, seconds + lost, chosen)
    }

    /// Books `tokens` that took one of our requests `seconds`, if the controller has `chosen` how
    /// they come. Returns the plain tokens won, negative if lost; 0 before the plain pace is known.
    fn book(&mut self, tokens: f64, seconds: f64, chosen: bool) -> f64 {
        let Some(token) = self.costs.plain_token() else { return 0.0 };
        let won = tokens * token - seconds;
        if chosen {
            let ours = self.concurrency.ours().max(1) as f64;
            self.regret_budget.book(won / ours, self.costs.regret_capacity());
        }
        if won.is_finite() { won / token } else { 0.0 }
    }

    /// True if the regret budget allows a session to begin to speculate, or one that does to go on.
    pub fn is_solvent(&self, speculating: bool) -> bool {
        let capacity = self.costs.regret_capacity();
        if speculating {
            self.regret_budget.may_go_on(capacity)
        } else {
            self.regret_budget.may_begin(capacity)
        }
    }

    /// Remaining regret budget, in plain tokens of every request.
    pub fn regret_remaining(&self) -> f64 {
        self.regret_budget.remaining(self.costs.regret_capacity()) / self.costs.plain_token_expected()
    }

    /// Notes that `seconds` have passed for a session of ours.
    fn passed(&mut self, seconds: f64) {
        let each = seconds / self.concurrency.ours().max(1) as f64;
        self.regret_budget.passed(each, self.costs.regret_capacity());
        self.budget.passed(each);
        self.costs.passed(each);
    }

    /// Expected number of tokens still to come of an output of `done` tokens.
    pub fn expected_remainder(&self, done: usize) -> f64 {
        self.length.expected_remainder(done)
    }

    /// Notes that an output ended after `tokens`.
    pub fn output_ended(&mut self, tokens: usize) {
        self.length.ended(tokens);
    }
}

/// The part of the state that outlives a restart.
#[derive(Serialize, Deserialize)]
struct Snapshot<C, A, E> {
    costs: C,
    regret_budget: A,
    engine_start: E,
}

/// Limit of every measured figure (seconds, tokens, weights, and products of two of them): far
/// above any real one, and calculations below it stay within the range of f64.
const MAX_FIGURE: f64 = 1e60;

/// Rejects figures that cannot have been measured.
fn learnable(saved: &serde_json::Value) -> serde_json::Result<()> {
    let refused = |figure| serde::de::Error::custom(format!("{figure:e} is not a valid measurement"));
    beyond(saved).map_or(Ok(()), |figure| Err(refused(figure)))
}

/// The first figure in `saved` that cannot have been measured.
fn beyond(saved: &serde_json::Value) -> Option<f64> {
    match saved {
        serde_json::Value::Number(number) => {
            // Integers are moments, counts and hashes.
            let figure = number.as_f64()?;
            let beyond = !figure.is_finite() || figure.abs() > MAX_FIGURE;
            (number.is_f64() && beyond).then_some(figure)
        }
        serde_json::Value::Array(items) => items.iter().find_map(beyond),
        serde_json::Value::Object(members) => members.values().find_map(beyond),
        _ => None,
    }
}

/// Maximum number of model drafters of an engine start with separate state.
const MAX_MODELS: usize = 32;

/// The shared state of one engine start of a replica. Time spent under its lock is microseconds.
#[derive(Debug, Default)]
pub struct Control {
    states: Mutex<(ReplicaState, EngineStartState)>,
}

impl Control {
    /// A store without measurements.
    pub fn new() -> Self {
        Self::default()
    }

    /// The measurements, to be stored over a restart, without the state of requests in flight.
    ///
    /// # Errors
    /// A figure cannot have been measured. Infinity has no number in JSON, and `null` instead
    /// could not be read back.
    pub fn save(&self) -> serde_json::Result<serde_json::Value> {
        let (replica, engine_start) = &*self.states.lock();
        let saved = serde_json::to_value(Snapshot {
            costs: &replica.costs,
            regret_budget: &replica.regret_budget,
            engine_start,
        })?;
        learnable(&saved)?;
        Snapshot::<Costs, RegretBudget, EngineStartState>::deserialize(&saved).map(|_| saved)
    }

    /// Forgets the measurements, except the state of requests in flight and the numbers of the
    /// models, which sessions hold.
    pub fn forget(&self) {
        {
            let (replica, engine_start) = &mut *self.states.lock();
            (replica.costs, replica.regret_budget) = (Costs::default(), RegretBudget::default());
            *engine_start = EngineStartState {
                models: std::mem::take(&mut engine_start.models),
                ..EngineStartState::default()
            };
        }
        self.with(|learnt| learnt.concurrency_changes(|_| {}));
    }

    /// A store that begins with the measurements that [`Self::save`] wrote `rest` ago.
    ///
    /// # Errors
    /// The value was not written by [`Self::save`], or a figure is so large that calculations with
    /// it may overflow.
    pub fn restored(saved: serde_json::Value, rest: Duration) -> serde_json::Result<Self> {
        learnable(&saved)?;
        let Snapshot { mut costs, regret_budget, engine_start }: Snapshot<
            Costs,
            RegretBudget,
            EngineStartState,
        > = serde_json::from_value(saved)?;
        costs.age(rest.as_secs_f64());
        let replica = ReplicaState { costs, regret_budget, ..ReplicaState::default() };
        Ok(Self { states: Mutex::new((replica, engine_start)) })
    }

    /// The number under which measurements of this model drafter are stored. It stays over a
    /// restart. At most 32 have separate ones; those beyond share the last.
    pub fn model(&self, name: &str) -> u8 {
        let models = &mut self.states.lock().1.models;
        let known = models.iter().position(|known| known == name);
        let position = known.unwrap_or_else(|| {
            // More drafters than this for one model are not expected; those beyond share one
            // number, and stay exact.
            models.truncate(MAX_MODELS - 1);
            models.push(name.to_owned());
            models.len() - 1
        });
        u8::try_from(position).unwrap_or(u8::MAX)
    }

    /// Reads or writes the measurements. Keep it short: all sessions of the replica wait for the
    /// lock. A call within `work` deadlocks.
    pub fn with<T>(&self, work: impl FnOnce(&mut Measurements<'_>) -> T) -> T {
        let (replica, engine_start) = &mut *self.states.lock();
        work(&mut Measurements {
            survival: &mut engine_start.survival,
            costs: &mut replica.costs,
            regret_budget: &mut replica.regret_budget,
            concurrency: &mut replica.concurrency,
            budget: &mut replica.budget,
            classes: &mut engine_start.classes,
            drift: &mut engine_start.drift,
            length: &mut engine_start.length,
        })
    }
}

/// A request of ours that the engine computes: it counts in the concurrency until this is dropped.
#[derive(Debug)]
pub struct Presence {
    control: std::sync::Arc<Control>,
    speculates: bool,
    /// Work of the engine before its next token, beyond a step.
    awaited: Option<Awaited>,
    /// Draft nodes of each of its verify requests in flight, in the order in which they end, and
    /// the tokens of the others that were in flight when it was sent.
    calls: VecDeque<(usize, usize)>,
    /// The state when it was sent.
    sent: costs::Sent,
}

impl Presence {
    /// Adds one request to the concurrency.
    pub fn new(control: std::sync::Arc<Control>) -> Self {
        let sent = control.with(|learnt| {
            learnt.concurrency_changes(Concurrency::enter);
            learnt.costs.sent(learnt.concurrency.drafted_now())
        });
        Self { control, speculates: false, awaited: None, calls: VecDeque::new(), sent }
    }

    /// As [`Self::new`], for one whose first token will be reported ([`Self::has_come`]): until
    /// then the engine reads its prompt.
    pub fn reading(control: std::sync::Arc<Control>) -> Self {
        let mut presence = Self::new(control);
        presence.awaits(Awaited::Prompt);
        presence
    }

    /// The next token of its plain request takes longer than a step.
    pub fn awaits(&mut self, awaited: Awaited) {
        self.has_come(None);
        self.awaited = Some(awaited);
        self.control.with(|learnt| learnt.concurrency.begins(awaited));
    }

    /// That token came at `now`, or (`None`) it was given up.
    pub fn has_come(&mut self, now: Option<Tick>) {
        if let Some(awaited) = self.awaited.take() {
            self.control.with(|learnt| learnt.concurrency.ends(awaited, now));
        }
    }

    /// Its first token has come, `seconds` after it was sent with `prompt` tokens.
    pub fn first_token(&self, prompt: usize, seconds: f64) {
        self.control.with(|learnt| learnt.costs.first_token(self.sent, prompt, seconds));
    }

    /// It is speculated on from now on, or decoded plainly.
    pub fn speculates(&mut self, speculates: bool) {
        while !speculates && !self.calls.is_empty() {
            self.call_ends();
        }
        if std::mem::replace(&mut self.speculates, speculates) != speculates {
            self.control
                .with(|learnt| learnt.concurrency_changes(|concurrency| concurrency.speculates(speculates)));
        }
    }

    /// It sends a verify request with `nodes` nodes, and so is speculated on.
    pub fn calls(&mut self, nodes: usize) {
        self.has_come(None);
        self.speculates(true);
        let before = self.control.with(|learnt| {
            let before = learnt.concurrency.drafted();
            learnt.concurrency.call_begins(nodes);
            before
        });
        self.calls.push_back((nodes, before));
    }

    /// The first of its verify requests has ended, if it sent any. Returns the tokens of our other
    /// verify requests that were in flight when it was sent, or are now: of those that share its
    /// step each is counted once, whatever their order.
    pub fn call_ends(&mut self) -> usize {
        let Some((nodes, before)) = self.calls.pop_front() else { return 0 };
        self.control.with(|learnt| {
            learnt.concurrency.call_ends(nodes);
            before + learnt.concurrency.drafted()
        })
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        self.has_come(None);
        self.speculates(false);
        self.control.with(|learnt| learnt.concurrency_changes(Concurrency::leave));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draft::DrafterId;
    use crate::words::VerifyMethod;

    const ALONE: Shared = Shared { concurrent: 0.0, waits: 0.0, modelled: 0, reading: false };

    #[test]
    fn rejected_tokens_use_up_the_budget_next_to_others_and_a_fixed_length_books_nothing() {
        let (control, way) = (Control::new(), Way::by(VerifyMethod::Tree, 300));
        control.with(|learnt| {
            (0..20).for_each(|_| learnt.note_plain(0.02, 1, Tick(0)));
            let left = learnt.regret_remaining();
            assert!(learnt.note_round(1, 0.2, 0.0, false) < -8.0);
            assert!(learnt.continued(0.2, 1, false, Tick(0)) < -8.0);
            assert!((learnt.regret_remaining() - left).abs() < 1e-9);
            learnt.note_round(1, 0.2, 0.0, true);
            assert!(learnt.regret_remaining() < left - 1.0);
            for nodes in [0, 8].repeat(50) {
                learnt.costs.verified(way, nodes, ALONE, 0.02 + 0.001 * nodes as f64);
            }
            learnt.rejected(way, 10_000);
            assert!(learnt.budget.may_begin(), "there are no others");
            learnt.set_signal(&Signal {
                running: 3,
                waiting: 0,
                kv_usage: None,
                limit: None,
                verifying: 0,
                calls: 0,
                age: Duration::ZERO,
            });
            learnt.rejected(way, 80);
            assert!(learnt.budget.may_begin());
            learnt.rejected(way, 30);
            assert!(!learnt.budget.may_begin());
        });
    }

    #[test]
    fn measurements_are_read_back_and_idle_time_has_made_them_less_certain() {
        let control = Control::new();
        let (way, now) = (Way::by(VerifyMethod::Tree, 300), Tick(90_000_000));
        let class = Class::new(DrafterId::model(control.model("small")), TemperatureBucket::Mid, 7);
        control.with(|learnt| {
            (0..20).for_each(|_| learnt.note_plain(0.02, 1, now));
            (0..8).for_each(|_| learnt.costs.verified(way, 4, ALONE, 0.03));
            (0..50).for_each(|_| learnt.classes.push(class, Round::new(4, 4, 3)));
            learnt.note_round(20, 0.1, 0.0, true);
        });
        let saved = control.save().unwrap();
        let read =
            Control::restored(serde_json::from_str(&saved.to_string()).unwrap(), Duration::from_hours(1));
        let read = read.unwrap();
        let figures = |control: &Control| {
            control.with(|learnt| {
                let rounds = learnt.classes.of(class).map(|rounds| rounds.count());
                (
                    learnt.costs.plain_token(),
                    learnt.costs.verify(way, 4, ALONE),
                    rounds,
                    learnt.regret_remaining(),
                )
            })
        };
        let (saved, read_back) = (figures(&control), figures(&read));
        assert!((saved.0.unwrap() - read_back.0.unwrap()).abs() < 1e-4, "{saved:?} {read_back:?}");
        assert!((saved.1 - read_back.1).abs() < 0.01 && saved.2 == read_back.2, "{saved:?} {read_back:?}");
        assert_eq!((read.model("large"), read.model("small"), read.model("large")), (1, 0, 1));
        let next = |control: &Control| {
            control.with(|learnt| {
                learnt.costs.verified(way, 4, ALONE, 0.06);
                learnt.costs.verify(way, 4, ALONE)
            })
        };
        assert!(next(&read) > next(&control) + 0.005, "a new measurement weighs more");
        assert!(Control::restored(serde_json::json!({ "now": 1 }), Duration::ZERO).is_err());
    }

    #[test]
    fn what_takes_long_while_a_prompt_is_read_shows_no_pace_and_loses_nothing() {
        let control = std::sync::Arc::new(Control::new());
        let mut now = Tick(90_000_000);
        let mut plain = |seconds| {
            now = now.after(Duration::from_secs_f64(seconds));
            control.with(|learnt| learnt.note_plain(seconds, 1, now));
            now
        };
        let pace = || control.with(|learnt| learnt.costs.plain_token()).unwrap();
        let mut first = Presence::new(std::sync::Arc::clone(&control));
        (0..80).for_each(|_| _ = plain(0.04));
        first.awaits(Awaited::Continuation);
        (0..8).for_each(|_| _ = plain(0.12));
        first.awaits(Awaited::Prompt);
        (0..8).for_each(|_| _ = plain(0.25));
        let now = plain(0.25);
        first.has_come(Some(now));
        assert!(pace() < 0.05, "{}", pace());
        let within = |millis| {
            let now = now.after(Duration::from_millis(millis));
            control.with(|learnt| learnt.concurrency.read_within(0.05, now))
        };
        assert!(within(20) && !within(60));

        // A thousand tokens of prompts take 0.2 s.
        for prompt in [100, 1_000, 2_000].repeat(100) {
            Presence::new(std::sync::Arc::clone(&control)).first_token(prompt, 0.05 + 2e-4 * prompt as f64);
        }
        let _second = Presence::new(std::sync::Arc::clone(&control));
        first.calls(4);
        let mut third = Presence::reading(std::sync::Arc::clone(&control));
        third.has_come(Some(now.after(Duration::from_millis(900))));
        let left = || control.with(|learnt| learnt.regret_remaining());
        let lost = |millis| {
            let before = left();
            control.with(|learnt| learnt.note_plain(0.25, 1, now.after(Duration::from_millis(millis))));
            before - left()
        };
        assert!(lost(1_000) < 1.0, "a prompt was read within it");
        assert!(lost(2_000) > 1.5, "none was");
    }

    #[test]
    fn an_invalid_figure_is_neither_written_nor_read_and_can_be_forgotten() {
        let control = Control::new();
        let (model, now) = (control.model("small"), Tick(90_000_000));
        (0..20).for_each(|_| control.with(|learnt| learnt.note_plain(0.02, 1, now)));
        let saved = control.save().unwrap();
        for figure in [1e300, -1e300] {
            let mut saved = saved.clone();
            saved["engine_start"]["length"]["mean"] = figure.into();
            let error = Control::restored(saved, Duration::ZERO).unwrap_err();
            assert!(error.to_string().contains("e300 is not a valid measurement"), "{error}");
        }
        for figure in [f64::INFINITY, f64::NAN] {
            control.states.lock().1.length =
                serde_json::from_value(saved["engine_start"]["length"].clone()).unwrap();
            control.save().unwrap();
            control.states.lock().1.length.spoil(figure);
            assert!(control.save().is_err());
        }
        control.forget();
        control.save().unwrap();
        let left = control.with(|learnt| learnt.costs.plain_token());
        assert_eq!((left, control.model("small")), (None, model));
    }
}
