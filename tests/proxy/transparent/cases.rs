//! The requests.

use foretell_wire::openai::Route;
use serde_json::{Value, json};

use super::engines::Engine;

pub const PROMPT: &str = "The quick brown fox. The quick brown dog. The quick ";

pub struct Case {
    pub name: &'static str,
    /// For a server whose parsers take reasoning and tool calls out of answers.
    pub parsers: bool,
    pub routes: &'static [Route],
    /// Streamed, whole.
    pub ways: &'static [bool],
    pub fields: fn(stop: &str, route: Route) -> Value,
}

const BOTH: &[Route] = &[Route::Completions, Route::Chat];
const CHAT: &[Route] = &[Route::Chat];
const EITHER: &[bool] = &[false, true];
const STREAMED: &[bool] = &[true];

const fn case(name: &'static str, fields: fn(&str, Route) -> Value) -> Case {
    Case { name, parsers: false, routes: BOTH, ways: EITHER, fields }
}

pub const CASES: [Case; 15] = [
    case("plain", |_, _| json!({})),
    case("stop", |stop, _| json!({"stop": [stop, "never there"]})),
    case("one token", |_, _| json!({"max_tokens": 1})),
    case("end", |_, _| json!({"max_tokens": 400, "stop": [], "ignore_eos": false})),
    case("logprobs", |_, route| match route {
        Route::Completions => json!({"logprobs": 1}),
        Route::Chat => json!({"logprobs": true, "top_logprobs": 1}),
    }),
    case("ids", |_, _| json!({"return_token_ids": true})),
    Case { ways: STREAMED, ..case("usage", |_, _| json!({"stream_options": {"include_usage": true}})) },
    Case { ways: STREAMED, ..case("no usage", |_, _| json!({"stream_options": {"include_usage": false}})) },
    Case {
        ways: STREAMED,
        ..case(
            "continuous",
            |_, _| json!({"stream_options": {"include_usage": true, "continuous_usage_stats": true}}),
        )
    },
    Case {
        routes: CHAT,
        ..case("response_format", |_, _| json!({"response_format": {"type": "json_object"}}))
    },
    case("error", |_, _| json!({"temperature": -1})),
    case("wrong type", |_, _| json!({"max_tokens": "many"})),
    Case { parsers: true, ..case("parsers", |_, _| json!({})) },
    Case {
        parsers: true,
        ways: STREAMED,
        ..case("parsers usage", |_, _| json!({"stream_options": {"include_usage": true}}))
    },
    Case {
        parsers: true,
        routes: CHAT,
        ..case("tools", |_, _| json!({"tools": [weather()], "tool_choice": "auto"}))
    },
];

fn weather() -> Value {
    let city = json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]});
    json!({"type": "function", "function": {"name": "weather", "description": "Weather of a city.", "parameters": city}})
}

/// The bytes of a request, in a form that no serialiser produces.
pub fn body(engine: &Engine, route: Route, stream: bool, more: &Value) -> Vec<u8> {
    let mut body = json!({"stream": stream, "temperature": 0, "max_tokens": 24, "model": engine.model});
    let fields = body.as_object_mut().unwrap();
    for value in [&serde_json::from_str(engine.says).unwrap(), more] {
        fields.extend(value.as_object().unwrap().clone());
    }
    match route {
        Route::Completions => fields.insert("prompt".into(), PROMPT.into()),
        Route::Chat => fields.insert("messages".into(), json!([{"role": "user", "content": PROMPT}])),
    };
    format!("{}\n", serde_json::to_string_pretty(&body).unwrap()).into_bytes()
}
