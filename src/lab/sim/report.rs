//! The result of a table for a terminal and as JSON.

use std::fmt::Write;

use serde_json::{Value, json};

use super::figures::{Figure, Outcome, Played};
use super::record::{Interval, Record};
use super::sweep::{self, Cell};
use super::table::{Expected, Table};

/// The controller and the fixed gammas over a set of tables.
#[derive(Clone, Debug, PartialEq)]
pub struct Set {
    /// Tables in which both could be compared.
    tables: usize,
    /// Geometric mean over the tables of our tokens per second ÷ direct, with the controller's
    /// decisions.
    auto: f64,
    /// The same with each fixed gamma.
    fixed: Vec<(usize, f64)>,
}

impl Set {
    /// Over these tables, each of which was played with the same fixed gammas.
    pub fn of(reports: &[TableReport]) -> Self {
        let speeds: Vec<(f64, Vec<(usize, f64)>)> = reports
            .iter()
            .filter_map(|report| {
                Some((report.outcome.figure(Figure::Ratio)?, report.outcome.fixed_ratios()?))
            })
            .collect();
        let mean = |logs: f64| (logs / speeds.len().max(1) as f64).exp();
        let mut fixed: Vec<(usize, f64)> = Vec::new();
        for (gamma, ratio) in speeds.iter().flat_map(|(_, fixed)| fixed) {
            match fixed.iter_mut().find(|(known, _)| known == gamma) {
                Some((_, logs)) => *logs += ratio.ln(),
                None => fixed.push((*gamma, ratio.ln())),
            }
        }
        for (_, logs) in &mut fixed {
            *logs = mean(*logs);
        }
        Self { tables: speeds.len(), auto: mean(speeds.iter().map(|(auto, _)| auto.ln()).sum()), fixed }
    }

    /// True if a fixed gamma is faster than the controller.
    pub fn is_beaten(&self) -> bool {
        self.fixed.iter().any(|(_, ratio)| *ratio >= self.auto)
    }

    pub fn text(&self) -> String {
        let fixed: Vec<String> =
            self.fixed.iter().map(|(gamma, ratio)| format!("fixed {gamma} {ratio:.3}")).collect();
        let beaten = if self.is_beaten() { "   BEATEN" } else { "" };
        let Self { tables, auto, .. } = self;
        format!(
            "{tables} tables, our tokens per second ÷ direct, geometric mean: auto {auto:.3}, {}{beaten}\n",
            fixed.join(", ")
        )
    }
}

/// A table that was played.
#[derive(Clone, Debug)]
pub struct TableReport {
    pub table: Table,
    pub outcome: Outcome,
    /// Gamma over temperature and load; empty if the table has no sweep.
    pub swept: Vec<Cell>,
}

impl TableReport {
    /// The expectations that were not met, with the measured values.
    pub fn shortfalls(&self) -> Vec<(Expected, Option<f64>)> {
        let measured = |expected: &Expected| (*expected, self.outcome.figure(expected.figure));
        let short = |(expected, value): &(Expected, Option<f64>)| !expected.is_met(*value);
        self.table.expected.iter().map(measured).filter(short).collect()
    }

    pub fn text(&self) -> String {
        let Self { table, outcome, swept } = self;
        let untuned = if table.untuned { " (untuned)" } else { "" };
        let mut text = format!("{}{untuned}: {}\n", table.name, table.about);
        for expected in &table.expected {
            let value = outcome.figure(expected.figure);
            let met = if expected.is_met(value) { "" } else { "   NOT MET" };
            let name = expected.figure.name();
            let _ = writeln!(text, "  {name:<11} {:>8}   expected {}{met}", number(value), range(expected));
        }
        let _ = writeln!(text, "  {}", self.asides().join(", "));
        text.push_str(&sweep::text(swept));
        text
    }

    /// Figures without an expectation, and the reasons at the end of the sessions.
    fn asides(&self) -> Vec<String> {
        let Self { table, outcome, .. } = self;
        let expected = |figure: Figure| table.expected.iter().any(|expected| expected.figure == figure);
        let others = Figure::ALL.into_iter().filter(|&figure| !expected(figure));
        let value = |figure: Figure| Some(format!("{} {:.3}", figure.name(), outcome.figure(figure)?));
        let mut asides: Vec<String> = others.filter_map(value).collect();
        let requests: usize = outcome.auto.0.iter().map(|record| record.served.len()).sum();
        asides.push(format!("{requests} requests"));
        if let Some((gamma, best)) = outcome.best() {
            asides.push(format!("best fixed gamma {gamma} ({best:.3})"));
        }
        let fixed = outcome.fixed_ratios().unwrap_or_default().into_iter().zip(&outcome.fixed);
        asides.extend(fixed.map(|((gamma, ratio), (_, played))| {
            let late = outcome.first_token(played).unwrap_or(f64::NAN);
            format!("fixed {gamma}: {ratio:.3}, first_token {late:.2}")
        }));
        asides.extend(reasons(&outcome.auto).into_iter().map(|(reason, count)| format!("{reason} {count}")));
        asides
    }

    pub fn json(&self) -> Value {
        let Self { table, outcome, swept } = self;
        let figures: serde_json::Map<String, Value> = Figure::ALL
            .into_iter()
            .map(|figure| (figure.name().to_owned(), json!(outcome.figure(figure))))
            .collect();
        let expected = table.expected.iter().map(|expected| {
            let got = outcome.figure(expected.figure);
            json!({
                "figure": expected.figure.name(),
                "min": expected.min,
                "max": expected.max,
                "got": got,
                "met": expected.is_met(got),
            })
        });
        let fixed =
            outcome.fixed.iter().map(|(gamma, played)| json!({ "gamma": gamma, "course": course(played) }));
        json!({
            "name": table.name,
            "about": table.about,
            "untuned": table.untuned,
            "figures": figures,
            "expected": expected.collect::<Vec<_>>(),
            "reasons": reasons(&outcome.auto).into_iter().map(|(reason, count)| json!({ "reason": reason, "requests": count })).collect::<Vec<_>>(),
            "interval": table.setup.interval,
            "direct": course(&outcome.direct),
            "auto": course(&outcome.auto),
            "fixed": fixed.collect::<Vec<_>>(),
            "sweep": swept.iter().map(cell).collect::<Vec<_>>(),
        })
    }
}

/// Number of sessions by the reason for which they decoded plainly at their end, or `speculated`;
/// the most frequent first.
fn reasons(played: &Played) -> Vec<(&'static str, usize)> {
    let mut counts: Vec<(&'static str, usize)> = Vec::new();
    let summaries =
        played.0.iter().flat_map(|record| &record.served).filter_map(|served| served.summary.as_ref());
    for name in summaries.map(|summary| summary.reason.map_or("speculated", |reason| reason.name())) {
        match counts.iter_mut().find(|count| count.0 == name) {
            Some(count) => count.1 += 1,
            None => counts.push((name, 1)),
        }
    }
    counts.sort_by_key(|count| std::cmp::Reverse(count.1));
    counts
}

fn cell(cell: &Cell) -> Value {
    json!({
        "clients": cell.clients,
        "load": cell.load,
        "temperature": cell.temperature,
        "gamma": cell.gamma,
        "drafted": cell.drafted,
        "plain": cell.plain,
        "accepted": cell.accepted,
        "requests": cell.requests,
    })
}

/// The course of the first seed.
fn course(played: &Played) -> Value {
    let intervals = played.0.first().map_or(&[][..], |record: &Record| &record.course[..]);
    let of = |value: &dyn Fn(&Interval) -> f64| intervals.iter().map(value).collect::<Vec<f64>>();
    json!({
        "tokens": of(&|at| at.tokens as f64),
        "rounds": of(&|at| at.rounds as f64),
        "drafted": of(&|at| at.drafted as f64),
        "followed": of(&|at| at.followed as f64),
        "running": of(&Interval::running),
        "waiting": of(&Interval::waiting),
    })
}

fn number(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.3}"))
}

fn range(expected: &Expected) -> String {
    match (expected.min, expected.max) {
        (Some(min), Some(max)) => format!("{min} to {max}"),
        (Some(min), None) => format!("at least {min}"),
        (None, Some(max)) => format!("at most {max}"),
        (None, None) => "anything".to_owned(),
    }
}

/// Several reports as one JSON document.
pub fn json(reports: &[TableReport]) -> String {
    let tables: Vec<Value> = reports.iter().map(TableReport::json).collect();
    format!("{:#}\n", json!({ "tables": tables }))
}
