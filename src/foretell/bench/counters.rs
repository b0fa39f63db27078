//! Counters of the servers themselves, read from their Prometheus pages before and after a block.
//!
//! The costs in the formula must be those of the runtime alone; times taken at the client would
//! include the overhead that the benchmark judges. Sums and counts are used, never quantiles, so
//! that two readings can be subtracted.

use std::ops::{AddAssign, Sub};

use foretell_engines::shared::metric_of;

/// Sum and count of a Prometheus histogram.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Spent {
    /// Sum of the measured times, seconds.
    pub seconds: f64,
    /// Number of measured times.
    pub times: f64,
}

impl Spent {
    /// Mean seconds; `None` if there was no measurement.
    pub fn mean(self) -> Option<f64> {
        (self.times > 0.0).then(|| self.seconds / self.times)
    }
}

impl Sub for Spent {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self { seconds: self.seconds - earlier.seconds, times: self.times - earlier.times }
    }
}

impl AddAssign for Spent {
    fn add_assign(&mut self, more: Self) {
        self.seconds += more.seconds;
        self.times += more.times;
    }
}

/// Times of the target's model runs by kind, and of the proxy's drafting.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counters {
    /// Model runs that computed one token for each sequence.
    pub decode: Spent,
    /// Model runs that verified drafts.
    pub verify: Spent,
    /// Model runs that read prompts.
    pub prefill: Spent,
    /// Drafts made by the proxy.
    pub draft: Spent,
}

impl Counters {
    /// Reads the target's metrics page; `None` if the target does not report step times.
    pub fn of_target(page: &str) -> Option<Self> {
        let kind = |kind| spent(page, "foretell_target_step_seconds", Some(&format!("kind=\"{kind}\"")));
        // A kind without any run may have no series; `decode` has one after the warm-up.
        Some(Self {
            decode: kind("decode")?,
            verify: kind("verify").unwrap_or_default(),
            prefill: kind("prefill").unwrap_or_default(),
            draft: Spent::default(),
        })
    }

    /// Adds the drafting times of the proxy's metrics page, zero if it has not drafted yet; `None`
    /// if the page is not Foretell's.
    #[must_use]
    pub fn with_drafts(self, page: &str) -> Option<Self> {
        let ours = page.lines().any(|line| line.starts_with("foretell_"));
        let draft = spent(page, "foretell_draft_seconds", None).unwrap_or_default();
        ours.then_some(Self { draft, ..self })
    }
}

impl Sub for Counters {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self {
            decode: self.decode - earlier.decode,
            verify: self.verify - earlier.verify,
            prefill: self.prefill - earlier.prefill,
            draft: self.draft - earlier.draft,
        }
    }
}

impl AddAssign for Counters {
    fn add_assign(&mut self, more: Self) {
        self.decode += more.decode;
        self.verify += more.verify;
        self.prefill += more.prefill;
        self.draft += more.draft;
    }
}

fn spent(page: &str, name: &str, label: Option<&str>) -> Option<Spent> {
    let total = |figure: &str| metric_of(page, &[&format!("{name}_{figure}")], label);
    Some(Spent { seconds: total("sum")?, times: total("count")? })
}

#[cfg(test)]
#[allow(clippy::float_cmp)] // exact values are expected
mod tests {
    use super::*;

    const TARGET: &str = "\
# TYPE foretell_target_step_seconds histogram
foretell_target_step_seconds_bucket{kind=\"decode\",le=\"0.1\"} 40
foretell_target_step_seconds_sum{kind=\"decode\"} 0.8
foretell_target_step_seconds_count{kind=\"decode\"} 40
foretell_target_step_seconds_sum{device=\"cpu\",kind=\"verify\"} 0.25
foretell_target_step_seconds_count{device=\"cpu\",kind=\"verify\"} 10
foretell_target_step_seconds_sum_of_something_else 7
";

    #[test]
    fn series_are_found_by_name_and_label() {
        let read = Counters::of_target(TARGET).unwrap();
        assert_eq!(read.decode, Spent { seconds: 0.8, times: 40.0 });
        assert_eq!(read.verify.mean(), Some(0.025));
        assert_eq!(read.prefill.mean(), None);
    }

    #[test]
    fn drafts_are_summed_over_all_drafters() {
        let page = "foretell_draft_seconds_sum{drafter=\"model\"} 0.02\n\
                    foretell_draft_seconds_count{drafter=\"model\"} 9\n\
                    foretell_draft_seconds_sum{drafter=\"prompt_lookup\"} 0.01 1700000000\n\
                    foretell_draft_seconds_count{drafter=\"prompt_lookup\"} 1\n";
        let draft = Counters::default().with_drafts(page).unwrap().draft;
        assert_eq!(draft.times, 10.0);
        assert!((draft.seconds - 0.03).abs() < 1e-12);
    }

    #[test]
    fn two_readings_are_subtracted_and_added() {
        let early = Counters { decode: Spent { seconds: 0.5, times: 10.0 }, ..Counters::default() };
        let mut sum = Counters::default();
        sum += Counters::of_target(TARGET).unwrap() - early;
        assert_eq!(sum.decode.times, 30.0);
        assert!((sum.decode.seconds - 0.3).abs() < 1e-12);
    }

    #[test]
    fn a_page_of_another_server_has_no_counters() {
        assert_eq!(Counters::of_target("vllm:num_requests_running 3\n"), None);
        assert_eq!(Counters::default().with_drafts(""), None);
    }
}
