//! Foretell, nginx and a bare hyper proxy before the same backend, turn by turn.
//!
//! The load is open loop: requests leave at their times whether or not earlier ones were answered, so a proxy
//! that stalls is seen to stall. A request's latency counts from the moment its first byte is written to the
//! moment its last one is read; an event's from the moment the backend writes it to the moment the client has
//! it. Each turn carries both loads at once. Ratios are taken pair by pair and judged by their median, so
//! slow changes of the machine cancel out. The bare proxy is not judged: it shows what hyper itself costs.

pub mod backend;
pub mod bare;
pub mod load;
pub mod proxies;

use std::fmt::Write;
use std::path::PathBuf;
use std::time::Duration;

use hdrhistogram::Histogram;
use serde_json::{Value, json};

use load::{Load, Measured};
use proxies::{Bare, Child, Foretell, Nginx};

/// Most of Foretell's median latency over nginx's.
pub const P50_MAX: f64 = 1.05;
/// Most of Foretell's 99th percentile over nginx's.
pub const P99_MAX: f64 = 1.25;
/// Most resident memory of Foretell without models.
pub const RSS_MAX: u64 = 40 << 20;

/// What to compare.
#[derive(Clone, Debug)]
pub struct Options {
    /// The `foretell` program; it is run as `serve --backend URL --listen ADDR --admin ADDR`.
    pub foretell: PathBuf,
    /// The `nginx` program.
    pub nginx: PathBuf,
    /// Its configuration.
    pub config: PathBuf,
    /// Foretell's configuration: no line per request, since nginx writes none.
    pub foretell_config: PathBuf,
    /// How many pairs of turns.
    pub pairs: usize,
    /// Length of a turn.
    pub turn: Duration,
    /// The load of a turn.
    pub load: Load,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            foretell: std::env::current_exe().unwrap_or_else(|_| "foretell".into()),
            nginx: "nginx".into(),
            config: "tests/relay/nginx.conf".into(),
            foretell_config: "tests/relay/foretell.yaml".into(),
            pairs: 10,
            turn: Duration::from_secs(20),
            load: Load::default(),
        }
    }
}

/// Why nothing could be compared.
#[derive(Debug, thiserror::Error)]
pub enum RelayError {
    /// A program or file is missing, or a connection failed.
    #[error("{what}: {error}")]
    Io {
        /// What was tried.
        what: String,
        /// What the system said.
        error: std::io::Error,
    },
    /// Latencies cannot be kept.
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

/// One pair of turns.
#[derive(Debug)]
pub struct Pair {
    /// Through nginx.
    pub nginx: Measured,
    /// Through Foretell.
    pub foretell: Measured,
    /// Through the bare hyper proxy; not judged.
    pub bare: Measured,
}

/// What came out.
#[derive(Debug)]
pub struct Report {
    /// The same load without a proxy, for comparison; not judged.
    pub direct: Measured,
    /// Every pair.
    pub pairs: Vec<Pair>,
    /// Largest resident memory of Foretell at the end of a turn.
    pub rss: u64,
}

/// Foretell's figure over nginx's for one load and one quantile.
#[derive(Clone, Debug, PartialEq)]
pub struct Ratio {
    /// `request p50` and the like.
    pub name: &'static str,
    /// Through nginx, median of the turns, in microseconds.
    pub nginx: f64,
    /// Through Foretell, likewise.
    pub foretell: f64,
    /// Through the bare hyper proxy, likewise.
    pub bare: f64,
    /// Median of the turns' ratios, Foretell ÷ nginx.
    pub ratio: f64,
    /// Median of the turns' ratios, bare hyper ÷ nginx.
    pub bare_ratio: f64,
    /// The most that is allowed.
    pub most: f64,
}

impl Report {
    /// The four figures that are judged.
    pub fn ratios(&self) -> Vec<Ratio> {
        let requests = |measured: &Measured, q: f64| micros(&measured.requests, q);
        let events = |measured: &Measured, q: f64| micros(&measured.events, q);
        vec![
            self.ratio("request p50", P50_MAX, |m| requests(m, 0.5)),
            self.ratio("request p99", P99_MAX, |m| requests(m, 0.99)),
            self.ratio("event p50", P50_MAX, |m| events(m, 0.5)),
            self.ratio("event p99", P99_MAX, |m| events(m, 0.99)),
        ]
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

    /// Requests and streams that did not end as they should, over all turns.
    pub fn failures(&self) -> u64 {
        self.pairs.iter().map(|pair| pair.nginx.failures + pair.foretell.failures).sum()
    }

    /// Whether everything is as good as required.
    pub fn holds(&self) -> bool {
        !self.pairs.is_empty()
            && self.failures() == 0
            && self.rss <= RSS_MAX
            && self.ratios().iter().all(|ratio| ratio.ratio <= ratio.most)
    }

    /// The report for reading.
    pub fn to_text(&self) -> String {
        let mut text = format!("{} pairs of turns, medians in microseconds\n", self.pairs.len());
        let _ = writeln!(
            text,
            "{:<12} {:>9} {:>9} {:>7} {:>7}   {:>10} {:>7}",
            "", "nginx", "foretell", "ratio", "most", "bare hyper", "ratio"
        );
        for Ratio { name, nginx, foretell, bare, ratio, bare_ratio, most } in self.ratios() {
            let verdict = if ratio <= most { "" } else { "  too much" };
            let _ = writeln!(
                text,
                "{name:<12} {nginx:>9.0} {foretell:>9.0} {ratio:>7.3} {most:>7.2}   {bare:>10.0} {bare_ratio:>7.3}{verdict}"
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
        let verdict = if self.rss <= RSS_MAX { "" } else { "  too much" };
        let _ = writeln!(text, "resident memory of foretell {mib:.1} MiB, most {most} MiB{verdict}");
        let busy = |of: fn(&Pair) -> &Measured| {
            median(self.pairs.iter().map(|pair| of(pair).busy.as_secs_f64()).collect())
        };
        let (nginx, foretell) = (busy(|pair| &pair.nginx), busy(|pair| &pair.foretell));
        let bare = busy(|pair| &pair.bare);
        let _ = writeln!(
            text,
            "processor seconds per turn: nginx {nginx:.2}, foretell {foretell:.2}, bare hyper {bare:.2}"
        );
        let _ = writeln!(text, "failures {}", self.failures());
        text
    }

    /// The report for machines.
    pub fn to_json(&self) -> Value {
        let ratios: Vec<Value> = self
            .ratios()
            .into_iter()
            .map(|r| json!({ "name": r.name, "nginx_us": r.nginx, "foretell_us": r.foretell, "bare_us": r.bare, "ratio": r.ratio, "bare_ratio": r.bare_ratio, "most": r.most }))
            .collect();
        json!({ "pairs": self.pairs.len(), "ratios": ratios, "rss": self.rss, "failures": self.failures(), "holds": self.holds() })
    }
}

/// Compares. `tell` gets a line per turn.
///
/// # Errors
/// See [`RelayError`].
pub fn run(options: &Options, mut tell: impl FnMut(&str)) -> Result<Report, RelayError> {
    let backend = backend::start(options.load.event_bytes)?;
    let nginx = Nginx::start(&options.nginx, &options.config, backend)?;
    let foretell = Foretell::start(&options.foretell, &options.foretell_config, backend)?;
    let bare = Bare::start(&options.foretell, backend)?;
    let mut turn = |name: &str, through: Option<&dyn Child>| {
        let busy = || through.map_or(Duration::ZERO, Child::busy);
        let before = busy();
        let address = through.map_or(backend, Child::address);
        let measured = load::turn(options.load, address, options.turn)?;
        let measured = Measured { busy: busy().saturating_sub(before), ..measured };
        tell(&format!("{name:<9} {}", measured.line()));
        Ok::<_, RelayError>(measured)
    };
    let mut report = Report { direct: turn("direct", None)?, pairs: Vec::new(), rss: 0 };
    for n in 0..options.pairs {
        // Whoever goes first goes second next time.
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
    fn the_median_of_an_even_count_lies_between_the_middle_two() {
        assert!((median(vec![4.0, 1.0, 2.0, 3.0]) - 2.5).abs() < 1e-12);
        assert!(median(Vec::new()).is_nan());
    }
}
