//! What can go wrong with a call, planned ahead: the n-th call of a kind gets a fault.

use std::time::Duration;

use parking_lot::Mutex;
use serde_json::{Value, json};

use super::http::Request;

/// What happens instead of a true answer, or in the middle of one.
#[derive(Clone, Debug, PartialEq)]
pub enum Fault {
    /// An error with this status.
    Status(u16),
    /// An error with this status and `Retry-After` in seconds.
    Later(u16, u64),
    /// A true status line and something that is no answer.
    Garbage,
    Empty,
    /// The answer's first half, and then the end of the connection.
    Half,
    /// So many events, and then the end of the connection.
    CutAfter(usize),
    /// So many events and half of the next.
    HalfEventAfter(usize),
    /// So many events and half of the next, and then what looks like the end. Of an answer that is no stream its first
    /// half, whose end is the end of the connection.
    HalfAsWhole(usize),
    /// So many events, and then one that is no JSON.
    GarbageAfter(usize),
    /// So many events, and then one that tells an error.
    ErrorAfter(usize),
    /// So many events, and then nothing more.
    HangAfter(usize),
    /// So many events, and then a reset.
    ResetAfter(usize),
    /// No answer, ever.
    Hang,
    /// A head and nothing behind it.
    Stall,
    Reset,
    /// The server goes down, until it is revived.
    Kill,
    /// The true answer, so much later.
    Slow(Duration),
    /// The true answer, and from it on other weights under the same name.
    Reload,
    /// The true answer, but that every id in it is the next one; texts are true.
    ShiftedIds,
    /// The true answer, but that it shows another prompt's ids; counts are true.
    OtherPrompt,
    /// The same, and counts are told at the end only.
    OtherPromptCountedLast,
    /// The true answer, but that it counts one more token in the prompt.
    OtherCount,
}

impl Fault {
    /// Whether it falsifies answers.
    pub fn doctors(&self) -> bool {
        matches!(self, Self::ShiftedIds | Self::OtherPrompt | Self::OtherPromptCountedLast | Self::OtherCount)
    }

    /// Falsifies an answer, if this is what the fault is.
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

/// Which calls.
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

/// The plan of one server; it may be changed while the server runs.
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

    /// How many calls have had a fault.
    pub fn struck(&self) -> usize {
        *self.struck.lock()
    }

    /// Counts a call; the first rule that strikes, strikes.
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
