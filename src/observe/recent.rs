//! The latest completions, for `/api/sessions` and the status page.

use std::collections::VecDeque;

use parking_lot::Mutex;
use serde_json::{Value, json};
use time::OffsetDateTime;
use time::format_description::well_known::Iso8601;
use time::format_description::well_known::iso8601::{Config, EncodedConfig, TimePrecision};

use super::Finished;
use super::log::millis;
use foretell_core::words::Reason;

/// Maximum number of stored completions.
const COMPLETIONS: usize = 50;
/// Maximum number of stored rounds of one completion: its last ones.
const ROUNDS: usize = 256;
/// Time format with microseconds, as in log lines.
const TIME: EncodedConfig = Config::DEFAULT
    .set_time_precision(TimePrecision::Second { decimal_digits: std::num::NonZero::new(6) })
    .encode();

/// The latest finished completions, newest first.
#[derive(Debug, Default)]
pub struct Recent {
    ring: Mutex<Ring>,
}

/// The completions, and their number so far.
#[derive(Debug, Default)]
struct Ring {
    completions: VecDeque<Completion>,
    count: u64,
}

/// A completion, with its last rounds only.
#[derive(Debug)]
struct Completion {
    /// Counts completions from 1.
    number: u64,
    /// Number of all of its rounds, and of the tokens drafted and accepted in them.
    all: (usize, u32, u32),
    finished: Finished,
}

impl Recent {
    pub(super) fn push(&self, mut finished: Finished) {
        let all = (finished.speculation.rounds.len(), finished.drafted(), finished.accepted());
        finished.speculation.rounds.drain(..finished.speculation.rounds.len().saturating_sub(ROUNDS));
        finished.speculation.rounds.shrink_to_fit();
        let mut ring = self.ring.lock();
        ring.count += 1;
        let number = ring.count;
        ring.completions.truncate(COMPLETIONS - 1);
        ring.completions.push_front(Completion { number, all, finished });
    }

    /// Number of completions so far, which is the number of the newest one.
    pub fn count(&self) -> u64 {
        self.ring.lock().count
    }

    /// The list in `/api/sessions`, newest first.
    pub fn to_json(&self) -> Value {
        self.ring.lock().completions.iter().map(Completion::to_json).collect()
    }

    /// The same without the single rounds.
    pub fn brief(&self) -> Value {
        self.ring.lock().completions.iter().map(Completion::brief).collect()
    }

    /// One completion with its rounds, by its number; `None` if it is not stored.
    pub fn one(&self, wanted: u64) -> Option<Value> {
        let ring = self.ring.lock();
        ring.completions.iter().find(|one| one.number == wanted).map(Completion::to_json)
    }
}

/// When the request was accepted, as in `2026-11-22T01:10:15.083349Z`.
fn time(finished: &Finished) -> String {
    OffsetDateTime::from(finished.time).format(&Iso8601::<TIME>).unwrap_or_default()
}

impl Completion {
    fn to_json(&self) -> Value {
        let rounds = self.finished.speculation.rounds.iter().map(|round| {
            json!({
                "drafted": round.drafted,
                "accepted": round.accepted,
                "drafter": round.drafter,
                "draft_ms": millis(round.draft),
                "verify_ms": millis(round.verify),
            })
        });
        let rounds: Vec<Value> = rounds.collect();
        let mut completion = self.brief();
        if let Some(members) = completion.as_object_mut() {
            members.insert("rounds".to_owned(), rounds.into());
        }
        completion
    }

    /// The completion without its rounds.
    fn brief(&self) -> Value {
        let Self { number, all: (rounds, drafted, accepted), finished } = self;
        json!({
            "number": number,
            "id": finished.id,
            "time": time(finished),
            "path": finished.path.name(),
            "reason": finished.reason.map(Reason::name),
            "parameter": finished.parameter,
            "policy": finished.policy,
            "model": finished.model,
            "backend": finished.upstream.backend,
            "route": finished.route.map(foretell_wire::openai::Api::name),
            "status": finished.status,
            "output_tokens": finished.usage.output_tokens,
            "output_tokens_estimated": finished.usage.is_estimate,
            "rounds_played": rounds,
            "drafted": drafted,
            "accepted": accepted,
            "first_byte_ms": finished.timing.first_byte.map(millis),
            "duration_ms": millis(finished.timing.duration),
            "client_gone": finished.client_gone,
            "error": finished.error,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use foretell_wire::openai::Path;

    #[test]
    fn only_the_last_fifty_are_kept_newest_first() {
        let recent = Recent::default();
        for n in 0..60 {
            recent.push(Finished { id: n.to_string(), ..Finished::new(Path::Plain, "b") });
        }
        let all = recent.to_json();
        let ids: Vec<&str> = all.as_array().unwrap().iter().filter_map(|s| s["id"].as_str()).collect();
        assert_eq!(ids.len(), 50);
        assert_eq!((ids[0], ids[49]), ("59", "10"));
        assert_eq!((recent.count(), recent.one(60).unwrap()["id"].as_str()), (60, Some("59")));
        assert!(recent.one(10).is_none() && recent.one(61).is_none());
    }

    #[test]
    fn the_brief_list_leaves_out_the_rounds() {
        let recent = Recent::default();
        let (draft, verify) = (std::time::Duration::from_micros(1_500), std::time::Duration::from_millis(20));
        let round = super::super::Round {
            drafted: 4,
            accepted: 3,
            depth: 4,
            number: 1,
            at: draft,
            drafter: "model",
            draft,
            verify,
            conditions: foretell_core::words::Conditions::default(),
        };
        let mut finished = Finished::new(Path::Speculated, "b");
        finished.speculation.rounds = vec![round; 300];
        recent.push(finished);
        let one = recent.one(1).unwrap();
        assert_eq!(
            (one["drafted"].as_u64(), one["rounds"].as_array().map(Vec::len)),
            (Some(1200), Some(256))
        );
        let told =
            json!({ "drafted": 4, "accepted": 3, "drafter": "model", "draft_ms": 1.5, "verify_ms": 20.0 });
        assert_eq!(one["rounds"][0], told);
        assert!(recent.brief()[0].get("rounds").is_none());
        assert_eq!(recent.to_json()[0], one);
    }
}
