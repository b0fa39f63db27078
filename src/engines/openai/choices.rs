//! Requests for several choices (`n`): each choice is a request of its own, and one answer is made
//! of theirs.
//!
//! An engine that draws its choices independently, as vLLM does by a request for each, gives the
//! same answer to both, and a request for one choice may be speculated on.

use serde_json::{Map, Value, json};

use super::eligibility::{Judgement, judge};
use super::event::{Data, choices, is_usage};
use super::json;
use super::request::{Request, Route};
use super::sse::{DONE, encode};

/// Maximum number of choices that are asked for apart.
const MOST: u64 = 16;

/// A request for several choices, as requests for one.
#[derive(Clone, Debug)]
pub struct Apart {
    /// The body of each: the client's without `n`.
    pub body: Vec<u8>,
    /// The same, as it is read.
    pub request: Box<Request>,
    /// Number of choices, 2 to 16.
    pub number: usize,
}

impl Apart {
    /// From the body of a request for several choices; `None` if there are too many, or if the
    /// request for one of them would be relayed.
    pub fn of(route: Route, body: &[u8]) -> Option<Self> {
        let Some(Value::Object(mut members)) = json::parse(body) else { return None };
        let number = members.shift_remove("n")?.as_u64().filter(|number| (2..=MOST).contains(number))?;
        // The best of several is chosen by what the engine knows of all of them.
        if members.get("best_of").is_some_and(|best| !best.is_null()) {
            return None;
        }
        let body = Value::Object(members).to_string().into_bytes();
        match judge(route, &body) {
            Judgement::Eligible(request) => {
                Some(Self { body, request, number: usize::try_from(number).ok()? })
            }
            Judgement::Relay { .. } => None,
        }
    }
}

/// Makes one stream of those of the choices. The first choice's events name the answer (`id`,
/// `created`), so none of another may come before its first.
#[derive(Clone, Debug)]
pub struct Merged {
    /// `id` and `created` of the answer, once known.
    name: Option<Vec<(&'static str, Value)>>,
    /// The last event of each stream, with its usage.
    usages: Vec<Option<Value>>,
    /// Streams that have sent their `[DONE]`.
    done: usize,
    /// A stream has sent an error, which ends the answer.
    failed: bool,
}

impl Merged {
    /// An answer with this number of choices.
    pub fn new(number: usize) -> Self {
        Self { name: None, usages: vec![None; number], done: 0, failed: false }
    }

    /// True once the first choice has named the answer.
    pub fn is_named(&self) -> bool {
        self.name.is_some()
    }

    /// True if a choice's stream has sent an error: the others are left, and this one is passed on
    /// to its end.
    pub fn has_failed(&self) -> bool {
        self.failed
    }

    /// Appends the event for the one with this data in the stream of this choice.
    pub fn push(&mut self, choice: usize, data: &str, out: &mut Vec<u8>) {
        if data == DONE {
            self.done += 1;
            return;
        }
        let Data::Answer(event) = Data::of(data) else { return out.extend(encode(data)) };
        if is_usage(&event) {
            return self.note_usage(choice, event);
        }
        if choices(&event).is_empty() {
            (self.failed, self.done) = (true, 0);
        }
        let Value::Object(mut event) = event else { return };
        for one in event.get_mut("choices").and_then(Value::as_array_mut).into_iter().flatten() {
            number(one, choice);
        }
        self.rename(choice, &mut event);
        out.extend(encode(&Value::Object(event).to_string()));
    }

    /// Appends the end of the answer: its usage, and `[DONE]` if every stream had one.
    pub fn end(&mut self, out: &mut Vec<u8>) {
        let usages: Option<Vec<Value>> = self.usages.iter_mut().map(Option::take).collect();
        let streams = if self.failed { 1 } else { self.usages.len() };
        if let Some(Value::Object(mut event)) = usages.and_then(|all| joined(all, &["usage"])) {
            self.rename(1, &mut event);
            out.extend(encode(&Value::Object(event).to_string()));
        }
        if self.done >= streams {
            out.extend(encode(DONE));
        }
    }

    fn note_usage(&mut self, choice: usize, event: Value) {
        if let Some(last) = self.usages.get_mut(choice) {
            *last = Some(event);
        }
    }

    /// Gives an event the name of the answer, which the first choice's first event has.
    fn rename(&mut self, choice: usize, event: &mut Map<String, Value>) {
        if choice == 0 && self.name.is_none() {
            let named = ["id", "created"].into_iter();
            self.name = Some(named.filter_map(|name| Some((name, event.get(name)?.clone()))).collect());
        }
        for (name, value) in self.name.iter().flatten() {
            if let Some(member) = event.get_mut(*name) {
                member.clone_from(value);
            }
        }
    }
}

/// One answer of those with a choice each; `None` if one has none.
pub fn merge(answers: Vec<Value>) -> Option<Value> {
    let mut answers = answers;
    for (index, answer) in answers.iter_mut().enumerate() {
        let [choice] = answer.get_mut("choices")?.as_array_mut()?.as_mut_slice() else { return None };
        number(choice, index);
    }
    joined(answers, &["usage", "choices"])
}

fn number(choice: &mut Value, index: usize) {
    if let Some(member) = choice.get_mut("index") {
        *member = index.into();
    }
}

/// The first of these objects, with these members joined from all of them.
fn joined(all: Vec<Value>, members: &[&str]) -> Option<Value> {
    let mut all = all;
    for name in members {
        let of_all = all.iter_mut().filter_map(|one| one.get_mut(*name).map(Value::take)).collect();
        let together = if *name == "usage" { usage(of_all) } else { concatenated(of_all) };
        if let Some(member) = all.first_mut().and_then(|first| first.get_mut(*name)) {
            *member = together;
        }
    }
    (!all.is_empty()).then(|| all.swap_remove(0))
}

fn concatenated(lists: Vec<Value>) -> Value {
    lists
        .into_iter()
        .filter_map(|list| if let Value::Array(items) = list { Some(items) } else { None })
        .flatten()
        .collect()
}

/// The usage of several choices of one prompt: the prompt counts once, the outputs add up, and what
/// Foretell says of each is listed.
fn usage(of_all: Vec<Value>) -> Value {
    let foretell: Vec<Value> =
        of_all.iter().map(|one| one.get("foretell").cloned().unwrap_or_default()).collect();
    let mut rest = of_all.into_iter();
    let Some(Value::Object(mut first)) = rest.next() else { return Value::Null };
    for other in rest {
        for name in ["completion_tokens", "completion_tokens_details"] {
            if let (Some(sum), Some(more)) = (first.get_mut(name), other.get(name)) {
                add(sum, more);
            }
        }
    }
    let count = |name| first.get(name).and_then(Value::as_u64);
    if let (Some(prompt), Some(output), true) =
        (count("prompt_tokens"), count("completion_tokens"), first.contains_key("total_tokens"))
    {
        first.insert("total_tokens".to_owned(), prompt.saturating_add(output).into());
    }
    if !foretell.iter().all(Value::is_null) {
        first.insert("foretell".to_owned(), json!({ "choices": foretell }));
    }
    Value::Object(first)
}

/// Adds a number, or the numbers of an object member by member.
fn add(sum: &mut Value, more: &Value) {
    match (sum, more) {
        (Value::Object(sum), Value::Object(more)) => {
            for (name, more) in more {
                add(sum.entry(name.as_str()).or_insert(Value::Null), more);
            }
        }
        (sum, more) => match (sum.as_u64(), more.as_u64()) {
            (Some(own), Some(more)) => *sum = own.saturating_add(more).into(),
            _ if sum.is_null() => sum.clone_from(more),
            _ => {}
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn apart(body: &Value) -> Option<Apart> {
        Apart::of(Route::Chat, body.to_string().as_bytes())
    }

    fn chat(more: &Value) -> Value {
        let mut body =
            json!({"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9});
        super::super::fill(&mut body, more);
        body
    }

    #[test]
    fn each_choice_is_the_clients_request_without_n() {
        let Apart { body, number, request } = apart(&chat(&json!({"n": 3, "temperature": 0.7}))).unwrap();
        assert_eq!(number, 3);
        assert_eq!(String::from_utf8(body).unwrap(), chat(&json!({"temperature": 0.7})).to_string());
        assert_eq!(request.model, "m");
    }

    #[test]
    fn what_may_not_be_speculated_on_is_not_taken_apart() {
        for more in [
            json!({}),
            json!({"n": 1}),
            json!({"n": 17}),
            json!({"n": "2"}),
            json!({"n": 2, "best_of": 4}),
            json!({"n": 2, "echo": true}),
            json!({"n": 2, "unknown": 1}),
        ] {
            assert!(apart(&chat(&more)).is_none(), "{more}");
        }
        assert!(Apart::of(Route::Completions, br#"{"model":"m","prompt":["a","b"],"n":2}"#).is_none());
    }

    fn event(id: &str, text: &str) -> String {
        json!({"id": id, "created": id.len(), "model": "m",
            "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": null}]})
        .to_string()
    }

    fn last(id: &str, tokens: u64) -> String {
        let usage = json!({"prompt_tokens": 5, "total_tokens": 5 + tokens, "completion_tokens": tokens,
            "prompt_tokens_details": {"cached_tokens": 4}, "completion_tokens_details": {"reasoning_tokens": tokens}});
        json!({"id": id, "created": id.len(), "model": "m", "choices": [], "usage": usage}).to_string()
    }

    fn datas(out: &[u8]) -> Vec<Value> {
        let text = String::from_utf8(out.to_vec()).unwrap();
        text.split_terminator("\n\n")
            .map(|one| one.strip_prefix("data: ").unwrap())
            .map(|data| serde_json::from_str(data).unwrap_or_else(|_| json!(data)))
            .collect()
    }

    #[test]
    fn streams_become_one_with_one_name_and_one_usage() {
        let (mut merged, mut out) = (Merged::new(2), Vec::new());
        assert!(!merged.is_named());
        merged.push(0, &event("a", "x"), &mut out);
        assert!(merged.is_named());
        merged.push(1, &event("bb", "y"), &mut out);
        merged.push(1, &last("bb", 7), &mut out);
        merged.push(1, DONE, &mut out);
        merged.push(0, &last("a", 2), &mut out);
        merged.push(0, DONE, &mut out);
        merged.end(&mut out);
        let wanted: Vec<Value> = [
            event("a", "x"),
            event("a", "y").replace(r#""index":0"#, r#""index":1"#),
            json!({"id": "a", "created": 1, "model": "m", "choices": [], "usage": {"prompt_tokens": 5,
                "total_tokens": 14, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4},
                "completion_tokens_details": {"reasoning_tokens": 9}}})
            .to_string(),
        ]
        .iter()
        .map(|text| serde_json::from_str(text).unwrap())
        .collect();
        assert_eq!(datas(&out), [wanted, vec![json!(DONE)]].concat());
    }

    #[test]
    fn an_error_is_passed_on_and_a_stream_that_broke_off_has_no_end() {
        let (mut merged, mut out) = (Merged::new(2), Vec::new());
        merged.push(0, &event("a", "x"), &mut out);
        merged.push(1, r#"{"error":{"message":"no"}}"#, &mut out);
        assert!(merged.has_failed());
        merged.push(1, DONE, &mut out);
        merged.end(&mut out);
        assert_eq!(datas(&out)[1..], [json!({"error": {"message": "no"}}), json!(DONE)]);
        let (mut merged, mut out) = (Merged::new(2), Vec::new());
        merged.push(0, DONE, &mut out);
        merged.push(1, "7", &mut out);
        merged.end(&mut out);
        assert_eq!(out, b"data: 7\n\n", "what is no event is passed on, and one end is missing");
    }

    #[test]
    fn whole_answers_become_one() {
        let answer = |text: &str, tokens: u64| {
            json!({"id": text, "choices": [{"index": 0, "text": text}], "usage": {"prompt_tokens": 5,
                "total_tokens": 5 + tokens, "completion_tokens": tokens,
                "foretell": {"path": "speculated", "rounds": tokens}}})
        };
        assert_eq!(
            merge(vec![answer("a", 2), answer("b", 3)]),
            Some(json!({"id": "a", "choices": [{"index": 0, "text": "a"}, {"index": 1, "text": "b"}],
                "usage": {"prompt_tokens": 5, "total_tokens": 10, "completion_tokens": 5, "foretell": {"choices":
                    [{"path": "speculated", "rounds": 2}, {"path": "speculated", "rounds": 3}]}}}))
        );
        let plain = json!({"choices": [{}], "usage": {"prompt_tokens": 5, "completion_tokens": 1}});
        let told = merge(vec![plain, answer("b", 3)]).unwrap()["usage"]["foretell"].clone();
        assert_eq!(told, json!({"choices": [null, {"path": "speculated", "rounds": 3}]}), "one was plain");
        assert_eq!(merge(vec![answer("a", 2), json!({"error": {}})]), None);
        assert_eq!(merge(vec![answer("a", 2), json!({"choices": [1, 2]})]), None);
    }
}
