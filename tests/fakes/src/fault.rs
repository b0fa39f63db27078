//! Scheduled faults: the n-th call of a kind gets a fault.

use std::time::Duration;

use parking_lot::Mutex;
use serde_json::{Value, json};

use super::http::Request;

/// Replacement or interruption of a correct answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Fault {
    /// An error with this status.
    Status(u16),
    /// An error with this status and `Retry-After` in seconds.
    Later(u16, u64),
    /// A correct status line and a body that is not an answer.
    Garbage,
    Empty,
    /// The answer's first half, and then the end of the connection.
    Half,
    /// This number of events, and then the end of the connection.
    CutAfter(usize),
    /// This number of events and half of the next.
    HalfEventAfter(usize),
    /// This number of events, half of the next, and then a regular end. For an answer that is not a
    /// stream, its first half, ended by the end of the connection.
    HalfAsWhole(usize),
    /// This number of events, and then one that is not JSON.
    GarbageAfter(usize),
    /// This number of events, and then one with an error.
    ErrorAfter(usize),
    /// This number of events, and then nothing more.
    HangAfter(usize),
    /// This number of events, and then a reset.
    ResetAfter(usize),
    /// No answer, ever.
    Hang,
    /// A head without a body.
    Stall,
    Reset,
    /// The server goes down until it is revived.
    Kill,
    /// The correct answer after this delay.
    Slow(Duration),
    /// The correct answer, and from then on other weights under the same name.
    Reload,
    /// The correct answer with every id increased by one; texts are correct.
    ShiftedIds,
    /// The correct answer with another prompt's ids; counts are correct.
    OtherPrompt,
    /// The same, with counts only at the end.
    OtherPromptCountedLast,
    /// The correct answer with one more token in the prompt's count.
    OtherCount,
}

impl Fault {
    /// True if it falsifies answers.
    pub fn doctors(&self) -> bool {
        matches!(self, Self::ShiftedIds | Self::OtherPrompt | Self::OtherPromptCountedLast | Self::OtherCount)
    }

    /// Falsifies an answer, if the fault is of that kind.
    pub fn doctor(&self, answer: &mut Value) {
        match answer {
            Value::Array(items) => items.iter_mut().for_each(|item| self.doctor(item)),
            Value::Object(members) => {
                let chooses = members.get("choices").is_some_and(|choices| choices != &json!([]));
                if *self == Self::OtherPromptCountedLast && chooses {
                    members.remove("usage");
                }
                for (name, value) in members.iter_mut() {
                    match (self, name.as_str()) {
                        (Self::ShiftedIds, "token_ids" | "tokens" | "output_ids") => shift(value),
                        (Self::OtherPrompt | Self::OtherPromptCountedLast, "prompt_token_ids")
                            if value.is_array() =>
                        {
                            *value = json!([1, 2, 3]);
                        }
                        (Self::OtherCount, "prompt_tokens" | "tokens_evaluated") => more(value),
                        _ => self.doctor(value),
                    }
                }
            }
            _ => {}
        }
    }
}

fn shift(ids: &mut Value) {
    ids.as_array_mut().into_iter().flatten().for_each(more);
}

fn more(number: &mut Value) {
    if let Some(one) = number.as_u64() {
        *number = json!(one + 1);
    }
}

/// Selection of calls.
#[derive(Clone, Debug, Default)]
pub struct When {
    path: Option<String>,
    query: Option<String>,
    streamed: Option<bool>,
    holds: Option<String>,
}

impl When {
    pub fn any() -> Self {
        Self::default()
    }

    pub fn path(path: &str) -> Self {
        Self { path: Some(path.to_owned()), ..Self::default() }
    }

    /// Only calls with this query.
    #[must_use]
    pub fn query(mut self, query: &str) -> Self {
        self.query = Some(query.to_owned());
        self
    }

    #[must_use]
    pub fn streamed(mut self, streamed: bool) -> Self {
        self.streamed = Some(streamed);
        self
    }

    /// Only calls whose body holds this text.
    #[must_use]
    pub fn holding(mut self, text: &str) -> Self {
        self.holds = Some(text.to_owned());
        self
    }

    fn fits(&self, request: &Request) -> bool {
        let streams = || request.json().is_some_and(|body| body["stream"] == true);
        self.path.as_ref().is_none_or(|path| *path == request.path)
            && self.query.as_ref().is_none_or(|query| *query == request.query)
            && self.streamed.is_none_or(|streamed| streamed == streams())
            && self.holds.as_ref().is_none_or(|text| String::from_utf8_lossy(&request.body).contains(text))
    }
}

struct Rule {
    when: When,
    nth: Option<usize>,
    seen: usize,
    fault: Fault,
}

/// The faults of one server; may be changed while the server runs.
#[derive(Default)]
pub struct Faults {
    rules: Mutex<Vec<Rule>>,
    struck: Mutex<usize>,
}

impl Faults {
    /// The n-th call (from 0, counted from now) of a kind.
    pub fn at(&self, when: When, nth: usize, fault: Fault) {
        self.rules.lock().push(Rule { when, nth: Some(nth), seen: 0, fault });
    }

    /// All calls of a kind.
    pub fn always(&self, when: When, fault: Fault) {
        self.rules.lock().push(Rule { when, nth: None, seen: 0, fault });
    }

    pub fn clear(&self) {
        self.rules.lock().clear();
    }

    /// Number of calls with a fault so far.
    pub fn struck(&self) -> usize {
        *self.struck.lock()
    }

    /// Counts a call; returns the fault of the first rule that applies.
    pub fn note(&self, request: &Request) -> Option<Fault> {
        let mut found = None;
        for rule in self.rules.lock().iter_mut().filter(|rule| rule.when.fits(request)) {
            let strikes = rule.nth.is_none_or(|nth| nth == rule.seen);
            rule.seen += 1;
            if strikes && found.is_none() {
                found = Some(rule.fault.clone());
            }
        }
        *self.struck.lock() += usize::from(found.is_some());
        found
    }
}
