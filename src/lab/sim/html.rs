//! The result of tables as one self-contained HTML page: figures, and their course over time in
//! plots.

mod sweep;

use std::fmt::Write;

use super::figures::Played;
use super::record::Interval;
use super::report::TableReport;
use foretell::bench::html::{STYLE, escape, section, table, tick, trimmed};

/// Edges of the plotting area: x from and to, y from and to.
const AREA: [f64; 4] = [60.0, 890.0, 8.0, 150.0];
/// Maximum number of points of a line; more are averaged.
const POINTS: usize = 300;

struct Line {
    name: String,
    /// CSS colour of the line.
    ink: &'static str,
    /// One value for each interval; `None` where there is nothing to show.
    values: Vec<Option<f64>>,
}

/// A plot over time.
struct Plot {
    title: &'static str,
    says: &'static str,
    lines: Vec<Line>,
}

pub fn page(reports: &[TableReport]) -> String {
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\"><title>foretell-lab sim</title>\
         <style>{STYLE}polyline{{fill:none;stroke-width:1.5}}.mark{{stroke:var(--mark)}}</style></head><body>\n\
         <h1>foretell-lab sim</h1><p>A fleet in virtual time: real sessions and the real controller in front of a simulated \
         engine, against the same traffic without Foretell.</p>\n"
    );
    for report in reports {
        one(&mut page, report);
    }
    page.push_str("</body></html>\n");
    page
}

fn one(page: &mut String, report: &TableReport) {
    let name = &report.table.name;
    let untuned = if report.table.untuned { " (untuned)" } else { "" };
    section(page, &format!("{}{untuned}", escape(name)), &escape(&report.table.about), &table(&rows(report)));
    sweep::put(page, &report.swept);
    for plot in plots(report) {
        let key = plot.lines.iter().map(|line| {
            format!("<span class=\"key\" style=\"background:{}\"></span>{}", line.ink, escape(&line.name))
        });
        let says = format!("{}{}", plot.says, key.collect::<String>());
        section(page, plot.title, &says, &drawn(&plot, report.table.setup.interval));
    }
}

fn rows(report: &TableReport) -> Vec<Vec<String>> {
    let mut rows = vec![["figure", "measured", "at least", "at most", ""].map(str::to_owned).to_vec()];
    let number = |value: Option<f64>| value.map_or_else(|| "–".to_owned(), |value| format!("{value:.3}"));
    rows.extend(report.table.expected.iter().map(|expected| {
        let value = report.outcome.figure(expected.figure);
        let met = if expected.is_met(value) { "met" } else { "not met" };
        let name = expected.figure.name().to_owned();
        vec![name, number(value), number(expected.min), number(expected.max), met.to_owned()]
    }));
    rows
}

fn plots(report: &TableReport) -> Vec<Plot> {
    let (direct, auto) = (&report.outcome.direct, &report.outcome.auto);
    let line = |name: &str, ink, values| Line { name: name.to_owned(), ink, values };
    let (soft, through, mark) = ("var(--direct)", "var(--through)", "var(--mark)");
    let gamma = |at: &Interval| (at.rounds > 0).then(|| at.drafted as f64 / at.rounds as f64);
    let accepted = |at: &Interval| (at.rounds > 0).then(|| at.followed as f64 / at.rounds as f64);
    let running = |at: &Interval| (at.reports > 0).then(|| at.running());
    let waiting = |at: &Interval| (at.reports > 0).then(|| at.waiting());
    vec![
        Plot {
            title: "Gamma",
            says: "Drafted tokens per round, and how many of them matched the true text.",
            lines: vec![
                line("drafted", through, of(auto, gamma)),
                line("accepted", mark, of(auto, accepted)),
            ],
        },
        Plot {
            title: "Load",
            says: "Running sequences and waiting requests, as reported by the engine.",
            lines: vec![
                line("running", through, of(auto, running)),
                line("waiting", mark, of(auto, waiting)),
                line("running, direct", soft, of(direct, running)),
            ],
        },
        Plot {
            title: "Ratio",
            says: "Tokens of all traffic in each interval, through Foretell ÷ direct.",
            lines: vec![line("ratio", through, ratio(auto, direct))],
        },
        Plot {
            title: "Regret",
            says: "Tokens of all traffic up to each moment, fewer than those of direct calls or the best fixed gamma, whichever is more.",
            lines: vec![line("regret", mark, regret(report))],
        },
    ]
}

/// One value for each interval of the first seed.
fn of(played: &Played, value: impl Fn(&Interval) -> Option<f64>) -> Vec<Option<f64>> {
    played.0.first().map_or_else(Vec::new, |record| record.course.iter().map(value).collect())
}

fn tokens(played: &Played) -> Vec<f64> {
    of(played, |at| Some(at.tokens as f64)).into_iter().flatten().collect()
}

fn ratio(auto: &Played, direct: &Played) -> Vec<Option<f64>> {
    let pairs = tokens(auto).into_iter().zip(tokens(direct));
    pairs.map(|(auto, direct)| (direct > 0.0).then(|| auto / direct)).collect()
}

/// Tokens by which the best of direct and all fixed gammas was ahead.
fn regret(report: &TableReport) -> Vec<Option<f64>> {
    let sums = |played: &Played| {
        let mut sum = 0.0;
        let add = |tokens: f64| {
            sum += tokens;
            sum
        };
        tokens(played).into_iter().map(add).collect::<Vec<f64>>()
    };
    let rivals =
        std::iter::once(&report.outcome.direct).chain(report.outcome.fixed.iter().map(|fixed| &fixed.1));
    let rivals: Vec<Vec<f64>> = rivals.map(sums).collect();
    let best =
        |position: usize| rivals.iter().filter_map(|sums| sums.get(position).copied()).reduce(f64::max);
    sums(&report.outcome.auto)
        .iter()
        .enumerate()
        .map(|(position, through)| Some(best(position)? - through))
        .collect()
}

/// At most [`POINTS`] means: position (in intervals) and value.
fn points(values: &[Option<f64>]) -> Vec<(f64, f64)> {
    let each = values.len().div_ceil(POINTS).max(1);
    let mean = |(number, chunk): (usize, &[Option<f64>])| {
        let known: Vec<f64> = chunk.iter().copied().flatten().collect();
        let value = known.iter().sum::<f64>() / known.len() as f64;
        (!known.is_empty()).then_some(((number * each) as f64 + chunk.len() as f64 / 2.0, value))
    };
    values.chunks(each).enumerate().filter_map(mean).collect()
}

fn drawn(plot: &Plot, interval: f64) -> String {
    let [start, end, above, below] = AREA;
    let lines: Vec<(&Line, Vec<(f64, f64)>)> =
        plot.lines.iter().map(|line| (line, points(&line.values))).collect();
    let all = || lines.iter().flat_map(|line| line.1.iter().map(|point| point.1));
    let (low, high) = (all().fold(0.0, f64::min), all().fold(0.0, f64::max));
    let step = tick(high - low) * 2.0;
    let (low, high) = ((low / step).floor() * step, ((high / step).ceil() * step).max(step));
    let positions = plot.lines.iter().map(|line| line.values.len()).max().unwrap_or(1).max(1) as f64;
    let x = |position: f64| start + (end - start) * position / positions;
    let y = |value: f64| below - (below - above) * (value - low) / (high - low);
    let mut svg = format!("<svg viewBox=\"0 0 900 {:.0}\" role=\"img\">", below + 24.0);
    for number in 0..=((high - low) / step).round() as u32 {
        let value = low + f64::from(number) * step;
        let at = y(value);
        rule(&mut svg, (start, end), at, value);
    }
    let seconds = tick(positions * interval);
    for number in 0..=(positions * interval / seconds) as u32 {
        let at = x(f64::from(number) * seconds / interval);
        let label = trimmed(f64::from(number) * seconds);
        let _ = write!(
            svg,
            "<text class=\"soft\" x=\"{at:.1}\" y=\"{:.0}\" text-anchor=\"middle\">{label} s</text>",
            below + 18.0
        );
    }
    for (line, points) in lines {
        let mut path = String::new();
        for (position, value) in points {
            let _ = write!(path, "{:.1},{:.1} ", x(position), y(value));
        }
        let _ = write!(svg, "<polyline style=\"stroke:{}\" points=\"{}\"/>", line.ink, path.trim_end());
    }
    svg + "</svg>"
}

/// A line across a plot at height `at`, labelled with its value.
fn rule(svg: &mut String, (start, end): (f64, f64), at: f64, value: f64) {
    let _ = write!(
        svg,
        "<line class=\"axis\" x1=\"{start}\" x2=\"{end}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\
         <text class=\"soft\" x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
        start - 6.0,
        at + 4.0,
        trimmed(value)
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plot(values: Vec<Option<f64>>) -> Plot {
        let line = Line { name: "a<b".into(), ink: "var(--mark)", values };
        Plot { title: "t", says: "", lines: vec![line] }
    }

    #[test]
    fn a_plot_keeps_its_lines_inside_and_averages_points() {
        let values = (0..1_000).map(|position| Some((f64::from(position) / 50.0).sin() * 7.0)).collect();
        let svg = drawn(&plot(values), 0.5);
        let path = svg.split("points=\"").nth(1).and_then(|rest| rest.split('"').next()).expect("a line");
        let points: Vec<(f64, f64)> = path
            .split(' ')
            .map(|point| point.split_once(',').expect("a point"))
            .map(|(x, y)| (x.parse().expect("x"), y.parse().expect("y")))
            .collect();
        assert!((200..=POINTS).contains(&points.len()));
        let [start, end, above, below] = AREA;
        assert!(
            points.iter().all(|(x, y)| (start..=end).contains(x) && (above..=below).contains(y)),
            "{svg}"
        );
        assert!(svg.contains(">500 s<") && !svg.contains("NaN"));
    }

    #[test]
    fn a_plot_of_nothing_is_empty() {
        let svg = drawn(&plot(vec![None; 5]), 1.0);
        assert!(svg.contains("points=\"\"") && !svg.contains("NaN"), "{svg}");
    }
}
