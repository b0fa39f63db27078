use super::super::recognise::{MODELS, Reply, dialect_of};
use super::*;
use foretell_core::draft::{Features, Source, Tree};
use foretell_wire::openai::{Judgement, SamplingField as F, SetFields, judge};

fn engine() -> Engine {
    Engine {
        methods: vec![VerifyMethod::FanOut],
        slots: Some(4),
        context: Some(2048),
        ..Engine::new(Dialect::LlamaCpp, "m", "b1-0c1e570")
    }
}

fn props(slots: usize, change: &Value) -> Value {
    let mut params = json!({"seed": 4_294_967_295_u32, "temperature": 0.800_000_011_920_929, "top_k": 40,
        "top_p": 0.949_999_988_079_071, "min_p": 0.050_000_000_745_058_06, "repeat_last_n": 64, "repeat_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "mirostat": 0, "adaptive_target": -1.0,
        "n_predict": -1, "speculative.types": "none"});
    params.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
    json!({"default_generation_settings": {"params": params, "n_ctx": 2048}, "total_slots": slots,
        "build_info": "b1-0c1e570"})
}

fn known(slots: usize, change: &Value) -> Engine {
    let mut answers = Answers::default();
    let models = json!({"data": [{"id": "m", "owned_by": "llamacpp"}]});
    let slots_page = json!([{"id": 0, "is_processing": false, "speculative": false}]);
    for (path, body) in [(MODELS, models), (PROPS, props(slots, change)), (SLOTS, slots_page)] {
        answers.add(path, Reply { status: 200, server: None, body: body.to_string().into_bytes() });
    }
    answers.add(METRICS, Reply { status: 501, server: None, body: Vec::new() });
    assert_eq!(dialect_of(&answers), Some(Dialect::LlamaCpp));
    LlamaCpp.engine(&answers).unwrap()
}

fn read(kind: RequestKind, event: &Value) -> Result<Chunk, Unreadable> {
    LlamaCpp.chunk(kind, &Event::of(event.to_string()).unwrap())
}

fn chain(tokens: &[TokenId]) -> Tree {
    Tree::chain(tokens, Source::Model, Features::default())
}

fn request(route: Route, fields: &Value) -> Request {
    let mut body = match route {
        Route::Completions => json!({"model": "m", "prompt": "x"}),
        Route::Chat => json!({"model": "m", "messages": [{"role": "user", "content": "x"}]}),
    };
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    match judge(route, body.to_string().as_bytes()) {
        Judgement::Eligible(request) => *request,
        Judgement::Passthrough { reason, .. } => panic!("{}", reason.name()),
    }
}

fn round<'a>(context: Context<'a>, draft: &'a Tree, sampling: &'a Sampling) -> Round<'a> {
    Round { context, draft, sampling, method: VerifyMethod::FanOut, weighs: false }
}

const CONTEXT: Context<'_> = Context::new("m", &[1, 2], &[3]);

#[test]
fn a_server_is_known_by_its_props() {
    let engine = known(9, &json!({}));
    assert_eq!((engine.context, engine.slots, engine.defaults.seeded), (Some(2048), Some(9), false));
    assert_eq!(
        (engine.methods.as_slice(), engine.pages.load),
        ([VerifyMethod::FanOut].as_slice(), Some(SLOTS))
    );
    let defaults = engine.defaults.sampling.unwrap();
    assert_eq!((defaults.top_k, defaults.repetition_penalty), (Some(40), 1.0));
    assert!((defaults.temperature - 0.8).abs() < 1e-6);
    let chat = request(Route::Chat, &json!({}));
    assert_eq!(known(9, &json!({})).limit(&chat), MaxTokens::Context);
    assert_eq!(known(9, &json!({"n_predict": 99})).limit(&chat), MaxTokens::Tokens(99));
}

#[test]
fn one_slot_or_a_stateful_sampler_has_no_method_and_a_fixed_seed_is_a_seed() {
    assert!(known(1, &json!({})).methods.is_empty());
    assert!(known(9, &json!({"mirostat": 2})).methods.is_empty());
    assert!(known(9, &json!({"adaptive_target": 0.3})).methods.is_empty());
    assert!(known(9, &json!({"speculative.types": "ngram-simple"})).speculates);
    let fixed = known(9, &json!({"seed": 42}));
    let open = request(Route::Chat, &json!({}));
    let refused = |engine: &Engine, request: &Request| {
        let (sampling, settled) = engine.sampling(request);
        engine.methods_for(request, &sampling, settled).err().map(|refused| refused.reason)
    };
    assert_eq!(refused(&fixed, &open), Some(PassthroughReason::Seed));
    assert_eq!(refused(&fixed, &request(Route::Chat, &json!({"temperature": 0}))), None);
    assert_eq!(refused(&known(9, &json!({})), &open), None);
}

#[test]
fn parameters_that_the_server_ignores_are_refused() {
    let by = |name: &str| {
        let row = foretell_wire::openai::parameters::find(Route::Completions, name).unwrap();
        Refused::by(PassthroughReason::Parameter, row.name)
    };
    for fields in [
        json!({"repetition_penalty": 1.1}),
        json!({"min_tokens": 2}),
        json!({"stop_token_ids": [5]}),
        json!({"include_stop_str_in_output": true}),
    ] {
        let request = request(Route::Completions, &fields);
        let (sampling, _) = known(9, &json!({})).sampling(&request);
        assert_eq!(
            refused(&engine(), &request, &sampling),
            fields.as_object().unwrap().keys().next().map(|name| by(name)),
            "{fields}"
        );
    }
    for (route, wanted) in [(Route::Completions, None), (Route::Chat, Some(by("n_probs")))] {
        let request = request(route, &json!({"n_probs": 0.0}));
        assert_eq!(refused(&engine(), &request, &request.sampling), wanted, "it is replaced in chats");
    }
    let house = known(9, &json!({"repeat_penalty": 1.05}));
    let request = request(Route::Completions, &json!({"presence_penalty": 0.5, "repetition_penalty": 1.0}));
    let (sampling, _) = house.sampling(&request);
    assert_eq!(refused(&house, &request, &sampling), None);
}

/// Later requests lack the field, so they would have the operator's sampler again.
#[test]
fn a_client_that_switches_the_operators_sampler_off_is_not_speculated_on() {
    let refused = |house: &Value, fields: &Value| {
        let (engine, request) = (known(9, house), request(Route::Completions, fields));
        let (sampling, settled) = engine.sampling(&request);
        engine.methods_for(&request, &sampling, settled).err().and_then(|refused| refused.parameter)
    };
    for (name, on, off) in [
        ("repeat_penalty", 1.1, 1.0),
        ("dry_multiplier", 0.8, 0.0),
        ("xtc_probability", 0.5, 0.0),
        ("typical_p", 0.9, 1.0),
        ("top_n_sigma", 1.0, -1.0),
        ("dynatemp_range", 0.5, 0.0),
    ] {
        assert_eq!(refused(&json!({ name: on }), &json!({ name: off })), Some(name));
        assert_eq!(refused(&json!({ name: on }), &json!({})), None, "{name}: every call has it");
        assert_eq!(refused(&json!({ name: off }), &json!({ name: off })), None, "{name}: no call has it");
    }
}

#[test]
fn a_fan_out_is_an_array_of_prompts_with_the_fields_of_the_client() {
    let set_by_client = SetFields::default().with(F::Temperature);
    let sampling =
        Sampling { temperature: 0.5, logit_bias: vec![(7, -1.0)], set_by_client, ..Sampling::default() };
    let draft = chain(&[4, 5]);
    let asked = LlamaCpp.verify(&engine(), &round(CONTEXT, &draft, &sampling)).unwrap();
    assert_eq!((asked.calls[0].path, asked.nodes), ("/completion", 2));
    assert_eq!(
        std::str::from_utf8(&asked.calls[0].body).unwrap(),
        r#"{"prompt":[[1,2,3],[1,2,3,4],[1,2,3,4,5]],"n_predict":1,"cache_prompt":true,"return_tokens":true,"stream":false,"response_fields":["index","content","tokens","tokens_evaluated","stop_type","timings","generation_settings/stop"],"temperature":0.5,"logit_bias":{"7":-1.0}}"#
    );
}

#[test]
fn a_round_takes_no_more_slots_and_context_than_there_are() {
    let (sampling, draft) = (Sampling::default(), chain(&[4; 9]));
    let nodes = |prompt: &[TokenId]| {
        let context = Context { prompt, ..CONTEXT };
        LlamaCpp.verify(&engine(), &round(context, &draft, &sampling)).map(|asked| asked.nodes)
    };
    assert_eq!(nodes(&[1; 50]), Ok(3));
    assert_eq!(nodes(&[1; 900]), Ok(1));
    assert_eq!(nodes(&[1; 1100]), Err(Refusal::NoRoom(1101)));
}

#[test]
fn a_cold_context_is_computed_once_and_copied() {
    let (sampling, draft) = (Sampling::default(), chain(&[4, 5]));
    let prompt = [7; 64];
    let warm = |prompt: &[TokenId], draft: &Tree| {
        let context = Context::new("m", prompt, &[]);
        LlamaCpp.warm(&engine(), &round(context, draft, &sampling))
    };
    let call = warm(&prompt, &draft).unwrap();
    let body: Value = serde_json::from_slice(&call.body).unwrap();
    assert_eq!((&body["n_cmpl"], &body["n_predict"]), (&json!(3), &json!(1)));
    assert!(warm(&prompt[..9], &draft).is_none() && warm(&prompt, &Tree::default()).is_none());
}

#[test]
fn a_plain_request_is_answered_whole_and_ends_by_stop_type() {
    let call = LlamaCpp.plain_request(&engine(), &CONTEXT, &Sampling::default(), 8);
    assert_eq!(
        std::str::from_utf8(&call.body).unwrap(),
        r#"{"prompt":[1,2,3],"n_predict":8,"cache_prompt":true,"return_tokens":true,"stream":false,"response_fields":["index","content","tokens","tokens_evaluated","stop_type","timings","generation_settings/stop"]}"#
    );
    let read = |kind: &str| {
        let event = json!({"index": 0, "tokens": [7, 0], "stop_type": kind, "timings": {"prompt_n": 1}});
        read(RequestKind::Later, &event)
    };
    let chunk = |finish: &str, ends| Chunk {
        tokens: vec![7, 0],
        finish: Some(finish.into()),
        ends,
        ..Chunk::default()
    };
    assert_eq!(read("eos"), Ok(chunk("stop", true)));
    assert_eq!(read("limit"), Ok(chunk("length", false)));
    assert_eq!(read("word"), Ok(chunk("stop", true)), "a token that was read is not asked for again");
    assert!(read("none").is_err());
}

#[test]
fn a_result_is_read_in_the_order_of_its_prompts() {
    let answer = |index: usize, token: u32, kind: &str| json!({"index": index, "tokens": [token], "stop_type": kind, "timings": {"cache_n": 25, "prompt_n": 2}});
    let (sampling, draft) = (Sampling::default(), chain(&[4]));
    let read = |body: Value| {
        let asked = VerifyRequest { nodes: 1, ..VerifyRequest::default() };
        LlamaCpp.result(
            &engine(),
            &round(CONTEXT, &draft, &sampling),
            &asked,
            &[body.to_string().into_bytes()],
        )
    };
    let result = read(json!([answer(1, 0, "eos"), answer(0, 4, "limit")])).unwrap();
    assert_eq!(result.rows, [Row::of(4), Row { ends: true, ..Row::of(0) }]);
    assert_eq!(result.computed, Some(4));
    assert!(read(json!([answer(0, 4, "limit")])).is_err());
    let ended = read(json!([answer(0, 4, "limit"), answer(1, 7, "word")])).unwrap();
    assert_eq!(ended.rows, [Row::of(4), Row { ends: true, ..Row::of(7) }]);
}

#[test]
fn stop_texts_of_the_servers_own_are_refused_whatever_was_sampled() {
    let (sampling, draft) = (Sampling::default(), chain(&[4]));
    let read = |stop: Value, kind: &str| {
        let answer = |index: usize| json!({"index": index, "tokens": [4], "stop_type": kind, "generation_settings/stop": stop});
        let body = json!([answer(0), answer(1)]).to_string().into_bytes();
        let asked = VerifyRequest { nodes: 1, ..VerifyRequest::default() };
        LlamaCpp.result(&engine(), &round(CONTEXT, &draft, &sampling), &asked, &[body])
    };
    assert!(read(json!(["User:"]), "limit").is_err() && read(json!(["User:"]), "word").is_err());
    assert!(read(json!([]), "limit").is_ok());
}

#[test]
fn a_completion_brings_its_ids_in_the_native_object() {
    let event = json!({"choices": [{"text": " #", "index": 0, "logprobs": null, "finish_reason": null}],
        "__verbose": {"index": 0, "content": " #", "tokens": [358], "stop": false, "tokens_predicted": 1,
            "tokens_evaluated": 26}});
    let chunk = read(RequestKind::First, &event).unwrap();
    assert_eq!((chunk.tokens, chunk.count, chunk.prompt_count), (vec![358], Some(1), Some(26)));
    assert!(!chunk.doubtful && !chunk.pending);
    let end = json!({"choices": [{"text": "", "index": 0, "finish_reason": null}],
        "__verbose": {"tokens": [0], "tokens_predicted": 1, "tokens_evaluated": 2}});
    assert!(read(RequestKind::First, &end).unwrap().pending);
}

#[test]
fn a_chat_brings_its_ids_in_log_probabilities_and_is_counted() {
    let event = |ids: Value| {
        json!({"choices": [{"finish_reason": null, "index": 0, "delta": {"content": "Return"},
            "logprobs": {"content": ids}}], "timings": {"cache_n": 10, "prompt_n": 1, "predicted_n": 1}})
    };
    let told = event(json!([{"id": 1260, "token": "Return", "prob": 1.0}]));
    let chunk = read(RequestKind::First, &told).unwrap();
    assert_eq!((chunk.tokens, chunk.count, chunk.prompt_count), (vec![1260], Some(1), Some(11)));
    assert!(!chunk.doubtful);
    assert!(read(RequestKind::First, &event(json!([]))).unwrap().doubtful);
    let opening = json!({"choices": [{"finish_reason": null, "index": 0,
        "delta": {"role": "assistant", "content": null}}]});
    let chunk = read(RequestKind::First, &opening).unwrap();
    assert!(!chunk.doubtful && !chunk.pending && chunk.tokens.is_empty());
}

#[test]
fn additive_fields_are_taken_out_again() {
    let chat = request(Route::Chat, &json!({"temperature": 0}));
    let body: Value = serde_json::from_slice(&engine().first_request(&chat, 1).body).unwrap();
    assert_eq!((&body["logprobs"], &body["stream_options"]["include_usage"]), (&json!(true), &json!(true)));
    let mut event = json!({"choices": [{"index": 0, "delta": {}, "logprobs": {}}], "timings": {}, "id": "x"});
    foretell_wire::openai::answer::strip(&mut event, engine().additive(&chat));
    assert_eq!(event, json!({"choices": [{"index": 0, "delta": {}}], "id": "x"}));
}

#[test]
fn the_prompt_is_found_by_template_and_tokenizer() {
    let chat = request(Route::Chat, &json!({}));
    let PromptStep::Call(first) = LlamaCpp.prompt_step(&engine(), &chat, None).unwrap() else {
        panic!("a call")
    };
    assert_eq!(first.path, "/apply-template");
    let next = LlamaCpp.prompt_step(&engine(), &chat, Some(br#"{"prompt":"<|user|>x"}"#)).unwrap();
    let body = br#"{"content":"<|user|>x","add_special":true,"parse_special":true}"#.to_vec();
    assert_eq!(next, PromptStep::Call(Call { path: "/tokenize", body }));
    let ids = LlamaCpp.prompt_step(&engine(), &chat, Some(br#"{"tokens":[2,7]}"#)).unwrap();
    assert_eq!(ids, PromptStep::Prompt(vec![2, 7]));
    assert!(LlamaCpp.prompt_step(&engine(), &chat, Some(b"{}")).is_err());
}

#[test]
fn loads_are_read_from_metrics_or_slots() {
    let page = "llamacpp:requests_processing 2\nllamacpp:requests_deferred 1\n";
    assert_eq!(LlamaCpp.load(page), Some(Load { running: 2, waiting: 1, ..Load::default() }));
    let slots = r#"[{"id":0,"is_processing":true},{"id":1,"is_processing":false}]"#;
    assert_eq!(LlamaCpp.load(slots), Some(Load { running: 1, limit: Some(2), ..Load::default() }));
}
