//! Prometheus metrics made from the entries of the list of metrics.

use prometheus::{
    CounterVec, Gauge as Level, GaugeVec, Histogram as Sizes, HistogramOpts, HistogramVec, IntCounter,
    IntCounterVec, IntGauge, IntGaugeVec, Opts,
};

use foretell_core::words::metric::{Counter, Gauge, Histogram, Metric};

type Made<T> = Result<T, prometheus::Error>;

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

/// A counter with labels.
pub fn counters(Counter(metric): Counter) -> Made<IntCounterVec> {
    IntCounterVec::new(options(&metric), metric.labels)
}

/// A sum of fractions with labels.
pub fn sums(Counter(metric): Counter) -> Made<CounterVec> {
    CounterVec::new(options(&metric), metric.labels)
}

/// A whole number without labels.
pub fn level(Gauge(metric): Gauge) -> Made<IntGauge> {
    IntGauge::with_opts(options(&metric))
}

/// Whole numbers with labels.
pub fn levels(Gauge(metric): Gauge) -> Made<IntGaugeVec> {
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

/// Histograms with labels.
pub fn histograms(histogram: Histogram) -> Made<HistogramVec> {
    HistogramVec::new(sized(&histogram), histogram.metric.labels)
}
