//! What has been learnt, and what it says to do next: survival of drafts, costs of calls, leap or ride.
//!
//! PURE. One [`Control`] per epoch, shared by all its sessions behind a short lock: sessions note what they saw and
//! ask what to expect. What is new weighs more than what is old, so a wrong belief is corrected within a handful of
//! rounds; and what being wrong may cost in all is bounded by an [`Account`].

pub mod account;
pub mod alarm;
pub mod belief;
pub mod budget;
pub mod chooser;
pub mod costs;
pub mod forecast;
pub mod gates;
pub mod groups;
pub mod hedge;
mod pairs;
pub mod prospect;
pub mod rounds;
pub mod shelf;
pub mod state;
pub mod survival;
pub mod switchback;
pub mod tariff;
pub mod tolerance;

pub use account::Account;
pub use alarm::Alarm;
pub use belief::Belief;
pub use budget::Budget;
pub use chooser::{Outlook, Quote, best_cut, dither};
pub use costs::{Basis, Beside, Costs, Way};
pub use forecast::{Forecast, Prospective, forecast};
pub use hedge::Passage;
pub use prospect::Prior;
pub use rounds::{Prices, Rounds, Value};
pub use shelf::Shelf;
pub use state::{Accounts, Class, Crowd, EpochState, ReplicaState};
pub use survival::{Heat, Survival, Tuning};
pub use switchback::{Switchback, Windows};
pub use tariff::Tariff;
pub use tolerance::Tolerance;

use std::collections::VecDeque;
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::units::Tick;

/// What sessions read and write: the state of their replica and of its epoch.
#[derive(Debug)]
pub struct Learnt<'a> {
    /// How likely drafted tokens are accepted.
    pub survival: &'a mut Survival,
    /// What calls cost.
    pub costs: &'a mut Costs,
    /// What leaping may still lose.
    pub account: &'a mut Account,
    /// The requests that the engine computes.
    pub crowd: &'a mut Crowd,
    /// What may be computed for nothing while others wait for the engine.
    pub budget: &'a mut Budget,
    /// Its ride-only windows.
    pub switchback: &'a mut Switchback,
    /// Rounds by class of requests.
    pub classes: &'a mut state::Classes,
    /// Which of several models drafts.
    pub hedges: &'a mut hedge::Hedges,
    length: &'a mut state::Length,
}

/// What was known of a round before it was made, seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Round {
    /// How long it would take.
    pub expected: f64,
    /// What requests of others would lose by it, all together.
    pub lost: f64,
}

/// What leaping may cost the other requests of a replica.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Imposed {
    /// Refused draft tokens ÷ generated tokens.
    pub extra_tokens: f64,
    /// Ride-only windows; `None` for none.
    pub windows: Option<Windows>,
}

impl Learnt<'_> {
    /// Sets what leaping may cost other requests.
    pub fn impose(&mut self, imposed: Imposed) {
        self.budget.allow(imposed.extra_tokens);
        self.switchback.plan(imposed.windows);
    }

    /// Notes that the engine computes one request of ours more or less, or that it has reported its load.
    pub fn crowd_changes(&mut self, change: impl FnOnce(&mut Crowd)) {
        change(self.crowd);
        let crowd = &*self.crowd;
        self.costs.crowded(crowd.requests(), crowd.has_riders_beside(), crowd.others() > 0);
    }

    /// Seconds that our requests that ride lose by a node of one verify call, all together.
    pub fn node_of_riders(&self) -> f64 {
        let leaping = self.crowd.leaping().max(1);
        let all = self.costs.per_node_of_all().unwrap_or(0.0);
        self.crowd.ours().saturating_sub(leaping) as f64 * all / leaping as f64
    }

    /// Notes that a ride brought `tokens` tokens `seconds` after the ones before.
    pub fn rode(&mut self, seconds: f64, tokens: usize, now: Tick) {
        // Beside verify calls riding is slower than by itself; leaping has to beat what it would be without them.
        if self.crowd.rides() {
            self.costs.rode(seconds, tokens, now);
        } else {
            self.costs.rode_beside(tokens);
            if let Some(token) = self.costs.ride_token() {
                self.account.rode_beside(tokens as f64, seconds, now, token);
            }
        }
        self.account.rode(tokens);
        self.passed(seconds, tokens, now);
    }

    /// Notes the first token of a ride that followed a leap, `seconds` after it was asked for. Returns the ridden tokens won,
    /// negative if lost.
    pub fn left(&mut self, seconds: f64, now: Tick) -> f64 {
        self.costs.left(seconds, now);
        let won = self.costs.ride_token().map_or(0.0, |token| {
            let round = Round { expected: token + self.costs.switch_out(), lost: 0.0 };
            self.account.leapt(1.0, seconds, round, now, token)
        });
        self.passed(seconds, 1, now);
        won
    }

    /// Seconds that so many tokens take to ride; 0 while that was not measured.
    pub fn to_ride(&self, tokens: f64) -> f64 {
        self.costs.ride_token().map_or(0.0, |token| tokens * token)
    }

    /// Notes that leaping brought `tokens` in `seconds`. Returns the ridden tokens won, negative if lost.
    pub fn leapt(&mut self, tokens: usize, seconds: f64, round: Round, now: Tick) -> f64 {
        self.passed(seconds, tokens, now);
        self.costs.leapt(seconds / self.crowd.ours().max(1) as f64);
        let Some(token) = self.costs.ride_token() else { return 0.0 };
        self.account.leapt(tokens as f64, seconds, round, now, token)
    }

    /// Notes that a session of ours got `tokens` in `seconds`, in which requests of others got theirs.
    fn passed(&mut self, seconds: f64, tokens: usize, now: Tick) {
        self.switchback.emitted(tokens, seconds, now);
        let ours = self.crowd.ours().max(1) as f64;
        let others = self.crowd.others() as f64 / ours * seconds / self.costs.ride_token_expected();
        self.budget.generated(tokens as f64 + others.min(1e6));
    }

    /// Tokens that an output of `done` tokens may still be expected to have.
    pub fn expected_rest(&self, done: usize) -> f64 {
        self.length.expected_rest(done)
    }

    /// Notes that an output ended after `tokens`.
    pub fn output_ended(&mut self, tokens: usize) {
        self.length.ended(tokens);
    }
}

/// What is kept over a restart.
#[derive(Serialize, Deserialize)]
struct Kept<C, A, E> {
    now: Tick,
    costs: C,
    accounts: A,
    epoch: E,
}

/// No figure that is learnt (seconds, tokens, weights, and products of two of them) comes near this, and reckoning with less
/// does not leave the range of numbers.
const FIGURE_MOST: f64 = 1e60;

/// Refuses figures that cannot have been learnt.
fn learnable(saved: &serde_json::Value) -> serde_json::Result<()> {
    let refused = |figure| serde::de::Error::custom(format!("{figure:e} is no figure of what was learnt"));
    beyond(saved).map_or(Ok(()), |figure| Err(refused(figure)))
}

/// The first figure in `saved` that is not one that can be learnt.
fn beyond(saved: &serde_json::Value) -> Option<f64> {
    match saved {
        serde_json::Value::Number(number) => {
            // Whole numbers are moments, counts and hashes.
            let figure = number.as_f64().filter(|_| number.is_f64())?;
            (!figure.is_finite() || figure.abs() > FIGURE_MOST).then_some(figure)
        }
        serde_json::Value::Array(items) => items.iter().find_map(beyond),
        serde_json::Value::Object(members) => members.values().find_map(beyond),
        _ => None,
    }
}

/// Most model drafters of an epoch that are learnt of apart.
const MODELS_MOST: usize = 32;

/// The shared state of one epoch of a replica. Time spent under its lock is microseconds.
#[derive(Debug, Default)]
pub struct Control {
    states: Mutex<(ReplicaState, EpochState)>,
}

impl Control {
    /// A store that knows nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// What has been learnt by `now`, to be kept over a restart. What is under way is not a part of it.
    ///
    /// # Errors
    /// A figure is not one that can be learnt. Infinity has no number in JSON, and `null` in its place could not be read again.
    pub fn save(&self, now: Tick) -> serde_json::Result<serde_json::Value> {
        let (replica, epoch) = &*self.states.lock();
        let saved =
            serde_json::to_value(Kept { now, costs: &replica.costs, accounts: &replica.accounts, epoch })?;
        learnable(&saved)?;
        Kept::<Costs, Accounts, EpochState>::deserialize(&saved).map(|_| saved)
    }

    /// Forgets what has been learnt, but for what is under way and the numbers of the models, which sessions hold.
    pub fn forget(&self) {
        {
            let (replica, epoch) = &mut *self.states.lock();
            (replica.costs, replica.accounts) = (Costs::default(), Accounts::default());
            *epoch = EpochState { models: std::mem::take(&mut epoch.models), ..EpochState::default() };
        }
        self.with(|learnt| learnt.crowd_changes(|_| {}));
    }

    /// A store that begins with what [`Self::save`] wrote `rest` ago.
    ///
    /// # Errors
    /// It is not what was written, or a figure is so large that reckoning with it may end beyond all numbers.
    pub fn restored(saved: serde_json::Value, rest: Duration) -> serde_json::Result<Self> {
        learnable(&saved)?;
        let Kept { now, mut costs, accounts, epoch }: Kept<Costs, Accounts, EpochState> =
            serde_json::from_value(saved)?;
        costs.age(now.after(rest));
        let replica = ReplicaState { costs, accounts, ..ReplicaState::default() };
        Ok(Self { states: Mutex::new((replica, epoch)) })
    }

    /// The number under which the model drafter of this name is learnt of here. It is kept over a restart.
    pub fn model(&self, name: &str) -> u8 {
        let models = &mut self.states.lock().1.models;
        let known = models.iter().position(|known| known == name);
        let place = known.unwrap_or_else(|| {
            // Nobody has so many drafters for one model; those beyond share what is learnt, and stay exact.
            models.truncate(MODELS_MOST - 1);
            models.push(name.to_owned());
            models.len() - 1
        });
        u8::try_from(place).unwrap_or(u8::MAX)
    }

    /// Reads or writes what has been learnt. Keep it short: all sessions of the replica wait for it.
    pub fn with<T>(&self, work: impl FnOnce(&mut Learnt<'_>) -> T) -> T {
        let (replica, epoch) = &mut *self.states.lock();
        let crowd = replica.costs.crowd_size();
        work(&mut Learnt {
            survival: &mut epoch.survival,
            costs: &mut replica.costs,
            account: replica.accounts.of(crowd),
            crowd: &mut replica.crowd,
            budget: &mut replica.budget,
            switchback: &mut replica.switchback,
            classes: &mut epoch.classes,
            hedges: &mut epoch.hedges,
            length: &mut epoch.length,
        })
    }
}

/// A request of ours that the engine computes: it counts as one of the crowd until this is dropped.
#[derive(Debug)]
pub struct Presence {
    control: std::sync::Arc<Control>,
    leaps: bool,
    /// In the order in which they began.
    calls: VecDeque<state::UnderWay>,
}

impl Presence {
    /// Adds one request to the crowd.
    pub fn new(control: std::sync::Arc<Control>) -> Self {
        control.with(|learnt| learnt.crowd_changes(Crowd::enter));
        Self { control, leaps: false, calls: VecDeque::new() }
    }

    /// It leaps from now on, or rides.
    pub fn leaps(&mut self, leaps: bool) {
        while !leaps && self.call_ends().is_some() {}
        if std::mem::replace(&mut self.leaps, leaps) != leaps {
            self.control.with(|learnt| learnt.crowd_changes(|crowd| crowd.leaps(leaps)));
        }
    }
}

impl Presence {
    /// It makes a verify call with so many draft nodes, and leaps.
    pub fn calls(&mut self, nodes: usize) {
        self.leaps(true);
        self.calls.push_back(self.control.with(|learnt| learnt.crowd.call_begins(nodes)));
    }

    /// The first of its verify calls is over. Returns the draft nodes that our calls had on average that were under way with it;
    /// `None` if it made none.
    pub fn call_ends(&mut self) -> Option<f64> {
        let call = self.calls.pop_front()?;
        Some(self.control.with(|learnt| learnt.crowd.call_ends(call)))
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        self.leaps(false);
        self.control.with(|learnt| learnt.crowd_changes(Crowd::leave));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draft::DrafterId;
    use crate::words::Plan;

    #[test]
    fn what_was_learnt_is_read_back_as_it_was_and_rest_has_made_it_less_certain() {
        let control = Control::new();
        let (way, now) = (Way::by(Plan::Tree, 300), Tick(90_000_000));
        let class = Class::new(DrafterId::model(control.model("small")), Heat::Mid, 7);
        control.with(|learnt| {
            (0..20).for_each(|_| learnt.rode(0.02, 1, now));
            (0..8).for_each(|_| learnt.costs.verified(way, 4, 0.03, now));
            (0..50).for_each(|_| learnt.classes.push(class, 4, 4, 3));
            learnt.leapt(20, 0.1, Round::default(), now);
        });
        let saved = control.save(now).unwrap();
        let read =
            Control::restored(serde_json::from_str(&saved.to_string()).unwrap(), Duration::from_hours(1));
        let read = read.unwrap();
        let figures = |control: &Control| {
            control.with(|learnt| {
                let rounds = learnt.classes.of(class).map(Rounds::count);
                (learnt.costs.ride_token(), learnt.costs.verify(way, 4), rounds, learnt.account.credit())
            })
        };
        assert_eq!(figures(&control), figures(&read));
        assert_eq!((read.model("large"), read.model("small"), read.model("large")), (1, 0, 1));
        let next = |control: &Control, now| {
            control.with(|learnt| {
                learnt.costs.verified(way, 4, 0.06, now);
                learnt.costs.verify(way, 4)
            })
        };
        assert!(next(&read, Tick(0)) > next(&control, now) + 0.01, "a new figure counts for more");
        assert!(Control::restored(serde_json::json!({ "now": 1 }), Duration::ZERO).is_err());
    }

    #[test]
    fn a_figure_that_is_no_number_is_neither_written_nor_read_and_can_be_forgotten() {
        let control = Control::new();
        let (model, now) = (control.model("small"), Tick(90_000_000));
        (0..20).for_each(|_| control.with(|learnt| learnt.rode(0.02, 1, now)));
        let saved = control.save(now).unwrap();
        for figure in [1e300, -1e300] {
            let mut saved = saved.clone();
            saved["epoch"]["length"]["mean"] = figure.into();
            let error = Control::restored(saved, Duration::ZERO).unwrap_err();
            assert!(error.to_string().contains("e300 is no figure"), "{error}");
        }
        for figure in [f64::INFINITY, f64::NAN] {
            control.states.lock().1.length =
                serde_json::from_value(saved["epoch"]["length"].clone()).unwrap();
            control.save(now).unwrap();
            control.states.lock().1.length.spoil(figure);
            assert!(control.save(now).is_err());
        }
        control.forget();
        control.save(now).unwrap();
        let left = control.with(|learnt| learnt.costs.ride_token());
        assert_eq!((left, control.model("small")), (None, model));
    }
}
