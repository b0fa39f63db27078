//! Metrics of rounds: drafts, acceptance, cost, and time won and lost.

use prometheus::{CounterVec, GaugeVec, Histogram, HistogramVec, IntCounterVec};

use super::Maker;
use crate::{Finished, Round, make};
use foretell_metrics::{self as metric, prompt_bucket};

#[derive(Debug)]
pub(super) struct RoundMetrics {
    rounds: IntCounterVec,
    drafted: IntCounterVec,
    accepted: IntCounterVec,
    accepted_at: IntCounterVec,
    drafted_at: IntCounterVec,
    verify: Histogram,
    draft: Histogram,
    gamma: HistogramVec,
    accepted_of: HistogramVec,
    tolerance: GaugeVec,
    load: GaugeVec,
    saved: CounterVec,
    wasted: CounterVec,
    calls: IntCounterVec,
    extra: IntCounterVec,
}

impl RoundMetrics {
    pub(super) fn new(new: &Maker) -> Result<Self, prometheus::Error> {
        Ok(Self {
            rounds: new.register(make::counters(metric::NUM_DRAFTS))?,
            drafted: new.register(make::counters(metric::DRAFT_TOKENS))?,
            accepted: new.register(make::counters(metric::ACCEPTED_TOKENS))?,
            accepted_at: new.register(make::counters(metric::ACCEPTED_PER_POSITION))?,
            drafted_at: new.register(make::counters(metric::DRAFTED_PER_POSITION))?,
            verify: new.register(make::histogram(metric::VERIFY_SECONDS))?,
            draft: new.register(make::histogram(metric::DRAFT_SECONDS))?,
            gamma: new.register(make::histograms(metric::GAMMA))?,
            accepted_of: new.register(make::histograms(metric::ACCEPTED))?,
            tolerance: new.register(make::gauges(metric::TOLERANCE))?,
            load: new.register(make::gauges(metric::LOAD))?,
            saved: new.register(make::sums(metric::SAVED))?,
            wasted: new.register(make::sums(metric::WASTED))?,
            calls: new.register(make::counters(metric::VERIFY_CALLS))?,
            extra: new.register(make::counters(metric::EXTRA_TOKENS))?,
        })
    }

    pub(super) fn finish(&self, finished: &Finished, policy: &str) {
        let prompt = prompt_bucket(finished.usage.prompt_tokens as usize);
        for round in &finished.speculation.rounds {
            self.round(round, policy, prompt);
        }
        if let Some(round) = finished.speculation.rounds.last() {
            self.tolerance.with_label_values(&[policy]).set(round.conditions.tolerance);
            self.load.with_label_values(&[&finished.upstream.backend]).set(round.conditions.load);
        }
        for (method, &calls) in finished.speculation.calls.by_method() {
            if calls > 0 {
                self.calls
                    .with_label_values(&[&finished.upstream.backend, method.name()])
                    .inc_by(u64::from(calls));
            }
        }
        for (source, tokens) in [
            ("reported", finished.speculation.calls.reported),
            ("estimated", finished.speculation.calls.estimated),
        ] {
            if tokens > 0 {
                self.extra.with_label_values(&[&*finished.upstream.backend, source]).inc_by(tokens);
            }
        }
        if finished.speculation.calls.any() {
            self.saved.with_label_values(&[policy]).inc_by(finished.speculation.balance.saved.max(0.0));
            self.wasted.with_label_values(&[policy]).inc_by(finished.speculation.balance.wasted.max(0.0));
        }
    }

    fn round(&self, round: &Round, policy: &str, prompt: &str) {
        let of = [policy, round.drafter, prompt];
        self.rounds.with_label_values(&of).inc();
        self.drafted.with_label_values(&of).inc_by(u64::from(round.drafted));
        self.accepted.with_label_values(&of).inc_by(u64::from(round.accepted));
        for (counter, positions) in [(&self.accepted_at, round.accepted), (&self.drafted_at, round.depth)] {
            for position in POSITIONS.iter().take(positions as usize) {
                counter.with_label_values(&[round.drafter, *position]).inc();
            }
        }
        if !round.is_injected() {
            self.verify.observe(round.verify.as_secs_f64());
            self.draft.observe(round.draft.as_secs_f64());
        }
        let of = [round.conditions.temperature_range(), round.conditions.load_range()];
        self.gamma.with_label_values(&of).observe(f64::from(round.drafted));
        self.accepted_of.with_label_values(&of).observe(f64::from(round.accepted));
    }
}

/// The positions of a draft that are counted separately, as labels.
const POSITIONS: [&str; 32] = [
    "0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "12", "13", "14", "15", "16", "17", "18",
    "19", "20", "21", "22", "23", "24", "25", "26", "27", "28", "29", "30", "31",
];
