//! What leaping is expected to bring to the next request of a kind, and everything that keeps it from leaping now: for an
//! operator who asks why. Nothing here decides, and nothing that sessions decide by is changed.

use super::costs::{Basis, Way};
use super::state::Class;
use super::{Learnt, Tariff};
use crate::units::Tick;
use crate::words::RideReason;

/// Rounds below which a class says too little.
const FEW: f64 = 4.0;
/// A round may always take as long as so many ridden tokens, as in sessions.
const GAP_TOKENS: f64 = 2.0;
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

/// What a request is, as far as a forecast depends on it.
#[derive(Clone, Copy, Debug)]
pub struct Prospective<'a> {
    /// Its class by each of its drafters.
    pub classes: &'a [Class],
    /// How its drafts would be verified.
    pub way: Way,
    /// The gain that leaping must promise, as a share.
    pub margin: f64,
    /// Longest silence that a round may cause, seconds.
    pub gap_most: f64,
    /// The share of first draft tokens below which the acceptance gate is closed where no gain is predicted.
    pub acceptance_least: f64,
    /// It leaps at every token, whatever it brings: only what it has no drafter for keeps it from that.
    pub forced: bool,
}

/// The forecast for a request.
pub fn forecast(learnt: &mut Learnt<'_>, asked: &Prospective<'_>, now: Tick) -> Forecast {
    let classes = asked.classes;
    let tariff = |model| Tariff::new(learnt, asked.way, model, None);
    let gain = classes.iter().filter_map(|class| gain(learnt, *class, &tariff(class.drafter().number)));
    let gain = gain.max_by(|a, b| a.middle.total_cmp(&b.middle));
    let tariff = tariff(0);
    Forecast {
        load: learnt.crowd.load(),
        credit: learnt.account.credit(),
        token: learnt.costs.ride_token(),
        reasons: if asked.forced { forced(classes) } else { reasons(learnt, gain, asked, &tariff, now) },
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

const UNDRAFTED: (RideReason, &str) = (RideReason::NoDraft, "the policy has no drafter that drafts here");

fn forced(classes: &[Class]) -> Vec<(RideReason, &'static str)> {
    if classes.is_empty() { vec![UNDRAFTED] } else { Vec::new() }
}

/// Whether hardly any first token of any of these drafters is accepted.
fn refused(learnt: &Learnt<'_>, asked: &Prospective<'_>) -> bool {
    let refused =
        |class: &Class| learnt.survival.is_refused(class.heat(), class.drafter(), asked.acceptance_least);
    !asked.classes.is_empty() && asked.classes.iter().all(refused)
}

fn reasons(
    learnt: &mut Learnt<'_>,
    gain: Option<Gain>,
    asked: &Prospective<'_>,
    tariff: &Tariff,
    now: Tick,
) -> Vec<(RideReason, &'static str)> {
    let undrafted = asked.classes.is_empty();
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
    add(undrafted, UNDRAFTED.0, UNDRAFTED.1);
    let gap = asked.gap_most.max(GAP_TOKENS * tariff.token);
    add(
        ridden && tariff.within(1, gap).is_none_or(|nodes| nodes == 0),
        RideReason::GateLatency,
        "even the shortest round takes longer than gates.max_gap",
    );
    let unseen = gain.is_none() && !undrafted;
    add(
        unseen,
        RideReason::NoGain,
        "too few rounds of this kind of request were seen; they are played while it rides",
    );
    let small = gain.is_some_and(|gain| gain.middle < 1.0 + asked.margin);
    let refuses = (small || unseen) && refused(learnt, asked);
    add(refuses, RideReason::GateAcceptance, "hardly any first token of a draft is accepted");
    let rest = learnt.expected_rest(0) * tariff.token;
    let wins = |gain: Gain| rest - rest / gain.middle >= tariff.switch_in + tariff.switch_out;
    let short = !small && gain.is_some_and(|gain| !wins(gain));
    add(short, RideReason::NoGain, "outputs are too short to win back what leaving the ride costs");
    add(small, RideReason::NoGain, "the gain that is expected is below gamma.margin");
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::{Control, Heat};
    use crate::draft::DrafterId;
    use crate::words::Plan;

    const CLASS: Class = Class::new(DrafterId::model(0), Heat::Greedy, 1);

    #[test]
    fn what_was_seen_is_foretold_and_what_was_not_is_a_reason() {
        let control = Control::new();
        let asked = |classes: &[Class]| {
            let asked = Prospective {
                classes,
                way: Way::by(Plan::Tree, 40),
                margin: 0.1,
                gap_most: 1.0,
                acceptance_least: 0.2,
                forced: false,
            };
            control.with(|learnt| {
                assert!(forecast(learnt, &Prospective { forced: true, ..asked }, Tick(1)).reasons.len() <= 1);
                forecast(learnt, &asked, Tick(1))
            })
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
        // What `Pilot::budget` finds: an empty round fits into the gap, one with a draft does not.
        let tight = |gap_most: f64| {
            control.with(|learnt| {
                for (nodes, seconds) in [(1, 0.3), (4, 0.35)] {
                    (0..40).for_each(|_| {
                        learnt.costs.verified(Way::by(Plan::Tree, 40), nodes, seconds, Tick(0));
                    });
                }
                let asked = Prospective {
                    classes: &[CLASS],
                    way: Way::by(Plan::Tree, 40),
                    margin: 0.1,
                    gap_most,
                    acceptance_least: 0.2,
                    forced: false,
                };
                forecast(learnt, &asked, Tick(1))
                    .reasons
                    .iter()
                    .any(|reason| reason.0 == RideReason::GateLatency)
            })
        };
        assert!(tight(0.1) && !tight(0.6));
    }
}
