//! Recorded answers of real engines (`tests/goldens`) against the fakes: the same request gets the
//! same status and the same shape, field by field and event by event.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::fakes::llamacpp::{self, Llama};
use crate::fakes::vllm::{self, Vllm};
use crate::fakes::{Defaults, Engine, Fake, Setup, Temper};
use crate::wire::{Message, Wire};

fn recorded(engine: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../goldens").join(engine);
    let entries = std::fs::read_dir(folder).unwrap();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    assert!(!files.is_empty());
    files.sort();
    files
}

/// The type of each field. Lists have the shape of their first entry; null is a separate type.
fn shape(value: &Value) -> Value {
    match value {
        Value::Object(fields)
            if fields.keys().all(|key| key.parse::<i64>().is_ok()) && !fields.is_empty() =>
        {
            Value::Object(Map::from_iter([("id".to_owned(), shape(fields.values().next().unwrap()))]))
        }
        Value::Object(fields) => {
            let mut sorted: Vec<(String, Value)> = fields
                .iter()
                .filter(|(name, _)| !DETAILS.contains(&name.as_str()))
                .map(|(name, value)| (name.clone(), shape(value)))
                .collect();
            sorted.sort_by(|a, b| a.0.cmp(&b.0));
            Value::Object(sorted.into_iter().collect())
        }
        Value::Array(list) => {
            Value::Array(list.iter().find(|entry| !entry.is_null()).map(shape).into_iter().collect())
        }
        Value::String(_) => "text".into(),
        Value::Number(_) => "number".into(),
        Value::Bool(_) => "flag".into(),
        Value::Null => Value::Null,
    }
}

/// Fields that no proxy needs and no fake has.
const DETAILS: &[&str] = &[
    "chat_template_caps",
    "cors_proxy_enabled",
    "media_marker",
    "meta",
    "permission",
    "top_logprobs",
    "ui",
    "ui_settings",
    "weight_versions",
    "models",
    "tags",
    "text_offset",
    "dry_sequence_breakers",
    "grammar",
    "grammar_lazy",
    "grammar_triggers",
    "logit_bias",
    "preserved_tokens",
    "__verbose",
    "id_task",
    "n_prompt_tokens",
    "n_prompt_tokens_processed",
    "n_prompt_tokens_cache",
    "next_token",
    "timings",
];

fn events(text: &str) -> BTreeSet<String> {
    let data = text.split("\n\n").filter_map(|event| event.strip_prefix("data: "));
    data.map(|data| {
        serde_json::from_str(data).map_or(data.to_owned(), |event: Value| shape(&event).to_string())
    })
    .collect()
}

async fn replay<E: Engine>(fake: &Fake<E>, golden: &Value) -> Message {
    let request = &golden["request"];
    let (method, path) = (request["method"].as_str().unwrap(), request["path"].as_str().unwrap());
    let body = match &request["body"] {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        body => body.to_string(),
    };
    let head = format!("{method} {path} HTTP/1.1\r\nhost: api\r\ncontent-length: {}\r\n\r\n", body.len());
    Wire::connect(fake.address).await.ask(head + &body).await
}

/// Differences between the recorded answer and the fake's.
async fn differences<E: Engine>(fake: &Fake<E>, golden: &Value) -> Option<String> {
    let answer = replay(fake, golden).await;
    if answer.head.status() != golden["status"].as_u64().unwrap() as u16 {
        return Some(format!("status {} {}", answer.head.status(), answer.text()));
    }
    if let Some(stream) = golden["sse"].as_str() {
        let (want, got) = (events(stream), events(&answer.text()));
        return (want != got).then(|| format!("events\n  want {want:#?}\n  got {got:#?}"));
    }
    if !golden["body"].is_object() && !golden["body"].is_array() {
        return None;
    }
    let (want, got) = (shape(&golden["body"]), shape(&answer.json()));
    (want != got).then(|| format!("\n  want {want}\n  got  {got}"))
}

/// Each recorded answer is requested from the first of these fakes whose name is a prefix of its
/// own.
async fn check<E: Engine>(engine: &str, fakes: &[(&str, Fake<E>)], other: &[&str]) {
    let mut all = Vec::new();
    for file in recorded(engine) {
        let name = file.file_stem().unwrap().to_string_lossy().into_owned();
        if other.contains(&name.as_str()) {
            continue;
        }
        let golden: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        let (_, fake) = fakes.iter().find(|(of, _)| name.starts_with(of)).unwrap();
        if let Some(difference) = differences(fake, &golden).await {
            all.push(format!("{name}: {difference}"));
        }
    }
    assert!(all.is_empty(), "{} differ\n{}", all.len(), all.join("\n"));
}

/// Text before the arguments of a tool call.
const CALL: &str = "<tool_call>\n{\"name\": \"weather\", \"arguments\": ";

fn setup(setup: Setup, house: bool) -> Setup {
    let defaults = Defaults { temperature: Some(0.7), repetition_penalty: Some(1.05), ..Defaults::default() };
    Setup {
        model: "foretell-target".to_owned(),
        temper: Temper { eos_every: None, ..Temper::default() },
        defaults: if house { defaults } else { Defaults::default() },
        max_len: 2048,
        block: 32,
        ..setup
    }
}

#[tokio::test]
async fn vllm_answers_as_recorded() {
    let make = |house: bool| {
        let mut options = vllm::Options::of("0.32.0");
        (options.scale_out, options.prompt_tokens_details, options.max_logprobs) = (true, true, -1);
        options.setup = setup(options.setup, house);
        Fake::start(Vllm::new(options))
    };
    // The result of these depends on the text that the model generates.
    let by_text = [
        "completion_stop",
        "completion_stop_included",
        "completion_stop_stream",
        "house_chat",
        "house_chat_stream",
        "house_chat_render",
        "house_chat_render_explicit",
        // The real engine fills its object with blanks up to the limit.
        "parsers_json_stream",
        "parsers_json_stream_ids",
        "parsers_json_stream_usage",
        // The fake calls at most one tool, and ignores a required call.
        "parsers_calls",
        "parsers_calls_ids",
        "parsers_calls_stream",
        "parsers_calls_stream_ids",
        "parsers_calls_stream_usage",
        "parsers_named",
        "parsers_named_ids",
        "parsers_named_stream",
        "parsers_named_stream_ids",
        "parsers_named_stream_usage",
    ];
    let parsers = async {
        let mut options = vllm::Options::of("0.32.0");
        (options.scale_out, options.prompt_tokens_details, options.max_logprobs) = (true, true, -1);
        let tool_call = Some((CALL.to_owned(), "}\n</tool_call>".to_owned()));
        let reasoning_end = Some("</think>".to_owned());
        options.setup = Setup { reasoning_end, tool_call, ..setup(options.setup, false) };
        Fake::start(Vllm::new(options)).await
    };
    let fakes = [("house", make(true).await), ("parsers", parsers.await), ("", make(false).await)];
    check("vllm", &fakes, &by_text).await;
}

#[tokio::test]
async fn llama_server_answers_as_recorded() {
    let make = |house: bool| {
        let mut options = llamacpp::Options {
            slots: 9,
            metrics: true,
            cache_idle_slots: false,
            ..llamacpp::Options::default()
        };
        options.setup = setup(options.setup, house);
        Fake::start(Llama::new(options))
    };
    // The contents of a slot depend on its earlier tasks.
    check("llamacpp", &[("house", make(true).await), ("", make(false).await)], &["slots_full"]).await;
}
