//! `foretell explain --traffic`: prints the coverage report of a running proxy.

use std::io::{self, Write};
use std::time::Duration;

use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::{ExplainArgs, query};
use crate::cli::admin_port::AdminPort;
use crate::cli::{Exit, OK, USAGE, complain, runtime};
use foretell_config::Strings;
use foretell_observe::coverage::report::percent;
use foretell_observe::coverage::{CoverageReport, CoverageRow};

/// Maximum number of rows printed.
const ROWS: usize = 20;
/// Columns of the table; the last three are numbers.
const COLUMNS: [&str; 8] = ["path", "reason", "route", "policy", "backend", "requests", "tokens", "share"];
/// Number of columns with names.
const NAMES: usize = 5;

/// Prints the report of the proxy with these settings. Returns the exit code: 1 if it does not
/// answer.
pub(super) fn run(args: &ExplainArgs, environment: &dyn Strings, out: &mut dyn Write) -> io::Result<u8> {
    let port = match AdminPort::of(&args.flags, None, environment) {
        Ok(port) => port,
        Err(problems) => {
            problems.iter().try_for_each(|problem| writeln!(out, "{problem}"))?;
            return Ok(USAGE);
        }
    };
    let why = match runtime()?.block_on(query::traffic(&port)) {
        Ok(Some(report)) if args.json => {
            return writeln!(out, "{}", serde_json::to_string_pretty(&report)?).map(|()| OK);
        }
        Ok(Some(report)) => return words(&report, out).map(|()| OK),
        Ok(None) => format!("no proxy answers at {}", port.address),
        Err(why) => why,
    };
    complain(&format_args!("foretell explain: {why}"));
    Ok(Exit::Unreachable.code())
}

/// Writes the sentence, the extent of the traffic, and the table.
fn words(report: &CoverageReport, out: &mut dyn Write) -> io::Result<()> {
    let CoverageReport { sentence, requests, tokens, estimated_tokens, rest, rows, .. } = report;
    writeln!(out, "{sentence}")?;
    writeln!(out, "{tokens} tokens of {requests} requests since {}{}", since(report), estimated(report))?;
    if *estimated_tokens > 0 {
        writeln!(out, "an answer without usage is estimated: a token for each event, or for 4 bytes")?;
    }
    for (at, rest) in rest.iter().enumerate() {
        let title = if at == 0 { "the rest" } else { "" };
        writeln!(out, "{title:<12} {:<10} {}: {}", percent(rest.share), rest.reason, rest.words)?;
    }
    if rows.is_empty() {
        return Ok(());
    }
    table(rows.get(..ROWS).unwrap_or(rows), out)?;
    match rows.len().saturating_sub(ROWS) {
        0 => Ok(()),
        more => writeln!(out, "and {more} more: --json shows all"),
    }
}

fn since(report: &CoverageReport) -> String {
    let began =
        OffsetDateTime::UNIX_EPOCH + Duration::try_from_secs_f64(report.since.floor()).unwrap_or_default();
    began.format(&Rfc3339).unwrap_or_default()
}

fn estimated(report: &CoverageReport) -> String {
    match report.estimated_tokens {
        0 => String::new(),
        estimated => format!(", {} of them estimated", percent(estimated as f64 / report.tokens as f64)),
    }
}

fn table(rows: &[CoverageRow], out: &mut dyn Write) -> io::Result<()> {
    let head = COLUMNS.map(str::to_owned);
    let lines: Vec<[String; 8]> = std::iter::once(head).chain(rows.iter().map(cells)).collect();
    let width = |column: usize| {
        lines.iter().filter_map(|line| line.get(column)).map(|cell| cell.chars().count()).max()
    };
    let widths: Vec<usize> = (0..COLUMNS.len()).map(|column| width(column).unwrap_or_default()).collect();
    for line in &lines {
        let cells = line.iter().zip(&widths).enumerate().map(|(column, (cell, &width))| {
            if column < NAMES { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
        });
        writeln!(out, "{}", cells.collect::<Vec<_>>().join("  "))?;
    }
    Ok(())
}

fn cells(row: &CoverageRow) -> [String; 8] {
    let CoverageRow { policy, backend, route, path, reason, requests, tokens, share } = row;
    let name = |name: &String| if name.is_empty() { "-".to_owned() } else { name.clone() };
    let [path, reason, route, policy, backend] = [path, reason, route, policy, backend].map(name);
    [path, reason, route, policy, backend, requests.to_string(), tokens.to_string(), percent(*share)]
}
