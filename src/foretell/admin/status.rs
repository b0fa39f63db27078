//! `GET /api/status`: the state that the status page polls, in one answer, and the samples of its
//! plots.

use std::sync::Arc;
use std::time::SystemTime;

use serde_json::{Value, json};
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use super::Configured;
use foretell_net::clock::{unix_now, unix_time};
use foretell_observe::history;
use foretell_proxy::gateway::Shared;

use foretell_proxy::serving::mode::ActiveMode;

/// Takes samples until `stop`. Without `configured`, load and tolerance are not known.
pub async fn sample_until_stopped(
    shared: Shared,
    configured: Option<Arc<Configured>>,
    stop: CancellationToken,
) {
    let mut ticks = tokio::time::interval(history::EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks.tick().await;
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = ticks.tick() => sample(&shared, configured.as_deref()),
        }
    }
}

fn sample(shared: &Shared, configured: Option<&Configured>) {
    let reading = configured.map(|configured| configured.reading(shared)).unwrap_or_default();
    let observer = &shared.observer;
    observer.history().take(observer.totals().now(), reading, SystemTime::now(), observer.started().1);
}

/// The answer, with the samples after the one of that number.
pub(super) fn shown(shared: &Shared, configured: Option<&Configured>, after: u64) -> Value {
    let observer = &shared.observer;
    let (started, ran) = observer.started();
    let sums = observer.totals().now();
    let (lately, long) = observer.history().lately(&sums, ran);
    let mut status = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "started": unix_time(started).as_secs_f64(),
        "now": unix_now().as_secs_f64(),
        "uptime_seconds": ran.as_secs_f64(),
        "unready": shared.unready(),
        "in_flight": observer.metrics().requests_in_flight(),
        "recording": observer.recording_fault(),
        "out": shared.fleet.out(),
        "nothing_eligible": observer.nothing_eligible(),
        "draining": shared.life.is_draining(),
        "mode": mode(shared),
        "sessions": observer.recent().count(),
        "since_start": sums.to_json(),
        "lately": lately.to_json(),
        "lately_seconds": long.as_secs_f64(),
        "every_seconds": history::EVERY.as_secs(),
        "samples": observer.history().after(after),
        "compared": [],
        "gates": [],
        "relaxed_by": [],
        "synchronized": null,
    });
    let known = configured.map(Configured::status);
    if let (Some(members), Some(Value::Object(known))) = (status.as_object_mut(), known) {
        members.extend(known);
    }
    status
}

fn mode(shared: &Shared) -> Value {
    let (process, overrides) = shared.modes.active();
    let backends = shared.fleet.names().map(|name| {
        let set = overrides.iter().find(|(backend, _)| backend == name);
        json!({ "name": name, "mode": shared.modes.of(name).name(), "override": set.map(|(_, set)| active(*set)) })
    });
    json!({ "process": active(process), "backends": backends.collect::<Vec<_>>() })
}

fn active(ActiveMode { mode, base, ends_in }: ActiveMode) -> Value {
    json!({ "mode": mode.name(), "base": base.name(), "ends_in_seconds": ends_in.map(|rest| rest.as_secs_f64()) })
}
