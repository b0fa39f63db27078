//! Output tokens by path and reason: the coverage of speculation, for `/api/coverage`.

pub mod report;
pub mod streak;

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};

use parking_lot::Mutex;

pub use report::{CoverageReport, CoverageRow, IneligibleTokens};

use super::Finished;
use foretell_core::words::{PassthroughReason, PlainReason, Reason};
use foretell_wire::openai::{Api, Path};

/// Maximum number of combinations that are counted separately; all others are one row.
const ROWS: usize = 500;
/// The name of everything in the row for all others.
const OTHER: &str = "other";

/// Counts of all finished requests for text, since the start of the process.
#[derive(Debug, Default)]
pub struct Coverage(Mutex<Counts>);

#[derive(Debug, Default)]
struct Counts {
    all: Sum,
    /// Speculated, plain, passed through.
    paths: [Sum; 3],
    /// Requests that are not eligible, by reason, and by policy if that switched them off.
    rest: BTreeMap<(Option<Reason>, String), Sum>,
    rows: HashMap<Key, Sum>,
    /// All other requests.
    other: Sum,
}

/// A combination that is counted separately.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    policy: String,
    backend: String,
    route: Api,
    path: Path,
    reason: Option<&'static str>,
    /// They are eligible.
    eligible: bool,
}

/// Requests, and their output tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sum {
    requests: u64,
    tokens: u64,
    /// The part of the tokens that is estimated.
    estimated: u64,
}

/// Speedup that is projected for the requests of a policy at a backend.
#[derive(Clone, Debug, PartialEq)]
pub struct Projected {
    /// The policy, without its revision.
    pub policy: String,
    pub backend: String,
    /// Plain time ÷ projected time.
    pub speedup: f64,
}

impl Sum {
    fn add(&mut self, finished: &Finished) {
        let tokens = u64::from(finished.usage.output_tokens);
        self.requests += 1;
        self.tokens += tokens;
        self.estimated += if finished.usage.is_estimate { tokens } else { 0 };
    }

    /// The share of these tokens in `all`; `None` if there are none at all.
    fn share(self, all: Self) -> Option<f64> {
        (all.tokens > 0).then(|| self.tokens as f64 / all.tokens as f64)
    }
}

impl Coverage {
    /// Adds a finished request for text; others do not count.
    pub(super) fn finish(&self, finished: &Finished) {
        if let Some(route) = finished.route {
            self.0.lock().add(finished, route);
        }
    }

    /// The report of a process that began at `since`, Unix seconds.
    pub fn report(&self, since: f64, projected: &[Projected]) -> CoverageReport {
        let counts = self.0.lock();
        let [speculated, ..] = counts.paths;
        let never: u64 = counts.rest.values().map(|sum| sum.tokens).sum();
        let eligible = Sum { tokens: counts.all.tokens - never, ..Sum::default() };
        let mut report = CoverageReport {
            since,
            requests: counts.all.requests,
            tokens: counts.all.tokens,
            estimated_tokens: counts.all.estimated,
            may_speculate: eligible.share(counts.all),
            speculated: speculated.share(counts.all),
            expected_speedup: counts.expected(projected),
            rest: counts.rest(),
            rows: counts.listed(),
            sentence: String::new(),
        };
        report.sentence = report.summary();
        report
    }
}

impl Counts {
    fn add(&mut self, finished: &Finished, route: Api) {
        self.all.add(finished);
        let [speculated, plain, passthrough] = &mut self.paths;
        match finished.path {
            Path::Speculated => speculated.add(finished),
            Path::Plain => plain.add(finished),
            Path::Passthrough => passthrough.add(finished),
        }
        if !is_eligible(finished) {
            let by_policy =
                finished.reason.is_some_and(|reason| reason.name() == PassthroughReason::Policy.name());
            let policy = if by_policy { finished.policy_name().to_owned() } else { String::new() };
            self.rest.entry((finished.reason, policy)).or_default().add(finished);
        }
        self.row(Key::of(finished, route)).add(finished);
    }

    fn row(&mut self, key: Key) -> &mut Sum {
        if self.rows.len() < ROWS || self.rows.contains_key(&key) {
            self.rows.entry(key).or_default()
        } else {
            &mut self.other
        }
    }

    /// Reasons for which tokens are not eligible, by number of tokens.
    fn rest(&self) -> Vec<IneligibleTokens> {
        let with_tokens = self.rest.iter().filter(|(_, sum)| sum.tokens > 0);
        let mut rest: Vec<IneligibleTokens> = with_tokens
            .map(|((reason, policy), sum)| IneligibleTokens {
                policy: policy.clone(),
                reason: reason.map_or("", Reason::name).to_owned(),
                words: reason.map_or("", Reason::words).to_owned(),
                tokens: sum.tokens,
                share: sum.share(self.all).unwrap_or_default(),
            })
            .collect();
        rest.sort_by_key(|rest| Reverse(rest.tokens));
        rest
    }

    /// The rows by number of tokens, that of all others last.
    fn listed(&self) -> Vec<CoverageRow> {
        let mut rows: Vec<CoverageRow> = self.rows.iter().map(|(key, sum)| key.row(*sum, self.all)).collect();
        rows.sort_by(|a, b| {
            (Reverse((a.tokens, a.requests)), a.names()).cmp(&(Reverse((b.tokens, b.requests)), b.names()))
        });
        if self.other.requests > 0 {
            rows.push(self.other.row([OTHER; 5], self.all));
        }
        rows
    }

    /// The projected speedup of all eligible tokens, as if each policy and backend
    /// generated its part of them; `None` if none is projected.
    fn expected(&self, projected: &[Projected]) -> Option<f64> {
        let weights = projected.iter().map(|one| self.eligible(one).max(1) as f64);
        let weighted = projected.iter().zip(weights).filter(|(one, _)| one.speedup > 0.0);
        let (plain, faster) = weighted.fold((0.0, 0.0), |(plain, faster), (one, weight)| {
            (plain + weight, faster + weight / one.speedup)
        });
        (faster > 0.0).then(|| plain / faster)
    }

    /// Eligible tokens of a policy at a backend.
    fn eligible(&self, at: &Projected) -> u64 {
        let matching = self
            .rows
            .iter()
            .filter(|(key, _)| key.eligible && key.policy == at.policy && key.backend == at.backend);
        matching.map(|(_, sum)| sum.tokens).sum()
    }
}

/// True if requests like this one are eligible, now or at another moment.
fn is_eligible(finished: &Finished) -> bool {
    match (finished.path, finished.reason) {
        (Path::Plain, Some(Reason::Plain(reason))) => !is_permanent(reason),
        (Path::Speculated | Path::Plain, _) => true,
        (Path::Passthrough, _) => false,
    }
}

/// True if a request that is decoded plainly for this reason always will be: it follows from the
/// request, its policy or its server, and from no measurement. `observe` and `shadow` are not
/// permanent: they measure how much could be speculated on.
fn is_permanent(reason: PlainReason) -> bool {
    match reason {
        PlainReason::BackendSpeculates
        | PlainReason::Client
        | PlainReason::Policy
        | PlainReason::UntrustedIds
        | PlainReason::ContextTooLong
        | PlainReason::Parser
        | PlainReason::Grammar
        | PlainReason::NoVerifyMethod => true,
        PlainReason::ControlGroup
        | PlainReason::Observe
        | PlainReason::NoGain
        | PlainReason::NotMeasured
        | PlainReason::Budget
        | PlainReason::MaxGap
        | PlainReason::GateLoad
        | PlainReason::GateStale
        | PlainReason::GateAcceptance
        | PlainReason::GateControl
        | PlainReason::GateRegret
        | PlainReason::GateFirstToken
        | PlainReason::GateMemory
        | PlainReason::GateHealth
        | PlainReason::Shadow
        | PlainReason::NoDraft
        | PlainReason::WithheldText
        | PlainReason::Undecided
        | PlainReason::DraftFault
        | PlainReason::VerifyFault
        | PlainReason::UpstreamError
        | PlainReason::RetryAfter
        | PlainReason::Draining => false,
    }
}

impl Key {
    fn of(finished: &Finished, route: Api) -> Self {
        Self {
            policy: finished.policy_name().to_owned(),
            backend: finished.upstream.backend.clone(),
            route,
            path: finished.path,
            reason: finished.reason.map(Reason::name),
            eligible: is_eligible(finished),
        }
    }

    fn row(&self, sum: Sum, all: Sum) -> CoverageRow {
        let Self { policy, backend, route, path, reason, .. } = self;
        let names = [policy, backend, route.name(), path.name(), reason.unwrap_or_default()];
        sum.row(names, all)
    }
}

impl Sum {
    fn row(self, [policy, backend, route, path, reason]: [&str; 5], all: Self) -> CoverageRow {
        CoverageRow {
            policy: policy.to_owned(),
            backend: backend.to_owned(),
            route: route.to_owned(),
            path: path.to_owned(),
            reason: reason.to_owned(),
            requests: self.requests,
            tokens: self.tokens,
            share: self.share(all).unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TokenUsage;
    use foretell_wire::openai::Route;

    fn finished(path: Path, reason: Option<Reason>, tokens: u32) -> Finished {
        let policy = (path != Path::Passthrough).then(|| "p@12345678".to_owned());
        Finished {
            route: Some(Route::Chat.into()),
            reason,
            policy,
            usage: TokenUsage { output_tokens: tokens, ..TokenUsage::default() },
            ..Finished::new(path, "b")
        }
    }

    fn projected(policy: &str, speedup: f64) -> Projected {
        Projected { policy: policy.to_owned(), backend: "b".to_owned(), speedup }
    }

    #[test]
    fn shares_add_up_and_the_rest_is_in_order() {
        let coverage = Coverage::default();
        coverage.finish(&finished(Path::Speculated, None, 40));
        coverage.finish(&finished(Path::Plain, Some(PlainReason::ControlGroup.into()), 22));
        coverage.finish(&finished(Path::Passthrough, Some(PassthroughReason::Route.into()), 10));
        coverage.finish(&finished(Path::Passthrough, Some(PassthroughReason::Route.into()), 7));
        let mut tools = finished(Path::Passthrough, Some(PassthroughReason::Tools.into()), 21);
        tools.usage.is_estimate = true;
        coverage.finish(&tools);
        coverage.finish(&Finished::new(Path::Passthrough, "b"));
        let report = coverage.report(7.0, &[projected("p", 1.5)]);
        assert_eq!((report.requests, report.tokens, report.estimated_tokens), (5, 100, 21));
        assert_eq!((report.may_speculate, report.speculated), (Some(0.62), Some(0.4)));
        let rest: Vec<(&str, u64)> =
            report.rest.iter().map(|rest| (rest.reason.as_str(), rest.tokens)).collect();
        assert_eq!(rest, [("tools", 21), ("route", 17)]);
        assert_eq!(report.rows.iter().map(|row| row.tokens).collect::<Vec<_>>(), [40, 22, 21, 17]);
        assert!((report.rows.iter().map(|row| row.share).sum::<f64>() - 1.0).abs() < 1e-9);
        let first = &report.rows[0];
        assert_eq!((first.names(), first.requests), (["p", "b", "chat", "speculated", ""], 1));
        assert_eq!(
            report.sentence,
            "62 % of your output tokens are eligible; expected 1.5×; the largest rest: tools, 21 %"
        );
    }

    #[test]
    fn what_never_will_be_speculated_on_is_in_the_rest() {
        let coverage = Coverage::default();
        let plain = |reason: PlainReason, tokens| finished(Path::Plain, Some(reason.into()), tokens);
        coverage.finish(&plain(PlainReason::BackendSpeculates, 60));
        coverage.finish(&plain(PlainReason::Client, 10));
        coverage.finish(&plain(PlainReason::NoGain, 20));
        coverage.finish(&finished(Path::Speculated, Some(PlainReason::UntrustedIds.into()), 10));
        let report = coverage.report(0.0, &[projected("p", 1.5)]);
        assert_eq!((report.may_speculate, report.rest.len()), (Some(0.3), 2));
        assert_eq!(
            report.sentence,
            "30 % of your output tokens are eligible; expected 1.5×; the largest rest: backend_speculates, 60 %"
        );
        let other = Some("q@12345678".to_owned());
        coverage.finish(&Finished { policy: other, ..finished(Path::Plain, None, 30) });
        let expected = coverage.report(0.0, &[projected("p", 2.0), projected("q", 1.0)]).expected_speedup;
        assert!((expected.unwrap() - 60.0 / 45.0).abs() < 1e-9, "30 tokens of each policy");
    }

    #[test]
    fn rows_are_bounded_and_the_sums_are_not() {
        let coverage = Coverage::default();
        for number in 0..2 * ROWS {
            let policy = Some(format!("p{number}@12345678"));
            coverage.finish(&Finished { policy, ..finished(Path::Plain, None, 1) });
        }
        let report = coverage.report(0.0, &[]);
        assert_eq!((report.rows.len(), report.tokens), (ROWS + 1, 2 * ROWS as u64));
        let last = &report.rows[ROWS];
        assert_eq!((last.names(), last.tokens), ([OTHER; 5], ROWS as u64));
        assert!((report.rows.iter().map(|row| row.share).sum::<f64>() - 1.0).abs() < 1e-9);
    }

    #[test]
    fn the_expected_speedup_is_weighted_by_tokens() {
        let coverage = Coverage::default();
        coverage.finish(&finished(Path::Plain, None, 300));
        let other = Some("q@12345678".to_owned());
        coverage.finish(&Finished { policy: other, ..finished(Path::Plain, None, 100) });
        let expected = coverage.report(0.0, &[projected("p", 2.0), projected("q", 1.0)]).expected_speedup;
        assert!((expected.unwrap() - 1.6).abs() < 1e-9, "400 tokens in the time of 250");
        assert_eq!(coverage.report(0.0, &[]).expected_speedup, None);
    }
}
