//! The gain that the measured acceptance would give if only model runs took time.
//!
//! Without speculation, N tokens take N target steps. With speculation, every round takes one
//! verify run and one draft, and yields the accepted tokens and one more; the remaining tokens are
//! plain steps. Measured gain ÷ this gain is the share that remains after the overhead of the
//! proxy, the network and the server. Prefill is omitted on both sides; it can only lower the
//! measured gain, so it never makes the share look better.

use super::counters::{Counters, Spent};
use super::probed::Probed;

/// Sums over the `usage.foretell` objects of many answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rounds {
    pub rounds: u64,
    /// Number of tokens drafted.
    pub drafted: u64,
    /// Number of drafted tokens accepted.
    pub accepted: u64,
}

impl Rounds {
    /// Mean acceptance length: accepted tokens per round, plus 1; `None` without rounds.
    pub fn mean_acceptance_length(&self) -> Option<f64> {
        (self.rounds > 0).then(|| (self.accepted + self.rounds) as f64 / self.rounds as f64)
    }
}

/// Time spent in the runtimes: `direct` during the direct blocks, `through` during the others.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Costs {
    /// Counted while the server was called directly; gives the plain step.
    pub direct: Counters,
    /// Counted while it was called through Foretell; gives verify runs and drafts.
    pub through: Counters,
    /// Times measured by a probe, used if the server does not report step times.
    pub probed: Option<Probed>,
}

/// Seconds of a plain step and of a round (`None` if there was none), and the time for drafts.
struct Prices {
    step: f64,
    round: Option<f64>,
    draft: Spent,
}

impl Costs {
    fn prices(&self, measured: Rounds) -> Result<Prices, Unknown> {
        let draft = self.through.draft;
        if let Some(probed) = &self.probed {
            let drafted = measured.drafted as f64 / measured.rounds.max(1) as f64;
            return Ok(Prices { step: probed.step, round: probed.round(drafted), draft });
        }
        let step = self.direct.decode.mean().ok_or(Unknown::NoSteps)?;
        Ok(Prices { step, round: self.through.verify.mean(), draft })
    }
}

/// Reason for which the formula's gain is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unknown {
    /// No metrics pages were given.
    #[error("no costs were given (--metrics-through with --metrics-direct or --probe)")]
    NoPages,
    /// A page could not be read or lacks the counters.
    #[error("a metrics page could not be read, or does not time its steps")]
    NoCounters,
    /// The answers have no `usage.foretell`.
    #[error("the answers carry no usage.foretell")]
    NoUsage,
    /// The target counted no plain step.
    #[error("the target counted no plain steps")]
    NoSteps,
    /// There were rounds, but the target counted no verify run.
    #[error("the target counted no verify runs although there were rounds")]
    NoVerify,
}

/// The formula's gain for `tokens` output tokens with these rounds; 1 without rounds.
pub fn gain(tokens: u64, measured: Rounds, costs: &Costs) -> Result<f64, Unknown> {
    let Prices { step, round, draft } = costs.prices(measured)?;
    if measured.rounds == 0 {
        return Ok(1.0);
    }
    let rounds = measured.rounds as f64;
    let verify = rounds * round.ok_or(Unknown::NoVerify)?;
    // Drafts that led to no round are charged to the controller, not to the formula.
    let used = if draft.times > rounds { rounds / draft.times } else { 1.0 };
    let stepped = tokens.saturating_sub(measured.accepted + measured.rounds) as f64;
    Ok(tokens as f64 * step / (stepped * step + verify + draft.seconds * used))
}

#[cfg(test)]
mod tests {
    use super::super::counters::Spent;
    use super::*;

    fn costs(step: f64, verify: Spent, draft: Spent) -> Costs {
        Costs {
            direct: Counters { decode: Spent { seconds: step * 7.0, times: 7.0 }, ..Counters::default() },
            through: Counters { verify, draft, ..Counters::default() },
            probed: None,
        }
    }

    #[test]
    fn the_gain_is_plain_time_over_speculated_time() {
        // 100 tokens: 20 rounds yield 80, 20 are plain steps. 1000 ms against 200 + 20 · 15 + 20 ·
        // 1 ms.
        let told = Rounds { rounds: 20, drafted: 100, accepted: 60 };
        let costs =
            costs(0.010, Spent { seconds: 0.300, times: 20.0 }, Spent { seconds: 0.020, times: 20.0 });
        assert!((gain(100, told, &costs).unwrap() - 1000.0 / 520.0).abs() < 1e-9);
        assert_eq!(told.mean_acceptance_length(), Some(4.0));
    }

    #[test]
    fn a_verify_run_shared_by_sessions_costs_each_of_them_its_time() {
        let told = Rounds { rounds: 20, drafted: 100, accepted: 60 };
        let shared = costs(0.010, Spent { seconds: 0.150, times: 10.0 }, Spent::default());
        assert!((gain(100, told, &shared).unwrap() - 1000.0 / 500.0).abs() < 1e-9);
    }

    #[test]
    fn drafts_without_a_round_are_not_charged() {
        let told = Rounds { rounds: 10, drafted: 10, accepted: 10 };
        let costs = costs(0.010, Spent { seconds: 0.1, times: 10.0 }, Spent { seconds: 0.2, times: 20.0 });
        assert!((gain(20, told, &costs).unwrap() - 200.0 / 200.0).abs() < 1e-9);
    }

    #[test]
    fn plain_decoding_has_a_gain_of_one() {
        let costs = costs(0.010, Spent::default(), Spent::default());
        assert_eq!(gain(100, Rounds::default(), &costs), Ok(1.0));
        assert_eq!(Rounds::default().mean_acceptance_length(), None);
    }

    #[test]
    fn probed_times_replace_missing_step_times() {
        let report = r#"{"verify": [{"method": "score", "gamma": 5, "ms": 15.0}], "times": {"token": [{"ms": 10.0}]}}"#;
        let told = Rounds { rounds: 20, drafted: 100, accepted: 60 };
        let draft = Spent { seconds: 0.020, times: 20.0 };
        let through = Counters { draft, ..Counters::default() };
        let costs = Costs { probed: Probed::parse(report).ok(), through, ..Costs::default() };
        assert!((gain(100, told, &costs).unwrap() - 1000.0 / 520.0).abs() < 1e-9);
    }

    #[test]
    fn missing_counts_are_an_error() {
        let told = Rounds { rounds: 1, drafted: 1, accepted: 1 };
        assert_eq!(gain(9, told, &costs(0.01, Spent::default(), Spent::default())), Err(Unknown::NoVerify));
        assert_eq!(gain(9, told, &Costs::default()), Err(Unknown::NoSteps));
    }
}
