//! Quantiles and intervals.
//!
//! Latencies go into HDR histograms (constant memory, 0.1 % resolution, any length of run). A ratio
//! is reported by its median over alternations with a bootstrap interval, which assumes nothing
//! about the distribution of the noise; a fixed seed makes equal measurements give equal intervals.
//! Fewer than six alternations allow no 95 % interval: even the range of five misses the true
//! median in one case of sixteen. For fewer than six, the range is reported and labelled as a
//! range.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;

use foretell_core::units::SplitMix64;

/// Number of resamples of the bootstrap.
const RESAMPLES: usize = 4_000;
/// Seed of the bootstrap; its value does not matter.
const SEED: u64 = 0x0F0E_7E11;

/// Recorded durations, with quantiles in milliseconds.
#[derive(Clone, Debug)]
pub struct Durations(Option<Histogram<u64>>);

impl Default for Durations {
    fn default() -> Self {
        // Nanoseconds, up to ten minutes; longer durations count as ten minutes.
        Self(Histogram::new_with_bounds(1, 600_000_000_000, 3).ok())
    }
}

impl Durations {
    pub fn record(&mut self, duration: Duration) {
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        if let Some(histogram) = &mut self.0 {
            histogram.saturating_record(nanos);
        }
    }

    /// The quantile `q` (0 to 1), milliseconds; `None` if nothing was recorded.
    pub fn ms(&self, q: f64) -> Option<f64> {
        let histogram = self.0.as_ref().filter(|histogram| !histogram.is_empty())?;
        Some(histogram.value_at_quantile(q) as f64 * 1e-6)
    }
}

/// Minimum number of measurements that allow a 95 % interval for their median, for any
/// distribution.
pub const MIN: usize = 6;

/// A median with its 95 % interval, or with the range if there are few measurements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Interval {
    /// The median; `None` if nothing was measured.
    pub median: Option<f64>,
    /// Lower end, in the unit of the values; `None` if nothing was measured.
    pub low: Option<f64>,
    /// Upper end, in the unit of the values; `None` if nothing was measured.
    pub high: Option<f64>,
    /// Number of measurements.
    pub n: usize,
}

impl Interval {
    /// True if the ends are those of a 95 % interval; otherwise they are the minimum and maximum
    /// measurement.
    pub const fn is_confident(&self) -> bool {
        self.n >= MIN
    }
}

/// The median of `values` with its bootstrap 95 % interval; with fewer than [`MIN`] values, with
/// their range.
pub fn interval(values: &[f64]) -> Interval {
    let median = quantile(values.to_vec(), 0.5);
    if values.len() < MIN {
        let end = |q: f64| quantile(values.to_vec(), q);
        return Interval { median, low: end(0.0), high: end(1.0), n: values.len() };
    }
    let mut rng = SplitMix64::new(SEED);
    let mut medians: Vec<f64> = (0..RESAMPLES)
        .filter_map(|_| {
            let resample: Vec<f64> = (0..values.len())
                .filter_map(|_| values.get(rng.below(values.len() as u64) as usize).copied())
                .collect();
            quantile(resample, 0.5)
        })
        .collect();
    medians.sort_by(f64::total_cmp);
    Interval {
        median,
        low: quantile(medians.clone(), 0.025),
        high: quantile(medians, 0.975),
        n: values.len(),
    }
}

/// The quantile `q` (0 to 1), interpolated between neighbours; `None` for an empty list.
pub fn quantile(mut values: Vec<f64>, q: f64) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let position = q.clamp(0.0, 1.0) * values.len().checked_sub(1)? as f64;
    let below = *values.get(position.floor() as usize)?;
    let above = *values.get(position.ceil() as usize)?;
    Some(below + (above - below) * position.fract())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_interpolate_in_any_order() {
        assert_eq!(quantile(vec![4.0, 1.0, 3.0, 2.0], 0.5), Some(2.5));
        assert_eq!(quantile(vec![4.0, 1.0, 3.0, 2.0], 0.0), Some(1.0));
        assert_eq!(quantile(vec![4.0, 1.0, 3.0, 2.0], 1.0), Some(4.0));
        assert_eq!(quantile(Vec::new(), 0.5), None);
    }

    #[test]
    fn the_interval_holds_the_median_and_is_the_same_every_time() {
        let values: Vec<f64> = (0..25).map(|i| 1.0 + 0.01 * f64::from(i)).collect();
        let found = interval(&values);
        assert_eq!(found, interval(&values));
        assert_eq!(found.median, Some(1.12));
        assert_eq!(found.n, 25);
        // The median of 25 equally spaced values: the binomial 95 % interval is the 8th to the 18th
        // of them.
        let (low, high) = (found.low.unwrap(), found.high.unwrap());
        assert!((1.06..1.09).contains(&low), "{low}");
        assert!((1.15..1.18).contains(&high), "{high}");
    }

    #[test]
    fn the_interval_covers_the_truth_about_nineteen_times_in_twenty() {
        let mut rng = SplitMix64::new(7);
        let covered = (0..200)
            .filter(|_| {
                // Uniform on 0..1, so the true median is 0.5.
                let values: Vec<f64> = (0..21).map(|_| rng.unit()).collect();
                let found = interval(&values);
                found.low.unwrap() <= 0.5 && 0.5 <= found.high.unwrap()
            })
            .count();
        assert!((178..=200).contains(&covered), "{covered} of 200");
    }

    #[test]
    fn few_values_have_a_range_and_no_interval() {
        for n in 1..=5 {
            let values: Vec<f64> = (1..=n).map(f64::from).collect();
            let found = interval(&values);
            assert_eq!((found.low, found.high), (Some(1.0), Some(f64::from(n))));
            assert!(!found.is_confident());
        }
        assert!(interval(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).is_confident());
    }

    #[test]
    fn no_values_have_no_interval() {
        assert_eq!(interval(&[]), Interval::default());
        assert_eq!(interval(&[2.0]), Interval { median: Some(2.0), low: Some(2.0), high: Some(2.0), n: 1 });
    }

    #[test]
    fn durations_keep_a_thousandth() {
        let mut durations = Durations::default();
        assert_eq!(durations.ms(0.5), None);
        for ms in 1..=100 {
            durations.record(Duration::from_millis(ms));
        }
        let (p50, p95) = (durations.ms(0.5).unwrap(), durations.ms(0.95).unwrap());
        assert!((p50 - 50.0).abs() < 0.1, "{p50}");
        assert!((p95 - 95.0).abs() < 0.2, "{p95}");
    }
}
