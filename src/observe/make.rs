//! Prometheus metrics made from the entries of the list of metrics.

use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{
    Counter as Sum, CounterVec, Gauge as Level, GaugeVec, Histogram as Sizes, HistogramOpts, HistogramVec,
    IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts,
};

use foretell_metrics::{Counter, Gauge, Histogram, Metric};

/// A metric, unless its description is invalid, which is a bug.
pub type Made<T> = Result<T, prometheus::Error>;

fn options(metric: &Metric) -> Opts {
    Opts::new(metric.name, metric.help)
}

fn sized(histogram: &Histogram) -> HistogramOpts {
    HistogramOpts::new(histogram.metric.name, histogram.metric.help).buckets(histogram.buckets.to_vec())
}

/// A counter without labels.
pub fn counter(Counter(metric): Counter) -> Made<IntCounter> {
    IntCounter::with_opts(options(&metric))
}

pub fn counters(Counter(metric): Counter) -> Made<IntCounterVec> {
    IntCounterVec::new(options(&metric), metric.labels)
}

/// A sum of fractions without labels.
pub fn sum(Counter(metric): Counter) -> Made<Sum> {
    Sum::with_opts(options(&metric))
}

/// A sum of fractions with labels.
pub fn sums(Counter(metric): Counter) -> Made<CounterVec> {
    CounterVec::new(options(&metric), metric.labels)
}

/// Sets a gauge to a count.
pub fn set(gauge: &IntGauge, count: u64) {
    gauge.set(i64::try_from(count).unwrap_or(i64::MAX));
}

/// An integer without labels.
pub fn int_gauge(Gauge(metric): Gauge) -> Made<IntGauge> {
    IntGauge::with_opts(options(&metric))
}

/// Integers with labels.
pub fn int_gauges(Gauge(metric): Gauge) -> Made<IntGaugeVec> {
    IntGaugeVec::new(options(&metric), metric.labels)
}

/// A number without labels.
pub fn gauge(Gauge(metric): Gauge) -> Made<Level> {
    Level::with_opts(options(&metric))
}

/// Numbers with labels.
pub fn gauges(Gauge(metric): Gauge) -> Made<GaugeVec> {
    GaugeVec::new(options(&metric), metric.labels)
}

/// A histogram without labels.
pub fn histogram(histogram: Histogram) -> Made<Sizes> {
    Sizes::with_opts(sized(&histogram))
}

pub fn histograms(histogram: Histogram) -> Made<HistogramVec> {
    HistogramVec::new(sized(&histogram), histogram.metric.labels)
}

type Make<F> = dyn Fn(&mut Families) -> Made<F> + Send + Sync;
type Set<F> = dyn Fn(&F) -> Option<()> + Send + Sync;

/// Metrics that are made anew and set at every scrape, so that the series of a source that is gone
/// disappear.
pub struct AtScrape<F> {
    make: Box<Make<F>>,
    set: Box<Set<F>>,
    /// Never set: only the descriptions are used.
    described: Families,
}

#[derive(Default)]
pub struct Families(Vec<Box<dyn Collector>>);

impl Families {
    /// Adds a metric.
    ///
    /// # Errors
    /// Its description is invalid.
    pub fn with<M: Collector + Clone + 'static>(&mut self, metric: Made<M>) -> Made<M> {
        let metric = metric?;
        self.0.push(Box::new(metric.clone()));
        Ok(metric)
    }
}

impl<F> AtScrape<F> {
    /// A collector of the metrics that `make` makes and `set` sets; `set` returns `None` if their
    /// sources are gone, and nothing is shown then.
    ///
    /// # Errors
    /// A metric has an invalid description, which is a bug.
    pub fn new(
        make: impl Fn(&mut Families) -> Made<F> + Send + Sync + 'static,
        set: impl Fn(&F) -> Option<()> + Send + Sync + 'static,
    ) -> Made<Self> {
        let mut described = Families::default();
        make(&mut described)?;
        Ok(Self { make: Box::new(make), set: Box::new(set), described })
    }
}

impl<F> Collector for AtScrape<F> {
    fn desc(&self) -> Vec<&Desc> {
        self.described.0.iter().flat_map(|metric| metric.desc()).collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let mut families = Families::default();
        let made = (self.make)(&mut families).ok();
        let set = made.and_then(|made| (self.set)(&made));
        set.map_or_else(Vec::new, |()| families.0.iter().flat_map(|metric| metric.collect()).collect())
    }
}
