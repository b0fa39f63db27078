//! The members of a request that its answer repeats, and the response object made of them.

use serde_json::{Map, Value, json};

use crate::openai::parsed_bytes;
use crate::translation::{broken_off, set};

/// Value of `include` that asks for log-probabilities. The others are about tools that the server
/// runs, or about reasoning that only its author can read.
pub(super) const LOGPROBS: &str = "message.output_text.logprobs";

/// Members of a response in vLLM's order. Most are members of the request; null where the server's
/// default applies, which is not known.
const MEMBERS: [&str; 28] = [
    "id",
    "created_at",
    "incomplete_details",
    "instructions",
    "metadata",
    "model",
    "object",
    "output",
    "parallel_tool_calls",
    "temperature",
    "tool_choice",
    "tools",
    "top_p",
    "background",
    "max_output_tokens",
    "max_tool_calls",
    "previous_response_id",
    "prompt",
    "reasoning",
    "service_tier",
    "status",
    "text",
    "top_logprobs",
    "truncation",
    "usage",
    "user",
    "presence_penalty",
    "frequency_penalty",
];

/// The members of a request that its answer repeats.
#[derive(Clone, Debug)]
pub struct Echo {
    /// A response without an answer.
    response: Map<String, Value>,
    /// Names of the free-form tools.
    custom: Vec<String>,
}

impl Echo {
    pub(super) fn of(request: &Map<String, Value>) -> Self {
        let given = |name: &str| request.get(name).filter(|value| !value.is_null()).cloned();
        let member = |name: &str| (name.to_owned(), given(name).unwrap_or_default());
        let mut response: Map<String, Value> = MEMBERS.into_iter().map(member).collect();
        let tools = given("tools").unwrap_or_else(|| json!([]));
        let listed = tools.as_array().map(Vec::as_slice).unwrap_or_default();
        let custom = listed.iter().filter(|tool| tool.get("type").is_some_and(|kind| kind == "custom"));
        let custom = custom.filter_map(|tool| Some(tool.get("name")?.as_str()?.to_owned())).collect();
        if listed.is_empty() {
            set(&mut response, "tool_choice", json!("none"));
        }
        let top = given("top_logprobs").unwrap_or_else(|| json!(0));
        set(&mut response, "top_logprobs", if wants_logprobs(request) { top } else { Value::Null });
        set(&mut response, "tools", tools);
        for (name, default) in [
            ("parallel_tool_calls", json!(true)),
            ("tool_choice", json!("auto")),
            ("background", json!(false)),
            ("service_tier", json!("auto")),
            ("truncation", json!("disabled")),
        ] {
            if response.get(name).is_none_or(Value::is_null) {
                set(&mut response, name, default);
            }
        }
        set(&mut response, "object", json!("response"));
        Self { response, custom }
    }

    /// Bytes that it takes in memory.
    pub fn bytes(&self) -> usize {
        serde_json::to_vec(&self.response).map_or(0, |text| parsed_bytes(&text))
    }

    /// True if the tool of this name is free-form.
    pub(super) fn is_custom(&self, name: &str) -> bool {
        self.custom.iter().any(|custom| custom == name)
    }

    /// Takes id, time and model of a chat's answer.
    pub(super) fn begin(&mut self, chat: &Value) {
        let id = chat.get("id").and_then(Value::as_str).unwrap_or_default();
        let id = id.strip_prefix("chatcmpl-").unwrap_or(id);
        set(&mut self.response, "id", json!(format!("resp_{id}")));
        set(&mut self.response, "created_at", chat.get("created").cloned().unwrap_or_else(|| json!(0)));
        if let Some(model) = chat.get("model") {
            set(&mut self.response, "model", model.clone());
        }
    }

    pub(super) fn response(
        &self,
        state: &ResponseStatus,
        output: Vec<Value>,
        usage: Option<&Value>,
    ) -> Value {
        let mut response = self.response.clone();
        set(&mut response, "status", json!(state.name()));
        set(&mut response, "output", Value::Array(output));
        if let Some(usage) = usage.filter(|usage| !usage.is_null()) {
            set(&mut response, "usage", super::usage(usage));
        }
        match state {
            ResponseStatus::InProgress | ResponseStatus::Completed => {}
            ResponseStatus::Incomplete(reason) => {
                set(&mut response, "incomplete_details", json!({ "reason": reason }));
            }
            ResponseStatus::Failed(words) => {
                set(&mut response, "error", json!({ "code": "server_error", "message": words }));
            }
        }
        Value::Object(response)
    }
}

/// Status of a response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ResponseStatus {
    InProgress,
    Completed,
    Incomplete(&'static str),
    /// With words for the client.
    Failed(String),
}

impl ResponseStatus {
    /// The status of an answer that ended for this `finish_reason` of a chat.
    pub fn of(finish: &str) -> Self {
        match finish {
            "stop" | "tool_calls" | "function_call" => Self::Completed,
            "length" => Self::Incomplete("max_output_tokens"),
            "content_filter" => Self::Incomplete("content_filter"),
            other => Self::Failed(broken_off(other)),
        }
    }

    pub fn name(&self) -> &'static str {
        match self {
            Self::InProgress => "in_progress",
            Self::Completed => "completed",
            Self::Incomplete(_) => "incomplete",
            Self::Failed(_) => "failed",
        }
    }

    /// The status of the item that ends with the answer.
    pub fn of_item(&self) -> &'static str {
        if *self == Self::Completed { "completed" } else { "incomplete" }
    }
}

/// True if the answer shows log-probabilities.
fn wants_logprobs(members: &Map<String, Value>) -> bool {
    let include = members.get("include").and_then(Value::as_array);
    include.is_some_and(|names| names.iter().any(|name| name == LOGPROBS))
}
