//! Detects a minute of traffic of which no output was eligible for speculation: a line of the log,
//! the status page and a metric report it, with the remedy.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use super::is_eligible;
use crate::Finished;
use foretell_core::words::{PassthroughReason, PlainReason, Reason};

/// Time between the first and the last request of a streak that is a problem.
const LONG: Duration = Duration::from_mins(1);
/// A streak without a request for this long is forgotten.
const PAST: Duration = Duration::from_mins(15);
/// Maximum number of reasons that are counted separately.
const REASONS: usize = 64;

/// The requests since the last eligible one.
#[derive(Debug, Default)]
pub struct Streak {
    first: Option<Instant>,
    last: Option<Instant>,
    requests: u64,
    /// Output tokens by reason and parameter.
    tokens: BTreeMap<(Option<Reason>, String), u64>,
    warned: bool,
}

/// Effect of a finished request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Nothing.
    None,
    /// The streak has become a problem: its words.
    Begun(String),
    /// An eligible request has ended it.
    Ended,
}

impl Streak {
    /// Adds a finished request for text that ended at `now`.
    pub fn finish(&mut self, finished: &Finished, now: Instant) -> Change {
        if is_eligible(finished) {
            let ended = self.warned;
            *self = Self::default();
            return if ended { Change::Ended } else { Change::None };
        }
        if finished.usage.output_tokens == 0 || is_wished(finished.reason) {
            return Change::None;
        }
        self.first.get_or_insert(now);
        self.last = Some(now);
        self.requests += 1;
        let key = (finished.reason, finished.parameter.clone().unwrap_or_default());
        if self.tokens.len() < REASONS || self.tokens.contains_key(&key) {
            *self.tokens.entry(key).or_default() += u64::from(finished.usage.output_tokens);
        }
        match self.problem(now) {
            Some(problem) if !self.warned => {
                self.warned = true;
                Change::Begun(problem)
            }
            _ => Change::None,
        }
    }

    /// The problem at `now`, with its remedy; `None` if there is none.
    pub fn problem(&self, now: Instant) -> Option<String> {
        let (first, last) = self.first.zip(self.last)?;
        let long = last.duration_since(first);
        if long < LONG || now.duration_since(last) >= PAST {
            return None;
        }
        let all: u64 = self.tokens.values().sum();
        let ((reason, parameter), most) = self.tokens.iter().max_by_key(|(_, tokens)| **tokens)?;
        let because = if parameter.is_empty() { String::new() } else { format!(" because of {parameter}") };
        Some(format!(
            "no output of the last {} requests ({} s) was eligible for speculation. {} %: {}{because} ({}). {}",
            self.requests,
            long.as_secs(),
            100 * most / all.max(1),
            reason.map_or("no reason", Reason::name),
            reason.map_or("", Reason::words),
            reason.map_or(EXPLAIN, remedy),
        ))
    }
}

/// True if the operator's mode or the client is the reason.
fn is_wished(reason: Option<Reason>) -> bool {
    matches!(
        reason,
        Some(
            Reason::Passthrough(PassthroughReason::Off | PassthroughReason::Client)
                | Reason::Plain(PlainReason::Client)
        )
    )
}

const EXPLAIN: &str = "`foretell explain --request body.json` names the step that decides";

/// The operator's next step for a reason.
fn remedy(reason: Reason) -> &'static str {
    match reason {
        Reason::Passthrough(PassthroughReason::DefaultsUnknown) => {
            "Name the folder of the model that the server serves (--tokenizer DIR, or models[].generation_config), or \
             start vLLM with --enable-scale-out, by which it reports its defaults"
        }
        Reason::Passthrough(PassthroughReason::Tokenizer) => {
            "Name the folder of the server's model, which holds its tokenizer.json (--tokenizer DIR, or \
             models[].tokenizer)"
        }
        Reason::Passthrough(PassthroughReason::NoVerifyMethod | PassthroughReason::SeveralEngines)
        | Reason::Plain(PlainReason::NoVerifyMethod) => "`foretell probe URL` says what the server lacks",
        Reason::Passthrough(PassthroughReason::Tools | PassthroughReason::Reasoning)
        | Reason::Plain(PlainReason::Parser) => {
            "Name the server's parsers (models[].parsers, docs/agents.md)"
        }
        Reason::Passthrough(PassthroughReason::Policy | PassthroughReason::NoPolicy)
        | Reason::Plain(PlainReason::Policy) => "Change the policies if that is not meant (docs/policies.md)",
        _ => EXPLAIN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TokenUsage;
    use foretell_wire::openai::{Path, Route};

    fn usage(output_tokens: u32) -> TokenUsage {
        TokenUsage { output_tokens, ..TokenUsage::default() }
    }

    fn passthrough(reason: PassthroughReason) -> Finished {
        Finished {
            route: Some(Route::Chat.into()),
            reason: Some(reason.into()),
            parameter: Some("top_p".to_owned()),
            usage: usage(10),
            ..Finished::new(Path::Passthrough, "b")
        }
    }

    #[test]
    fn a_minute_without_eligible_output_is_said_once_and_ends_with_the_next() {
        let mut streak = Streak::default();
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let unknown = passthrough(PassthroughReason::DefaultsUnknown);
        assert_eq!(streak.finish(&unknown, at(0)), Change::None);
        assert_eq!(
            streak.finish(&passthrough(PassthroughReason::Off), at(61)),
            Change::None,
            "the operator's own mode"
        );
        assert_eq!(streak.finish(&Finished { usage: usage(0), ..unknown.clone() }, at(61)), Change::None);
        assert_eq!(streak.finish(&unknown, at(59)), Change::None);
        let Change::Begun(problem) = streak.finish(&unknown, at(60)) else { panic!("not noticed") };
        assert!(problem.starts_with(
            "no output of the last 3 requests (60 s) was eligible for speculation. 100 %: defaults_unknown because of top_p"
        ));
        assert!(problem.contains("--enable-scale-out"), "{problem}");
        assert_eq!(streak.finish(&unknown, at(70)), Change::None);
        assert!(streak.problem(at(71)).is_some() && streak.problem(at(70) + PAST).is_none());
        let eligible = Finished { usage: usage(1), ..Finished::new(Path::Plain, "b") };
        assert_eq!(streak.finish(&eligible, at(80)), Change::Ended);
        assert_eq!((streak.problem(at(80)), streak.finish(&eligible, at(81))), (None, Change::None));
    }
}
