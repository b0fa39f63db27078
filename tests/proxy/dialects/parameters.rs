//! Every parameter of the table by itself, on the same prompt: what the client gets is what the engine alone
//! would have said, and what may not leap is relayed with the table's own reason. Unseeded sampling is put to the
//! engine's law in `law`.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::net::SocketAddr;

use foretell::openai::parameters::{Field, Parameter, Plain, Treatment};
use foretell::openai::{Route, parameters};
use foretell::words::BypassReason;
use serde_json::{Value, json};

use super::contract::{PROMPTS, both, greedy, talkative};
use super::house::{House, on_each, setup};
use super::table::{Row, Seeds, TABLE};
use crate::client::{Answer, Ask, send};

/// A parameter with a value, and why it may not leap, if the table says so.
pub struct Setting {
    pub value: Value,
    pub refused: Option<BypassReason>,
}

impl Setting {
    fn may(value: Value) -> Self {
        Self { value, refused: None }
    }

    fn may_not(value: Value, reason: BypassReason) -> Self {
        Self { value, refused: Some(reason) }
    }
}

/// What the engine has said to the prompt, to choose values from that matter.
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

/// So many characters from the middle on.
fn middle(text: &str, len: usize) -> String {
    text.chars().skip(text.chars().count() / 2).take(len).collect()
}

/// Values of a parameter that Foretell carries. A new field needs some before this compiles.
fn carried(field: Field, said: &Said) -> Vec<Setting> {
    let all = |values: Vec<Value>| values.into_iter().map(Setting::may).collect();
    match field {
        Field::Model => all(vec![json!("toy"), json!("another")]),
        Field::Prompt => vec![
            Setting::may(json!([said.prompt])),
            Setting::may(json!([200, 201, 202, 203, 200, 201, 202, 203])),
            Setting::may(json!([[200, 201, 202, 203, 200, 201, 202, 203]])),
            Setting::may_not(json!(["one", "two"]), BypassReason::Choices),
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
        // With no stop to keep, it must change nothing; with one, see below.
        Field::IncludeStop
        | Field::IgnoreEos
        | Field::Stream
        | Field::IncludeUsage
        | Field::ContinuousUsage
        | Field::ReturnTokenIds => all(vec![json!(true), json!(false)]),
        Field::MinTokens => all(vec![json!(20), json!(0)]),
        Field::StreamOptions => all(vec![json!({})]),
        Field::Prediction => all(vec![json!({"type": "content", "content": said.text})]),
        Field::Choices => {
            vec![Setting::may(json!(1)), Setting::may_not(json!(2), BypassReason::Choices)]
        }
    }
}

/// Values that do nothing, and one that does.
fn neutral(plain: Plain) -> (Vec<Value>, Value) {
    match plain {
        Plain::Bool(value) => (vec![json!(value)], json!(!value)),
        Plain::Number(value) => (vec![json!(value as i64), json!(value)], json!(value as i64 + 1)),
        Plain::Text(value) => (vec![json!(value)], json!("something else")),
        Plain::EmptyList => (vec![json!([])], json!(["x"])),
        Plain::EmptyObject => (vec![json!({})], json!({"x": 1})),
        Plain::TypeText => (vec![json!({"type": "text"})], json!({"type": "json_object"})),
        Plain::ListOfText => (vec![json!(["text"])], json!(["text", "audio"])),
    }
}

/// A value of a parameter that never leaps: one that engines understand, where they know it.
fn foreign(name: &str) -> Value {
    match name {
        "logprobs" | "prompt_logprobs" | "logprob_token_ids" => json!(2),
        "allowed_token_ids" => json!([200, 201, 202]),
        "n_predict" | "n_keep" | "truncate_prompt_tokens" => json!(7),
        "top_logprobs" => json!(1),
        "samplers" => json!(["top_k"]),
        "tools" | "functions" => json!([]),
        _ => json!("x"),
    }
}

pub fn settings(row: &Parameter, said: &Said) -> Vec<Setting> {
    match row.treatment {
        Treatment::Carried(field) | Treatment::Emulated(field) => carried(field, said),
        Treatment::Inert => vec![Setting::may(if row.name == "metadata" { json!({}) } else { json!("me") })],
        Treatment::Neutral(plain, reason) => {
            let (mut all, mut other) = (Vec::new(), Value::Null);
            for (values, harmful) in plain.iter().map(|&plain| neutral(plain)) {
                all.extend(values.into_iter().map(Setting::may));
                other = harmful;
            }
            all.push(Setting::may_not(other, reason));
            all
        }
        Treatment::Bypass(reason) => vec![Setting::may_not(foreign(row.name), reason)],
    }
}

/// The request with the parameter set, in the ways in which it makes sense.
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
        // What is relayed is relayed alike.
        _ if setting.refused.is_some() => vec![whole],
        _ => vec![whole, stream],
    }
}

/// A whole answer without what is another in every answer.
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

/// What the client gets, and whether a call that verifies came meanwhile.
async fn asked(house: &House, ask: &Ask) -> (Answer, bool) {
    let rounds = house.rounds();
    let through = house.through(ask).await;
    // Some engines verify by the route on which they are asked.
    (through, house.rounds() > rounds + 1)
}

/// What is wrong with how a bypass is told: the header names a parameter where one is the reason, and `explain` says the
/// same, refuses that parameter, and says nowhere that all of them are carried.
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
    // The server as a whole, whatever the parameters: no plan for this route, or it is not known yet which engine it is.
    if named.is_empty() && ["no_plan", "balanced"].contains(&reason.as_str()) {
        return String::new();
    }
    let path = format!("/api/explain?route={}", ask.route.name());
    let told = send(admin, &path, "", &ask.body()).await.json();
    let refused: Vec<_> =
        told["parameters"].as_array().unwrap().iter().filter(|line| !line["refused"].is_null()).collect();
    let of_the_row = setting.refused.is_none() || named == row.name;
    let known = parameters::find(ask.route, &named).is_some();
    let listed =
        refused.iter().any(|line| line["name"] == named.as_str() && line["refused"] == reason.as_str());
    let agrees = told["path"] == "bypassed" && told["reason"] == reason.as_str();
    let carried = told["steps"]
        .as_array()
        .unwrap()
        .iter()
        .any(|step| step["words"].as_str().unwrap().contains("every parameter is carried exactly"));
    if agrees && of_the_row && known && listed && !carried {
        return String::new();
    }
    format!("{engine} {} {ask:?}\n  {reason} named {named:?}: {told}\n", row.name)
}

/// What an account of many comparisons comes to.
#[derive(Default)]
struct Account {
    wrong: String,
    /// Parameters with which some request leapt.
    leapt: BTreeSet<&'static str>,
    /// Parameters with which some request might have, by the table.
    might: BTreeSet<&'static str>,
}

impl Account {
    /// Of several engines, on both routes; the comparisons of each are made at once.
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
        self.leapt.extend(other.leapt);
        self.might.extend(other.might);
        self
    }

    async fn compare(&mut self, house: &House, row: &Parameter, setting: &Setting, ask: &Ask) {
        let direct = house.direct(ask).await;
        let (mut through, mut verified) = asked(house, ask).await;
        if verified && setting.refused.is_some() {
            // A call beside the request before may have come late. One of this request's own would come again.
            (through, verified) = asked(house, ask).await;
        }
        let head = |name| through.message.head.get(name);
        let (path, reason) = (head("x-foretell-path"), head("x-foretell-reason"));
        let mut same = (&through.plain, &through.ids) == (&direct.plain, &direct.ids);
        if path == Some("bypassed") || direct.plain.status != 200 {
            same &= lasting(&through) == lasting(&direct);
        }
        if path == Some("bypassed") {
            let (admin, said) = (house.proxy.gateway.admin.unwrap(), house.said(ask));
            self.wrong += &blamed(house.row.name, admin, row, setting, &said, &through).await;
        }
        let rightly = match setting.refused {
            Some(refused) => (path, reason, verified) == (Some("bypassed"), Some(refused.name()), false),
            None => path.is_some(),
        };
        if setting.refused.is_none() {
            self.might.insert(row.name);
        }
        if verified {
            self.leapt.insert(row.name);
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
async fn every_row_of_the_table_by_itself_gets_what_the_engine_alone_says() {
    let account = Account::of(TABLE.iter(), |engine, route| async move {
        let mut account = Account::default();
        let house = House::build(engine, setup(Some(60))).await;
        let said = Said::by(&house, route, PROMPTS[1]).await;
        for row in parameters::TABLE.iter().filter(|row| row.routes.has(route)) {
            for setting in settings(row, &said) {
                for ask in asks(route, row, &setting, &said) {
                    account.compare(&house, row, &setting, &ask).await;
                }
            }
        }
        house.leave().await;
        account
    })
    .await;
    assert!(account.wrong.is_empty(), "{}", account.wrong);
    let never: Vec<_> = account.might.difference(&account.leapt).collect();
    assert!(never.is_empty(), "nobody leapt with {never:?}");
}

/// At a temperature, where the engine's own noise can be gone on with.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_carried_parameter_with_a_seed_gets_what_the_engine_alone_says() {
    let seeded = TABLE.iter().filter(|engine| engine.seeds == Seeds::Kept);
    let account = Account::of(seeded, |engine, route| async move {
        let mut account = Account::default();
        let house = House::build(engine, setup(Some(60))).await;
        let said = Said::by(&house, route, PROMPTS[0]).await;
        for row in parameters::TABLE.iter().filter(|row| row.routes.has(route)) {
            let (Treatment::Carried(field) | Treatment::Emulated(field)) = row.treatment else {
                continue;
            };
            // Such a request kills the engine, with and without a proxy.
            if engine.name == "sglang-deterministic" && field == Field::MinP {
                continue;
            }
            for setting in carried(field, &said) {
                for mut ask in asks(route, row, &setting, &said) {
                    let warm = if field == Field::Temperature { json!(1.3) } else { json!(0.8) };
                    ask.fields["temperature"] = warm;
                    ask.fields["seed"] = json!(7);
                    account.compare(&house, row, &setting, &ask).await;
                }
            }
        }
        house.leave().await;
        account
    })
    .await;
    assert!(account.wrong.is_empty(), "{}", account.wrong);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_that_is_kept_is_the_engines_own() {
    let row = parameters::find(Route::Completions, "include_stop_str_in_output").unwrap();
    let account = Account::of(TABLE.iter(), |engine, route| async move {
        let mut account = Account::default();
        let house = House::build(engine, setup(None)).await;
        let said = Said::by(&house, route, PROMPTS[2]).await;
        for stop in [json!({"stop": middle(&said.text, 3)}), json!({"stop_token_ids": [said.token]})] {
            for keeps in [true, false] {
                let mut fields = greedy(&said.prompt, &stop);
                fields[row.name] = json!(keeps);
                for ask in both(route, &fields) {
                    account.compare(&house, row, &Setting::may(json!(keeps)), &ask).await;
                }
            }
        }
        house.leave().await;
        account
    })
    .await;
    assert!(account.wrong.is_empty(), "{}", account.wrong);
    assert!(!account.leapt.is_empty(), "nobody leapt");
}
