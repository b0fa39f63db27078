//! Requirements on a benchmark: `rewrite>=2.2,hostile.low>=0.95,*.gain>=0.8,*.first_token<=1`.
//!
//! A figure that was not measured does not meet its requirement.

use std::str::FromStr;

use super::tally::Run;
use super::workload::Workload;

/// A figure of a workload and its threshold.
#[derive(Clone, Debug, PartialEq)]
pub struct Requirement {
    /// Name of the workload; `None`: every workload.
    workload: Option<String>,
    figure: Figure,
    comparison: Comparison,
    value: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Figure {
    Ratio,
    Low,
    High,
    Gain,
    MeanAcceptanceLength,
    Identical,
    Looping,
    Failures,
    FirstToken,
}

const FIGURES: &[(&str, Figure)] = &[
    ("ratio", Figure::Ratio),
    ("low", Figure::Low),
    ("high", Figure::High),
    ("gain", Figure::Gain),
    ("mean_acceptance_length", Figure::MeanAcceptanceLength),
    ("identical", Figure::Identical),
    ("looping", Figure::Looping),
    ("failures", Figure::Failures),
    ("first_token", Figure::FirstToken),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Comparison {
    AtLeast,
    AtMost,
}

/// The text is not a valid [`Requirement`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "allowed WORKLOAD[.FIGURE]>=N or <=N with FIGURE ratio|low|high|gain|mean_acceptance_length|identical|looping|failures|\
     first_token, got {0:?}"
)]
pub struct NoRequirement(String);

impl FromStr for Requirement {
    type Err = NoRequirement;

    fn from_str(text: &str) -> Result<Self, NoRequirement> {
        let read = || {
            let (name, comparison, value) = text
                .split_once(">=")
                .map(|(name, value)| (name.trim(), Comparison::AtLeast, value))
                .or_else(|| {
                    text.split_once("<=").map(|(name, value)| (name.trim(), Comparison::AtMost, value))
                })?;
            let (workload, figure) = name.split_once('.').unwrap_or((name, "ratio"));
            let (_, figure) = FIGURES.iter().find(|(name, _)| *name == figure)?;
            let value = value.trim().parse().ok().filter(|value: &f64| value.is_finite())?;
            let workload = (workload != "*").then(|| workload.to_owned());
            workload.as_ref().is_none_or(|name| !name.is_empty()).then_some(Self {
                workload,
                figure: *figure,
                comparison,
                value,
            })
        };
        read().ok_or_else(|| NoRequirement(text.to_owned()))
    }
}

impl Figure {
    fn name(self) -> &'static str {
        FIGURES.iter().find(|(_, figure)| *figure == self).map_or("", |(name, _)| name)
    }

    fn of(self, run: &Run) -> Option<f64> {
        match self {
            Self::Ratio => run.ratio.median,
            Self::Low => run.ratio.low,
            Self::High => run.ratio.high,
            Self::Gain => run.gain_over_formula,
            Self::MeanAcceptanceLength => run.mean_acceptance_length,
            Self::Identical => run.identical,
            Self::Looping => run.direct.looping_share,
            Self::Failures => Some((run.through.failures + run.direct.failures) as f64),
            Self::FirstToken => run.first_token(),
        }
    }
}

impl Requirement {
    /// The workload that it names, if it is none of these.
    pub fn unknown(&self, workloads: &[Workload]) -> Option<&str> {
        let named = self.workload.as_deref()?;
        workloads.iter().all(|workload| workload.name != named).then_some(named)
    }

    /// The runs that do not meet the requirement, one sentence each; empty if all do.
    pub fn shortfalls(&self, runs: &[Run]) -> Vec<String> {
        let applies = |run: &&Run| self.workload.as_ref().is_none_or(|name| *name == run.workload);
        let mut runs = runs.iter().filter(applies).peekable();
        if runs.peek().is_none() {
            let name = self.workload.as_deref().unwrap_or("*");
            return vec![format!("{name}: no such workload was measured")];
        }
        runs.filter_map(|run| self.shortfall(run)).collect()
    }

    fn shortfall(&self, run: &Run) -> Option<String> {
        let figure = self.figure.of(run);
        let (sign, is_met) = match self.comparison {
            Comparison::AtLeast => (">=", figure.is_some_and(|figure| figure >= self.value)),
            Comparison::AtMost => ("<=", figure.is_some_and(|figure| figure <= self.value)),
        };
        if is_met {
            return None;
        }
        let got = figure.map_or_else(|| "not measured".into(), |figure| format!("{figure:.3}"));
        let (name, value) = (self.figure.name(), self.value);
        Some(format!(
            "{}, {} clients, temperature {}: {name} {got}, required {sign} {value}",
            run.workload, run.concurrency, run.temperature
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::super::stats::Interval;
    use super::super::tally::{Figures, FirstToken};
    use super::*;

    fn run(workload: &str, median: f64, low: f64) -> Run {
        let figures = |p50| Figures {
            ttft_ms: FirstToken { p50: Some(p50), p95: None },
            requests: 100,
            ..Figures::default()
        };
        Run {
            workload: workload.into(),
            concurrency: 1,
            temperature: 0.0,
            direct: figures(20.0),
            through: figures(21.5),
            ratio: Interval { median: Some(median), low: Some(low), high: Some(median), n: 20 },
            mean_acceptance_length: None,
            formula: None,
            gain_over_formula: None,
            identical: Some(1.0),
            notes: Vec::new(),
        }
    }

    fn shortfalls(text: &str, runs: &[Run]) -> Vec<String> {
        text.parse::<Requirement>().unwrap().shortfalls(runs)
    }

    #[test]
    fn missed_thresholds_are_listed() {
        let runs = [run("rewrite", 2.3, 2.1), run("hostile", 0.99, 0.94)];
        for met in [
            "rewrite>=2.2",
            "hostile.low>=0.94",
            "*.identical>=1",
            "*.failures<=0",
            " hostile.ratio >= 0.98",
            "*.first_token<=1",
        ] {
            assert!(shortfalls(met, &runs).is_empty(), "{met}");
        }
        assert_eq!(
            shortfalls("hostile.low>=0.95", &runs),
            ["hostile, 1 clients, temperature 0: low 0.940, required >= 0.95"]
        );
        assert_eq!(shortfalls("*>=1", &runs).len(), 1);
    }

    #[test]
    fn unmeasured_figures_fall_short() {
        let runs = [run("rewrite", 2.3, 2.1)];
        assert!(shortfalls("rewrite.gain>=0.8", &runs)[0].contains("gain not measured"));
        assert_eq!(shortfalls("prose>=1", &runs), ["prose: no such workload was measured"]);
        assert_eq!(shortfalls("*>=1", &[]), ["*: no such workload was measured"]);
    }

    #[test]
    fn a_threshold_that_cannot_be_read_is_refused() {
        for wrong in ["", "rewrite", "rewrite=2", "rewrite.speed>=2", "rewrite>=fast", ">=2", "a>=NaN"] {
            assert!(wrong.parse::<Requirement>().is_err(), "{wrong}");
        }
    }
}
