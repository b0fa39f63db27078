//! Computes the figures of a report from pairs of answers.

use std::collections::BTreeMap;

use serde::Serialize;

use super::alternate::Side;
use super::formula::{self, Costs, Rounds, Unknown};
use super::stats::{Durations, Interval, interval};
use super::stream::{Answer, Failure};

/// The answers of both sides to one prompt in the same alternation.
#[derive(Clone, Debug)]
pub struct Pair {
    /// Index of the prompt in the workload.
    pub prompt: usize,
    /// The answer without Foretell.
    pub direct: Result<Answer, Failure>,
    pub through: Result<Answer, Failure>,
}

impl Pair {
    pub const fn of(&self, side: Side) -> &Result<Answer, Failure> {
        match side {
            Side::Direct => &self.direct,
            Side::Through => &self.through,
        }
    }

    fn both(&self) -> Option<(&Answer, &Answer)> {
        self.direct.as_ref().ok().zip(self.through.as_ref().ok())
    }
}

/// The measurements of one run.
#[derive(Clone, Debug)]
pub struct Measured {
    pub workload: String,
    /// Number of concurrent clients.
    pub concurrency: usize,
    /// Sampling temperature of every request.
    pub temperature: f64,
    /// True if both sides must give the same text: at temperature 0, or with seeds.
    pub comparable: bool,
    pub alternations: Vec<Vec<Pair>>,
    /// Times counted by the servers during the run.
    pub costs: Result<Costs, Unknown>,
    pub looping: Looping,
}

/// Share of looping outputs of each side, 0 to 1; `None` if there were none to check.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Looping {
    /// Without Foretell.
    pub direct: Option<f64>,
    pub through: Option<f64>,
    /// Loops were found by words, because no token ids were available.
    pub by_words: bool,
}

/// Time to the first output, milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct FirstToken {
    pub p50: Option<f64>,
    pub p95: Option<f64>,
}

/// Time between successive output events, milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Gaps {
    pub p50: Option<f64>,
    pub p95: Option<f64>,
    pub p99: Option<f64>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Figures {
    /// Speed of one client: sum of output tokens ÷ sum of times from request to last event.
    pub tokens_per_second: Option<f64>,
    pub ttft_ms: FirstToken,
    pub gap_ms: Gaps,
    /// Number of requests sent.
    pub requests: u64,
    /// Number of requests without a complete answer.
    pub failures: u64,
    /// Share of looping outputs, 0 to 1; `None` if there were none to check.
    pub looping_share: Option<f64>,
    /// Median over requests of the mean time per token, milliseconds; not in the JSON report.
    #[serde(skip)]
    pub per_token_ms: Option<f64>,
}

/// The figures of one run, a line of the report.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Run {
    pub workload: String,
    /// Number of concurrent clients.
    pub concurrency: usize,
    /// Sampling temperature of every request.
    pub temperature: f64,
    /// Figures without Foretell.
    pub direct: Figures,
    pub through: Figures,
    /// Ratio of the speeds, through ÷ direct, over alternations.
    pub ratio: Interval,
    /// Mean acceptance length: accepted tokens per round, plus 1.
    pub mean_acceptance_length: Option<f64>,
    /// The gain that the formula gives for the measured acceptance and costs.
    pub formula: Option<f64>,
    /// Measured ratio ÷ the formula's gain.
    pub gain_over_formula: Option<f64>,
    /// Share of prompts with the same text from both sides, 0 to 1; `None` if the texts need not be
    /// the same.
    #[serde(skip)]
    pub identical: Option<f64>,
    /// Remarks that a reader of the figures needs, one sentence each.
    #[serde(skip)]
    pub notes: Vec<String>,
}

impl Run {
    /// Time added to the first token (medians) ÷ the time allowed: 5 % of the direct time, at least
    /// 2 ms.
    pub fn first_token(&self) -> Option<f64> {
        let (direct, through) = (self.direct.ttft_ms.p50?, self.through.ttft_ms.p50?);
        Some((through - direct) / (direct * 0.05).max(2.0))
    }
}

pub fn conclude(measured: Measured) -> Run {
    let pairs = || measured.alternations.iter().flatten();
    let ratios: Vec<f64> = measured.alternations.iter().filter_map(|pairs| ratio(pairs)).collect();
    let ratio = interval(&ratios);
    let through: Vec<&Answer> = pairs().filter_map(|pair| pair.through.as_ref().ok()).collect();
    let rounds = rounds(&through);
    let tokens = through.iter().map(|answer| answer.completion_tokens).sum();
    let formula = measured.costs.and_then(|costs| {
        let rounds = rounds.ok_or(Unknown::NoUsage)?;
        formula::gain(tokens, rounds, &costs)
    });
    let compared: Vec<bool> =
        pairs().filter_map(Pair::both).map(|(direct, through)| direct.text == through.text).collect();
    let identical = (measured.comparable && !compared.is_empty())
        .then(|| compared.iter().filter(|&&same| same).count() as f64 / compared.len() as f64);
    Run {
        direct: Figures { looping_share: measured.looping.direct, ..figures(&pairs(), Side::Direct) },
        through: Figures { looping_share: measured.looping.through, ..figures(&pairs(), Side::Through) },
        ratio,
        mean_acceptance_length: rounds.and_then(|rounds| rounds.mean_acceptance_length()),
        formula: formula.ok(),
        gain_over_formula: ratio.median.zip(formula.ok()).map(|(gain, formula)| gain / formula),
        identical,
        notes: notes(pairs(), &through, formula, identical, measured.looping),
        workload: measured.workload,
        concurrency: measured.concurrency,
        temperature: measured.temperature,
    }
}

/// Ratio of the speeds of one alternation, over the prompts that both sides answered.
fn ratio(pairs: &[Pair]) -> Option<f64> {
    let both = || pairs.iter().filter_map(Pair::both);
    let direct = speed(both().map(|(direct, _)| direct))?;
    let through = speed(both().map(|(_, through)| through))?;
    Some(through / direct)
}

fn speed<'a>(answers: impl Iterator<Item = &'a Answer>) -> Option<f64> {
    let (tokens, seconds) = answers.fold((0, 0.0), |(tokens, seconds), answer| {
        (tokens + answer.completion_tokens, seconds + answer.last.as_secs_f64())
    });
    (tokens > 0 && seconds > 0.0).then(|| tokens as f64 / seconds)
}

/// The sum of the `usage.foretell` objects; `None` unless every answer has one.
fn rounds(answers: &[&Answer]) -> Option<Rounds> {
    answers.iter().try_fold(Rounds::default(), |sum, answer| {
        let usage = answer.foretell.as_ref()?;
        Some(Rounds {
            rounds: sum.rounds + usage.rounds,
            drafted: sum.drafted + usage.drafted,
            accepted: sum.accepted + usage.accepted,
        })
    })
}

fn figures<'a>(pairs: &(impl Iterator<Item = &'a Pair> + Clone), side: Side) -> Figures {
    let answers = || pairs.clone().filter_map(|pair| pair.of(side).as_ref().ok());
    let [mut first, mut gaps, mut per_token] = [(); 3].map(|()| Durations::default());
    for answer in answers() {
        first.record(answer.first());
        answer.gaps().for_each(|gap| gaps.record(gap));
        if let Some(duration) = answer.per_token() {
            per_token.record(duration);
        }
    }
    let requests = pairs.clone().count() as u64;
    Figures {
        tokens_per_second: speed(answers()),
        ttft_ms: FirstToken { p50: first.ms(0.5), p95: first.ms(0.95) },
        gap_ms: Gaps { p50: gaps.ms(0.5), p95: gaps.ms(0.95), p99: gaps.ms(0.99) },
        requests,
        failures: requests - answers().count() as u64,
        looping_share: None,
        per_token_ms: per_token.ms(0.5),
    }
}

fn notes<'a>(
    pairs: impl Iterator<Item = &'a Pair> + Clone,
    through: &[&Answer],
    formula: Result<f64, Unknown>,
    identical: Option<f64>,
    looping: Looping,
) -> Vec<String> {
    let mut notes = Vec::new();
    for side in [Side::Direct, Side::Through] {
        let failures: Vec<_> = pairs.clone().filter_map(|pair| pair.of(side).as_ref().err()).collect();
        if let Some(first) = failures.first() {
            notes.push(format!("{} of the {} requests failed; first: {first}", failures.len(), side.name()));
        }
    }
    if let Err(unknown) = formula {
        notes.push(format!("no formula gain: {unknown}"));
    }
    let differs = |pair: &Pair| pair.both().is_some_and(|(direct, through)| direct.text != through.text);
    if identical.is_some_and(|share| share < 1.0) {
        let mut prompts: Vec<_> = pairs.filter(|pair| differs(pair)).map(|pair| pair.prompt + 1).collect();
        prompts.sort_unstable();
        prompts.dedup();
        let shown: Vec<_> = prompts.iter().take(10).map(ToString::to_string).collect();
        notes.push(format!("outputs differ on prompts {} ({} in all)", shown.join(", "), prompts.len()));
    }
    if looping.by_words {
        notes.push("loops were counted in words: the server does not tokenize".into());
    }
    notes.extend(paths(through));
    notes
}

/// Paths of the requests, with counts: `speculated 90, plain (no_gain) 10`.
fn paths(answers: &[&Answer]) -> Option<String> {
    let mut counts = BTreeMap::new();
    for usage in answers.iter().filter_map(|answer| answer.foretell.as_ref()) {
        let reason = usage.reason.as_ref().map_or_else(String::new, |reason| format!(" ({reason})"));
        *counts.entry(format!("{}{reason}", usage.path)).or_insert(0_u64) += 1;
    }
    let shown: Vec<_> = counts.iter().map(|(path, count)| format!("{path} {count}")).collect();
    (!shown.is_empty()).then(|| format!("paths: {}", shown.join(", ")))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::counters::{Counters, Spent};
    use super::super::stream::{ForetellUsage, Piece};
    use super::*;

    fn answer(text: &str, tokens: u64, ms: u64) -> Answer {
        let pieces = (1..=tokens)
            .map(|i| Piece {
                at: Duration::from_millis(ms * i / tokens),
                end: text.len() * i as usize / tokens as usize,
                tokens: 1,
            })
            .collect();
        Answer {
            text: text.into(),
            pieces,
            last: Duration::from_millis(ms),
            finish: "length".into(),
            completion_tokens: tokens,
            foretell: None,
        }
    }

    fn told(answer: Answer, rounds: u64, accepted: u64) -> Answer {
        let foretell =
            ForetellUsage { path: "speculated".into(), rounds, drafted: 4 * rounds, accepted, reason: None };
        Answer { foretell: Some(foretell), ..answer }
    }

    fn pair(direct: Answer, through: Answer) -> Pair {
        Pair { prompt: 0, direct: Ok(direct), through: Ok(through) }
    }

    fn measured(alternations: Vec<Vec<Pair>>) -> Measured {
        Measured {
            workload: "code".into(),
            concurrency: 1,
            temperature: 0.0,
            comparable: true,
            alternations,
            costs: Err(Unknown::NoPages),
            looping: Looping::default(),
        }
    }

    #[test]
    fn the_ratio_is_the_median_over_alternations_of_sums_over_sums() {
        // 20 tokens in 300 ms against 20 in 200 ms gives 1.5; then 2.0; then 1.0.
        let alternations = [(100, 200, 200), (200, 200, 200), (100, 100, 200)]
            .map(|(one, two, both)| {
                vec![
                    pair(answer("abcdefghij", 10, one), answer("abcdefghij", 10, both / 2)),
                    pair(answer("abcdefghij", 10, two), answer("abcdefghij", 10, both / 2)),
                ]
            })
            .to_vec();
        let run = conclude(measured(alternations));
        assert!((run.ratio.median.unwrap() - 1.5).abs() < 1e-9);
        assert_eq!(run.ratio.n, 3);
        assert!((run.through.tokens_per_second.unwrap() - 100.0).abs() < 1e-9);
        assert_eq!(run.identical, Some(1.0));
        assert_eq!((run.mean_acceptance_length, run.formula, run.gain_over_formula), (None, None, None));
        assert!(run.notes[0].starts_with("no formula gain: no costs were given"), "{:?}", run.notes);
    }

    #[test]
    fn gain_over_formula_takes_the_runtimes_costs() {
        let spent = |seconds, times| Spent { seconds, times };
        let costs = Costs {
            probed: None,
            direct: Counters { decode: spent(0.1, 10.0), ..Counters::default() },
            through: Counters { verify: spent(0.040, 2.0), draft: spent(0.004, 2.0), ..Counters::default() },
        };
        let alternation = vec![pair(answer("x", 10, 110), told(answer("x", 10, 80), 2, 6))];
        let run = conclude(Measured { costs: Ok(costs), ..measured(vec![alternation]) });
        // 10 · 10 ms ÷ (2 · 10 + 2 · 20 + 4) ms
        let formula = 100.0 / 64.0;
        assert_eq!(run.mean_acceptance_length, Some(4.0));
        assert!((run.formula.unwrap() - formula).abs() < 1e-9);
        assert!((run.gain_over_formula.unwrap() - 110.0 / 80.0 / formula).abs() < 1e-9);
        assert_eq!(run.notes, ["paths: speculated 1"]);
    }

    #[test]
    fn a_failed_request_is_counted_and_its_pair_is_not_compared() {
        let failed = Pair {
            prompt: 3,
            direct: Ok(answer("slow", 1, 10_000)),
            through: Err(Failure::Status(500, "boom".into())),
        };
        let run = conclude(measured(vec![vec![pair(answer("a", 1, 10), answer("a", 1, 10)), failed]]));
        assert_eq!(run.ratio.median, Some(1.0));
        assert_eq!((run.through.requests, run.through.failures, run.direct.failures), (2, 1, 0));
        assert_eq!(run.notes[0], "1 of the through requests failed; first: HTTP 500: boom");
    }

    #[test]
    fn differing_outputs_are_noted_where_they_must_agree() {
        let pairs = vec![vec![pair(answer("a", 1, 10), answer("b", 1, 10))]];
        let run = conclude(measured(pairs.clone()));
        assert_eq!(run.identical, Some(0.0));
        assert!(run.notes.iter().any(|note| note == "outputs differ on prompts 1 (1 in all)"));
        let free = conclude(Measured { comparable: false, ..measured(pairs) });
        assert_eq!(free.identical, None);
    }

    #[test]
    fn the_first_token_may_come_five_percent_or_two_milliseconds_later() {
        let run = |direct, through| {
            let one = |ms| answer("x", 1, ms);
            conclude(measured(vec![vec![pair(one(direct), one(through))]])).first_token().unwrap()
        };
        assert!((run(100, 105) - 1.0).abs() < 0.05);
        assert!((run(10, 11) - 0.5).abs() < 0.05);
        assert!(run(10, 9) < 0.0);
    }

    #[test]
    fn nothing_measured_is_null_and_not_a_number() {
        let run = conclude(measured(Vec::new()));
        let json = serde_json::to_value(&run).unwrap();
        assert!(json["ratio"]["median"].is_null() && json["direct"]["tokens_per_second"].is_null());
    }
}
