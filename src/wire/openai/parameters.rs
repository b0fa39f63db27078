//! The table of every parameter: OpenAI's two schemas, and the extras of vLLM, SGLang and
//! llama.cpp.
//!
//! One row per name (and per route, where the meaning differs). A request with a parameter that is
//! not in the table is passed through; so is one with a parameter that no test has shown to be
//! carried exactly. Reasons for single rows are in the comments above them. A `null` is an absent
//! parameter everywhere.

use serde_json::Value;

use super::request::Route;
use foretell_core::words::PassthroughReason;

/// The routes on which a parameter exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Routes {
    /// Completions and chat.
    Both,
    /// Completions only.
    Completions,
    /// Chat completions only.
    Chat,
}

impl Routes {
    /// Names of the routes, separated by commas.
    pub const fn names(self) -> &'static str {
        match self {
            Self::Both => "completions, chat",
            Self::Completions => "completions",
            Self::Chat => "chat",
        }
    }

    /// True if `route` is among them.
    pub const fn has(self, route: Route) -> bool {
        match self {
            Self::Both => true,
            Self::Completions => matches!(route, Route::Completions),
            Self::Chat => matches!(route, Route::Chat),
        }
    }
}

/// The API that a parameter belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// In OpenAI's schema.
    OpenAi,
    /// An extra of vLLM (which several other servers share).
    Vllm,
    /// An extra of SGLang.
    Sglang,
    /// An extra of the llama.cpp server.
    LlamaCpp,
}

impl Owner {
    /// The name in the output of `explain`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::OpenAi => "openai",
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
            Self::LlamaCpp => "llamacpp",
        }
    }
}

/// A field that is read from a request, one per carried row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Field {
    Model,
    Prompt,
    Messages,
    MaxTokens,
    MaxCompletionTokens,
    Temperature,
    TopP,
    TopK,
    MinP,
    PresencePenalty,
    FrequencyPenalty,
    RepetitionPenalty,
    LogitBias,
    Seed,
    Stop,
    StopTokenIds,
    IncludeStop,
    MinTokens,
    IgnoreEos,
    Stream,
    StreamOptions,
    IncludeUsage,
    /// `stream_options.continuous_usage_stats`
    ContinuousUsage,
    ReturnTokenIds,
    Prediction,
    /// One choice is carried, several are not.
    Choices,
    Tools,
    /// `auto` and `none` are carried; a forced call where the server's grammar goes on from an
    /// output that was sent.
    ToolChoice,
    /// At `false` the output parser leaves out all calls but the first.
    ParallelToolCalls,
    /// Carried where the server's grammar goes on from an output that was sent.
    ResponseFormat,
    /// As [`Field::ResponseFormat`].
    StructuredOutputs,
}

/// A value that is the default of every server, so that sending it has no effect; llama.cpp's
/// operator may set another default (`Engine::operator_samplers`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Plain {
    /// This boolean.
    Bool(bool),
    /// This number, as integer or float.
    Number(f64),
    /// This string.
    Text(&'static str),
    /// A list without elements.
    EmptyList,
    /// An object without members.
    EmptyObject,
    /// `["text"]`.
    ListOfText,
}

impl Plain {
    /// As JSON text.
    pub fn to_json_text(self) -> String {
        match self {
            Self::Bool(plain) => plain.to_string(),
            Self::Number(plain) => plain.to_string(),
            Self::Text(plain) => format!("\"{plain}\""),
            Self::EmptyList => "[]".to_owned(),
            Self::EmptyObject => "{}".to_owned(),
            Self::ListOfText => "[\"text\"]".to_owned(),
        }
    }

    /// True if `value` is this value.
    pub fn is(self, value: &Value) -> bool {
        match (self, value) {
            (Self::Bool(plain), Value::Bool(value)) => plain == *value,
            (Self::Number(plain), Value::Number(number)) => {
                number.as_f64().is_some_and(|number| number.total_cmp(&plain).is_eq())
            }
            (Self::Text(plain), Value::String(text)) => plain == text,
            (Self::EmptyList, Value::Array(items)) => items.is_empty(),
            (Self::EmptyObject, Value::Object(members)) => members.is_empty(),
            (Self::ListOfText, Value::Array(items)) => {
                matches!(items.as_slice(), [only] if only.as_str() == Some("text"))
            }
            _ => false,
        }
    }
}

/// The treatment of a parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Treatment {
    /// Every call sends it, or Foretell applies it itself with the same result.
    Carried(Field),
    /// Foretell applies it where the backend does not.
    Emulated(Field),
    /// Sent with the first call; it does not change the output.
    Inert,
    /// Changes the prompt, and perhaps more: carried where the engine tells the prompt and the
    /// sampling of exactly this request (`Engine::renders`), else passed
    /// through for this reason.
    Rendered(PassthroughReason),
    /// No effect at these values; at any other the request is passed through.
    Neutral(&'static [Plain], PassthroughReason),
    /// Passed through at every value.
    Passthrough(PassthroughReason),
}

impl Treatment {
    /// The name in the output of `explain`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Carried(_) => "carried",
            Self::Emulated(_) => "emulated",
            Self::Inert => "inert",
            Self::Rendered(_) => "rendered",
            Self::Neutral(..) => "neutral",
            Self::Passthrough(_) => "passthrough",
        }
    }
}

/// One row of the table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Parameter {
    /// The name in the body; members of an object are written `object.member`.
    pub name: &'static str,
    /// Routes that know it.
    pub routes: Routes,
    /// The API that defines it.
    pub owner: Owner,
    /// Its treatment.
    pub treatment: Treatment,
}

/// The row of `name` on `route`; `None` if it is unknown there.
pub fn find(route: Route, name: &str) -> Option<&'static Parameter> {
    TABLE.iter().find(|row| row.name == name && row.routes.has(route))
}

const fn row(name: &'static str, routes: Routes, owner: Owner, treatment: Treatment) -> Parameter {
    Parameter { name, routes, owner, treatment }
}

use Owner::{LlamaCpp, OpenAi, Sglang, Vllm};
use PassthroughReason as R;
use Routes::{Both, Chat, Completions};
use Treatment::{Carried, Emulated, Inert, Neutral, Passthrough, Rendered};

const FALSE: &[Plain] = &[Plain::Bool(false)];
const TRUE: &[Plain] = &[Plain::Bool(true)];
const ZERO: &[Plain] = &[Plain::Number(0.0)];
const ONE: &[Plain] = &[Plain::Number(1.0)];
const MINUS_ONE: &[Plain] = &[Plain::Number(-1.0)];
const NO_LIST: &[Plain] = &[Plain::EmptyList];
const NO_OBJECT: &[Plain] = &[Plain::EmptyObject];
const NONE: &[Plain] = &[Plain::Text("none")];
const TEXT_ONLY: &[Plain] = &[Plain::ListOfText];

/// Every known parameter and its treatment.
#[rustfmt::skip]
pub static TABLE: &[Parameter] = &[
    // OpenAI: completions and chat.
    row("model", Both, OpenAi, Carried(Field::Model)),
    row("prompt", Completions, OpenAi, Carried(Field::Prompt)),
    row("messages", Chat, OpenAi, Carried(Field::Messages)),
    row("max_tokens", Both, OpenAi, Carried(Field::MaxTokens)),
    row("max_completion_tokens", Chat, OpenAi, Carried(Field::MaxCompletionTokens)),
    row("temperature", Both, OpenAi, Carried(Field::Temperature)),
    row("top_p", Both, OpenAi, Carried(Field::TopP)),
    row("presence_penalty", Both, OpenAi, Carried(Field::PresencePenalty)),
    row("frequency_penalty", Both, OpenAi, Carried(Field::FrequencyPenalty)),
    row("logit_bias", Both, OpenAi, Carried(Field::LogitBias)),
    // The dialect decides whether the engine's seeded noise can be continued (otherwise passed
    // through, `seed`).
    row("seed", Both, OpenAi, Carried(Field::Seed)),
    row("stop", Both, OpenAi, Carried(Field::Stop)),
    row("stream", Both, OpenAi, Carried(Field::Stream)),
    row("stream_options", Both, OpenAi, Carried(Field::StreamOptions)),
    row("stream_options.include_usage", Both, OpenAi, Carried(Field::IncludeUsage)),
    row("stream_options.include_obfuscation", Both, OpenAi, Neutral(FALSE, R::Parameter)),
    row("prediction", Chat, OpenAi, Emulated(Field::Prediction)),
    row("n", Both, OpenAi, Carried(Field::Choices)),
    row("best_of", Completions, OpenAi, Carried(Field::Choices)),
    row("user", Both, OpenAi, Inert),
    row("metadata", Chat, OpenAi, Inert),
    row("safety_identifier", Chat, OpenAi, Inert),
    // Names a cache, a tier or a log of the provider; no sampled token depends on it.
    row("prompt_cache_key", Chat, OpenAi, Inert),
    row("prompt_cache_retention", Chat, OpenAi, Inert),
    row("store", Chat, OpenAi, Inert),
    row("service_tier", Chat, OpenAi, Inert),
    row("echo", Completions, OpenAi, Neutral(FALSE, R::Parameter)),
    row("logprobs", Completions, OpenAi, Passthrough(R::Parameter)),
    row("logprobs", Chat, OpenAi, Neutral(FALSE, R::Parameter)),
    row("top_logprobs", Chat, OpenAi, Neutral(ZERO, R::Parameter)),
    row("suffix", Completions, OpenAi, Passthrough(R::Parameter)),
    row("verbosity", Chat, OpenAi, Rendered(R::Parameter)),
    row("reasoning_effort", Chat, OpenAi, Rendered(R::Reasoning)),
    row("response_format", Chat, OpenAi, Carried(Field::ResponseFormat)),
    row("tools", Chat, OpenAi, Carried(Field::Tools)),
    row("tool_choice", Chat, OpenAi, Carried(Field::ToolChoice)),
    row("parallel_tool_calls", Chat, OpenAi, Carried(Field::ParallelToolCalls)),
    row("functions", Chat, OpenAi, Passthrough(R::Tools)),
    row("function_call", Chat, OpenAi, Neutral(NONE, R::Tools)),
    row("web_search_options", Chat, OpenAi, Passthrough(R::Tools)),
    row("audio", Chat, OpenAi, Passthrough(R::Multimodal)),
    row("modalities", Chat, OpenAi, Neutral(TEXT_ONLY, R::Multimodal)),

    // vLLM (and, where the names agree, SGLang and others).
    row("top_k", Both, Vllm, Carried(Field::TopK)),
    row("min_p", Both, Vllm, Carried(Field::MinP)),
    row("repetition_penalty", Both, Vllm, Carried(Field::RepetitionPenalty)),
    row("stop_token_ids", Both, Vllm, Carried(Field::StopTokenIds)),
    row("include_stop_str_in_output", Both, Vllm, Carried(Field::IncludeStop)),
    row("ignore_eos", Both, Vllm, Carried(Field::IgnoreEos)),
    row("min_tokens", Both, Vllm, Carried(Field::MinTokens)),
    row("return_token_ids", Both, Vllm, Carried(Field::ReturnTokenIds)),
    row("stream_options.continuous_usage_stats", Both, Vllm, Carried(Field::ContinuousUsage)),
    row("use_beam_search", Both, Vllm, Neutral(FALSE, R::Choices)),
    row("length_penalty", Both, Vllm, Neutral(ONE, R::Choices)),
    row("early_stopping", Both, Vllm, Neutral(FALSE, R::Choices)),
    row("watermarking", Both, Vllm, Neutral(FALSE, R::Parameter)),
    row("skip_special_tokens", Both, Vllm, Neutral(TRUE, R::Parameter)),
    row("spaces_between_special_tokens", Both, Vllm, Neutral(TRUE, R::Parameter)),
    row("truncate_prompt_tokens", Both, Vllm, Passthrough(R::Parameter)),
    row("truncation_side", Both, Vllm, Passthrough(R::Parameter)),
    row("allowed_token_ids", Both, Vllm, Passthrough(R::Parameter)),
    row("bad_words", Both, Vllm, Neutral(NO_LIST, R::Parameter)),
    row("prompt_logprobs", Both, Vllm, Passthrough(R::Parameter)),
    row("logprob_token_ids", Both, Vllm, Passthrough(R::Parameter)),
    row("return_tokens_as_token_ids", Both, Vllm, Neutral(FALSE, R::Parameter)),
    row("prompt_embeds", Completions, Vllm, Passthrough(R::Multimodal)),
    row("add_special_tokens", Completions, Vllm, Neutral(TRUE, R::Parameter)),
    row("add_special_tokens", Chat, Vllm, Neutral(FALSE, R::Parameter)),
    row("response_format", Completions, Vllm, Carried(Field::ResponseFormat)),
    row("structured_outputs", Both, Vllm, Carried(Field::StructuredOutputs)),
    row("guided_json", Both, Vllm, Passthrough(R::Structured)),
    row("guided_regex", Both, Vllm, Passthrough(R::Structured)),
    row("guided_choice", Both, Vllm, Passthrough(R::Structured)),
    row("guided_grammar", Both, Vllm, Passthrough(R::Structured)),
    row("guided_decoding_backend", Both, Vllm, Passthrough(R::Structured)),
    row("guided_whitespace_pattern", Both, Vllm, Passthrough(R::Structured)),
    row("structural_tag", Both, Vllm, Passthrough(R::Structured)),
    row("priority", Both, Vllm, Neutral(ZERO, R::Parameter)),
    row("request_id", Both, Vllm, Passthrough(R::Parameter)),
    row("session_id", Both, Vllm, Passthrough(R::Parameter)),
    row("routed_experts_prompt_start", Both, Vllm, Neutral(ZERO, R::Parameter)),
    row("return_token_offsets", Both, Vllm, Neutral(FALSE, R::Parameter)),
    row("return_mm_kwargs", Both, Vllm, Neutral(TRUE, R::Parameter)),
    row("return_prompt_text", Chat, Vllm, Neutral(FALSE, R::Parameter)),
    row("cache_salt", Both, Vllm, Passthrough(R::Parameter)),
    row("kv_transfer_params", Both, Vllm, Passthrough(R::Parameter)),
    row("ec_transfer_params", Both, Vllm, Passthrough(R::Parameter)),
    row("vllm_xargs", Both, Vllm, Neutral(NO_OBJECT, R::Parameter)),
    row("repetition_detection", Both, Vllm, Passthrough(R::Parameter)),
    row("thinking_token_budget", Both, Vllm, Neutral(MINUS_ONE, R::Reasoning)),
    row("include_reasoning", Chat, Vllm, Neutral(TRUE, R::Reasoning)),
    row("stream_interval", Both, Vllm, Neutral(ONE, R::Parameter)),
    row("logits_processors", Both, Vllm, Passthrough(R::Parameter)),
    row("echo", Chat, Vllm, Neutral(FALSE, R::Parameter)),
    row("add_generation_prompt", Chat, Vllm, Neutral(TRUE, R::Parameter)),
    row("continue_final_message", Chat, Vllm, Neutral(FALSE, R::Parameter)),
    row("documents", Chat, Vllm, Rendered(R::Parameter)),
    row("chat_template", Chat, Vllm, Rendered(R::Parameter)),
    row("chat_template_kwargs", Chat, Vllm, Rendered(R::Parameter)),
    row("media_io_kwargs", Chat, Vllm, Passthrough(R::Multimodal)),
    row("mm_processor_kwargs", Chat, Vllm, Passthrough(R::Multimodal)),

    // SGLang.
    row("regex", Both, Sglang, Passthrough(R::Structured)),
    row("ebnf", Both, Sglang, Passthrough(R::Structured)),
    row("json_schema", Both, Sglang, Passthrough(R::Structured)),
    row("stop_regex", Both, Sglang, Passthrough(R::Parameter)),
    // Keeps stop tokens as well as stop strings, which `include_stop_str_in_output` does not.
    row("no_stop_trim", Both, Sglang, Neutral(FALSE, R::Parameter)),
    row("return_hidden_states", Both, Sglang, Neutral(FALSE, R::Parameter)),
    row("return_routed_experts", Both, Sglang, Neutral(FALSE, R::Parameter)),
    row("routed_experts_start_len", Both, Sglang, Neutral(ZERO, R::Parameter)),
    row("return_cached_tokens_details", Both, Sglang, Neutral(FALSE, R::Parameter)),
    row("return_prompt_token_ids", Chat, Sglang, Neutral(FALSE, R::Parameter)),
    row("return_meta_info", Chat, Sglang, Neutral(FALSE, R::Parameter)),
    row("lora_path", Both, Sglang, Passthrough(R::Parameter)),
    row("session_params", Both, Sglang, Passthrough(R::Parameter)),
    row("custom_params", Both, Sglang, Passthrough(R::Parameter)),
    row("custom_logit_processor", Both, Sglang, Passthrough(R::Parameter)),
    row("custom_labels", Completions, Sglang, Passthrough(R::Parameter)),
    row("images_config", Both, Sglang, Passthrough(R::Multimodal)),
    row("max_dynamic_patch", Chat, Sglang, Passthrough(R::Multimodal)),
    row("min_dynamic_patch", Chat, Sglang, Passthrough(R::Multimodal)),
    row("use_audio_in_video", Chat, Sglang, Neutral(FALSE, R::Multimodal)),
    row("bootstrap_host", Both, Sglang, Passthrough(R::Parameter)),
    row("bootstrap_port", Both, Sglang, Passthrough(R::Parameter)),
    row("bootstrap_room", Both, Sglang, Passthrough(R::Parameter)),
    row("routed_dp_rank", Both, Sglang, Passthrough(R::Parameter)),
    row("disagg_prefill_dp_rank", Both, Sglang, Passthrough(R::Parameter)),
    row("data_parallel_rank", Both, Sglang, Passthrough(R::Parameter)),
    row("rid", Both, Sglang, Passthrough(R::Parameter)),
    row("extra_key", Both, Sglang, Passthrough(R::Parameter)),
    row("ngram_corpus_id", Both, Sglang, Passthrough(R::Parameter)),
    row("sampling_seed", Both, Sglang, Passthrough(R::Seed)),
    row("input_ids", Chat, Sglang, Passthrough(R::Parameter)),
    row("task", Chat, Sglang, Passthrough(R::Parameter)),
    row("reasoning", Chat, Sglang, Passthrough(R::Reasoning)),
    row("separate_reasoning", Chat, Sglang, Neutral(TRUE, R::Reasoning)),
    row("stream_reasoning", Chat, Sglang, Neutral(TRUE, R::Reasoning)),

    // llama.cpp. Its sampling chain has other defaults, so only values that switch a sampler off
    // are neutral, and where the operator has switched that sampler on its dialect refuses them.
    row("n_predict", Both, LlamaCpp, Passthrough(R::Parameter)),
    row("max_completion_tokens", Completions, LlamaCpp, Passthrough(R::Parameter)),
    row("n_cmpl", Both, LlamaCpp, Neutral(ONE, R::Choices)),
    row("n_indent", Both, LlamaCpp, Neutral(ZERO, R::Parameter)),
    row("n_keep", Both, LlamaCpp, Passthrough(R::Parameter)),
    row("n_discard", Both, LlamaCpp, Passthrough(R::Parameter)),
    row("n_probs", Both, LlamaCpp, Neutral(ZERO, R::Parameter)),
    row("post_sampling_probs", Both, LlamaCpp, Neutral(FALSE, R::Parameter)),
    row("min_keep", Both, LlamaCpp, Neutral(ZERO, R::Parameter)),
    row("n_cache_reuse", Both, LlamaCpp, Passthrough(R::Parameter)),
    row("cache_prompt", Both, LlamaCpp, Neutral(TRUE, R::Parameter)),
    row("id_slot", Both, LlamaCpp, Neutral(MINUS_ONE, R::Parameter)),
    row("return_tokens", Both, LlamaCpp, Neutral(FALSE, R::Parameter)),
    row("return_progress", Both, LlamaCpp, Neutral(FALSE, R::Parameter)),
    row("response_fields", Both, LlamaCpp, Passthrough(R::Parameter)),
    row("verbose", Both, LlamaCpp, Neutral(FALSE, R::Parameter)),
    row("timings_per_token", Both, LlamaCpp, Neutral(FALSE, R::Parameter)),
    row("sse_ping_interval", Both, LlamaCpp, Passthrough(R::Parameter)),
    row("t_max_predict_ms", Both, LlamaCpp, Neutral(MINUS_ONE, R::Parameter)),
    row("backend_sampling", Both, LlamaCpp, Neutral(FALSE, R::Parameter)),
    row("samplers", Both, LlamaCpp, Passthrough(R::Parameter)),
    row("top_n_sigma", Both, LlamaCpp, Neutral(MINUS_ONE, R::Parameter)),
    row("xtc_probability", Both, LlamaCpp, Neutral(ZERO, R::Parameter)),
    row("xtc_threshold", Both, LlamaCpp, Passthrough(R::Parameter)),
    row("typical_p", Both, LlamaCpp, Neutral(ONE, R::Parameter)),
    row("dynatemp_range", Both, LlamaCpp, Neutral(ZERO, R::Parameter)),
    row("dynatemp_exponent", Both, LlamaCpp, Passthrough(R::Parameter)),
    row("repeat_penalty", Both, LlamaCpp, Neutral(ONE, R::Parameter)),
    row("repeat_last_n", Both, LlamaCpp, Passthrough(R::Parameter)),
    row("dry_multiplier", Both, LlamaCpp, Neutral(ZERO, R::Parameter)),
    row("dry_base", Both, LlamaCpp, Passthrough(R::Parameter)),
    row("dry_allowed_length", Both, LlamaCpp, Passthrough(R::Parameter)),
    row("dry_penalty_last_n", Both, LlamaCpp, Passthrough(R::Parameter)),
    row("dry_sequence_breakers", Both, LlamaCpp, Passthrough(R::Parameter)),
    row("mirostat", Both, LlamaCpp, Neutral(ZERO, R::Parameter)),
    row("mirostat_tau", Both, LlamaCpp, Passthrough(R::Parameter)),
    row("mirostat_eta", Both, LlamaCpp, Passthrough(R::Parameter)),
    row("adaptive_target", Both, LlamaCpp, Neutral(MINUS_ONE, R::Parameter)),
    row("adaptive_decay", Both, LlamaCpp, Passthrough(R::Parameter)),
    row("lora", Both, LlamaCpp, Passthrough(R::Parameter)),
    row("image_data", Both, LlamaCpp, Passthrough(R::Multimodal)),
    row("grammar", Both, LlamaCpp, Passthrough(R::Structured)),
    row("grammar_type", Both, LlamaCpp, Passthrough(R::Structured)),
    row("grammar_lazy", Both, LlamaCpp, Neutral(FALSE, R::Structured)),
    row("grammar_triggers", Both, LlamaCpp, Neutral(NO_LIST, R::Structured)),
    row("preserved_tokens", Both, LlamaCpp, Neutral(NO_LIST, R::Structured)),
    row("chat_format", Both, LlamaCpp, Passthrough(R::Parameter)),
    row("chat_parser", Both, LlamaCpp, Passthrough(R::Parameter)),
    row("generation_prompt", Both, LlamaCpp, Passthrough(R::Parameter)),
    row("parse_tool_calls", Both, LlamaCpp, Passthrough(R::Tools)),
    row("reasoning_format", Both, LlamaCpp, Passthrough(R::Reasoning)),
    row("enable_thinking", Both, LlamaCpp, Passthrough(R::Reasoning)),
    row("reasoning_control", Both, LlamaCpp, Neutral(FALSE, R::Reasoning)),
    row("reasoning_budget_tokens", Both, LlamaCpp, Neutral(MINUS_ONE, R::Reasoning)),
    row("reasoning_budget_start_tag", Both, LlamaCpp, Passthrough(R::Reasoning)),
    row("reasoning_budget_end_tag", Both, LlamaCpp, Passthrough(R::Reasoning)),
    row("reasoning_budget_end_tags", Both, LlamaCpp, Passthrough(R::Reasoning)),
    row("reasoning_budget_message", Both, LlamaCpp, Passthrough(R::Reasoning)),
];

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn no_name_has_two_rows_on_one_route() {
        for route in [Route::Completions, Route::Chat] {
            let mut seen = HashSet::new();
            for row in TABLE.iter().filter(|row| row.routes.has(route)) {
                assert!(seen.insert(row.name), "{} twice on {}", row.name, route.name());
            }
        }
    }

    #[test]
    fn a_number_is_plain_as_integer_and_as_float_but_not_as_text() {
        let one = Plain::Number(1.0);
        assert!(one.is(&serde_json::json!(1)));
        assert!(one.is(&serde_json::json!(1.0)));
        assert!(!one.is(&serde_json::json!("1")));
        assert!(!one.is(&serde_json::json!(true)));
    }
}
