//! The state of the store: log lines at changes, metrics.

use std::sync::Arc;

use parking_lot::Mutex;
use prometheus::core::Collector;
use prometheus::{Gauge, IntCounterVec, IntGauge};
use tokio::time::Instant;

use super::{Fault, FaultKind};
use foretell_metrics as metric;
use foretell_observe::make::{self, AtScrape, Made};

/// The state of the store.
#[derive(Debug)]
pub struct Status {
    /// The store's address.
    url: String,
    state: Mutex<StoreState>,
}

#[derive(Debug)]
struct StoreState {
    /// Outcome of the last exchange; `None` before the first.
    last: Option<Result<(), FaultKind>>,
    /// The last reading of measurements, or the start.
    pulled: Instant,
    /// Sidecars whose measurements were read then.
    sidecars: usize,
    /// Sidecars of another version, and entries that could not be read then.
    strangers: usize,
    unreadable: usize,
    /// Faults so far, by [`FaultKind::index`].
    faults: [u64; FaultKind::ALL.len()],
}

impl StoreState {
    fn count(&mut self, kind: FaultKind) {
        if let Some(count) = self.faults.get_mut(kind.index()) {
            *count += 1;
        }
    }
}

impl Status {
    /// The state before the first exchange with the store at this address.
    pub(super) fn new(url: String) -> Self {
        let state = StoreState {
            last: None,
            pulled: Instant::now(),
            sidecars: 0,
            strangers: 0,
            unreadable: 0,
            faults: [0; FaultKind::ALL.len()],
        };
        Self { url, state: Mutex::new(state) }
    }

    /// Takes the result of reading: the numbers of sidecars, of those of another version, and of
    /// entries that could not be read.
    pub(super) fn pulled(&self, sidecars: usize, strangers: usize, unreadable: usize) {
        let mut state = self.state.lock();
        let store = &self.url;
        if strangers > 0 {
            state.count(FaultKind::Version);
            if state.strangers == 0 {
                tracing::warn!(
                    store,
                    strangers,
                    "sidecars of another version use the fleet store; nothing is shared with them"
                );
            }
        }
        if unreadable > 0 {
            state.count(FaultKind::Answer);
            if state.unreadable == 0 {
                tracing::warn!(
                    store,
                    unreadable,
                    "entries of the fleet store cannot be read, and are ignored"
                );
            }
        }
        state.sidecars = sidecars;
        state.strangers = strangers;
        state.unreadable = unreadable;
        state.pulled = Instant::now();
    }

    /// Takes the outcome of an exchange.
    pub(super) fn exchanged(&self, outcome: &Result<(), Fault>) {
        let mut state = self.state.lock();
        let store = &self.url;
        let now = outcome.as_ref().map_err(|fault| fault.kind).copied();
        if state.last != Some(now) {
            match outcome {
                Ok(()) => tracing::info!(store, "measurements are shared over the fleet store"),
                Err(Fault { kind, cause }) => {
                    tracing::warn!(
                        store,
                        kind = kind.name(),
                        cause,
                        "fleet store cannot be used; this sidecar goes on alone"
                    );
                }
            }
        }
        if let Err(kind) = now {
            state.count(kind);
        }
        state.last = Some(now);
    }
}

/// A collector for the state of the store.
///
/// # Errors
/// A metric has an invalid description, which is a bug.
pub fn collector(status: Arc<Status>) -> Made<impl Collector + use<>> {
    AtScrape::new(Families::new, move |families| {
        families.set(&status.state.lock());
        Some(())
    })
}

/// The metrics of one scrape.
struct Families {
    up: IntGauge,
    age: Gauge,
    sidecars: IntGauge,
    errors: IntCounterVec,
}

impl Families {
    fn new(all: &mut make::Families) -> Made<Self> {
        Ok(Self {
            up: all.with(make::int_gauge(metric::STORE_UP))?,
            age: all.with(make::gauge(metric::STORE_AGE))?,
            sidecars: all.with(make::int_gauge(metric::STORE_SIDECARS))?,
            errors: all.with(make::counters(metric::STORE_ERRORS))?,
        })
    }

    fn set(&self, state: &StoreState) {
        self.up.set((state.last == Some(Ok(()))).into());
        self.age.set(state.pulled.elapsed().as_secs_f64());
        self.sidecars.set(i64::try_from(state.sidecars).unwrap_or(i64::MAX));
        for (kind, count) in FaultKind::ALL.into_iter().zip(state.faults) {
            self.errors.with_label_values(&[kind.name()]).inc_by(count);
        }
    }
}
