//! Results of the control groups: metrics, and a part of `/api/policies`.

use std::sync::Arc;

use prometheus::GaugeVec;
use prometheus::core::Collector;
use serde_json::{Value, json};

use super::{Compared, Comparisons};
use foretell_config::store::PolicyStore;
use foretell_core::control::groups::Interval;
use foretell_metrics as metric;
use foretell_observe::coverage::Projected;
use foretell_observe::make::{self, AtScrape, Made};

/// A collector for those of these groups whose policies are in force.
///
/// # Errors
/// A metric has an invalid description, which is a bug.
pub fn collector(comparisons: Arc<Comparisons>, policies: Arc<PolicyStore>) -> Made<impl Collector> {
    AtScrape::new(Families::new, move |families| {
        let policies = policies.current();
        let in_force =
            |compared: &Compared| policies.policies().iter().any(|policy| policy.name == compared.policy);
        let all = comparisons.all();
        all.iter().filter(|compared| in_force(compared)).for_each(|compared| families.show(compared));
        Some(())
    })
}

/// The metrics of one scrape.
struct Families {
    ratio: GaugeVec,
    projected: GaugeVec,
}

impl Families {
    fn new(all: &mut make::Families) -> Made<Self> {
        Ok(Self {
            ratio: all.with(make::gauges(metric::CONTROL_GROUP_RATIO))?,
            projected: all.with(make::gauges(metric::PROJECTED_SPEEDUP))?,
        })
    }

    fn show(&self, compared: &Compared) {
        let Compared { policy, backend, groups, .. } = compared;
        for (end, value) in groups.ratio().map(bounds).into_iter().flatten() {
            self.ratio.with_label_values(&[policy, backend, end]).set(value);
        }
        let Some(projected) = groups.projected() else { return };
        for (end, value) in bounds(projected.gain) {
            self.projected.with_label_values(&[policy, backend, end, projected.basis.name()]).set(value);
        }
    }
}

/// The bounds of an interval, as labels and values of metrics.
pub(super) fn bounds(interval: Interval) -> [(&'static str, f64); 3] {
    [("low", interval.low), ("middle", interval.middle), ("high", interval.high)]
}

/// The bounds of an interval, as the admin API shows them.
pub(super) fn rounded(interval: Interval) -> Value {
    let rounded = |(end, value): (&str, f64)| (end.to_owned(), json!((value * 1000.0).round() / 1000.0));
    Value::Object(bounds(interval).map(rounded).into_iter().collect())
}

impl Comparisons {
    /// The groups of a policy at every backend, as `/api/policies` shows them. Figures are `null`
    /// before there are enough requests.
    pub fn shown(&self, policy: &str) -> Value {
        self.of(policy).iter().map(entry).collect()
    }

    /// The projected speedup of a policy at each backend where there are enough requests for one.
    pub fn projected(&self, policy: &str) -> Vec<Projected> {
        let projected = |compared: Compared| {
            let speedup = compared.groups.projected()?.gain.middle;
            Some(Projected { policy: compared.policy, backend: compared.backend, speedup })
        };
        self.of(policy).into_iter().filter_map(projected).collect()
    }

    /// The groups of a policy, by name of the backend.
    fn of(&self, policy: &str) -> Vec<Compared> {
        let mut groups: Vec<Compared> =
            self.all().into_iter().filter(|compared| compared.policy == policy).collect();
        groups.sort_by(|a, b| a.backend.cmp(&b.backend));
        groups
    }
}

fn entry(compared: &Compared) -> Value {
    let groups = &compared.groups;
    let (speculating, control_group) = groups.requests();
    json!({
        "backend": compared.backend,
        "requests": { "speculating": speculating, "control_group": control_group },
        "time_per_token_ratio": groups.ratio().map(rounded),
        "closed": compared.closed,
        "projected_speedup": groups.projected().map(|projected| json!({
            "ratio": rounded(projected.gain),
            "requests": projected.requests,
            "basis": projected.basis.name(),
        })),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use foretell_core::control::costs::Basis;
    use foretell_core::units::SplitMix64;
    use foretell_policy::PolicySet;

    #[test]
    fn figures_are_shown_once_there_are_enough_requests() {
        let comparisons = Arc::new(Comparisons::new(SplitMix64::new(1)));
        let policies = foretell_config::policy::built_in().unwrap();
        let policy = Arc::clone(&policies.policies()[0]);
        let store = Arc::new(PolicyStore::new(policies));
        let metrics = collector(Arc::clone(&comparisons), Arc::clone(&store)).unwrap();
        let drawn = comparisons.draw(&policy, "llama", true);
        drawn.note_projected(1.5, Basis::Probe);
        let shown = comparisons.shown(&policy.name);
        assert_eq!((&shown[0]["backend"], &shown[0]["projected_speedup"]), (&json!("llama"), &Value::Null));
        (0..200).for_each(|_| drawn.note_projected(1.5, Basis::Probe));
        for _ in 0..400 {
            let drawn = comparisons.draw(&policy, "llama", true);
            drawn.ended(if drawn.group().in_control { 0.03 } else { 0.02 });
        }
        let shown = comparisons.shown(&policy.name);
        let projected = &shown[0]["projected_speedup"];
        assert_eq!(
            (&projected["basis"], &projected["ratio"]["middle"]),
            (&json!("probe"), &json!(1.5)),
            "{shown}"
        );
        let projected = comparisons.projected(&policy.name);
        assert_eq!((projected.len(), projected[0].backend.as_str()), (1, "llama"));
        assert!((projected[0].speedup - 1.5).abs() < 1e-9);
        assert!(shown[0]["time_per_token_ratio"]["high"].as_f64().unwrap() < 0.8, "{shown}");
        assert_eq!(comparisons.shown("another"), json!([]));
        assert_eq!(shown[0]["closed"], false);
        let series = || -> usize { metrics.collect().iter().map(|family| family.get_metric().len()).sum() };
        assert_eq!(series(), 6);
        store.reload(|| Ok(PolicySet::default()), |_| Ok(())).unwrap();
        assert_eq!(series(), 0, "none for a policy that is not in force");
    }

    #[test]
    fn a_loss_is_shown_while_it_closes_the_gate() {
        let comparisons = Arc::new(Comparisons::new(SplitMix64::new(2)));
        let policy = Arc::clone(&foretell_config::policy::built_in().unwrap().policies()[0]);
        let mut sent = 0;
        while !comparisons.all().iter().any(|compared| compared.closed) {
            let drawn = comparisons.draw(&policy, "llama", true);
            drawn.ended(if drawn.group().in_control { 0.02 } else { 0.06 });
            sent += 1;
            assert!(sent < 1_000);
        }
        let shown = comparisons.shown(&policy.name);
        assert_eq!((&shown[0]["closed"], &shown[0]["time_per_token_ratio"]), (&json!(true), &Value::Null));
        let requests = &shown[0]["requests"];
        let counted = requests["speculating"].as_u64().unwrap() + requests["control_group"].as_u64().unwrap();
        assert_eq!(counted, sent, "what was counted is not lost");
        let late = comparisons.draw(&policy, "llama", true);
        assert!(late.group().is_slower);
        let looks = |backend: &str| comparisons.is_closed(&policy.name, backend);
        assert_eq!((looks("llama"), looks("other")), (true, false));
        late.ended(0.02);
        assert_eq!(&comparisons.shown(&policy.name)[0]["requests"], requests, "in neither group");
    }
}
