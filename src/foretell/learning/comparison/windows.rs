//! Results of the replicas' plain windows (switchback): a metric, and a part of `/api/replicas`.

use std::sync::Arc;

use prometheus::core::Collector;
use serde_json::{Value, json};

use super::shown::{bounds, rounded};
use crate::fleet::Replica;
use crate::fleet::identity::Identities;
use crate::learning::Learnt;
use crate::observe::make::{self, AtScrape, Made};
use foretell_core::control::{LearntCosts, Switchback};
use foretell_core::units::Tick;
use foretell_core::words::metric;

/// A collector for the replicas of these engines. They hold the registry that holds it, so it holds
/// them weakly.
///
/// # Errors
/// The metric has an invalid description, which is a bug.
pub fn collector(learnt: &Arc<Learnt>, identities: &Arc<Identities>) -> Made<impl Collector + use<>> {
    let (learnt, identities) = (Arc::downgrade(learnt), Arc::downgrade(identities));
    let make = |all: &mut make::Families| all.with(make::gauges(metric::SWITCHBACK_RATIO));
    AtScrape::new(make, move |family| {
        let (learnt, identities) = (learnt.upgrade()?, identities.upgrade()?);
        for (replica, switchback) in learnt.switchbacks(&identities) {
            let ratio = switchback.groups().ratio();
            for (bound, value) in ratio.map(bounds).into_iter().flatten() {
                family.with_label_values(&[replica.label(), bound]).set(value);
            }
        }
        Some(())
    })
}

impl Learnt {
    /// The windows of a replica, as `/api/replicas` shows them. `null` before its first request and
    /// if none are planned; the ratio is `null` before enough windows could be compared.
    pub fn windows(&self, identities: &Identities, replica: &Arc<Replica>) -> Value {
        let now = self.clock.now();
        self.switchback(identities, replica).map_or(Value::Null, |switchback| entry(&switchback, now))
    }

    /// The learnt costs of a replica; `None` if it is not an identified one.
    pub fn costs(&self, identities: &Identities, replica: &Arc<Replica>) -> Option<LearntCosts> {
        let (control, now) = (self.at(identities, replica)?, self.clock.now());
        Some(control.with(|learnt| learnt.learnt_costs(now)))
    }

    /// The replicas that have windows.
    fn switchbacks(&self, identities: &Identities) -> Vec<(Arc<Replica>, Switchback)> {
        let all = identities.all().into_iter();
        let planned = |replica: Arc<Replica>| Some((self.switchback(identities, &replica)?, replica));
        all.filter_map(|(replica, _)| planned(replica))
            .map(|(switchback, replica)| (replica, switchback))
            .collect()
    }

    fn switchback(&self, identities: &Identities, replica: &Arc<Replica>) -> Option<Switchback> {
        let control = self.at(identities, replica)?;
        Some(control.with(|learnt| *learnt.switchback)).filter(Switchback::is_planned)
    }
}

fn entry(switchback: &Switchback, now: Tick) -> Value {
    let groups = switchback.groups();
    json!({
        "windows": switchback.compared(),
        "time_per_token_ratio": groups.ratio().map(rounded),
        "in_window": switchback.in_window(now),
        "closed": groups.looks_closed(now),
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use foretell_core::control::Windows;
    use foretell_core::units::SplitMix64;

    #[test]
    fn windows_are_counted_and_their_ratio_is_shown_once_there_are_enough() {
        let (mut switchback, mut rng) = (Switchback::default(), SplitMix64::new(5));
        let windows = Windows { window: Duration::from_secs(20), every: Duration::from_mins(2) };
        switchback.set_windows(Some(windows));
        let mut shown = Vec::new();
        for second in 0..3_600_u64 {
            let now = Tick(second * 1_000_000);
            let starts_plain = switchback.starts_plain(now, &mut rng);
            switchback.emitted(10, if starts_plain { 1.0 } else { 0.6 }, now);
            let entry = entry(&switchback, now);
            assert_eq!((&entry["in_window"], &entry["closed"]), (&json!(starts_plain), &json!(false)));
            let (windows, ratio) = (entry["windows"].as_u64().unwrap(), &entry["time_per_token_ratio"]);
            assert_eq!(ratio.is_null(), windows < 10, "{entry}");
            shown.push(entry);
        }
        let last = shown.last().unwrap();
        assert!(last["windows"].as_u64().unwrap() > 20, "{last}");
        let [low, middle, high] =
            ["low", "middle", "high"].map(|bound| last["time_per_token_ratio"][bound].as_f64().unwrap());
        assert!(low < middle && middle < high && (middle - 0.6).abs() < 0.01, "{last}");
    }
}
