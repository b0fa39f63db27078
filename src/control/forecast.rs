//! What leaping is expected to bring to the next request of a kind, and everything that keeps it from leaping now: for an
//! operator who asks why. Nothing here decides; it reads what sessions decide by.

use super::costs::{Basis, Way};
use super::state::Class;
use super::{Learnt, Tariff};
use crate::units::Tick;
use crate::words::RideReason;

/// Rounds below which a class says too little.
const FEW: f64 = 4.0;
/// Two-sided 95 % of a normal distribution.
const NORMAL: f64 = 1.96;

/// What is expected of the next request of a kind on a replica.
#[derive(Clone, Debug, PartialEq)]
pub struct Forecast {
    /// How busy the engine is, 0 to 1.
    pub load: f64,
    /// Ridden tokens that leaping may still lose there.
    pub credit: f64,
    /// Seconds of a ridden token; `None` before any was ridden.
    pub token: Option<f64>,
    /// How many times as fast as riding; `None` before enough rounds of its kind, real or virtual.
    pub gain: Option<Gain>,
    /// Every reason not to leap from its first token on, in the order in which sessions look.
    pub reasons: Vec<(RideReason, &'static str)>,
}

/// An expected gain and its spread.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gain {
    /// The mean.
    pub middle: f64,
    /// Bounds of 95 %, by how much the tokens of a round vary (as a geometric law of that mean does) and how many rounds
    /// were seen. What is uncertain about costs is not in them.
    pub low: f64,
    /// The upper one.
    pub high: f64,
    /// Rounds of its kind that it rests on, decayed.
    pub rounds: f64,
    /// What the costs rest on.
    pub basis: Basis,
}

/// The forecast for a request that is of one of these classes by each of its drafters. `margin`: the gain that leaping must
/// promise, as a share.
pub fn forecast(learnt: &mut Learnt<'_>, classes: &[Class], way: Way, margin: f64, now: Tick) -> Forecast {
    let tariff = Tariff::new(learnt, way, None);
    let gain = classes.iter().filter_map(|class| gain(learnt, *class, &tariff));
    let gain = gain.max_by(|a, b| a.middle.total_cmp(&b.middle));
    Forecast {
        load: learnt.crowd.load(),
        credit: learnt.account.credit(),
        token: learnt.costs.ride_token(),
        reasons: reasons(learnt, gain, classes.is_empty(), margin, now),
        gain,
    }
}

fn gain(learnt: &Learnt<'_>, class: Class, tariff: &Tariff) -> Option<Gain> {
    let value = tariff.value(learnt.classes.of(class)?);
    let rate = value.rate().filter(|_| value.rounds >= FEW)?;
    let middle = rate * tariff.token;
    let tokens = value.tokens / value.rounds;
    let spread = NORMAL * (tokens * (tokens - 1.0).max(0.0) / value.rounds).sqrt() / tokens;
    let (low, high) = (middle * (1.0 - spread).max(0.0), middle * (1.0 + spread));
    Some(Gain { middle, low, high, rounds: value.rounds, basis: tariff.basis })
}

fn reasons(
    learnt: &mut Learnt<'_>,
    gain: Option<Gain>,
    undrafted: bool,
    margin: f64,
    now: Tick,
) -> Vec<(RideReason, &'static str)> {
    let mut found = Vec::new();
    let mut add = |holds: bool, reason: RideReason, says: &'static str| {
        if holds {
            found.push((reason, says));
        }
    };
    let ridden = learnt.costs.ride_token().is_some();
    add(
        !ridden,
        RideReason::NoGain,
        "nothing was ridden on this replica yet: how long a token takes is not known",
    );
    add(
        ridden && learnt.costs.pace_is_old(),
        RideReason::Switchback,
        "the pace of riding is to be measured again",
    );
    add(
        learnt.switchback.in_window(now),
        RideReason::Switchback,
        "a window in which everything rides is under way",
    );
    let beside = learnt.crowd.others() > 0;
    add(
        beside && !learnt.budget.may_begin(),
        RideReason::Budget,
        "too many refused tokens beside requests of others",
    );
    let leaping = learnt.crowd.leaping();
    add(
        !learnt.account.may_begin(leaping),
        RideReason::GateLatency,
        "leaping has lost what it may lose here; riding refills it",
    );
    add(
        learnt.switchback.is_closed(now),
        RideReason::GateLatency,
        "the ride-only windows were faster than the time between them",
    );
    add(undrafted, RideReason::NoDraft, "the policy has no drafter that drafts here");
    let unseen = gain.is_none() && !undrafted;
    add(
        unseen,
        RideReason::NoGain,
        "too few rounds of this kind of request were seen; they are played while it rides",
    );
    let small = gain.is_some_and(|gain| gain.middle < 1.0 + margin);
    add(small, RideReason::NoGain, "the gain that is expected is below gamma.margin");
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::{Control, Heat};
    use crate::draft::Source;
    use crate::words::Plan;

    const CLASS: Class = Class { source: Source::Model, heat: Heat::Greedy, kind: 1 };

    #[test]
    fn what_was_seen_is_foretold_and_what_was_not_is_a_reason() {
        let control = Control::new();
        let asked = |classes: &[Class]| {
            control.with(|learnt| forecast(learnt, classes, Way::by(Plan::Tree, 40), 0.1, Tick(1)))
        };
        let fresh = asked(&[CLASS]);
        assert_eq!((fresh.token, fresh.gain), (None, None));
        let why: Vec<RideReason> = fresh.reasons.iter().map(|reason| reason.0).collect();
        assert_eq!(why, [RideReason::NoGain, RideReason::NoGain]);
        control.with(|learnt| {
            (0..40).for_each(|_| learnt.rode(0.1, 1, Tick(0)));
            for nodes in [0, 4] {
                (0..8).for_each(|_| learnt.costs.verified(Way::by(Plan::Tree, 40), nodes, 0.12, Tick(0)));
            }
            (0..40).for_each(|_| learnt.classes.push(CLASS, 4, 0, 3));
        });
        let known = asked(&[CLASS]);
        let gain = known.gain.expect("forty rounds");
        assert!(known.reasons.is_empty(), "{:?}", known.reasons);
        assert!(
            (2.2..2.7).contains(&gain.middle) && gain.low < gain.middle && gain.middle < gain.high,
            "{gain:?}"
        );
        assert!(gain.low > 1.7, "{gain:?}");
        assert_eq!(asked(&[]).reasons.len(), 1);
    }
}
