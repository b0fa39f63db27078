//! A mean over about the last measurements of one quantity.

use serde::{Deserialize, Serialize};

/// Maximum of a time that counts, as a multiple of a mean of a few: one hiccup is not a trend.
const OUTLIER: f64 = 3.0;
const FEW: f64 = 3.0;

/// The mean (seconds, or a share from 0 to 1) over about the last `MEMORY` measurements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Mean<const MEMORY: u32> {
    mean: f64,
    weight: f64,
}

impl<const MEMORY: u32> Mean<MEMORY> {
    pub fn note(&mut self, value: f64) {
        self.weight = (self.weight.max(0.0) + 1.0).min(f64::from(MEMORY));
        self.mean += (value - self.mean) / self.weight;
    }

    /// Notes a measured time. Invalid ones are ignored.
    pub fn note_time(&mut self, seconds: f64) {
        if seconds.is_finite() && seconds >= 0.0 {
            let most = if self.weight >= FEW { self.mean * OUTLIER } else { f64::INFINITY };
            self.note(seconds.min(most));
        }
    }

    /// The mean; `None` before the first measurement.
    pub fn known(self) -> Option<f64> {
        (self.weight > 0.0).then_some(self.mean)
    }

    /// The mean of as many as it remembers; `None` before.
    pub fn settled(self) -> Option<f64> {
        (self.weight >= f64::from(MEMORY)).then_some(self.mean)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_learnt_within_a_handful_and_one_hiccup_is_no_trend() {
        let mut mean = Mean::<8>::default();
        (0..20).for_each(|_| mean.note_time(0.010));
        mean.note_time(5.0);
        assert!(mean.known().unwrap() < 0.014, "{mean:?}");
        mean.note_time(f64::NAN);
        (0..12).for_each(|_| mean.note_time(0.030));
        assert!(mean.settled().unwrap() > 0.025, "{mean:?}");
    }
}
