//! Sums over all finished requests, for the status page: two states subtract to the requests
//! between them.

use std::collections::BTreeMap;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::{Value, json};

use super::{Finished, Round};
use foretell_core::words::{PlainReason, Reason};
use foretell_wire::openai::Path;

/// Positions in a draft that are counted separately; deeper ones are not counted.
pub const POSITIONS: usize = 32;

/// Sums over finished requests, since the start of the process.
#[derive(Debug, Default)]
pub struct Totals {
    sums: Mutex<Sums>,
}

impl Totals {
    /// Adds a finished request.
    pub(super) fn finish(&self, finished: &Finished) {
        self.sums.lock().add(finished);
    }

    pub fn now(&self) -> Sums {
        self.sums.lock().clone()
    }
}

/// Sums over some requests.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sums {
    /// Requests for text, by any API; every other one is in [`Self::others`].
    pub completions: u64,
    /// Requests for anything but text.
    pub others: u64,
    /// Completions by path: speculated on at least once, plain, and passed through (other APIs
    /// included).
    paths: [u64; 3],
    /// Output tokens of completions, where known.
    pub tokens: u64,
    /// Completions that were speculated on at least once.
    pub speculated: Pace,
    /// Completions that were in the control group.
    pub control_group: Pace,
    /// Completions with an error of the server or of Foretell.
    pub failed: u64,
    /// Completions whose client disconnected.
    pub client_gone: u64,
    /// Completions by the reason for which they were not speculated on, or not to the end.
    reasons: BTreeMap<Reason, u64>,
    /// Rounds by name of the drafter.
    drafters: BTreeMap<&'static str, Rounds>,
    /// Rounds by range of temperatures and of loads.
    conditions: BTreeMap<(&'static str, &'static str), Under>,
    /// Positions that a relaxed rule decided.
    pub relaxed: u64,
    /// Tokens emitted that the target had not chosen.
    pub substitutions: u64,
}

/// The pace of a group of requests. Only requests with a known pace count.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pace {
    pub requests: u64,
    /// Output tokens after the first of each.
    pub tokens: u64,
    pub seconds: f64,
}

impl Pace {
    fn add(&mut self, finished: &Finished) {
        if let Some(seconds) = finished.seconds_per_token() {
            let tokens = finished.usage.output_tokens.saturating_sub(1);
            self.requests += 1;
            self.tokens += u64::from(tokens);
            self.seconds += seconds * f64::from(tokens);
        }
    }

    fn since(self, before: Self) -> Self {
        Self {
            requests: self.requests - before.requests,
            tokens: self.tokens - before.tokens,
            seconds: (self.seconds - before.seconds).max(0.0),
        }
    }

    /// Seconds per token; `None` without a token.
    fn token(self) -> Option<f64> {
        (self.tokens > 0).then(|| self.seconds / self.tokens as f64)
    }

    fn to_json(self) -> Value {
        json!({ "requests": self.requests, "tokens": self.tokens, "seconds_per_token": self.token() })
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rounds {
    pub rounds: u64,
    pub drafted: u64,
    pub accepted: u64,
    draft: Duration,
    verify: Duration,
    /// Rounds that drafted a token at each position (of a tree: of its longest branch), and those
    /// that accepted one.
    positions: [[u64; 2]; POSITIONS],
}

impl Rounds {
    fn add(&mut self, round: &Round) {
        self.rounds += 1;
        self.drafted += u64::from(round.drafted);
        self.accepted += u64::from(round.accepted);
        self.draft += round.draft;
        self.verify += round.verify;
        for (position, [drafted, accepted]) in (1..).zip(&mut self.positions) {
            *drafted += u64::from(round.depth >= position);
            *accepted += u64::from(round.accepted >= position);
        }
    }

    fn since(&self, before: &Self) -> Self {
        let mut positions = self.positions;
        for (now, before) in positions.iter_mut().flatten().zip(before.positions.iter().flatten()) {
            *now -= before;
        }
        Self {
            rounds: self.rounds - before.rounds,
            drafted: self.drafted - before.drafted,
            accepted: self.accepted - before.accepted,
            draft: self.draft.saturating_sub(before.draft),
            verify: self.verify.saturating_sub(before.verify),
            positions,
        }
    }

    fn to_json(self, name: &str) -> Value {
        let deepest =
            self.positions.iter().rposition(|[drafted, _]| *drafted > 0).map_or(0, |position| position + 1);
        json!({
            "drafter": name,
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "draft_seconds": self.draft.as_secs_f64(),
            "verify_seconds": self.verify.as_secs_f64(),
            "positions": self.positions.get(..deepest),
        })
    }
}

/// Rounds of one range of temperatures and one of loads.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Under {
    rounds: u64,
    drafted: u64,
    accepted: u64,
    /// Sum of their tolerances.
    tolerance: f64,
}

impl Under {
    fn add(&mut self, round: &Round) {
        self.rounds += 1;
        self.drafted += u64::from(round.drafted);
        self.accepted += u64::from(round.accepted);
        self.tolerance += round.conditions.tolerance;
    }

    fn since(&self, before: &Self) -> Self {
        Self {
            rounds: self.rounds - before.rounds,
            drafted: self.drafted - before.drafted,
            accepted: self.accepted - before.accepted,
            tolerance: self.tolerance - before.tolerance,
        }
    }

    fn to_json(self, (temperature, load): (&str, &str)) -> Value {
        json!({
            "temperature": temperature,
            "load": load,
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "tolerance": self.tolerance / self.rounds.max(1) as f64,
        })
    }
}

impl Sums {
    fn add(&mut self, finished: &Finished) {
        if finished.route.is_none() {
            self.others += 1;
            return;
        }
        self.completions += 1;
        let [speculated, plain, passthrough] = &mut self.paths;
        *match finished.path {
            Path::Speculated => speculated,
            Path::Plain => plain,
            Path::Passthrough => passthrough,
        } += 1;
        self.tokens += u64::from(finished.usage.output_tokens);
        self.failed += u64::from(finished.has_failed());
        self.client_gone += u64::from(finished.client_gone);
        self.relaxed += u64::from(finished.speculation.drift.relaxed);
        self.substitutions += u64::from(finished.speculation.drift.substitutions);
        if let Some(reason) = finished.reason {
            *self.reasons.entry(reason).or_default() += 1;
        }
        match (finished.path, finished.reason) {
            (Path::Speculated, _) => self.speculated.add(finished),
            (Path::Plain, Some(Reason::Plain(PlainReason::ControlGroup))) => self.control_group.add(finished),
            (Path::Plain | Path::Passthrough, _) => {}
        }
        for round in &finished.speculation.rounds {
            self.drafters.entry(round.drafter).or_default().add(round);
            let ranges = (round.conditions.temperature_range(), round.conditions.load_range());
            self.conditions.entry(ranges).or_default().add(round);
        }
    }

    /// The difference to `before`, an earlier state of the same sums.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let reason = |(reason, count): (&Reason, &u64)| {
            let more = count - before.reasons.get(reason).unwrap_or(&0);
            (more > 0).then_some((*reason, more))
        };
        let drafter = |(name, rounds): (&&'static str, &Rounds)| {
            let more = before.drafters.get(name).map_or(*rounds, |before| rounds.since(before));
            (more.rounds > 0).then_some((*name, more))
        };
        let under = |(ranges, rounds): (&(&'static str, &'static str), &Under)| {
            let more = before.conditions.get(ranges).map_or(*rounds, |before| rounds.since(before));
            (more.rounds > 0).then_some((*ranges, more))
        };
        let mut paths = self.paths;
        for (now, before) in paths.iter_mut().zip(before.paths) {
            *now -= before;
        }
        Self {
            completions: self.completions - before.completions,
            others: self.others - before.others,
            paths,
            tokens: self.tokens - before.tokens,
            speculated: self.speculated.since(before.speculated),
            control_group: self.control_group.since(before.control_group),
            failed: self.failed - before.failed,
            client_gone: self.client_gone - before.client_gone,
            reasons: self.reasons.iter().filter_map(reason).collect(),
            drafters: self.drafters.iter().filter_map(drafter).collect(),
            conditions: self.conditions.iter().filter_map(under).collect(),
            relaxed: self.relaxed - before.relaxed,
            substitutions: self.substitutions - before.substitutions,
        }
    }

    /// Rounds, drafted tokens and accepted tokens of all drafters together.
    pub fn rounds(&self) -> (u64, u64, u64) {
        let all = self.drafters.values();
        all.fold((0, 0, 0), |sum, one| (sum.0 + one.rounds, sum.1 + one.drafted, sum.2 + one.accepted))
    }

    /// As `/api/status` shows them.
    pub fn to_json(&self) -> Value {
        let [speculated, plain, passthrough] = self.paths;
        let reasons = self.reasons.iter().map(|(reason, requests)| {
            let (kind, name, words) = (reason.kind(), reason.name(), reason.words());
            json!({ "kind": kind, "reason": name, "words": words, "requests": requests })
        });
        json!({
            "completions": self.completions,
            "other_requests": self.others,
            "paths": { "speculated": speculated, "plain": plain, "passthrough": passthrough },
            "tokens": self.tokens,
            "speculated": self.speculated.to_json(),
            "control_group": self.control_group.to_json(),
            "failed": self.failed,
            "disconnected": self.client_gone,
            "reasons": reasons.collect::<Vec<_>>(),
            "drafters": self.drafters.iter().map(|(name, rounds)| rounds.to_json(name)).collect::<Vec<_>>(),
            "conditions": self.conditions.iter().map(|(at, rounds)| rounds.to_json(*at)).collect::<Vec<_>>(),
            "relaxed": self.relaxed,
            "substitutions": self.substitutions,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Speculation, Timing, TokenUsage};
    use foretell_core::words::PassthroughReason;
    use foretell_wire::openai::{Api, Route};

    fn round(drafter: &'static str, drafted: u32, accepted: u32) -> Round {
        let (draft, verify) = (Duration::from_millis(1), Duration::from_millis(20));
        let conditions = foretell_core::words::Conditions::default();
        Round { drafted, accepted, depth: drafted, number: 1, at: draft, drafter, draft, verify, conditions }
    }

    fn completion(path: Path, reason: Option<Reason>) -> Finished {
        Finished {
            route: Some(Route::Chat.into()),
            reason,
            status: 200,
            usage: TokenUsage { output_tokens: 11, ..TokenUsage::default() },
            timing: timing(300),
            ..Finished::new(path, "b")
        }
    }

    fn timing(duration_ms: u64) -> Timing {
        let first = Some(Duration::from_millis(100));
        let duration = Duration::from_millis(duration_ms);
        Timing { first_byte: first, first_token: first, duration, ..Timing::default() }
    }

    fn speculation(rounds: Vec<Round>) -> Speculation {
        Speculation { rounds, ..Speculation::default() }
    }

    #[test]
    fn acceptance_is_counted_by_drafter_and_position() {
        let totals = Totals::default();
        let tree = Round { drafted: 6, depth: 3, ..round("model", 0, 1) };
        let rounds = vec![round("prompt_lookup", 4, 2), round("prompt_lookup", 2, 2), tree];
        let speculation = speculation(rounds);
        totals.finish(&Finished { speculation, ..completion(Path::Speculated, None) });
        let now = totals.now();
        assert_eq!(now.rounds(), (3, 12, 5));
        let shown = now.to_json();
        let lookup = &shown["drafters"][1];
        assert_eq!(lookup["drafter"], "prompt_lookup");
        assert_eq!(lookup["positions"], json!([[2, 2], [2, 2], [1, 0], [1, 0]]));
        assert_eq!(shown["drafters"][0]["positions"], json!([[1, 1], [1, 0], [1, 0]]), "a tree of depth 3");
        assert!((lookup["verify_seconds"].as_f64().unwrap() - 0.04).abs() < 1e-9);
        let cold = json!({ "temperature": "0", "load": "0-0.25", "rounds": 3, "drafted": 12, "accepted": 5, "tolerance": 0.0 });
        assert_eq!(shown["conditions"], json!([cold]));
    }

    #[test]
    fn the_groups_are_speculated_and_control_group_requests() {
        let totals = Totals::default();
        totals.finish(&completion(Path::Speculated, Some(PlainReason::NoGain.into())));
        totals.finish(&completion(Path::Plain, Some(PlainReason::ControlGroup.into())));
        totals.finish(&Finished {
            timing: timing(500),
            ..completion(Path::Plain, Some(PlainReason::ControlGroup.into()))
        });
        totals.finish(&completion(Path::Plain, Some(PlainReason::NoGain.into())));
        totals.finish(&Finished::new(Path::Passthrough, "b"));
        for api in Api::PASSTHROUGH {
            let reason = Some(PassthroughReason::Route.into());
            totals.finish(&Finished { route: Some(api), reason, ..Finished::new(Path::Passthrough, "b") });
        }
        let shown = totals.now().to_json();
        assert_eq!(shown["speculated"], json!({ "requests": 1, "tokens": 10, "seconds_per_token": 0.02 }));
        assert_eq!(shown["control_group"]["requests"], 2);
        assert!((shown["control_group"]["seconds_per_token"].as_f64().unwrap() - 0.03).abs() < 1e-9);
        assert_eq!((&shown["completions"], &shown["other_requests"]), (&json!(6), &json!(1)));
        assert_eq!(shown["paths"], json!({ "speculated": 1, "plain": 3, "passthrough": 2 }));
        let route = &shown["reasons"][2];
        assert_eq!(
            (&route["reason"], &route["requests"]),
            (&json!("route"), &json!(2)),
            "they are part of the whole"
        );
        let no_gain = &shown["reasons"][1];
        assert_eq!((&no_gain["reason"], &no_gain["requests"]), (&json!("no_gain"), &json!(2)));
    }

    #[test]
    fn since_is_the_difference_without_unchanged_entries() {
        let totals = Totals::default();
        let first = Finished {
            speculation: speculation(vec![round("model", 2, 1)]),
            ..completion(Path::Speculated, Some(PlainReason::NoGain.into()))
        };
        totals.finish(&first);
        let before = totals.now();
        let second = Finished {
            speculation: speculation(vec![round("suffix", 3, 3)]),
            ..completion(Path::Passthrough, Some(PassthroughReason::Tools.into()))
        };
        totals.finish(&second);
        let since = totals.now().since(&before);
        let mut alone = Sums::default();
        alone.add(&second);
        assert_eq!(since, alone);
        assert_eq!(before.since(&before), Sums::default());
    }
}
