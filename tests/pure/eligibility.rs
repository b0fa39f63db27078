//! Eligibility of requests for speculation: every parameter of the table at a harmless and at a
//! harmful value, every reason, and the parsed form of an eligible request.

use foretell_core::words::{PassthroughReason as R, Refused};
use foretell_wire::openai::parameters::{Field, Plain, TABLE, Treatment, find};
use foretell_wire::openai::{Judgement, Prompt, Request, Route, judge, understand};
use rstest::rstest;
use serde_json::{Map, Value, json};

const ROUTES: [Route; 2] = [Route::Completions, Route::Chat];

fn base(route: Route) -> Map<String, Value> {
    let body = match route {
        Route::Completions => json!({"model": "m", "prompt": "Once"}),
        Route::Chat => json!({"model": "m", "messages": [{"role": "user", "content": "Hi"}]}),
    };
    body.as_object().unwrap().clone()
}

/// The base request with one more parameter, which may be a member such as
/// `stream_options.include_usage`.
fn with(route: Route, name: &str, value: &Value) -> String {
    let mut body = base(route);
    match name.split_once('.') {
        Some((object, member)) => body.insert(object.to_owned(), json!({ member: value })),
        None => body.insert(name.to_owned(), value.clone()),
    };
    if name.starts_with("stream_options") {
        body.insert("stream".to_owned(), json!(true));
    }
    Value::Object(body).to_string()
}

fn result(route: Route, body: &str) -> Result<Request, (R, Option<String>)> {
    match judge(route, body.as_bytes()) {
        Judgement::Eligible(request) => Ok(*request),
        Judgement::Passthrough { reason, parameter } => Err((reason, parameter)),
    }
}

fn plain_value(plain: Plain) -> Value {
    match plain {
        Plain::Bool(value) => json!(value),
        Plain::Number(value) => json!(value),
        Plain::Text(value) => json!(value),
        Plain::EmptyList => json!([]),
        Plain::EmptyObject => json!({}),
        Plain::ListOfText => json!(["text"]),
    }
}

/// For every field a value that is carried, one that is not, and the reason.
fn samples(field: Field) -> (Value, Value, R) {
    match field {
        Field::Model => (json!("m"), json!(7), R::Body),
        Field::Prompt => (json!([1, 2]), json!({}), R::Body),
        Field::Messages => (json!([{"role": "user", "content": "x"}]), json!("x"), R::Body),
        Field::MaxTokens | Field::MaxCompletionTokens => (json!(7), json!(0), R::Parameter),
        Field::Temperature => (json!(2), json!(2.1), R::Parameter),
        Field::TopP => (json!(0.1), json!(0), R::Parameter),
        Field::TopK => (json!(-1), json!(-2), R::Parameter),
        Field::MinP => (json!(0), json!(1.5), R::Parameter),
        Field::PresencePenalty | Field::FrequencyPenalty => (json!(-2), json!(2.5), R::Parameter),
        Field::RepetitionPenalty => (json!(1.3), json!(0), R::Parameter),
        Field::LogitBias => (json!({"12": -100}), json!({"12": 101}), R::Parameter),
        Field::Seed => (json!(u64::MAX), json!(-1), R::Parameter),
        Field::Stop => (json!(["a", "b"]), json!(""), R::Parameter),
        Field::StopTokenIds => (json!([1]), json!([-1]), R::Parameter),
        Field::MinTokens => (json!(3), json!(-1), R::Parameter),
        Field::StreamOptions => (json!({}), json!(true), R::Parameter),
        Field::IncludeStop
        | Field::IgnoreEos
        | Field::Stream
        | Field::IncludeUsage
        | Field::ContinuousUsage
        | Field::ReturnTokenIds
        | Field::ParallelToolCalls => (json!(true), json!("true"), R::Parameter),
        Field::Prediction => {
            (json!({"type": "content", "content": "x"}), json!({"type": "other"}), R::Parameter)
        }
        Field::Choices => (json!(1), json!(2), R::Choices),
        Field::Tools => (json!([{"type": "function"}]), json!({}), R::Tools),
        Field::ToolChoice => (json!("required"), json!("sometimes"), R::Tools),
        Field::ResponseFormat => (json!({"type": "json_object"}), json!({"type": "grammar"}), R::Structured),
        Field::StructuredOutputs => (json!({"regex": "a+"}), json!({"structural_tag": "x"}), R::Structured),
    }
}

#[test]
fn every_row_of_the_table_is_applied() {
    for route in ROUTES {
        for row in TABLE.iter().filter(|row| row.routes.has(route)) {
            let judged = |value: &Value| result(route, &with(route, row.name, value)).map(|_| ());
            let refused = |reason| Err((reason, Some(row.name.to_owned())));
            assert_eq!(judged(&Value::Null).is_err(), ["model", "prompt", "messages"].contains(&row.name));
            match row.treatment {
                Treatment::Carried(field) | Treatment::Emulated(field) => {
                    let (good, bad, reason) = samples(field);
                    assert_eq!(judged(&good), Ok(()), "{} = {good}", row.name);
                    assert_eq!(judged(&bad), refused(reason), "{} = {bad}", row.name);
                }
                Treatment::Inert | Treatment::Rendered(_) => {
                    assert_eq!(judged(&json!("x")), Ok(()), "{}", row.name);
                }
                Treatment::Neutral(plain, reason) => {
                    for &plain in plain {
                        assert_eq!(judged(&plain_value(plain)), Ok(()), "{} = {plain:?}", row.name);
                    }
                    assert_eq!(judged(&json!("something else")), refused(reason), "{}", row.name);
                }
                Treatment::Passthrough(reason) => {
                    assert_eq!(judged(&json!("x")), refused(reason), "{}", row.name);
                }
            }
        }
    }
}

/// Copied from the engines' schemas, so that no row can get lost.
#[rstest]
#[case::openai_completions(
    Route::Completions,
    "best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty prompt seed stop stream stream_options suffix temperature top_p user"
)]
#[case::openai_chat(
    Route::Chat,
    "audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens messages metadata modalities model n parallel_tool_calls prediction presence_penalty prompt_cache_key prompt_cache_retention reasoning_effort response_format safety_identifier seed service_tier stop store stream stream_options stream_options.include_usage stream_options.include_obfuscation temperature tool_choice tools top_logprobs top_p user verbosity web_search_options"
)]
#[case::vllm_completions(
    Route::Completions,
    "add_special_tokens allowed_token_ids bad_words cache_salt ec_transfer_params guided_choice guided_decoding_backend guided_grammar guided_json guided_regex guided_whitespace_pattern ignore_eos include_stop_str_in_output kv_transfer_params length_penalty logprob_token_ids logits_processors min_p min_tokens priority prompt_embeds prompt_logprobs repetition_detection repetition_penalty request_id response_format return_mm_kwargs return_token_ids return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start session_id skip_special_tokens spaces_between_special_tokens stop_token_ids stream_interval stream_options.continuous_usage_stats structured_outputs thinking_token_budget top_k truncate_prompt_tokens truncation_side use_beam_search vllm_xargs watermarking"
)]
#[case::vllm_chat(
    Route::Chat,
    "add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template chat_template_kwargs continue_final_message documents echo ec_transfer_params guided_json ignore_eos include_reasoning include_stop_str_in_output kv_transfer_params length_penalty logprob_token_ids media_io_kwargs min_p min_tokens mm_processor_kwargs priority prompt_logprobs repetition_detection repetition_penalty request_id return_mm_kwargs return_prompt_text return_token_ids return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start session_id skip_special_tokens spaces_between_special_tokens stop_token_ids stream_interval structured_outputs thinking_token_budget top_k truncate_prompt_tokens truncation_side use_beam_search vllm_xargs watermarking"
)]
#[case::sglang_completions(
    Route::Completions,
    "bootstrap_host bootstrap_port bootstrap_room cache_salt custom_labels custom_logit_processor custom_params data_parallel_rank disagg_prefill_dp_rank ebnf extra_key ignore_eos images_config json_schema lora_path min_p min_tokens ngram_corpus_id no_stop_trim priority regex repetition_penalty response_format return_cached_tokens_details return_hidden_states return_routed_experts return_token_ids rid routed_dp_rank routed_experts_start_len session_id session_params skip_special_tokens stop_regex stop_token_ids top_k"
)]
#[case::sglang_chat(
    Route::Chat,
    "bootstrap_host chat_template_kwargs continue_final_message custom_logit_processor custom_params data_parallel_rank ebnf extra_key images_config input_ids lora_path max_dynamic_patch min_dynamic_patch ngram_corpus_id no_stop_trim priority reasoning regex return_cached_tokens_details return_hidden_states return_meta_info return_prompt_token_ids return_routed_experts rid routed_dp_rank routed_experts_start_len sampling_seed separate_reasoning session_id session_params stop_regex stream_reasoning task use_audio_in_video"
)]
#[case::llamacpp(
    Route::Completions,
    "adaptive_decay adaptive_target backend_sampling cache_prompt chat_format chat_parser dry_allowed_length dry_base dry_multiplier dry_penalty_last_n dry_sequence_breakers dynatemp_exponent dynatemp_range echo generation_prompt grammar grammar_lazy grammar_triggers grammar_type id_slot ignore_eos json_schema logit_bias lora max_completion_tokens min_keep min_p mirostat mirostat_eta mirostat_tau n_cache_reuse n_cmpl n_discard n_indent n_keep n_predict n_probs parse_tool_calls post_sampling_probs preserved_tokens reasoning_budget_end_tag reasoning_budget_end_tags reasoning_budget_message reasoning_budget_start_tag reasoning_budget_tokens reasoning_control reasoning_format repeat_last_n repeat_penalty response_fields return_progress return_tokens samplers seed sse_ping_interval t_max_predict_ms timings_per_token top_n_sigma typical_p verbose xtc_probability xtc_threshold"
)]
fn no_field_of_a_schema_is_missing(#[case] route: Route, #[case] names: &str) {
    for name in names.split(' ') {
        assert!(find(route, name).is_some(), "{name} on {}", route.name());
    }
}

#[rstest]
#[case::not_json("{", R::Body, None)]
#[case::not_utf8_text("\"x\"", R::Body, None)]
#[case::a_list("[]", R::Body, None)]
#[case::a_key_twice(r#"{"model":"m","prompt":"x","n":1,"n":1}"#, R::Body, None)]
#[case::no_model(r#"{"prompt":"x"}"#, R::Body, Some("model"))]
#[case::no_prompt(r#"{"model":"m"}"#, R::Body, Some("prompt"))]
#[case::unknown(
    r#"{"model":"m","prompt":"x","presence_penality":1}"#,
    R::UnknownParameter,
    Some("presence_penality")
)]
#[case::unknown_member(
    r#"{"model":"m","prompt":"x","stream":true,"stream_options":{"x":1}}"#,
    R::UnknownParameter,
    Some("stream_options.x")
)]
#[case::chat_only(r#"{"model":"m","prompt":"x","prediction":{}}"#, R::UnknownParameter, Some("prediction"))]
#[case::empty_prompt(r#"{"model":"m","prompt":""}"#, R::Parameter, Some("prompt"))]
#[case::two_texts(r#"{"model":"m","prompt":["a","b"]}"#, R::Choices, Some("prompt"))]
#[case::two_id_prompts(r#"{"model":"m","prompt":[[1],[2]]}"#, R::Choices, Some("prompt"))]
#[case::mixed_prompt(r#"{"model":"m","prompt":[1,"a"]}"#, R::Body, Some("prompt"))]
#[case::id_too_large(r#"{"model":"m","prompt":[4294967296]}"#, R::Body, Some("prompt"))]
#[case::float_id(r#"{"model":"m","prompt":[1.5]}"#, R::Body, Some("prompt"))]
#[case::several(r#"{"model":"m","prompt":"x","n":2}"#, R::Choices, Some("n"))]
#[case::best_of_several(r#"{"model":"m","prompt":"x","best_of":3}"#, R::Choices, Some("best_of"))]
#[case::options_without_stream(
    r#"{"model":"m","prompt":"x","stream_options":{"include_usage":true}}"#,
    R::Parameter,
    Some("stream_options")
)]
#[case::bias_of_text(
    r#"{"model":"m","prompt":"x","logit_bias":{"the":1}}"#,
    R::Parameter,
    Some("logit_bias")
)]
#[case::bias_spelt_oddly(
    r#"{"model":"m","prompt":"x","logit_bias":{"01":1}}"#,
    R::Parameter,
    Some("logit_bias")
)]
#[case::grammar(r#"{"model":"m","prompt":"x","grammar":"root ::= \"a\""}"#, R::Structured, Some("grammar"))]
#[case::first_in_the_body(
    r#"{"model":"m","regex":"a","echo":true,"prompt":"x"}"#,
    R::Structured,
    Some("regex")
)]
fn an_ineligible_completion_has_a_reason(
    #[case] body: &str,
    #[case] reason: R,
    #[case] parameter: Option<&str>,
) {
    assert_eq!(result(Route::Completions, body).map(|_| ()), Err((reason, parameter.map(str::to_owned))));
}

#[rstest]
#[case::none(json!([]), R::Body)]
#[case::no_role(json!([{"content": "x"}]), R::Body)]
#[case::no_content(json!([{"role": "assistant", "content": null}]), R::Body)]
#[case::odd_role(json!([{"role": "critic", "content": "x"}]), R::Parameter)]
#[case::old_call(json!([{"role": "assistant", "content": "x", "function_call": {}}]), R::Tools)]
#[case::image(json!([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]), R::Multimodal)]
#[case::sound(json!([{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "input_audio"}]}]), R::Multimodal)]
#[case::thought_part(json!([{"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}]}]), R::Reasoning)]
#[case::prefill(json!([{"role": "assistant", "content": "x", "prefix": true}]), R::Parameter)]
#[case::unknown_key(json!([{"role": "user", "content": "x", "mood": "good"}]), R::UnknownParameter)]
#[case::unknown_part(json!([{"role": "user", "content": [{"type": "hologram"}]}]), R::UnknownParameter)]
#[case::marked_part(json!([{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]}]), R::UnknownParameter)]
fn ineligible_messages_have_a_reason(#[case] messages: Value, #[case] reason: R) {
    let body = with(Route::Chat, "messages", &messages);
    assert_eq!(result(Route::Chat, &body).map(|_| ()), Err((reason, Some("messages".to_owned()))));
}

/// Speculated on only where the engine tells the prompt that it makes of them.
#[rstest]
#[case::result(json!([{"role": "user", "content": "x"}, {"role": "tool", "content": "x", "tool_call_id": "c"}]), Some(R::Tools))]
#[case::call(json!([{"role": "assistant", "content": null, "tool_calls": []}]), Some(R::Tools))]
#[case::thought(json!([{"role": "assistant", "content": "x", "reasoning_content": "hm"}]), Some(R::Reasoning))]
#[case::text(json!([{"role": "user", "content": "x"}]), None)]
fn rendered_messages_are_noted(#[case] messages: Value, #[case] reason: Option<R>) {
    let request = result(Route::Chat, &with(Route::Chat, "messages", &messages)).unwrap();
    let wanted: Vec<Refused> = reason.map(|reason| Refused::by(reason, "messages")).into_iter().collect();
    assert_eq!(request.rendered, wanted);
}

#[test]
fn a_full_completion_is_understood() {
    let body = json!({"model": "m", "prompt": [[1, 2, 3]], "max_tokens": 64, "temperature": 0.8, "top_p": 0.9,
        "top_k": 40, "min_p": 0.05, "presence_penalty": 0.1, "frequency_penalty": 0.2, "repetition_penalty": 1.1,
        "logit_bias": {"9": 1.5, "4": -100}, "seed": 7, "stop": "\n\n", "stop_token_ids": [5],
        "include_stop_str_in_output": true, "min_tokens": 2, "ignore_eos": true, "stream": true,
        "stream_options": {"include_usage": true}, "return_token_ids": true, "user": "u", "n": 1, "echo": false});
    let request = result(Route::Completions, &body.to_string()).unwrap();
    assert_eq!(request.prompt, Prompt::Ids(vec![1, 2, 3]));
    assert_eq!((request.model.as_str(), request.max_tokens), ("m", Some(64)));
    let sampling = &request.sampling;
    assert_eq!(
        (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p),
        (0.8, 0.9, Some(40), 0.05)
    );
    assert_eq!((sampling.presence_penalty, sampling.frequency_penalty), (0.1, 0.2));
    assert_eq!((sampling.repetition_penalty, sampling.seed, sampling.min_tokens), (1.1, Some(7), 2));
    assert_eq!(sampling.logit_bias, [(4, -100.0), (9, 1.5)]);
    assert!(sampling.ignore_eos && request.include_stop && request.stream);
    assert!(request.include_usage && request.return_token_ids);
    assert_eq!(
        (request.stop.as_slice(), request.stop_token_ids.as_slice()),
        (["\n\n".to_owned()].as_slice(), [5].as_slice())
    );
    assert_eq!(Value::Object(request.body.clone()), body);
    assert_eq!((request.prompt_size().tokens, request.prompt_size().exact), (3, true));
}

#[test]
fn a_chat_is_understood_and_the_newer_limit_wins_in_any_order() {
    for limits in
        [r#""max_tokens":5,"max_completion_tokens":9"#, r#""max_completion_tokens":9,"max_tokens":5"#]
    {
        let body = format!(
            r#"{{"model":"m","messages":[{{"role":"system","content":[{{"type":"text","text":"abcd"}}]}},{{"role":"user","name":"u","content":"é"}}],{limits},"prediction":{{"type":"content","content":[{{"type":"text","text":"a"}},{{"type":"text","text":"b"}}]}},"tool_choice":"none","logprobs":false}}"#
        );
        let request = result(Route::Chat, &body).unwrap();
        assert_eq!(request.max_tokens, Some(9));
        assert_eq!(request.prediction.as_deref(), Some("ab"));
        assert!(
            matches!(&request.prompt, Prompt::Messages(messages) if messages.as_array().unwrap().len() == 2)
        );
        // Six bytes of text: two tokens by the estimate.
        assert_eq!((request.prompt_size().tokens, request.prompt_size().exact), (2, false));
    }
}

#[test]
fn one_text_in_a_list_is_one_text() {
    let request = result(Route::Completions, r#"{"model":"m","prompt":["x"]}"#).unwrap();
    assert_eq!(request.prompt, Prompt::Text("x".to_owned()));
}

#[test]
fn explaining_lists_every_parameter_and_not_only_the_first() {
    let body = br#"{"model":"m","regex":"a","prompt":"x","bogus":1,"echo":null}"#;
    let (_, findings) = understand(Route::Completions, body).unwrap();
    let told: Vec<_> = findings.iter().map(|f| (f.parameter.as_str(), f.row.is_some(), f.refused)).collect();
    assert_eq!(
        told,
        [
            ("model", true, None),
            ("regex", true, Some(R::Structured)),
            ("prompt", true, None),
            ("bogus", false, Some(R::UnknownParameter)),
        ]
    );
}

#[test]
fn every_reason_has_a_name_of_its_own() {
    let names: std::collections::BTreeSet<&str> = R::ALL.iter().map(|reason| reason.name()).collect();
    let expected = "off client policy no_policy route body encoded parameter unknown_parameter defaults_unknown \
        structured tools reasoning multimodal choices seed tokenizer no_verify_method unreachable several_engines unreadable_answers billed inject sessions memory fault";
    assert_eq!(names, expected.split_whitespace().collect());
    assert!(R::ALL.iter().all(|reason| !reason.words().is_empty()));
}
