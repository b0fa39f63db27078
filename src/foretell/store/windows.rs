//! Plain windows that the sidecars of one engine's process have at the same time.
//!
//! The store holds the start of the next window of a process. The sidecar that finds none proposes
//! the one that it has drawn itself, and whoever is first wins; the value expires with the window.
//! Without a store each sidecar has its own windows.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::link::Link;
use super::{Fault, millis};
use crate::clock::{Clock, unix_now};
use crate::config::values::Revision;
use crate::learning::Learnt;
use crate::learning::shared::ProcessKey;
use foretell_core::control::Control;
use foretell_core::units::Tick;

/// The next windows of all processes that have some.
pub struct Plans {
    clock: Clock,
    plans: Vec<Plan>,
}

struct Plan {
    /// Its key in the store.
    key: String,
    /// The control states of its engine here: one, or one for each rank.
    controls: Vec<Arc<Control>>,
    /// The store has a start.
    agreed: bool,
}

impl Plans {
    /// The processes known here. `key`: the store's key for a name.
    pub fn of(learnt: &Learnt, key: impl Fn(&str) -> String) -> Self {
        let mut processes: BTreeMap<ProcessKey, Vec<Arc<Control>>> = BTreeMap::new();
        for (process, control) in learnt.processes() {
            if control.with(|learnt| learnt.switchback.is_planned()) {
                processes.entry(process).or_default().push(control);
            }
        }
        let plan = |(process, controls)| Plan { key: key(&name(&process)), controls, agreed: false };
        Self { clock: learnt.clock(), plans: processes.into_iter().map(plan).collect() }
    }

    /// The keys of all starts.
    pub fn keys(&self) -> impl Iterator<Item = String> {
        self.plans.iter().map(|plan| plan.key.clone())
    }

    /// Takes the values of these keys.
    pub fn take(&mut self, values: &[Option<Vec<u8>>]) {
        let (now, unix) = (self.clock.now(), millis(unix_now()));
        for (plan, value) in self.plans.iter_mut().zip(values) {
            let Some(value) = value else { continue };
            plan.agreed = true;
            let start = std::str::from_utf8(value).ok().and_then(|text| text.parse().ok());
            if let Some(start) = start.map(|start: u64| tick(start, now, unix)) {
                plan.agree(start, now);
            }
        }
    }

    /// Proposes a start for each process without one; all sidecars must have read it before.
    /// `every`: the pause between two exchanges.
    pub async fn propose(&self, link: &mut Link, every: Duration) -> Result<(), Fault> {
        for plan in self.plans.iter().filter(|plan| !plan.agreed) {
            let (now, unix) = (self.clock.now(), millis(unix_now()));
            let Some((start, window)) = plan.next(now) else { continue };
            let start = start.max(now.after(2 * every));
            let wait = start - now;
            let text = unix.saturating_add(millis(wait)).to_string();
            if link.put_new(&plan.key, text, wait + window).await? {
                plan.agree(start, now);
            }
        }
        Ok(())
    }
}

impl Plan {
    /// Start and length of the next window that was drawn here. A window that is due has no
    /// requests: `None`, since it would never begin.
    fn next(&self, now: Tick) -> Option<(Tick, Duration)> {
        let next = |control: &Arc<Control>| {
            control.with(|learnt| Some((learnt.switchback.next()?, learnt.switchback.windows()?.window)))
        };
        self.controls.iter().filter_map(next).find(|(start, _)| *start > now)
    }

    /// Schedules the window, unless its start is further away than any that a sidecar draws.
    fn agree(&self, start: Tick, now: Tick) {
        for control in &self.controls {
            control.with(|learnt| {
                let every = learnt.switchback.windows().map(|windows| windows.every);
                if every.is_some_and(|every| start - now < 2 * every) {
                    learnt.switchback.agree(start);
                }
            });
        }
    }
}

/// A name of the process for a key: its start time, and a hash of all that identifies it.
fn name(process: &ProcessKey) -> String {
    let hash = Revision::of(&serde_json::to_vec(process).unwrap_or_default());
    format!("{}-{hash}", process.started())
}

/// The moment `start`, Unix milliseconds, where `now` is `unix`.
fn tick(start: u64, now: Tick, unix: u64) -> Tick {
    match start.checked_sub(unix) {
        Some(ahead) => now.after(Duration::from_millis(ahead)),
        None => Tick(now.0.saturating_sub((unix - start).saturating_mul(1_000))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starts_are_converted_between_the_clocks_of_two_sidecars() {
        assert_eq!(tick(10_500, Tick(7_000_000), 10_000), Tick(7_500_000));
        assert_eq!(tick(9_000, Tick(7_000_000), 10_000), Tick(6_000_000));
        assert_eq!(tick(0, Tick(7_000_000), u64::MAX), Tick(0));
    }
}
