//! Times measured by a probe, for engines that do not report step times.
//!
//! Read from the output of `foretell probe URL --json`: seconds of a plain step, and of a round by
//! its number of drafted tokens, for the verification method that the report lists first.

use serde::Deserialize;

/// Request times measured by a probe, seconds.
#[derive(Clone, Debug, PartialEq)]
pub struct Probed {
    pub step: f64,
    /// Seconds of a round by number of drafted tokens, ascending, not empty.
    rounds: Vec<(usize, f64)>,
}

/// Reason for which a file cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Useless {
    /// It is not the output of `foretell probe --json`.
    #[error("not the output of `foretell probe --json`: {0}")]
    Foreign(String),
    /// The probe could not measure the times named here.
    #[error("the probe measured no {0}")]
    Untimed(&'static str),
}

#[derive(Deserialize)]
struct ProbeReport {
    verify: Vec<Timed>,
    times: Times,
}

#[derive(Deserialize)]
struct Timed {
    method: String,
    gamma: usize,
    ms: f64,
}

#[derive(Deserialize)]
struct Times {
    token: Vec<Token>,
}

#[derive(Deserialize)]
struct Token {
    ms: f64,
}

impl Probed {
    /// Parses the probe's JSON.
    ///
    /// # Errors
    /// See [`Useless`].
    pub fn parse(json: &str) -> Result<Self, Useless> {
        let report: ProbeReport =
            serde_json::from_str(json).map_err(|error| Useless::Foreign(error.to_string()))?;
        let first = report.verify.first().ok_or(Useless::Untimed("round"))?;
        let step = mean(report.times.token.iter().map(|token| token.ms)).ok_or(Useless::Untimed("step"))?;
        let of_first: Vec<&Timed> =
            report.verify.iter().filter(|timed| timed.method == first.method).collect();
        let mut gammas: Vec<usize> = of_first.iter().map(|timed| timed.gamma).collect();
        gammas.sort_unstable();
        gammas.dedup();
        let at = |gamma: usize| {
            let timed = of_first.iter().filter(|timed| timed.gamma == gamma).map(|timed| timed.ms);
            mean(timed).map(|ms| (gamma, ms / 1e3))
        };
        Ok(Self { step: step / 1e3, rounds: gammas.into_iter().filter_map(at).collect() })
    }

    /// Seconds of a round with `drafted` tokens, interpolated linearly between the measured
    /// numbers; outside of them, the time of the nearest one.
    pub fn round(&self, drafted: f64) -> Option<f64> {
        let below = self.rounds.iter().rev().find(|point| point.0 as f64 <= drafted);
        let above = self.rounds.iter().find(|point| point.0 as f64 >= drafted);
        match (below, above) {
            (Some(below), Some(above)) if above.0 > below.0 => {
                let share = (drafted - below.0 as f64) / (above.0 - below.0) as f64;
                Some(below.1 + share * (above.1 - below.1))
            }
            (below, above) => below.or(above).map(|point| point.1),
        }
    }
}

fn mean(of: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = of.fold((0.0, 0.0), |(sum, count), value| (sum + value, count + 1.0));
    (count > 0.0).then(|| sum / count)
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = r#"{"verify": [
        {"method": "score", "context": 1026, "gamma": 0, "ms": 110.0, "computed": 2},
        {"method": "score", "context": 65, "gamma": 0, "ms": 90.0, "computed": 1},
        {"method": "score", "context": 66, "gamma": 4, "ms": 140.0, "computed": 5},
        {"method": "fan_out", "context": 66, "gamma": 4, "ms": 900.0, "computed": null}],
        "times": {"token": [{"context": 9, "ms": 80.0}, {"context": 99, "ms": 100.0}], "t_in_ms": null}}"#;

    #[test]
    fn step_is_the_mean_and_rounds_are_interpolated() {
        let probed = Probed::parse(REPORT).unwrap();
        assert!((probed.step - 0.09).abs() < 1e-12);
        let round = |drafted| probed.round(drafted).unwrap();
        assert!((round(0.0) - 0.1).abs() < 1e-12 && (round(4.0) - 0.14).abs() < 1e-12);
        assert!((round(3.0) - 0.13).abs() < 1e-12 && (round(7.0) - 0.14).abs() < 1e-12);
    }

    #[test]
    fn foreign_and_empty_reports_are_refused() {
        assert!(matches!(Probed::parse("{}"), Err(Useless::Foreign(_))));
        let without = |json: &str| Probed::parse(json).unwrap_err();
        assert_eq!(without(r#"{"verify": [], "times": {"token": []}}"#), Useless::Untimed("round"));
        let silent = r#"{"verify": [{"method": "score", "gamma": 0, "ms": 1.0}], "times": {"token": []}}"#;
        assert_eq!(without(silent), Useless::Untimed("step"));
    }
}
