//! The report of a benchmark as a table and as JSON.

use std::fmt::Write as _;

use serde::Serialize;

use super::stats::{Interval, MIN};
use super::tally::Run;

/// The report as JSON, `{"runs": [...]}` and a newline.
pub fn json(runs: &[Run]) -> String {
    #[derive(Serialize)]
    struct Runs<'a> {
        runs: &'a [Run],
    }
    let mut text = serde_json::to_string_pretty(&Runs { runs }).unwrap_or_default();
    text.push('\n');
    text
}

/// The report as two aligned tables and the notes.
pub fn table(runs: &[Run]) -> String {
    let mut text =
        String::from("Speed: tokens/s of one client; ratio = through ÷ direct, median of alternations\n");
    text.push_str(&aligned(&speed(runs)));
    if let Some(why) = no_interval(runs) {
        let _ = writeln!(text, "{why}");
    }
    text.push_str("\nLatency in ms: direct → through\n");
    text.push_str(&aligned(&latency(runs)));
    for run in runs {
        for note in &run.notes {
            let _ = write!(text, "\n{}: {note}", label(run));
        }
    }
    text.trim_end().to_owned() + "\n"
}

/// Label of a run: workload, temperature, clients.
pub fn label(run: &Run) -> String {
    let plural = if run.concurrency == 1 { "client" } else { "clients" };
    format!("{}, T={}, {} {plural}", run.workload, run.temperature, run.concurrency)
}

/// Rows of the table of speeds, heading first.
pub fn speed(runs: &[Run]) -> Vec<Vec<String>> {
    let heading = [
        "run",
        "direct",
        "through",
        "ratio",
        "interval",
        "n",
        "length",
        "formula",
        "of formula",
        "identical",
        "looping",
    ];
    let mut rows = vec![heading.map(ToOwned::to_owned).to_vec()];
    rows.extend(runs.iter().map(|run| {
        let ratio = &run.ratio;
        vec![
            label(run),
            number(run.direct.tokens_per_second, 1),
            number(run.through.tokens_per_second, 1),
            number(ratio.median, 2),
            ends(ratio),
            ratio.n.to_string(),
            number(run.mean_acceptance_length, 2),
            number(run.formula, 2),
            percent(run.gain_over_formula),
            percent(run.identical),
            both(&percent(run.direct.looping_share), &percent(run.through.looping_share)),
        ]
    }));
    rows
}

/// Rows of the table of latencies, heading first.
pub fn latency(runs: &[Run]) -> Vec<Vec<String>> {
    let heading =
        ["run", "first token p50", "p95", "per token p50", "between events p50", "p95", "p99", "failed"];
    let mut rows = vec![heading.map(ToOwned::to_owned).to_vec()];
    rows.extend(runs.iter().map(|run| {
        let (direct, through) = (&run.direct, &run.through);
        let pair = |one, other| both(&number(one, 2), &number(other, 2));
        vec![
            label(run),
            pair(direct.ttft_ms.p50, through.ttft_ms.p50),
            pair(direct.ttft_ms.p95, through.ttft_ms.p95),
            pair(direct.per_token_ms, through.per_token_ms),
            pair(direct.gap_ms.p50, through.gap_ms.p50),
            pair(direct.gap_ms.p95, through.gap_ms.p95),
            pair(direct.gap_ms.p99, through.gap_ms.p99),
            format!("{}/{} → {}/{}", direct.failures, direct.requests, through.failures, through.requests),
        ]
    }));
    rows
}

/// The ends of an interval, or of the range if there are few measurements.
pub fn ends(ratio: &Interval) -> String {
    match (ratio.low, ratio.high) {
        (Some(low), Some(high)) if ratio.is_confident() => format!("{low:.2} – {high:.2} (95 %)"),
        (Some(low), Some(high)) => format!("{low:.2} – {high:.2} (range)"),
        _ => "–".to_owned(),
    }
}

/// Reason for which some runs have no interval; `None` if all have one.
pub fn no_interval(runs: &[Run]) -> Option<String> {
    let few = runs.iter().any(|run| !run.ratio.is_confident());
    few.then(|| {
        format!(
            "Fewer than {MIN} alternations allow no interval: their range is shown, and even that of five misses the true \
             median once in sixteen times. Ask for more with --alternations."
        )
    })
}

fn both(one: &str, other: &str) -> String {
    format!("{one} → {other}")
}

/// A number with `decimals` decimal places; a dash if it was not measured.
pub fn number(value: Option<f64>, decimals: usize) -> String {
    value.map_or_else(|| "–".into(), |value| format!("{value:.decimals$}"))
}

/// A share as a percentage; a share below 1 is rounded down, so it never shows as 100 %.
pub fn percent(share: Option<f64>) -> String {
    match share {
        None => "–".into(),
        Some(share) if share < 1.0 => format!("{:.1} %", (share * 1000.0).floor() / 10.0),
        Some(share) => format!("{:.0} %", share * 100.0),
    }
}

/// A table with aligned columns: the first at its start, the others at their end.
pub fn aligned(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or_default();
    let width = |column: usize| {
        rows.iter()
            .filter_map(|row| row.get(column))
            .map(|cell| cell.chars().count())
            .max()
            .unwrap_or_default()
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (column, (cell, &width)) in row.iter().zip(&widths).enumerate() {
            let _ = match column {
                0 => write!(line, "{cell:width$}"),
                _ => write!(line, "  {cell:>width$}"),
            };
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::json;

    use super::super::tally::{Figures, FirstToken, Gaps};
    use super::*;

    pub(in super::super) fn run() -> Run {
        let figures = |speed, ms| Figures {
            tokens_per_second: Some(speed),
            ttft_ms: FirstToken { p50: Some(ms), p95: Some(ms * 2.0) },
            gap_ms: Gaps { p50: Some(ms / 2.0), p95: Some(ms), p99: Some(ms * 1.5) },
            requests: 100,
            failures: 0,
            looping_share: Some(0.05),
            per_token_ms: Some(1000.0 / speed),
        };
        Run {
            workload: "rewrite".into(),
            concurrency: 1,
            temperature: 0.0,
            direct: figures(60.0, 20.0),
            through: figures(144.0, 20.5),
            ratio: Interval { median: Some(2.4), low: Some(2.25), high: Some(2.5), n: 20 },
            mean_acceptance_length: Some(4.9),
            formula: Some(2.7),
            gain_over_formula: Some(0.8889),
            identical: Some(0.9995),
            notes: vec!["paths: speculated 100".into()],
        }
    }

    #[test]
    fn the_json_report_has_exactly_the_agreed_fields() {
        let read: serde_json::Value = serde_json::from_str(&json(&[run()])).unwrap();
        assert_eq!(
            read,
            json!({"runs": [{
                "workload": "rewrite", "concurrency": 1, "temperature": 0.0,
                "direct": {"tokens_per_second": 60.0, "ttft_ms": {"p50": 20.0, "p95": 40.0},
                    "gap_ms": {"p50": 10.0, "p95": 20.0, "p99": 30.0},
                    "requests": 100, "failures": 0, "looping_share": 0.05},
                "through": {"tokens_per_second": 144.0, "ttft_ms": {"p50": 20.5, "p95": 41.0},
                    "gap_ms": {"p50": 10.25, "p95": 20.5, "p99": 30.75},
                    "requests": 100, "failures": 0, "looping_share": 0.05},
                "ratio": {"median": 2.4, "low": 2.25, "high": 2.5, "n": 20},
                "mean_acceptance_length": 4.9, "formula": 2.7, "gain_over_formula": 0.8889}]})
        );
    }

    #[test]
    fn the_table_is_aligned_and_carries_the_notes() {
        let text = table(&[run(), Run { workload: "documentation".into(), notes: Vec::new(), ..run() }]);
        let lines: Vec<_> = text.lines().collect();
        let end_of = |line: &str, cell: &str| {
            line.get(..line.find(cell).unwrap() + cell.len()).unwrap().chars().count()
        };
        assert_eq!(end_of(lines[1], "ratio"), end_of(lines[2], "2.40"));
        assert_eq!(end_of(lines[2], "2.40"), end_of(lines[3], "2.40"));
        assert!(text.ends_with("rewrite, T=0, 1 client: paths: speculated 100\n"));
    }

    #[test]
    fn without_an_interval_the_table_shows_the_range_and_the_reason() {
        let few = Interval { median: Some(2.0), low: Some(1.5), high: Some(2.5), n: 5 };
        let text = table(&[Run { ratio: few, ..run() }]);
        assert!(text.contains("1.50 – 2.50 (range)") && text.contains("Fewer than 6 alternations"), "{text}");
        assert!(!table(&[run()]).contains("Fewer than"));
    }

    #[test]
    fn a_share_below_one_is_never_shown_as_all() {
        assert_eq!(percent(Some(0.9999)), "99.9 %");
        assert_eq!(percent(Some(1.0)), "100 %");
        assert_eq!(percent(None), "–");
    }
}
