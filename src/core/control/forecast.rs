//! Projected speedup of the next request of a kind, and all reasons that keep it from speculation
//! now: for an operator who asks why. Nothing here decides, and no state that sessions decide by is
//! changed.

use serde::{Deserialize, Serialize};

use super::chooser::{is_faster, wins_switches};
use super::costs::{Basis, Way};
use super::gates::{self, Closed};
use super::state::Class;
use super::{Measurements, RoundCosts};
use crate::draft::Source;
use crate::words::PlainReason;

/// Minimum rounds of a class for a projection.
const FEW: f64 = 4.0;
/// Two-sided 95 % of a normal distribution.
const NORMAL: f64 = 1.96;

/// The projection for the next request of a kind on a replica.
#[derive(Clone, Debug, PartialEq)]
pub struct Forecast {
    /// Load of the engine, 0 to 1.
    pub load: f64,
    /// Regret budget there: plain tokens that speculation may still cost every request.
    pub regret_budget: f64,
    /// Seconds per plain token; `None` before any was measured.
    pub token: Option<f64>,
    /// Projected speedup; `None` before enough rounds of its kind, real or virtual.
    pub gain: Option<Gain>,
    /// Why a draft of the best drafter has its length; `None` before there is a speedup.
    pub length: Option<Length>,
    /// Every reason not to speculate from its first token on, with a sentence for the operator, in
    /// the order in which sessions check them.
    pub reasons: Vec<Closed>,
}

/// A projected speedup and its spread, as multiples of plain decoding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gain {
    /// Mean speedup: plain time ÷ time with speculation.
    pub middle: f64,
    /// Lower limit of 95 %, from the variance of the tokens of a round (as of a geometric
    /// distribution of that mean) and the number of rounds. The uncertainty of costs is not
    /// included.
    pub low: f64,
    /// Upper limit of 95 %.
    pub high: f64,
    /// Rounds of its kind that it is based on, decayed.
    pub rounds: f64,
    /// Basis of the costs of verify requests.
    pub basis: Basis,
}

/// Draft lengths compared, by the mean acceptance of the drafter's tokens: a draft whose evidence
/// is stronger than usual is longer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Length {
    /// The name of the drafter.
    pub drafter: String,
    /// The length with the largest surplus.
    pub best: usize,
    /// Tokens per second that a second is worth elsewhere.
    pub rate: f64,
    /// A token is drafted if its survival probability is above this.
    pub min_survival: f64,
    pub lengths: Vec<OneLength>,
}

/// A round of one draft length.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct OneLength {
    pub draft: usize,
    /// Survival probability of the last token.
    pub survival: f64,
    /// Expected tokens, the bonus token included.
    pub tokens: f64,
    pub seconds: f64,
    /// Tokens beyond those that the seconds yield elsewhere.
    pub surplus: f64,
}

/// The properties of a request that a forecast depends on.
#[derive(Clone, Copy, Debug)]
pub struct Prospective<'a> {
    /// Its class by each of its drafters; empty if none can draft for it.
    pub classes: &'a [Class],
    /// Verification method and context of its drafts.
    pub way: Way,
    /// Minimum predicted gain for speculation, as a share (0.10: 10 % faster).
    pub margin: f64,
    /// Longest pause that a round may cause, seconds.
    pub max_gap: f64,
    /// Greatest ratio of the times to first tokens with and without drafts.
    pub first_token: f64,
    /// Share of accepted first draft tokens, 0 to 1, below which the acceptance gate is closed
    /// where no gain is predicted.
    pub min_acceptance: f64,
    /// Longest draft, nodes.
    pub gamma_max: usize,
    /// It is speculated on at every token, whatever the gain: only the lack of a drafter prevents
    /// that.
    pub forced: bool,
}

/// The forecast for a request, with the gain of its best drafter.
pub fn forecast(learnt: &mut Measurements<'_>, request: &Prospective<'_>) -> Forecast {
    let classes = request.classes;
    let round_costs = |model| RoundCosts::new(learnt, request.way, model);
    let known = classes.iter().filter_map(|class| {
        let costs = round_costs(class.drafter().number);
        Some((gain(learnt, *class, &costs)?, *class, costs))
    });
    let best = known.max_by(|a, b| a.0.middle.total_cmp(&b.0.middle));
    let gain = best.as_ref().map(|best| best.0);
    let length = best.and_then(|(gain, class, costs)| length(learnt, class, gain, &costs, request.gamma_max));
    let round_costs = round_costs(0);
    Forecast {
        load: learnt.concurrency.load(),
        regret_budget: learnt.regret_remaining(),
        token: learnt.costs.plain_token(),
        reasons: if request.forced { forced(classes) } else { reasons(learnt, gain, request, &round_costs) },
        gain,
        length,
    }
}

/// Lengths that are compared, besides the best.
const LENGTHS: [usize; 5] = [1, 4, 8, 16, 32];

fn length(
    learnt: &Measurements<'_>,
    class: Class,
    gain: Gain,
    costs: &RoundCosts,
    gamma_max: usize,
) -> Option<Length> {
    let (drafter, modelled) = (class.drafter(), class.drafter().source == Source::Model);
    let accepted = learnt.survival.accepted(class.bucket(), drafter);
    let last = *accepted.last()?;
    let each = accepted.into_iter().chain(std::iter::repeat(last));
    let alive = each.scan(1.0, |alive, share| {
        *alive *= share;
        Some(*alive)
    });
    let survival: Vec<f64> = alive.take(gamma_max).collect();
    let rate = (gain.middle / costs.token).max(1.0 / costs.token);
    let best = costs.cut(&survival, rate, modelled).nodes;
    let mut shown: Vec<usize> =
        LENGTHS.into_iter().filter(|&nodes| nodes <= gamma_max).chain([best]).collect();
    shown.sort_unstable();
    shown.dedup();
    let round = |&draft: &usize| {
        let tokens = 1.0 + survival.iter().take(draft).sum::<f64>();
        let (survival, seconds) =
            (survival.get(draft.wrapping_sub(1)).copied(), costs.spent(draft, modelled));
        OneLength {
            draft,
            survival: survival.unwrap_or(1.0),
            tokens,
            seconds,
            surplus: tokens - rate * seconds,
        }
    };
    let (drafter, min_survival) =
        (drafter.source.name().to_owned(), costs.min_survival(rate, best, modelled));
    Some(Length { drafter, best, rate, min_survival, lengths: shown.iter().map(round).collect() })
}

fn gain(learnt: &Measurements<'_>, class: Class, round_costs: &RoundCosts) -> Option<Gain> {
    let rounds = learnt.classes.of(class)?;
    let value = rounds.value(round_costs);
    if value.rounds < FEW {
        return None;
    }
    let middle = value.rate()? * round_costs.token;
    let tokens = value.tokens / value.rounds;
    let spread = NORMAL * (tokens * (tokens - 1.0).max(0.0) / value.rounds).sqrt() / tokens;
    let (low, high) = (middle * (1.0 - spread).max(0.0), middle * (1.0 + spread));
    Some(Gain { middle, low, high, rounds: value.rounds, basis: round_costs.basis })
}

const UNDRAFTED: Closed = (PlainReason::NoDraft, "the policy has no drafter that drafts here");
const UNSEEN: Closed = (
    PlainReason::NoGain,
    "too few rounds of this kind of request were seen; they are simulated while it is decoded plainly",
);
const REFUSED: Closed = (PlainReason::GateAcceptance, "hardly any first token of a draft is accepted");
const SHORT: Closed =
    (PlainReason::NoGain, "outputs are too short to win back the cost of switching to speculation");
const SMALL: Closed = (PlainReason::NoGain, "the projected speedup is below gamma.margin");

fn forced(classes: &[Class]) -> Vec<Closed> {
    if classes.is_empty() { vec![UNDRAFTED] } else { Vec::new() }
}

/// True if hardly any first token of any of these drafters is accepted.
fn refused(learnt: &Measurements<'_>, request: &Prospective<'_>) -> bool {
    let drafters = request.classes.iter().map(|class| (class.bucket(), class.drafter()));
    learnt.survival.all_refused(drafters, request.min_acceptance)
}

fn reasons(
    learnt: &mut Measurements<'_>,
    gain: Option<Gain>,
    request: &Prospective<'_>,
    round_costs: &RoundCosts,
) -> Vec<Closed> {
    let mut found: Vec<Closed> = gates::closed(learnt, false, request.first_token).collect();
    if request.classes.is_empty() {
        found.push(UNDRAFTED);
    }
    let measured = learnt.costs.plain_token().is_some();
    if measured && round_costs.within_gap(1, request.max_gap).is_none_or(|nodes| nodes == 0) {
        found.push((PlainReason::MaxGap, PlainReason::MaxGap.words()));
    }
    found.extend(yields(learnt, gain, request, round_costs));
    found
}

/// The reasons that follow from the projected speedup, or from the lack of one.
fn yields(
    learnt: &Measurements<'_>,
    gain: Option<Gain>,
    request: &Prospective<'_>,
    round_costs: &RoundCosts,
) -> impl Iterator<Item = Closed> {
    let unseen = gain.is_none() && !request.classes.is_empty();
    let small = gain.is_some_and(|gain| !is_faster(gain.middle, 1.0, request.margin));
    let refuses = (small || unseen) && refused(learnt, request);
    let rest = learnt.expected_remainder(0) * round_costs.token;
    let switches = round_costs.switch_in + round_costs.switch_out;
    let short = !small && gain.is_some_and(|gain| !wins_switches(rest, rest / gain.middle, switches));
    let reasons = [(unseen, UNSEEN), (refuses, REFUSED), (short, SHORT), (small, SMALL)];
    reasons.into_iter().filter_map(|(holds, reason)| holds.then_some(reason))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::{Control, Round, Shared, TemperatureBucket};
    use crate::draft::{Agreement, DrafterId, Features, Vote};
    use crate::units::Tick;
    use crate::words::VerifyMethod;

    const CLASS: Class = Class::new(DrafterId::model(0), TemperatureBucket::Greedy, 1);

    #[test]
    fn seen_rounds_give_a_forecast_and_unseen_ones_a_reason() {
        let control = Control::new();
        let request = |classes: &[Class]| {
            let request = Prospective {
                classes,
                way: Way::by(VerifyMethod::Tree, 40),
                margin: 0.1,
                max_gap: 1.0,
                first_token: 1.1,
                min_acceptance: 0.2,
                gamma_max: 8,
                forced: false,
            };
            control.with(|learnt| {
                assert!(forecast(learnt, &Prospective { forced: true, ..request }).reasons.len() <= 1);
                forecast(learnt, &request)
            })
        };
        let fresh = request(&[CLASS]);
        assert_eq!((fresh.token, fresh.gain), (None, None));
        let why: Vec<PlainReason> = fresh.reasons.iter().map(|reason| reason.0).collect();
        assert_eq!(why, [PlainReason::NotMeasured, PlainReason::NoGain]);
        control.with(|learnt| {
            (0..40).for_each(|_| learnt.note_plain(0.1, 1, Tick(0)));
            for nodes in [0, 4] {
                (0..8).for_each(|_| {
                    learnt.costs.verified(Way::by(VerifyMethod::Tree, 40), nodes, Shared::default(), 0.12);
                });
            }
            for round in 0..40 {
                learnt.classes.push(CLASS, Round::new(4, 0, 3));
                let vote = Vote::new(CLASS.drafter(), Features::default());
                for position in 0..3 {
                    learnt.survival.observe(CLASS.bucket(), vote, Agreement::Alone, position, round % 10 < 8);
                }
            }
        });
        let known = request(&[CLASS]);
        let gain = known.gain.expect("forty rounds");
        assert!(known.reasons.is_empty(), "{:?}", known.reasons);
        assert!(
            (2.2..2.7).contains(&gain.middle) && gain.low < gain.middle && gain.middle < gain.high,
            "{gain:?}"
        );
        assert!(gain.low > 1.7, "{gain:?}");
        let length = known.length.expect("tokens were tried");
        assert!((0.1..0.6).contains(&length.min_survival), "{length:?}");
        let best = length.lengths.iter().max_by(|a, b| a.surplus.total_cmp(&b.surplus));
        assert_eq!((&*length.drafter, best.map(|best| best.draft)), ("model", Some(length.best)));
        let four = length.lengths.iter().find(|one| one.draft == 4).expect("it is shown");
        assert!((four.survival - 0.8_f64.powi(4)).abs() < 0.02, "{length:?}");
        assert_eq!(request(&[]).reasons.len(), 1);
        // As in `SpeculationController::budget`: an empty round fits into the gap, one with a draft
        // does not.
        let tight = |max_gap: f64| {
            control.with(|learnt| {
                for (nodes, seconds) in [(1, 0.3), (4, 0.35)] {
                    (0..40).for_each(|_| {
                        learnt.costs.verified(
                            Way::by(VerifyMethod::Tree, 40),
                            nodes,
                            Shared::default(),
                            seconds,
                        );
                    });
                }
                let request = Prospective {
                    classes: &[CLASS],
                    way: Way::by(VerifyMethod::Tree, 40),
                    margin: 0.1,
                    max_gap,
                    first_token: 1.1,
                    min_acceptance: 0.2,
                    gamma_max: 8,
                    forced: false,
                };
                forecast(learnt, &request).reasons.iter().any(|reason| reason.0 == PlainReason::MaxGap)
            })
        };
        assert!(tight(0.1) && !tight(0.6));
    }
}
