//! The last quarter of an hour, in samples of a few seconds: for the plots of the status page.
//!
//! A sample is the difference of two states of the [`Sums`], so that it adds no cost to a request.

use std::collections::VecDeque;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use serde::Serialize;

use super::totals::Sums;
use foretell_net::clock::unix_time;

/// Interval between samples.
pub const EVERY: Duration = Duration::from_secs(5);
/// Maximum number of samples: a quarter of an hour.
const SAMPLES: usize = 180;
/// Samples from one stored state of the sums to the next: a minute.
const STEP: u64 = 12;
/// Maximum number of stored states of the sums: a quarter of an hour.
const STATES: usize = 15;

/// Values read at the moment of a sample.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Reading {
    /// Load of the busiest engine, 0 to 1; `None` if none is known.
    pub load: Option<f64>,
    /// Highest tolerance of all policies at temperature 1 and that load; `None` if all are exact.
    pub tolerance: Option<f64>,
}

/// The requests that finished during one sample.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Sample {
    /// Counts samples from 1.
    pub number: u64,
    /// Its end, Unix seconds.
    pub at: f64,
    /// Its length, seconds.
    pub seconds: f64,
    pub completions: u64,
    pub tokens: u64,
    pub rounds: u64,
    pub drafted: u64,
    pub accepted: u64,
    /// Completions with an error.
    pub failed: u64,
    /// See [`Reading::load`].
    pub load: Option<f64>,
    /// See [`Reading::tolerance`].
    pub tolerance: Option<f64>,
}

/// The samples of the last quarter of an hour.
#[derive(Debug, Default)]
pub struct History {
    data: Mutex<HistoryData>,
}

#[derive(Debug, Default)]
struct HistoryData {
    samples: VecDeque<Sample>,
    /// Samples so far.
    number: u64,
    /// The sums at the last sample, and how long the process had run then.
    last: (Sums, Duration),
    /// States of the sums, a minute apart, each with how long the process had run then.
    states: VecDeque<(Sums, Duration)>,
}

impl History {
    /// Takes a sample: of the `sums` of a process that has run for `ran`.
    pub fn take(&self, sums: Sums, reading: Reading, at: SystemTime, ran: Duration) {
        let mut data = self.data.lock();
        let since = sums.since(&data.last.0);
        let (rounds, drafted, accepted) = since.rounds();
        data.number += 1;
        let sample = Sample {
            number: data.number,
            at: unix_time(at).as_secs_f64(),
            seconds: ran.saturating_sub(data.last.1).as_secs_f64(),
            completions: since.completions,
            tokens: since.tokens,
            rounds,
            drafted,
            accepted,
            failed: since.failed,
            load: reading.load,
            tolerance: reading.tolerance,
        };
        if data.samples.len() >= SAMPLES {
            data.samples.pop_front();
        }
        data.samples.push_back(sample);
        if data.number.is_multiple_of(STEP) {
            if data.states.len() >= STATES {
                data.states.pop_front();
            }
            data.states.push_back((sums.clone(), ran));
        }
        data.last = (sums, ran);
    }

    /// The samples after the one of that number, oldest first.
    pub fn after(&self, number: u64) -> Vec<Sample> {
        self.data.lock().samples.iter().filter(|sample| sample.number > number).copied().collect()
    }

    /// Sums over the requests of the last quarter of an hour, and the length of that time, which is
    /// shorter after a start.
    pub fn lately(&self, now: &Sums, ran: Duration) -> (Sums, Duration) {
        let data = self.data.lock();
        match data.states.front() {
            Some((sums, then)) if data.states.len() >= STATES => (now.since(sums), ran.saturating_sub(*then)),
            _ => (now.clone(), ran),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;
    use crate::totals::Totals;
    use crate::{Finished, TokenUsage};
    use foretell_wire::openai::{Path, Route};

    fn plain(tokens: u32) -> Finished {
        let route = Some(Route::Chat.into());
        let usage = TokenUsage { output_tokens: tokens, ..TokenUsage::default() };
        Finished { route, usage, status: 200, ..Finished::new(Path::Plain, "b") }
    }

    #[test]
    fn a_sample_holds_what_finished_during_it() {
        let (history, totals) = (History::default(), Totals::default());
        let reading = Reading { load: Some(0.5), tolerance: None };
        totals.finish(&plain(7));
        history.take(totals.now(), reading, UNIX_EPOCH + Duration::from_secs(100), EVERY);
        totals.finish(&plain(4));
        totals.finish(&plain(1));
        history.take(totals.now(), reading, UNIX_EPOCH + Duration::from_secs(107), EVERY * 2);
        let samples = history.after(0);
        let told = |sample: &Sample| (sample.number, sample.completions, sample.tokens);
        assert_eq!(samples.iter().map(told).collect::<Vec<_>>(), [(1, 1, 7), (2, 2, 5)]);
        assert!((samples[1].seconds - 5.0).abs() < 1e-9 && (samples[1].at - 107.0).abs() < 1e-9);
        assert_eq!(history.after(1).len(), 1);
    }

    #[test]
    fn a_quarter_of_an_hour_is_kept_and_no_more() {
        let (history, totals) = (History::default(), Totals::default());
        for number in 1..=400_u32 {
            totals.finish(&plain(1));
            history.take(totals.now(), Reading::default(), UNIX_EPOCH, EVERY * number);
            let (lately, long) = history.lately(&totals.now(), EVERY * number);
            assert!(long <= EVERY * 191 && (number < 180 || long >= Duration::from_mins(14)), "{long:?}");
            assert_eq!(lately.completions, long.as_secs() / 5);
        }
        let samples = history.after(0);
        assert_eq!((samples.len(), samples[0].number, samples[179].number), (180, 221, 400));
    }
}
