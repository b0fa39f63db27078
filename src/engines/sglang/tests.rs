use super::super::recognise::{Reply, dialect_of};
use super::*;
use crate::{SpecialTokens, first_token};
use foretell_core::draft::{Features, Source, Tree};
use foretell_wire::openai::{Judgement, SetFields, judge};

fn engine() -> Engine {
    Engine {
        methods: vec![VerifyMethod::Score, VerifyMethod::FanOut],
        noise: Noise::Ignored,
        tokens: SpecialTokens { eos: Vec::new(), special: vec![0], may_end: vec![0] },
        ..Engine::new(Dialect::Sglang, "m", "0.5.23")
    }
}

fn read(kind: RequestKind, event: &Value) -> Result<Chunk, Unreadable> {
    Sglang.chunk(kind, &Event::of(event.to_string()).unwrap())
}

fn chain(tokens: &[TokenId]) -> Tree {
    Tree::chain(tokens, Source::Model, Features::default())
}

fn greedy() -> Sampling {
    Sampling {
        temperature: 0.0,
        set_by_client: SetFields::default().with(F::Temperature),
        ..Sampling::default()
    }
}

fn round<'a>(draft: &'a Tree, sampling: &'a Sampling, method: VerifyMethod) -> Round<'a> {
    let context = Context::new("m", &[1, 2], &[3]);
    Round { context, draft, sampling, method, weighs: false }
}

fn body(draft: &[TokenId], sampling: &Sampling, method: VerifyMethod) -> (&'static str, String) {
    let draft = chain(draft);
    let mut asked = Sglang.verify(&engine(), &round(&draft, sampling, method)).unwrap();
    let call = asked.calls.remove(0);
    (call.path, String::from_utf8(call.body).unwrap())
}

fn request(route: Route, body: &Value) -> Request {
    match judge(route, body.to_string().as_bytes()) {
        Judgement::Eligible(request) => *request,
        Judgement::Passthrough { reason, .. } => panic!("{}", reason.name()),
    }
}

fn chat(fields: &Value) -> Request {
    let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "x"}]});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    request(Route::Chat, &body)
}

fn answers(info: &Value) -> Answers {
    let mut answers = Answers::default();
    let models = json!({"data": [{"id": "m", "owned_by": "sglang", "max_model_len": 4096}]});
    for (path, body) in [(MODELS, &models), (SERVER_INFO, info)] {
        answers.add(path, Reply { status: 200, server: None, body: body.to_string().into_bytes() });
    }
    answers
}

#[test]
fn a_server_is_recognised_by_its_server_info() {
    let info = json!({"version": "0.5.23", "page_size": 64, "enable_deterministic_inference": true,
        "speculative_algorithm": "EAGLE", "sampling_defaults": "openai", "preferred_sampling_params": null});
    let answers = answers(&info);
    assert_eq!(dialect_of(&answers), Some(Dialect::Sglang));
    let engine = Sglang.engine(&answers).unwrap();
    assert_eq!((engine.cache.block, engine.noise, engine.speculates), (64, Noise::Position, true));
    assert_eq!((engine.context, engine.defaults.sampling), (Some(4096), Some(Defaults::OPENAI)));
    assert_eq!(Sglang.questions(&answers).len(), 3);
}

#[test]
fn without_the_cache_or_with_unknown_defaults_nothing_is_promised() {
    let off = Sglang.engine(&answers(&json!({"version": "0.5.23", "disable_radix_cache": true}))).unwrap();
    assert!(off.methods.is_empty());
    let methods =
        |version: &str| Sglang.engine(&answers(&json!({ "version": version }))).unwrap().methods.len();
    assert_eq!(["0.5.17", "0.5.18", "0.5.18.post1", "0.6.0", "dev"].map(methods), [0, 2, 2, 2, 0]);
    let preferred = json!({"version": "0.5.23", "sampling_defaults": "openai",
        "preferred_sampling_params": {"top_p": 0.9}});
    let preferred = Sglang.engine(&answers(&preferred)).unwrap();
    assert_eq!((preferred.defaults.sampling, preferred.defaults.preferred), (None, true));
}

#[test]
fn a_fan_out_leaves_open_what_the_client_left_open() {
    let (path, text) = body(&[4, 5], &Sampling::default(), VerifyMethod::FanOut);
    assert_eq!(path, "/v1/completions");
    assert_eq!(
        text,
        r#"{"model":"m","prompt":[[1,2,3],[1,2,3,4],[1,2,3,4,5]],"max_tokens":1,"stream":false,"return_token_ids":true}"#
    );
}

#[test]
fn a_score_begins_at_the_last_token_of_the_context() {
    let (path, text) = body(&[4, 5, 0, 6], &greedy(), VerifyMethod::Score);
    assert_eq!(path, "/generate");
    assert_eq!(
        text,
        r#"{"input_ids":[1,2,3,4,5],"sampling_params":{"max_new_tokens":1,"temperature":0.0,"top_p":1.0,"top_k":-1,"min_p":0.0,"frequency_penalty":0.0,"presence_penalty":0.0,"repetition_penalty":1.0,"ignore_eos":false},"stream":false,"return_logprob":true,"logprob_start_len":2,"top_logprobs_num":2,"return_text_in_logprobs":false}"#
    );
    assert!(!body(&[], &greedy(), VerifyMethod::Score).1.contains("logprob"));
}

#[test]
fn a_plain_request_continues_by_ids() {
    let context = Context::new("m", &[1, 2], &[3]);
    let call = Sglang.plain_request(&engine(), &context, &greedy(), 7);
    assert_eq!(
        std::str::from_utf8(&call.body).unwrap(),
        r#"{"model":"m","prompt":[[1,2,3]],"max_tokens":7,"stream":true,"temperature":0.0,"return_token_ids":true}"#
    );
}

#[test]
fn the_first_entry_is_skipped_and_missing_rows_stay_undecided() {
    let rows = |listed: &Value| {
        let body = json!({"text": "x", "output_ids": [9], "meta_info": {"id": "r", "prompt_tokens": 5, "cached_tokens": 2,
            "finish_reason": {"type": "stop", "matched": 9}, "input_top_logprobs": listed}});
        let (draft, sampling) = (chain(&[4, 5]), greedy());
        let round = round(&draft, &sampling, VerifyMethod::Score);
        score_result(&engine(), &round, 2, body.to_string().as_bytes()).unwrap()
    };
    let row = |first: u32, second: u32| json!([[-0.1, first, null], [-3.0, second, null]]);
    let result = rows(&json!([null, row(4, 7), row(6, 5)]));
    assert_eq!(result.computed, Some(3));
    assert_eq!(
        result.rows,
        [Row::of(4), Row::of(6), Row { ends: true, text: Some("x".into()), ..Row::of(9) }]
    );
    assert!(rows(&json!([null, row(4, 7)])).rows.is_empty());
    assert_eq!(rows(&json!([null, row(4, 7), [[-0.7, 5, null], [-0.7, 6, null]]])).rows, [Row::of(4)]);
    assert_eq!(rows(&json!([null, row(4, 7), row(0, 5)])).rows, [Row::of(4)], "the end is not decided here");
}

#[test]
fn a_chat_is_speculated_on_only_if_it_sets_all_that_the_model_may_set() {
    let methods = |engine: &Engine, fields: Value| {
        let request = chat(&fields);
        let (sampling, settled) = engine.sampling(&request);
        engine.methods_for(&request, &sampling, settled).map_err(|refused| refused.parameter.unwrap())
    };
    let may_be_the_models = Err("repetition_penalty");
    assert_eq!(methods(&engine(), json!({"temperature": 0})), may_be_the_models);
    let greedy = json!({"temperature": 0, "repetition_penalty": 1});
    assert_eq!(methods(&engine(), greedy), Ok(vec![VerifyMethod::Score, VerifyMethod::FanOut]));
    let open = json!({"temperature": 0.8, "repetition_penalty": 1, "top_p": 0.9});
    assert_eq!(methods(&engine(), open), Err("top_k"));
    let full = json!({"temperature": 0.8, "repetition_penalty": 1, "top_p": 0.9, "top_k": -1, "min_p": 0.0});
    assert_eq!(methods(&engine(), full), Ok(vec![VerifyMethod::FanOut]));
    let defaults = ServerDefaults { sampling: Some(Defaults::OPENAI), ..ServerDefaults::default() };
    let openai = Engine { defaults, ..engine() };
    assert_eq!(
        methods(&openai, json!({"temperature": 0})),
        Ok(vec![VerifyMethod::Score, VerifyMethod::FanOut])
    );
}

/// `/generate` would answer with the base model.
#[test]
fn an_adapter_is_verified_by_its_own_route_only() {
    let methods = |model: &str| {
        let body = json!({"model": model, "prompt": "x", "temperature": 0});
        let request = request(Route::Completions, &body);
        Sglang.methods(&engine(), &request, &greedy(), true).unwrap()
    };
    assert_eq!(methods("m"), [VerifyMethod::Score, VerifyMethod::FanOut]);
    assert_eq!(methods("m:adapter"), [VerifyMethod::FanOut]);
}

#[test]
fn parameters_that_count_output_or_crash_the_server_are_refused() {
    let refused = |engine: &Engine, fields: Value| {
        let request = chat(&fields);
        let (sampling, settled) = engine.sampling(&request);
        let refused = engine.methods_for(&request, &sampling, settled).err();
        refused.map(|refused| (refused.reason, refused.parameter.unwrap()))
    };
    let parameter = |name: &'static str| Some((PassthroughReason::Parameter, name));
    let position = Engine { noise: Noise::Position, ..engine() };
    for (name, value) in [
        ("repetition_penalty", json!(1.1)),
        ("presence_penalty", json!(0.1)),
        ("frequency_penalty", json!(-0.1)),
        ("min_tokens", json!(3)),
        ("include_stop_str_in_output", json!(true)),
        ("return_token_ids", json!(true)),
    ] {
        assert_eq!(refused(&engine(), json!({ name: value })), parameter(name), "{name}");
    }
    assert_eq!(refused(&position, json!({"min_p": 0.1})), parameter("min_p"));
    let deaf = json!({"stop_token_ids": [4], "ignore_eos": true});
    assert_eq!(refused(&engine(), deaf), parameter("stop_token_ids"));
    let own = json!({"min_p": 0.1, "seed": 5, "repetition_penalty": 1});
    let open = Some((PassthroughReason::DefaultsUnknown, "temperature"));
    assert_eq!(
        refused(&engine(), own),
        open,
        "nothing that the server lacks, but its defaults are not known"
    );
}

#[test]
fn both_names_of_the_ids_are_read() {
    let event = |name: &str| {
        let mut event = json!({"choices": [{"index": 0, "delta": {"content": "a", "reasoning_content": null},
            "finish_reason": null}]});
        event["choices"][0][name] = json!([7]);
        read(RequestKind::First, &event).unwrap()
    };
    for name in ["token_ids", "response_token_ids"] {
        assert_eq!((event(name).tokens, event(name).doubtful), (vec![7], false), "{name}");
    }
    assert!(event("other").doubtful);
}

#[test]
fn loads_are_read_from_either_page() {
    let json = r#"{"loads":[{"dp_rank":0,"num_running_reqs":2,"num_waiting_reqs":1,"token_usage":0.25},
        {"dp_rank":1,"num_running_reqs":1,"num_waiting_reqs":0,"token_usage":0.5}]}"#;
    let expected = Load { running: 3, waiting: 1, kv_usage: Some(0.5), ..Load::default() };
    assert_eq!(Sglang.load(json), Some(expected));
    let page = "sglang:num_running_reqs{x=\"1\"} 3.0\nsglang:num_queue_reqs{x=\"1\"} 1.0\nsglang:token_usage{x=\"1\"} 0.5\n";
    assert_eq!(Sglang.load(page), Some(expected));
    let ranks = "sglang:num_running_reqs{r=\"0\"} 3\nsglang:num_queue_reqs{r=\"0\"} 1\n\
        sglang:token_usage{r=\"0\"} 0.5\nsglang:token_usage{r=\"1\"} 0.25\n";
    assert_eq!(Sglang.load(ranks), Some(expected), "the fullest rank, not the sum");
    let full = r#"{"loads":[{"num_reqs":4294967295,"num_queue_reqs":0},{"num_reqs":9,"num_queue_reqs":0}]}"#;
    assert_eq!(Sglang.load(full), Some(Load { running: u32::MAX, ..Load::default() }));
}

/// A server of which everything is told, but for these members of its two pages.
fn told(server: &Value, model: &Value) -> Engine {
    let mut info = json!({"version": "0.5.23", "chat_template": null});
    info.as_object_mut().unwrap().extend(server.as_object().unwrap().clone());
    let mut page = json!({"model_path": "m", "model_type": "llama", "reasoning_parser": null, "tool_call_parser": null,
        "has_image_understanding": false, "has_audio_understanding": false});
    page.as_object_mut().unwrap().extend(model.as_object().unwrap().clone());
    let mut answers = answers(&info);
    answers.add(MODEL_INFO, Reply { status: 200, server: None, body: page.to_string().into_bytes() });
    Sglang.engine(&answers).unwrap()
}

#[test]
fn a_first_token_is_asked_for_where_nothing_is_made_of_the_text() {
    let none = json!({});
    let plain = chat(&json!({}));
    let tells = |engine: &Engine, request: &Request| engine.reports_first_token(request);
    assert!(tells(&told(&none, &none), &plain));
    assert!(tells(
        &told(&json!({"chat_template": "/models/chat.jinja"}), &json!({"tool_call_parser": "qwen25"})),
        &plain
    ));
    assert!(!tells(&told(&json!({"chat_template": "chatml"}), &none), &plain));
    for other in [
        json!({"reasoning_parser": "qwen3"}),
        json!({"tool_call_parser": "minimax-m3"}),
        json!({"model_path": "lmsys/Vicuna-7b"}),
        json!({"has_image_understanding": true}),
        json!({"has_audio_understanding": null}),
        json!({"model_type": "gpt_oss"}),
        json!({"model_type": null}),
    ] {
        assert!(!tells(&told(&none, &other), &plain), "{other}");
    }
    let silent = answers(&json!({"version": "0.5.23"}));
    assert!(!tells(&Sglang.engine(&silent).unwrap(), &plain), "it does not say that it has no parser");
    let engine = told(&none, &none);
    let tools =
        chat(&json!({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}));
    let counted = chat(&json!({"stream": true, "stream_options": {"continuous_usage_stats": true}}));
    assert!(!tells(&engine, &tools) && !tells(&engine, &counted));
    assert!(!tells(&engine, &request(Route::Completions, &json!({"model": "m", "prompt": "x"}))));
    let asked =
        chat(&json!({"stream": true, "stream_options": {"include_usage": true}, "max_completion_tokens": 9}));
    let call = first_token::request(&asked);
    assert_eq!(
        String::from_utf8(call.body).unwrap(),
        r#"{"model":"m","messages":[{"role":"user","content":"x"}],"stream":false,"max_tokens":1,"return_token_ids":true,"return_prompt_token_ids":true}"#
    );
}

/// An answer of one token, with this value at this place.
fn one_token(pointer: &str, value: &Value) -> Value {
    let mut answer = json!({"id": "c", "object": "chat.completion", "created": 7, "model": "m", "choices": [{"index": 0,
        "message": {"role": "assistant", "content": "Hi", "reasoning_content": null}, "logprobs": null,
        "finish_reason": "length", "matched_stop": null, "prompt_token_ids": [1, 2], "response_token_ids": [3]}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 1}, "metadata": {"weight_version": "default"}});
    let at = pointer.rfind('/').unwrap();
    answer.pointer_mut(&pointer[..at]).unwrap()[&pointer[at + 1..]] = value.clone();
    answer
}

#[test]
fn a_first_token_with_anything_but_its_text_is_not_read() {
    let first = first_token::read(&one_token("/id", &json!("c"))).unwrap().unwrap();
    let chunk = read(RequestKind::Later, &first.event).unwrap();
    assert_eq!((chunk.tokens, chunk.prompt, chunk.text.as_str()), (vec![3], None, "Hi"));
    assert_eq!((chunk.finish, chunk.more.is_empty(), chunk.doubtful), (None, true, false));
    assert_eq!((first.prompt, first.token, first.text.as_deref()), (vec![1, 2], 3, Some("Hi")));
    assert_eq!(first.usage["usage"]["prompt_tokens"], 2);
    for (pointer, value) in [
        ("/choices/0/message/reasoning_content", json!("Hm")),
        ("/choices/0/message/tool_calls", json!([])),
        ("/choices/0/response_token_ids", json!([3, 4])),
        ("/choices/0/response_token_ids", json!(null)),
        ("/choices/0/prompt_token_ids", json!(null)),
        ("/choices/0/prompt_token_ids", json!([1])),
        ("/sglext", json!({"input_ids": [1, 2]})),
    ] {
        assert!(first_token::read(&one_token(pointer, &value)).is_err(), "{pointer} = {value}");
    }
    let aborted = one_token("/choices/0/finish_reason", &json!("abort"));
    assert_eq!(first_token::read(&aborted), Ok(None));
}

/// The token that ends a text is told; a stop text is left to whoever goes on, and its token has
/// lost the text.
#[test]
fn a_first_token_may_be_the_last() {
    let ended = |stop: Value| {
        let mut answer = one_token("/choices/0/finish_reason", &json!("stop"));
        answer["choices"][0]["matched_stop"] = stop;
        let first = first_token::read(&answer).unwrap().unwrap();
        (first.event["choices"][0]["finish_reason"].clone(), first.text.is_some())
    };
    assert_eq!(ended(json!(0)), (json!("stop"), true));
    assert_eq!(ended(json!("Hi")), (Value::Null, false));
}

#[test]
fn figures_of_the_load_are_as_old_as_the_scheduler_says() {
    let load = |top: &str, ranks: &[f64]| {
        let ranks: Vec<Value> = ranks
            .iter()
            .map(|at| json!({"timestamp": at, "dp_rank": 0, "num_running_reqs": 1, "num_waiting_reqs": 0}))
            .collect();
        Sglang.load(&json!({"timestamp": top, "version": "0.5.23", "loads": ranks}).to_string()).unwrap()
    };
    let now = 1_795_967_281.0;
    let age = |top: &str, ranks: &[f64]| load(top, ranks).age.as_secs_f64();
    assert!((age("2026-11-29T15:48:01+00:00", &[now - 2.5]) - 2.5).abs() < 1e-3);
    assert!((age("2026-11-29T15:48:01.500000+00:00", &[now]) - 0.5).abs() < 1e-3);
    assert!((age("2026-11-29T15:48:01+00:00", &[now - 1.0, now - 3.0]) - 3.0).abs() < 1e-3, "the oldest");
    for (top, rank) in [("2026-11-29T15:48:01+00:00", now + 0.9), ("not a time", now - 9.0)] {
        assert_eq!(load(top, &[rank]).age, Duration::ZERO);
    }
    assert_eq!(load("2026-11-29T15:48:01+00:00", &[-1e300]).age, Duration::MAX, "never fresh");
}

#[test]
fn a_process_is_named_by_what_it_drew_and_measured_at_its_start() {
    let process = |info: Value| {
        let mut all = json!({"version": "0.5.23"});
        all.as_object_mut().unwrap().extend(info.as_object().unwrap().clone());
        Sglang.engine(&answers(&all)).unwrap().process.drawn
    };
    let one = process(json!({"random_seed": 7, "startup_time": {"load": 1.5}}));
    assert!(one.is_some());
    assert_eq!(process(json!({"startup_time": {"load": 1.5}, "random_seed": 7})), one);
    assert_ne!(process(json!({"random_seed": 8, "startup_time": {"load": 1.5}})), one);
    assert_ne!(process(json!({"random_seed": 7, "startup_time": {"load": 1.25}})), one);
    for alike in
        [json!({"random_seed": 7}), json!({"random_seed": 7, "startup_time": {"load": 1}}), json!({})]
    {
        assert_eq!(process(alike), None, "the operator may have chosen the seed");
    }
}

#[test]
fn a_known_server_is_checked_by_pages_that_do_not_wait_for_its_scheduler() {
    let mut all = answers(&json!({"version": "0.5.23", "weight_version": "a"}));
    let weights = |all: &Answers| Sglang.engine(all).unwrap().process.weights;
    assert_eq!(weights(&all).as_deref(), Some("a"));
    let page = json!({"weight_version": "b"}).to_string().into_bytes();
    all.add(MODEL_INFO, Reply { status: 200, server: None, body: page });
    assert_eq!(weights(&all).as_deref(), Some("b"), "new weights show without /server_info");
    let pages = super::super::recognise::check_of(Dialect::Sglang, &all, None);
    assert_eq!(pages.iter().map(|page| &*page.path).collect::<Vec<_>>(), [MODELS, MODEL_INFO]);
}

#[test]
fn a_method_is_missing_for_its_own_reason() {
    let old = answers(&json!({"version": "0.5.17"}));
    let off = answers(&json!({"version": "0.5.23", "disable_radix_cache": true}));
    for all in [&old, &off] {
        assert_eq!(Sglang.missing(all, VerifyMethod::Tree), "SGLang has no such endpoint");
    }
    assert!(Sglang.missing(&old, VerifyMethod::Score).contains("where a text ends"));
    assert!(Sglang.missing(&off, VerifyMethod::FanOut).contains("prefix cache"));
}

#[test]
fn a_whole_answer_names_the_weights_of_all_its_tokens() {
    let weights = Some("default".to_owned());
    let whole = |version: &str| {
        let process = ProcessMarks { weights: weights.clone(), ..ProcessMarks::default() };
        let engine = Engine { process, version: version.to_owned(), ..engine() };
        let mut answer = json!({"usage": {"completion_tokens": 8}});
        Sglang.complete(&engine, Route::Completions, &mut answer);
        answer
    };
    let metadata = json!({"weight_version": "default",
        "weight_versions": [{"version": "default", "start": 0, "end": 8}]});
    let usage =
        json!({"completion_tokens": 8, "prompt_tokens_details": null, "completion_tokens_details": null});
    assert_eq!(whole("0.5.23"), json!({"usage": usage, "metadata": metadata}));
    assert_eq!(whole("0.5.22")["metadata"], json!({"weight_version": "default"}));
}
