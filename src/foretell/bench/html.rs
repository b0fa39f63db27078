//! The report as one self-contained HTML page: figures, plots, tables.

use std::fmt::Write as _;

use super::about::About;
use super::report::{ends, label, latency, no_interval, number, speed};
use super::tally::{Figures, Run};

/// Style sheet of every report.
pub const STYLE: &str = "\
:root{--ink:#1f2933;--soft:#66727f;--line:#d9dee4;--ground:#fff;--direct:#8593a3;--through:#0b7a75;--mark:#c2410c}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ed;--soft:#9aa5b1;--line:#38424d;--ground:#14181d;
--direct:#8a97a6;--through:#3fc1b8;--mark:#fb923c}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--ground);max-width:64rem;margin:2.5rem auto;
padding:0 1rem}h1{font-size:1.5rem;margin:0}h2{font-size:1.1rem;margin:2.2rem 0 .2rem}p{color:var(--soft);margin:.2rem 0 .8rem}
svg{width:100%;height:auto;font:12px system-ui,sans-serif}text{fill:var(--ink)}.soft{fill:var(--soft)}
.axis{stroke:var(--line)}.one{stroke:var(--soft);stroke-dasharray:4 3}.direct{stroke:var(--direct);fill:var(--direct)}
.through{stroke:var(--through);fill:var(--through)}.range{stroke-width:3;stroke-linecap:round}
.formula{fill:none;stroke:var(--mark);stroke-width:2}.scroll{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;white-space:nowrap;font-size:13px}
th,td{padding:.25rem .7rem;border-bottom:1px solid var(--line);text-align:right}
th{color:var(--soft);font-weight:500}th:first-child,td:first-child{text-align:start;padding-inline-start:0}
.key{display:inline-block;width:.7em;height:.7em;border-radius:50%;margin:0 .35em 0 1em}";

const BENCH_STYLE: &str = "\
.runs{list-style:none;padding:0;margin:1.2rem 0;display:grid;gap:.6rem}.runs li{display:flex;gap:1rem;align-items:baseline;\
border-inline-start:4px solid var(--through);padding:.1rem 0 .1rem .9rem}.runs b{font-size:1.6rem;min-width:5.2rem;\
color:var(--through);font-variant-numeric:tabular-nums}.runs small{display:block;color:var(--soft);font-size:13px}\
svg{display:block;min-width:38rem}dl{display:grid;grid-template-columns:max-content 1fr;gap:.25rem 1.2rem;font-size:13px;margin:.4rem 0}\
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}ul{padding-inline-start:1.1rem;font-size:13px}.runs{font-size:15px}";

/// x coordinates of the edges of the plotting area.
const X_MIN: f64 = 230.0;
const X_MAX: f64 = 865.0;
/// Height of one row of a plot.
const STEP: f64 = 26.0;

/// A range with a dot in it.
struct Bar {
    class: &'static str,
    low: f64,
    dot: f64,
    high: f64,
    /// Position of an additional diamond: the formula's gain.
    mark: Option<f64>,
    /// Text shown on hovering.
    says: String,
}

/// A run and its bars, one below the other.
struct Group {
    name: String,
    bars: Vec<Bar>,
}

pub fn page(runs: &[Run], about: &About) -> String {
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\"><title>Foretell benchmark</title>\
         <style>{STYLE}{BENCH_STYLE}</style></head><body>\n<h1>Speculation by Foretell, measured</h1>\
         <p>The same server called directly and through Foretell, in alternating blocks. {}</p>\n",
        escape(&about.summary())
    );
    headlines(&mut page, runs);
    page.push_str(
        "<p>In the plots:<span class=\"key\" style=\"background:var(--direct)\"></span>direct\
         <span class=\"key\" style=\"background:var(--through)\"></span>through</p>\n",
    );
    let why = no_interval(runs).unwrap_or_default();
    let ends = if why.is_empty() { "95 % interval" } else { "interval or the range of few" };
    section(
        &mut page,
        "Speed ratio",
        &format!(
            "Through ÷ direct tokens/s: median over alternations, with its {ends}. Right of 1 is faster. \
             The diamond, where there is one, is the gain that the runtimes' costs allow at the measured acceptance. {why}"
        ),
        &plot(&runs.iter().map(ratio).collect::<Vec<_>>(), Some(1.0), "×"),
    );
    section(
        &mut page,
        "Time to first token",
        "From sending the request: dot at the median, line to the 95th percentile.",
        &plot(&both(runs, |side| [side.ttft_ms.p50, side.ttft_ms.p50, side.ttft_ms.p95]), None, "ms"),
    );
    section(
        &mut page,
        "Time between output events",
        "Line from the median to the 99th percentile, dot at the 95th. A round brings several tokens in one event.",
        &plot(&both(runs, |side| [side.gap_ms.p50, side.gap_ms.p95, side.gap_ms.p99]), None, "ms"),
    );
    section(&mut page, "Speed", "Tokens/s of one client.", &table(&speed(runs)));
    section(&mut page, "Latency", "Milliseconds, direct → through.", &table(&latency(runs)));
    let mut notes = String::new();
    for (run, note) in runs.iter().flat_map(|run| run.notes.iter().map(move |note| (run, note))) {
        let _ = write!(notes, "<li>{}: {}</li>", escape(&label(run)), escape(note));
    }
    section(&mut page, "Notes", "", &format!("<ul>{notes}</ul>"));
    section(&mut page, "How it was measured", "", &described(about));
    page.push_str("</body></html>\n");
    page
}

/// A line with the main figures of each run.
fn headlines(page: &mut String, runs: &[Run]) {
    page.push_str("<ul class=\"runs\">");
    for run in runs {
        let (direct, through) = (&run.direct, &run.through);
        let _ = write!(
            page,
            "<li><b>{}×</b><span>{}<small>{} → {} tokens/s; first token {} → {} ms; interval {}, n = {}</small></span></li>",
            number(run.ratio.median, 2),
            escape(&label(run)),
            number(direct.tokens_per_second, 1),
            number(through.tokens_per_second, 1),
            number(direct.ttft_ms.p50, 0),
            number(through.ttft_ms.p50, 0),
            escape(&ends(&run.ratio)),
            run.ratio.n,
        );
    }
    page.push_str("</ul>");
}

fn described(about: &About) -> String {
    let mut rows = String::from("<dl>");
    for (name, value) in about.rows() {
        let _ = write!(rows, "<dt>{name}</dt><dd>{}</dd>", escape(value));
    }
    rows + "</dl>"
}

/// Adds a heading, a sentence and their content to a page.
pub fn section(page: &mut String, title: &str, says: &str, content: &str) {
    let _ = writeln!(page, "<h2>{title}</h2><p>{says}</p><div class=\"scroll\">{content}</div>");
}

fn ratio(run: &Run) -> Group {
    let interval = &run.ratio;
    let bar = interval.median.map(|median| Bar {
        class: "through",
        low: interval.low.unwrap_or(median),
        dot: median,
        high: interval.high.unwrap_or(median),
        mark: run.formula,
        says: format!(
            "{}, {}, formula {}",
            number(interval.median, 2),
            ends(interval),
            number(run.formula, 2)
        ),
    });
    Group { name: label(run), bars: bar.into_iter().collect() }
}

fn both(runs: &[Run], quantiles: impl Fn(&Figures) -> [Option<f64>; 3]) -> Vec<Group> {
    let bar = |class, figures: &Figures| {
        let [low, dot, high] = quantiles(figures);
        let says = format!("{class}: {} / {} / {} ms", number(low, 2), number(dot, 2), number(high, 2));
        Some(Bar { class, low: low?, dot: dot?, high: high?, mark: None, says })
    };
    let group = |run: &Run| Group {
        name: label(run),
        bars: [bar("direct", &run.direct), bar("through", &run.through)].into_iter().flatten().collect(),
    };
    runs.iter().map(group).collect()
}

/// A plot of horizontal ranges over a common axis that starts at zero.
fn plot(groups: &[Group], reference: Option<f64>, unit: &str) -> String {
    let bars = || groups.iter().flat_map(|group| &group.bars);
    let top = bars().flat_map(|bar| [bar.high, bar.mark.unwrap_or_default()]).fold(0.0, f64::max);
    let tick = tick(top.max(reference.unwrap_or_default() * 1.2));
    let ticks = (top / tick).ceil().max(1.0);
    let x = |value: f64| X_MIN + (X_MAX - X_MIN) * value / (ticks * tick);
    let lines: usize = groups.iter().map(|group| group.bars.len().max(1)).sum();
    let height = STEP * lines as f64;
    let mut svg = format!("<svg viewBox=\"0 0 900 {:.0}\" role=\"img\">", height + 34.0);
    for step in 0..=ticks as u32 {
        let value = f64::from(step) * tick;
        let at = x(value);
        let _ = write!(
            svg,
            "<line class=\"axis\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"4\" y2=\"{height:.0}\"/>\
             <text class=\"soft\" x=\"{at:.1}\" y=\"{:.0}\" text-anchor=\"middle\">{} {unit}</text>",
            height + 18.0,
            trimmed(value)
        );
    }
    if let Some(at) = reference.map(x) {
        let _ =
            write!(svg, "<line class=\"one\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"4\" y2=\"{height:.0}\"/>");
    }
    let mut line = 0.0;
    for group in groups {
        let middle = STEP * (line + group.bars.len().max(1) as f64 / 2.0) + 4.0;
        let _ = write!(svg, "<text x=\"0\" y=\"{middle:.1}\">{}</text>", escape(&group.name));
        for bar in &group.bars {
            draw(&mut svg, bar, STEP * (line + 0.5), &x);
            line += 1.0;
        }
        line += f64::from(u8::from(group.bars.is_empty()));
    }
    svg + "</svg>"
}

fn draw(svg: &mut String, bar: &Bar, y: f64, x: &impl Fn(f64) -> f64) {
    let (class, low, dot, high) = (bar.class, x(bar.low), x(bar.dot), x(bar.high));
    let _ = write!(
        svg,
        "<g><title>{}</title><line class=\"{class} range\" x1=\"{low:.1}\" x2=\"{high:.1}\" y1=\"{y:.1}\" \
         y2=\"{y:.1}\"/><circle class=\"{class}\" cx=\"{dot:.1}\" cy=\"{y:.1}\" r=\"5\"/>",
        escape(&bar.says)
    );
    if let Some(at) = bar.mark.map(x) {
        let _ = write!(svg, "<path class=\"formula\" d=\"M{at:.1} {:.1}l6 6l-6 6l-6 -6z\"/>", y - 6.0);
    }
    svg.push_str("</g>");
}

/// A round step width that divides `top` into four to ten parts.
pub fn tick(top: f64) -> f64 {
    if top <= 0.0 {
        return 1.0;
    }
    let rough = top / 8.0;
    let power = 10_f64.powf(rough.log10().floor());
    [1.0, 2.0, 2.5, 5.0, 10.0]
        .map(|step| step * power)
        .into_iter()
        .find(|step| *step >= rough)
        .unwrap_or(rough)
}

/// A number with at most three decimal places.
pub fn trimmed(value: f64) -> String {
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// A table whose first row is its heading.
pub fn table(rows: &[Vec<String>]) -> String {
    let mut html = String::from("<table>");
    for (at, row) in rows.iter().enumerate() {
        let cell = if at == 0 { "th" } else { "td" };
        html.push_str("<tr>");
        for text in row {
            let _ = write!(html, "<{cell}>{}</{cell}>", escape(text));
        }
        html.push_str("</tr>");
    }
    html + "</table>"
}

pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
#[allow(clippy::float_cmp)] // exact values are expected
mod tests {
    use super::super::report::tests::run;
    use super::super::stats::Interval;
    use super::*;

    #[test]
    fn the_page_stands_alone_and_shows_every_run() {
        let other = Run { workload: "a<b".into(), ratio: Interval::default(), ..run() };
        let about = About { direct: "http://a<b:1".into(), ..About::default() };
        let page = page(&[run(), other], &about);
        for outside in ["src=", "href=", "<link", "<script", "@import", "url("] {
            assert!(!page.contains(outside), "{outside}");
        }
        assert_eq!(page.matches("<svg").count(), 3);
        // One bar for the one measured ratio, and two for each latency of both runs.
        assert_eq!(page.matches("<circle").count(), 1 + 4 + 4);
        assert!(page.contains("a&lt;b, T=0, 1 client") && !page.contains("a<b"));
        assert!(page.contains("<b>2.40×</b>") && page.contains("60.0 → 144.0 tokens/s"), "{page}");
        assert!(page.contains("<dt>Direct</dt><dd>http://a&lt;b:1</dd>"), "{page}");
        assert!(page.contains("2.40, 2.25 – 2.50 (95 %), formula 2.70"));
    }

    #[test]
    fn a_plot_keeps_its_ranges_inside() {
        let svg = plot(&[ratio(&run())], Some(1.0), "×");
        let positions =
            svg.split("x1=\"").skip(1).filter_map(|rest| rest.split('"').next()?.parse::<f64>().ok());
        assert!(
            positions.clone().count() > 3 && positions.clone().all(|x| (X_MIN..=X_MAX).contains(&x)),
            "{svg}"
        );
    }

    #[test]
    fn ticks_are_round() {
        assert_eq!(tick(2.7), 0.5);
        assert_eq!(tick(80.0), 10.0);
        assert_eq!(tick(0.0), 1.0);
    }
}
