//! The latest completions, for `/api/sessions` and the status page.

use std::collections::VecDeque;

use parking_lot::Mutex;
use serde_json::{Value, json};
use time::OffsetDateTime;
use time::format_description::well_known::Iso8601;
use time::format_description::well_known::iso8601::{Config, EncodedConfig, TimePrecision};

use super::Finished;
use super::log::millis;

const KEPT: usize = 50;
/// Most rounds kept of one completion: its last ones.
const ROUNDS: usize = 256;
/// Time format with microseconds, as in log lines.
const TIME: EncodedConfig = Config::DEFAULT
    .set_time_precision(TimePrecision::Second { decimal_digits: std::num::NonZero::new(6) })
    .encode();

/// The latest finished completions, newest first.
#[derive(Debug, Default)]
pub struct Recent {
    ring: Mutex<VecDeque<Finished>>,
}

impl Recent {
    pub(super) fn push(&self, mut finished: Finished) {
        finished.rounds.drain(..finished.rounds.len().saturating_sub(ROUNDS));
        finished.rounds.shrink_to_fit();
        let mut ring = self.ring.lock();
        ring.truncate(KEPT - 1);
        ring.push_front(finished);
    }

    /// Calls `show` for each completion, newest first.
    pub fn each(&self, show: impl FnMut(&Finished)) {
        self.ring.lock().iter().for_each(show);
    }

    /// The list in `/api/sessions`, newest first.
    pub fn to_json(&self) -> Value {
        self.ring.lock().iter().map(session).collect()
    }
}

/// When the request was accepted, as in `2026-11-22T01:10:15.083349Z`.
pub fn time(finished: &Finished) -> String {
    OffsetDateTime::from(finished.time).format(&Iso8601::<TIME>).unwrap_or_default()
}

fn session(finished: &Finished) -> Value {
    let rounds: Vec<Value> = finished
        .rounds
        .iter()
        .map(|round| {
            json!({
                "drafted": round.drafted,
                "accepted": round.accepted,
                "drafter": round.drafter,
                "verify_ms": millis(round.verify),
            })
        })
        .collect();
    json!({
        "id": finished.id,
        "time": time(finished),
        "path": finished.path.name(),
        "reason": finished.reason,
        "parameter": finished.parameter,
        "policy": finished.policy,
        "model": finished.model,
        "backend": finished.backend,
        "route": finished.route.map(crate::openai::Route::name),
        "status": finished.status,
        "output_tokens": finished.output_tokens,
        "duration_ms": millis(finished.duration),
        "client_gone": finished.client_gone,
        "error": finished.error,
        "rounds": rounds,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openai::Path;

    #[test]
    fn only_the_last_fifty_are_kept_newest_first() {
        let recent = Recent::default();
        for n in 0..60 {
            recent.push(Finished { id: n.to_string(), ..Finished::new(Path::Ridden, "b") });
        }
        let all = recent.to_json();
        let ids: Vec<&str> = all.as_array().unwrap().iter().filter_map(|s| s["id"].as_str()).collect();
        assert_eq!(ids.len(), 50);
        assert_eq!((ids[0], ids[49]), ("59", "10"));
    }
}
