//! Every parameter of the table by itself, on the same prompt: the client gets the text of the
//! engine alone, and requests that are not eligible are passed through with the table's own
//! reason. `distribution` tests unseeded sampling against the engine's distribution.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::net::SocketAddr;

use foretell_core::words::PassthroughReason;
use foretell_wire::openai::parameters::{Field, Parameter, Plain, Treatment};
use foretell_wire::openai::{Route, parameters};
use serde_json::{Value, json};

use super::contract::{PROMPTS, both, greedy, talkative};
use super::house::{House, on_each, setup};
use super::table::{Row, Seeds, TABLE};
use crate::client::{Answer, Ask, send};

/// A parameter with a value, and the reason not to speculate with it, if the table has one.
pub struct Setting {
    pub value: Value,
    pub refused: Option<PassthroughReason>,
}

impl Setting {
    fn may(value: Value) -> Self {
        Self { value, refused: None }
    }

    fn may_not(value: Value, reason: PassthroughReason) -> Self {
        Self { value, refused: Some(reason) }
    }
}

/// The engine's output for the prompt, to choose values from that change it.
pub struct Said {
    pub prompt: String,
    pub text: String,
    pub token: u32,
}

impl Said {
    async fn by(house: &House, route: Route, prompt: &str) -> Self {
        let prompt = talkative(house, route, prompt).await;
        let [ask, _] = both(route, &greedy(&prompt, &json!({})));
        let text = house.direct(&ask).await.plain.text;
        let token = *house.engine.house().toy.encode(&middle(&text, 12)).last().unwrap();
        Self { prompt, text, token }
    }
}

/// `len` characters from the middle on.
fn middle(text: &str, len: usize) -> String {
    text.chars().skip(text.chars().count() / 2).take(len).collect()
}

/// Values of a parameter that Foretell carries. A new field needs values here to compile.
fn carried(field: Field, said: &Said) -> Vec<Setting> {
    let all = |values: Vec<Value>| values.into_iter().map(Setting::may).collect();
    match field {
        Field::Model => all(vec![json!("toy"), json!("another")]),
        Field::Prompt => vec![
            Setting::may(json!([said.prompt])),
            Setting::may(json!([200, 201, 202, 203, 200, 201, 202, 203])),
            Setting::may(json!([[200, 201, 202, 203, 200, 201, 202, 203]])),
            Setting::may_not(json!(["one", "two"]), PassthroughReason::Choices),
        ],
        Field::Messages => all(vec![
            json!([{"role": "user", "content": [{"type": "text", "text": said.prompt}]}]),
            json!([{"role": "system", "content": "Go on."}, {"role": "user", "content": said.prompt}]),
        ]),
        Field::MaxTokens | Field::MaxCompletionTokens => all(vec![json!(1), json!(2), json!(17)]),
        Field::Temperature => all(vec![json!(0), json!(0.0)]),
        Field::TopP => all(vec![json!(0.5), json!(1)]),
        Field::TopK => all(vec![json!(5), json!(-1)]),
        Field::MinP => all(vec![json!(0.2)]),
        Field::PresencePenalty => all(vec![json!(1.5), json!(-1)]),
        Field::FrequencyPenalty => all(vec![json!(0.8), json!(-0.5)]),
        Field::RepetitionPenalty => all(vec![json!(1.4), json!(0.8)]),
        Field::LogitBias => all(vec![json!({"300": 9.0, "0": -50.0}), json!({said.token.to_string(): -100})]),
        Field::Seed => all(vec![json!(7)]),
        Field::Stop => all(vec![json!(middle(&said.text, 3)), json!(["never there", middle(&said.text, 5)])]),
        Field::StopTokenIds => all(vec![json!([said.token]), json!([])]),
        // Without a stop text it must change nothing; with one, see below.
        Field::IncludeStop
        | Field::IgnoreEos
        | Field::Stream
        | Field::IncludeUsage
        | Field::ContinuousUsage
        | Field::ReturnTokenIds
        | Field::ParallelToolCalls => all(vec![json!(true), json!(false)]),
        Field::MinTokens => all(vec![json!(20), json!(0)]),
        Field::StreamOptions => all(vec![json!({})]),
        Field::Prediction => all(vec![json!({"type": "content", "content": said.text})]),
        Field::Choices => {
            vec![Setting::may(json!(1)), Setting::may_not(json!(2), PassthroughReason::Choices)]
        }
        // With tools, the engine has to render the request: tests/proxy/parsers.rs.
        Field::Tools => {
            let tool = json!({"type": "function", "function": {"name": "f", "parameters": {}}});
            vec![Setting::may(json!([])), Setting::may_not(json!([tool]), PassthroughReason::Tools)]
        }
        // Where a server goes on with a grammar from output that was sent: tests/proxy/end_to_end.
        Field::ResponseFormat => vec![
            Setting::may(json!({"type": "text"})),
            Setting::may_not(json!({"type": "json_object"}), PassthroughReason::Structured),
        ],
        Field::StructuredOutputs => {
            vec![Setting::may_not(json!({"regex": "a+"}), PassthroughReason::Structured)]
        }
        Field::ToolChoice => {
            vec![
                Setting::may(json!("none")),
                Setting::may_not(json!("required"), PassthroughReason::Structured),
            ]
        }
    }
}

/// Values without effect, and one with an effect.
fn neutral(plain: Plain) -> (Vec<Value>, Value) {
    match plain {
        Plain::Bool(value) => (vec![json!(value)], json!(!value)),
        Plain::Number(value) => (vec![json!(value as i64), json!(value)], json!(value as i64 + 1)),
        Plain::Text(value) => (vec![json!(value)], json!("something else")),
        Plain::EmptyList => (vec![json!([])], json!(["x"])),
        Plain::EmptyObject => (vec![json!({})], json!({"x": 1})),
        Plain::ListOfText => (vec![json!(["text"])], json!(["text", "audio"])),
    }
}

/// A value of a parameter that always prevents speculation; a valid one where engines know the
/// parameter.
fn foreign(name: &str) -> Value {
    match name {
        "prompt_logprobs" | "logprob_token_ids" => json!(2),
        "allowed_token_ids" => json!([200, 201, 202]),
        "n_predict" | "n_keep" | "truncate_prompt_tokens" => json!(7),
        "samplers" => json!(["top_k"]),
        "tools" | "functions" => json!([]),
        _ => json!("x"),
    }
}

pub fn settings(row: &Parameter, said: &Said) -> Vec<Setting> {
    match row.treatment {
        Treatment::Carried(field) | Treatment::Emulated(field) => carried(field, said),
        Treatment::Inert => vec![Setting::may(match row.name {
            "metadata" => json!({}),
            "store" => json!(true),
            "service_tier" => json!("flex"),
            _ => json!("me"),
        })],
        Treatment::Neutral(plain, reason) => {
            let (mut all, mut other) = (Vec::new(), Value::Null);
            for (values, harmful) in plain.iter().map(|&plain| neutral(plain)) {
                all.extend(values.into_iter().map(Setting::may));
                other = harmful;
            }
            all.push(Setting::may_not(other, reason));
            all
        }
        Treatment::Passthrough(reason) | Treatment::Rendered(reason) => {
            vec![Setting::may_not(foreign(row.name), reason)]
        }
    }
}

/// The request with the parameter set, whole and streamed where that makes sense.
pub fn asks(route: Route, row: &Parameter, setting: &Setting, said: &Said) -> Vec<Ask> {
    let carried = matches!(row.treatment, Treatment::Carried(_) | Treatment::Emulated(_));
    let mut fields = greedy(&said.prompt, &json!({"max_tokens": if carried { 24 } else { 10 }}));
    match row.name.split_once('.') {
        Some((object, member)) => fields[object] = json!({ member: setting.value }),
        None => fields[row.name] = setting.value.clone(),
    }
    let [whole, stream] = both(route, &fields);
    let streams = row.name == "stream" && setting.value == true;
    match row.name {
        "stream" if streams => vec![stream],
        "stream" => vec![whole],
        _ if row.name.starts_with("stream_options") => vec![stream],
        // Whole and streamed requests are passed through alike.
        _ if setting.refused.is_some() => vec![whole],
        _ => vec![whole, stream],
    }
}

/// A whole answer without the fields that differ in every answer.
fn lasting(answer: &Answer) -> Value {
    fn strip(value: &mut Value) {
        match value {
            Value::Object(members) => {
                for name in ["id", "created", "timings", "prompt_tokens_details", "request_id", "rid"] {
                    members.shift_remove(name);
                }
                members.values_mut().for_each(strip);
            }
            Value::Array(items) => items.iter_mut().for_each(strip),
            _ => {}
        }
    }
    let mut value = serde_json::from_slice(&answer.message.body).unwrap_or(Value::Null);
    strip(&mut value);
    value
}

/// The answer through the proxy, and true if a verify request came meanwhile.
async fn asked(house: &House, ask: &Ask) -> (Answer, bool) {
    let rounds = house.rounds();
    let through = house.through(ask).await;
    // Some engines verify on the route of the request itself.
    (through, house.rounds() > rounds + 1)
}

/// Faults in how a passthrough request is reported: the header must name a parameter if one is the
/// reason, and `explain` must give the same reason, refuse that parameter and not say that all of
/// them are carried.
pub async fn blamed(
    engine: &str,
    admin: SocketAddr,
    row: &Parameter,
    setting: &Setting,
    ask: &Ask,
    answer: &Answer,
) -> String {
    let head = |name| answer.message.head.get(name).unwrap_or_default().to_owned();
    let (reason, named) = (head("x-foretell-reason"), head("x-foretell-parameter"));
    // The reason is the server and not a parameter: no verification method for this route, or its
    // engine is not known yet.
    if named.is_empty() && ["no_verify_method", "several_engines"].contains(&reason.as_str()) {
        return String::new();
    }
    let path = format!("/api/explain?route={}", ask.route.name());
    let explained = send(admin, &path, "", &ask.body()).await.json();
    let refused: Vec<_> = explained["parameters"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|line| !line["refused"].is_null())
        .collect();
    let of_the_row = setting.refused.is_none() || named == row.name;
    let known = parameters::find(ask.route, &named).is_some();
    let listed =
        refused.iter().any(|line| line["name"] == named.as_str() && line["refused"] == reason.as_str());
    let agrees = explained["path"] == "passthrough" && explained["reason"] == reason.as_str();
    if agrees && of_the_row && known && listed {
        return String::new();
    }
    format!("{engine} {} {ask:?}\n  {reason} named {named:?}: {explained}\n", row.name)
}

/// The result of many comparisons.
#[derive(Default)]
struct Tally {
    wrong: String,
    /// Parameters with which some request was speculated on.
    speculated: BTreeSet<&'static str>,
    /// Parameters that allow speculation, by the table.
    might: BTreeSet<&'static str>,
}

impl Tally {
    /// Compares several engines on both routes, all concurrently.
    async fn of<F>(
        engines: impl Iterator<Item = &'static Row>,
        compared: impl Fn(&'static Row, Route) -> F,
    ) -> Self
    where
        F: Future<Output = Self> + Send + 'static,
    {
        let all = engines.flat_map(|engine| [Route::Completions, Route::Chat].map(|route| (engine, route)));
        let accounts = on_each(all, |(engine, route)| compared(engine, route));
        accounts.await.into_iter().fold(Self::default(), Self::and)
    }

    fn and(mut self, other: Self) -> Self {
        self.wrong += &other.wrong;
        self.speculated.extend(other.speculated);
        self.might.extend(other.might);
        self
    }

    async fn compare(&mut self, house: &House, row: &Parameter, setting: &Setting, ask: &Ask) {
        let direct = house.direct(ask).await;
        let (mut through, mut verified) = asked(house, ask).await;
        if verified && setting.refused.is_some() && !matches!(row.treatment, Treatment::Rendered(_)) {
            // A call of the previous request may have come late. A call of this request would come
            // again.
            (through, verified) = asked(house, ask).await;
        }
        let head = |name| through.message.head.get(name);
        let (path, reason) = (head("x-foretell-path"), head("x-foretell-reason"));
        let of = |answer: &Answer| (answer.plain.clone(), answer.ids.clone(), answer.logprobs.clone());
        let mut same = of(&through) == of(&direct);
        if path == Some("passthrough") || direct.plain.status != 200 {
            same &= lasting(&through) == lasting(&direct);
        }
        if path == Some("passthrough") {
            let admin = house.proxy.gateway.admin.unwrap();
            self.wrong += &blamed(house.row.name, admin, row, setting, ask, &through).await;
        }
        // These render requests, or tell the prompt with the first token.
        let tells = house.row.name == "vllm-scale-out" || house.row.dialect == "sglang";
        let renders = tells && matches!(row.treatment, Treatment::Rendered(_));
        let rightly = match setting.refused {
            Some(_) if renders => matches!(path, Some("plain" | "speculated")),
            Some(refused) => (path, reason, verified) == (Some("passthrough"), Some(refused.name()), false),
            None => path.is_some(),
        };
        if setting.refused.is_none() {
            self.might.insert(row.name);
        }
        if verified {
            self.speculated.insert(row.name);
        }
        if !same || !rightly {
            writeln!(
                self.wrong,
                "{} {} {ask:?}\n  {path:?} {reason:?} {}\n  got  {:?}\n  want {:?}",
                house.row.name,
                row.name,
                through.foretell(),
                through.message.text(),
                direct.message.text(),
            )
            .unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_parameter_by_itself_gives_the_text_of_the_engine_alone() {
    let tally = Tally::of(TABLE.iter(), |engine, route| async move {
        let mut tally = Tally::default();
        let house = House::build(engine, setup(Some(60))).await;
        let said = Said::by(&house, route, PROMPTS[1]).await;
        for row in parameters::TABLE.iter().filter(|row| row.routes.has(route)) {
            for setting in settings(row, &said) {
                for ask in asks(route, row, &setting, &said) {
                    tally.compare(&house, row, &setting, &ask).await;
                }
            }
        }
        house.leave().await;
        tally
    })
    .await;
    assert!(tally.wrong.is_empty(), "{}", tally.wrong);
    let never: Vec<_> = tally.might.difference(&tally.speculated).collect();
    assert!(never.is_empty(), "no engine speculated with {never:?}");
}

/// At a temperature above 0, where the engine's own noise can be continued.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_carried_parameter_with_a_seed_gives_the_text_of_the_engine_alone() {
    let seeded = TABLE.iter().filter(|engine| engine.seeds == Seeds::Kept);
    let tally = Tally::of(seeded, |engine, route| async move {
        let mut tally = Tally::default();
        let house = House::build(engine, setup(Some(60))).await;
        let said = Said::by(&house, route, PROMPTS[0]).await;
        for row in parameters::TABLE.iter().filter(|row| row.routes.has(route)) {
            let (Treatment::Carried(field) | Treatment::Emulated(field)) = row.treatment else {
                continue;
            };
            // Such a request crashes the engine, with and without a proxy.
            if engine.name == "sglang-deterministic" && field == Field::MinP {
                continue;
            }
            for setting in carried(field, &said) {
                for mut ask in asks(route, row, &setting, &said) {
                    let warm = if field == Field::Temperature { json!(1.3) } else { json!(0.8) };
                    ask.fields["temperature"] = warm;
                    ask.fields["seed"] = json!(7);
                    tally.compare(&house, row, &setting, &ask).await;
                }
            }
        }
        house.leave().await;
        tally
    })
    .await;
    assert!(tally.wrong.is_empty(), "{}", tally.wrong);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_that_is_kept_is_the_engines_own() {
    let row = parameters::find(Route::Completions, "include_stop_str_in_output").unwrap();
    let tally = Tally::of(TABLE.iter(), |engine, route| async move {
        let mut tally = Tally::default();
        let house = House::build(engine, setup(None)).await;
        let said = Said::by(&house, route, PROMPTS[2]).await;
        for stop in [json!({"stop": middle(&said.text, 3)}), json!({"stop_token_ids": [said.token]})] {
            for keeps in [true, false] {
                let mut fields = greedy(&said.prompt, &stop);
                fields[row.name] = json!(keeps);
                for ask in both(route, &fields) {
                    tally.compare(&house, row, &Setting::may(json!(keeps)), &ask).await;
                }
            }
        }
        house.leave().await;
        tally
    })
    .await;
    assert!(tally.wrong.is_empty(), "{}", tally.wrong);
    assert!(!tally.speculated.is_empty(), "no request was speculated on");
}
