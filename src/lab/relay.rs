//! Compares Foretell, nginx and a bare hyper proxy in front of the same backend, in alternating
//! turns.
//!
//! The load is open loop: requests are sent at fixed times, even if earlier ones are not answered
//! yet, so a stalled proxy shows in the latencies. The latency of a request runs from writing its
//! first byte to reading the answer's last byte; that of an event from the backend writing it to
//! the client receiving it. Every turn carries both loads at once. Ratios are computed per pair of
//! turns and judged by their median, so slow changes of the machine cancel out. The bare proxy is
//! not judged; it shows the cost of hyper itself.

pub mod backend;
pub mod bare;
pub mod load;
pub mod proxies;

use std::fmt::Write;
use std::path::PathBuf;
use std::time::Duration;

use hdrhistogram::Histogram;
use serde_json::{Value, json};

use load::{Busy, Load, Measured};
use proxies::{Bare, Child, Foretell, Nginx};

/// Maximum allowed ratio of the median latencies, Foretell ÷ nginx.
const P50_MAX: f64 = 1.05;
/// Maximum allowed ratio of the 99th percentiles, Foretell ÷ nginx.
const P99_MAX: f64 = 1.25;
/// Maximum resident memory allowed for Foretell without models, bytes.
pub const RSS_MAX: u64 = 40 << 20;

/// Programs and load of a comparison.
#[derive(Clone, Debug)]
pub struct Options {
    /// Path of the `foretell` program; it is run as
    /// `serve --backend URL --listen ADDR --admin ADDR`.
    pub foretell: PathBuf,
    /// Path of the `nginx` program.
    pub nginx: PathBuf,
    /// Configuration file of nginx.
    pub config: PathBuf,
    /// Process file of Foretell; it turns off the line per request, since nginx writes none.
    pub foretell_config: PathBuf,
    /// Number of pairs of turns.
    pub pairs: usize,
    /// Length of a turn.
    pub turn: Duration,
    /// Load of every turn.
    pub load: Load,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            foretell: std::env::current_exe()
                .map_or_else(|_| "foretell".into(), |lab| lab.with_file_name("foretell")),
            nginx: "nginx".into(),
            config: "tests/relay/nginx.conf".into(),
            foretell_config: "tests/relay/foretell.yaml".into(),
            pairs: 10,
            turn: Duration::from_secs(20),
            load: Load::default(),
        }
    }
}

/// Reason for which a comparison cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum RelayError {
    /// A program or file is missing, or a connection failed.
    #[error("{what}: {error}")]
    Io {
        /// The step or file that failed.
        what: String,
        /// The system's error.
        error: std::io::Error,
    },
    /// A histogram of latencies cannot be created.
    #[error("latencies: {0}")]
    Histogram(#[from] hdrhistogram::CreationError),
    /// A proxy did not begin to listen.
    #[error("{0} did not begin to listen")]
    Silent(&'static str),
}

impl RelayError {
    fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        move |error| Self::Io { what: what.into(), error }
    }
}

/// One turn of each proxy.
#[derive(Debug)]
pub struct Pair {
    /// Through nginx.
    pub nginx: Measured,
    /// Through Foretell.
    pub foretell: Measured,
    /// Through the bare hyper proxy; not judged.
    pub bare: Measured,
}

/// The measurements of a comparison.
#[derive(Debug)]
pub struct Report {
    /// The same load without a proxy, for comparison; not judged.
    pub direct: Measured,
    /// The turns, in the order they were taken.
    pub pairs: Vec<Pair>,
    /// Largest resident memory of Foretell, bytes.
    pub rss: u64,
}

/// One latency figure compared, Foretell ÷ nginx.
#[derive(Clone, Debug, PartialEq)]
pub struct Ratio {
    /// Name of the figure, such as `request p50`.
    pub name: &'static str,
    /// Through nginx: median over the turns, microseconds.
    pub nginx: f64,
    /// Through Foretell: median over the turns, microseconds.
    pub foretell: f64,
    /// Through the bare hyper proxy: median over the turns, microseconds.
    pub bare: f64,
    /// Median over the pairs of Foretell ÷ nginx.
    pub ratio: f64,
    /// Median over the pairs of bare hyper ÷ nginx.
    pub bare_ratio: f64,
    /// Maximum allowed `ratio`.
    pub most: f64,
}

impl Report {
    /// The judged figures: four, or two if the load had no requests or no streams.
    pub fn ratios(&self) -> Vec<Ratio> {
        let requests = |measured: &Measured, q: f64| micros(&measured.requests, q);
        let events = |measured: &Measured, q: f64| micros(&measured.events, q);
        let all = [
            self.ratio("request p50", P50_MAX, |m| requests(m, 0.5)),
            self.ratio("request p99", P99_MAX, |m| requests(m, 0.99)),
            self.ratio("event p50", P50_MAX, |m| events(m, 0.5)),
            self.ratio("event p99", P99_MAX, |m| events(m, 0.99)),
        ];
        all.into_iter().filter(|ratio| ratio.nginx > 0.0 || ratio.foretell > 0.0).collect()
    }

    fn ratio(&self, name: &'static str, most: f64, of: impl Fn(&Measured) -> f64) -> Ratio {
        let all = |of: &dyn Fn(&Pair) -> f64| median(self.pairs.iter().map(of).collect());
        Ratio {
            name,
            nginx: all(&|pair| of(&pair.nginx)),
            foretell: all(&|pair| of(&pair.foretell)),
            bare: all(&|pair| of(&pair.bare)),
            ratio: all(&|pair| of(&pair.foretell) / of(&pair.nginx)),
            bare_ratio: all(&|pair| of(&pair.bare) / of(&pair.nginx)),
            most,
        }
    }

    /// Median processor time per turn, as text: user time, kernel time.
    fn busy(&self, of: fn(&Pair) -> &Measured) -> String {
        let of = |part: fn(&Busy) -> Duration| {
            median(self.pairs.iter().map(|pair| part(&of(pair).busy).as_secs_f64()).collect())
        };
        format!("{:.2} + {:.2}", of(|busy| busy.user), of(|busy| busy.system))
    }

    /// Failed requests and ended streams, over all turns of nginx and Foretell.
    pub fn failures(&self) -> u64 {
        self.pairs.iter().map(|pair| pair.nginx.failures + pair.foretell.failures).sum()
    }

    /// True if every requirement is met: latencies, memory, and no failures.
    pub fn holds(&self) -> bool {
        !self.pairs.is_empty()
            && self.failures() == 0
            && self.rss <= RSS_MAX
            && self.ratios().iter().all(|ratio| ratio.ratio <= ratio.most)
    }

    /// The report as text.
    pub fn to_text(&self) -> String {
        let mut text = format!("{} pairs of turns, medians in microseconds\n", self.pairs.len());
        let _ = writeln!(
            text,
            "{:<12} {:>9} {:>9} {:>7} {:>7}   {:>10} {:>7}",
            "", "nginx", "foretell", "ratio", "most", "bare hyper", "ratio"
        );
        for Ratio { name, nginx, foretell, bare, ratio, bare_ratio, most } in self.ratios() {
            let result = if ratio <= most { "" } else { "  too much" };
            let _ = writeln!(
                text,
                "{name:<12} {nginx:>9.0} {foretell:>9.0} {ratio:>7.3} {most:>7.2}   {bare:>10.0} {bare_ratio:>7.3}{result}"
            );
        }
        let direct = |histogram, q| micros(histogram, q);
        let _ = writeln!(
            text,
            "direct       request p50 {:.0} p99 {:.0}, event p50 {:.0} p99 {:.0}",
            direct(&self.direct.requests, 0.5),
            direct(&self.direct.requests, 0.99),
            direct(&self.direct.events, 0.5),
            direct(&self.direct.events, 0.99)
        );
        let mib = self.rss as f64 / f64::from(1 << 20);
        let most = RSS_MAX >> 20;
        let result = if self.rss <= RSS_MAX { "" } else { "  too much" };
        let _ = writeln!(text, "resident memory of foretell {mib:.1} MiB, most {most} MiB{result}");
        let _ = writeln!(
            text,
            "processor time per turn, own code + kernel, seconds: nginx {}, foretell {}, bare hyper {}",
            self.busy(|pair| &pair.nginx),
            self.busy(|pair| &pair.foretell),
            self.busy(|pair| &pair.bare)
        );
        let _ = writeln!(text, "failures {}", self.failures());
        text
    }

    /// The report as JSON.
    pub fn to_json(&self) -> Value {
        let ratios: Vec<Value> = self
            .ratios()
            .into_iter()
            .map(|r| json!({ "name": r.name, "nginx_us": r.nginx, "foretell_us": r.foretell, "bare_us": r.bare, "ratio": r.ratio, "bare_ratio": r.bare_ratio, "most": r.most }))
            .collect();
        json!({ "pairs": self.pairs.len(), "ratios": ratios, "rss": self.rss, "failures": self.failures(), "holds": self.holds() })
    }
}

/// Runs a comparison; `tell` receives one line per turn.
///
/// # Errors
/// See [`RelayError`].
pub fn run(options: &Options, mut tell: impl FnMut(&str)) -> Result<Report, RelayError> {
    let backend = backend::start(options.load.event_bytes)?;
    let nginx = Nginx::start(&options.nginx, &options.config, backend)?;
    let foretell = Foretell::start(&options.foretell, &options.foretell_config, backend)?;
    let bare = Bare::start(backend)?;
    let mut turn = |name: &str, through: Option<&dyn Child>| {
        let busy = || through.map_or(Busy::default(), Child::busy);
        let before = busy();
        let address = through.map_or(backend, Child::address);
        let measured = load::turn(options.load, address, options.turn)?;
        let measured = Measured { busy: busy().since(before), ..measured };
        tell(&format!("{name:<9} {}", measured.line()));
        Ok::<_, RelayError>(measured)
    };
    let mut report = Report { direct: turn("direct", None)?, pairs: Vec::new(), rss: 0 };
    for n in 0..options.pairs {
        // The order changes from pair to pair.
        let first = (n % 2 == 1).then(|| turn("foretell", Some(&foretell))).transpose()?;
        let nginx = turn("nginx", Some(&nginx))?;
        let foretell_turn = first.map_or_else(|| turn("foretell", Some(&foretell)), Ok)?;
        let bare = turn("bare", Some(&bare))?;
        report.rss = report.rss.max(foretell.peak_memory().unwrap_or(u64::MAX));
        report.pairs.push(Pair { nginx, foretell: foretell_turn, bare });
    }
    Ok(report)
}

fn micros(histogram: &Histogram<u64>, quantile: f64) -> f64 {
    histogram.value_at_quantile(quantile) as f64 / 1e3
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let upper = values.get(values.len() / 2).copied();
    let lower = values.get(values.len().saturating_sub(1) / 2).copied();
    match (lower, upper) {
        (Some(lower), Some(upper)) => f64::midpoint(lower, upper),
        _ => f64::NAN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(micros: u64) -> Measured {
        let mut measured = Measured::new().unwrap();
        measured.requests.record(micros * 1000).unwrap();
        measured.events.record(micros * 1000).unwrap();
        measured
    }

    fn report(pairs: &[(u64, u64)], rss: u64) -> Report {
        let pair = |(nginx, foretell): &(u64, u64)| Pair {
            nginx: measured(*nginx),
            foretell: measured(*foretell),
            bare: measured(*nginx),
        };
        Report { direct: measured(1), pairs: pairs.iter().map(pair).collect(), rss }
    }

    #[test]
    fn the_median_of_the_pairs_decides_not_the_worst_of_them() {
        assert!(report(&[(100, 100), (100, 104), (100, 300)], 0).holds());
        assert!(!report(&[(100, 106), (100, 110), (100, 90)], 0).holds());
    }

    #[test]
    fn memory_failures_and_an_empty_comparison_fall_short() {
        assert!(!report(&[(100, 100)], RSS_MAX + 1).holds());
        assert!(!report(&[], 0).holds());
        let mut failed = report(&[(100, 100)], 0);
        failed.pairs[0].foretell.failures = 1;
        assert!(!failed.holds());
    }

    #[test]
    fn a_part_of_the_load_that_was_left_out_is_not_judged() {
        let mut requests_only = report(&[(100, 100)], 0);
        let pair = &mut requests_only.pairs[0];
        for measured in [&mut pair.nginx, &mut pair.foretell] {
            measured.events.reset();
        }
        assert!(requests_only.holds());
        assert_eq!(requests_only.ratios().len(), 2);
        // One proxy alone without an event is another matter.
        requests_only.pairs[0].foretell.events.record(300_000).unwrap();
        assert!(!requests_only.holds());
    }

    #[test]
    fn the_median_of_an_even_count_lies_between_the_middle_two() {
        assert!((median(vec![4.0, 1.0, 2.0, 3.0]) - 2.5).abs() < 1e-12);
        assert!(median(Vec::new()).is_nan());
    }
}
