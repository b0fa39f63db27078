use proptest::prelude::*;

use super::*;
use crate::SpecialTokens;
use foretell_core::draft::{Features, Source, Tree};
use foretell_core::units::TokenId;

fn engine() -> Engine {
    Engine {
        methods: vec![VerifyMethod::Score, VerifyMethod::FanOut],
        cache: PrefixCache { block: 16, ..PrefixCache::default() },
        tokens: SpecialTokens { eos: Vec::new(), special: vec![0], may_end: vec![0] },
        ..Engine::new(Dialect::Vllm, "m", "0.32.0")
    }
}

/// A server that reports its defaults.
fn known() -> Engine {
    let defaults = ServerDefaults { sampling: Some(Defaults::OPENAI), ..ServerDefaults::default() };
    Engine { defaults, ..engine() }
}

fn chain(tokens: &[TokenId]) -> Tree {
    Tree::chain(tokens, Source::Model, Features::default())
}

fn greedy() -> Sampling {
    Sampling { temperature: 0.0, ..Sampling::default() }
}

fn round<'a>(
    prompt: &'a [TokenId],
    draft: &'a Tree,
    sampling: &'a Sampling,
    method: VerifyMethod,
) -> Round<'a> {
    let context = Context::new("m", prompt, &[]);
    Round { context, draft, sampling, method, weighs: false }
}

proptest! {
    #[test]
    fn no_input_builds_the_call_that_crashes_the_engine(
        prompt in prop::collection::vec(0_u32..50_000, 1..200),
        tokens in prop::collection::vec(0_u32..50_000, 0..33),
        temperature in 0.0_f64..2.0,
        top_k in prop::option::of(1_u32..30),
        seed in prop::option::of(any::<u64>()),
        score in any::<bool>(),
        reports_hits in any::<bool>(),
        block in 1_usize..129,
    ) {
        let cache = PrefixCache { block, reports_hits, ..PrefixCache::default() };
        let engine = Engine { cache, ..engine() };
        let sampling = Sampling { temperature, top_k, seed, ..Sampling::default() };
        let draft = chain(&tokens);
        let method = if score { VerifyMethod::Score } else { VerifyMethod::FanOut };
        let round = round(&prompt, &draft, &sampling, method);
        let Ok(asked) = Vllm.verify(&engine, &round) else { return Ok(()) };
        let again = engine.retry(&round, &asked);
        for call in asked.calls.iter().chain(again.iter().flat_map(|again| &again.calls)) {
            let body: Value = serde_json::from_slice(&call.body).unwrap();
            prop_assert!(body.get("prompt_logprobs").is_none());
            let params = body.get("sampling_params");
            if call.path == GENERATE {
                prop_assert_eq!(&params.unwrap()["detokenize"], &json!(false));
                prop_assert_eq!(&params.unwrap()["max_tokens"], &json!(1));
            } else {
                prop_assert!(params.is_none() && body.get("echo").is_none());
            }
        }
    }

    #[test]
    fn no_row_of_a_block_that_may_be_cached_is_read(
        context in 1_usize..300,
        draft in 1_usize..33,
        block in prop::sample::select(vec![1_usize, 16, 32, 128]),
    ) {
        let cache = PrefixCache { block, ..PrefixCache::default() };
        let mut engine = Engine { cache, ..engine() };
        let prompt = vec![7; context];
        let draft = chain(&vec![8; draft]);
        let sampling = greedy();
        let round = round(&prompt, &draft, &sampling, VerifyMethod::Score);
        // No multiple of the block size in n..n+k.
        let reads_no_block = |nodes: usize| (context..context + nodes).all(|position| position % block != 0);
        prop_assert!(reads_no_block(token_endpoint::scored_nodes(&engine, &round)));
        engine.cache.reports_hits = true;
        let asked = Vllm.verify(&engine, &round).unwrap();
        prop_assert_eq!(asked.nodes, draft.len());
        match engine.retry(&round, &asked) {
            Some(again) => prop_assert!(again.nodes < asked.nodes && reads_no_block(again.nodes)),
            None => prop_assert!(reads_no_block(asked.nodes), "the same call is not made twice"),
        }
    }
}

#[test]
fn a_fan_out_leaves_open_what_the_client_left_open() {
    let (draft, sampling) = (chain(&[4, 5]), Sampling::default());
    let asked = Vllm.verify(&engine(), &round(&[1, 2], &draft, &sampling, VerifyMethod::FanOut)).unwrap();
    assert_eq!(
        std::str::from_utf8(&asked.calls[0].body).unwrap(),
        r#"{"model":"m","prompt":[[1,2],[1,2,4],[1,2,4,5]],"max_tokens":1,"stream":false,"return_token_ids":true}"#
    );
}

/// A token that may end the text is barred in a call exactly where it is barred in the client's own
/// request: for every minimum, length of output and draft, and every token that a call yields.
#[test]
fn every_call_bars_the_end_where_the_clients_own_request_does() {
    let vote = foretell_core::draft::Vote::new(Source::Model, Features::default());
    let mut bushy = chain(&[4, 5, 6]);
    for (token, parent) in [(7, None), (8, Some(3)), (9, Some(1))] {
        bushy.push(foretell_core::draft::Node::new(token, parent, vote));
    }
    let drafts = [Tree::default(), chain(&[4]), chain(&[4, 5, 6]), bushy];
    let least = |params: &Value| params.get("min_tokens").map_or(0, |least| least.as_u64().unwrap() as usize);
    let read = |call: &Call| serde_json::from_slice::<Value>(&call.body).unwrap();
    for (min_tokens, output) in (0..8_usize).flat_map(|least| (0..8_usize).map(move |output| (least, output)))
    {
        let sampling = Sampling { min_tokens: min_tokens as u32, ..greedy() };
        let tokens = vec![3; output];
        let context = Context::new("m", &[1, 2], &tokens);
        let barred = |at: usize| at < min_tokens;
        for most in 1..6 {
            let asked = read(&Vllm.plain_request(&engine(), &context, &sampling, most));
            for at in 0..most as usize {
                assert_eq!(at < least(&asked), barred(output + at), "{min_tokens} {output} {most}");
            }
            assert!(least(&asked) <= most as usize, "more is refused");
        }
        for draft in &drafts {
            let round = |method| Round { context, draft, sampling: &sampling, method, weighs: false };
            let asked = Vllm.verify(&engine(), &round(VerifyMethod::FanOut)).unwrap();
            let body = read(&asked.calls[0]);
            let prompts = body["prompt"].as_array().unwrap();
            assert_eq!(prompts.len(), asked.nodes + 1);
            for prompt in prompts {
                let at = prompt.as_array().unwrap().len() - 2;
                assert_eq!(least(&body), usize::from(barred(at)), "{min_tokens} {output} {draft:?}");
            }
            let next = (asked.nodes < draft.len()).then(|| output + draft.path(asked.nodes).len());
            assert!(next.is_none_or(|at| barred(output) && !barred(at)), "cut nowhere else");
            let asked = Vllm.verify(&engine(), &round(VerifyMethod::Score)).unwrap();
            let body = read(&asked.calls[0]);
            let at = body["token_ids"].as_array().unwrap().len() - 2;
            assert_eq!(least(&body["sampling_params"]), usize::from(barred(at)));
        }
    }
}

#[test]
fn a_score_is_one_prompt_with_the_draft_at_its_end() {
    let (draft, sampling) = (chain(&[4, 5]), greedy());
    let asked = Vllm.verify(&engine(), &round(&[1, 2], &draft, &sampling, VerifyMethod::Score)).unwrap();
    assert_eq!((asked.calls[0].path, asked.nodes), ("/inference/v1/generate", 2));
    assert_eq!(
        std::str::from_utf8(&asked.calls[0].body).unwrap(),
        r#"{"model":"m","token_ids":[1,2,4,5],"sampling_params":{"max_tokens":1,"temperature":0.0,"top_p":1.0,"top_k":0,"min_p":0.0,"detokenize":false,"ignore_eos":false,"prompt_logprobs":2,"skip_reading_prefix_cache":false},"stream":false}"#
    );
}

fn scored(rows: &Value, usage: &Value) -> Vec<u8> {
    json!({"choices": [{"token_ids": [9], "finish_reason": "length"}], "prompt_logprobs": rows, "usage": usage})
        .to_string()
        .into_bytes()
}

fn samples(body: &[u8]) -> Vec<TokenId> {
    let (draft, sampling) = (chain(&[4, 5]), greedy());
    let round = round(&[1, 2, 3], &draft, &sampling, VerifyMethod::Score);
    let result = token_endpoint::score_result(&engine(), &round, 2, body).unwrap();
    result.rows.iter().filter_map(|row| row.sample).collect()
}

#[test]
fn rows_are_read_from_the_right_whether_cached_ones_are_listed_or_not() {
    let row = |first: &str, second: &str| json!({first: {"logprob": -0.1, "rank": 1}, second: {"logprob": -3.0, "rank": 2}});
    let garbage = json!({"4294967295": {"logprob": -9999.0, "rank": 0}});
    let full = json!([null, garbage, garbage, row("4", "7"), row("6", "5")]);
    assert_eq!(samples(&scored(&full, &Value::Null)), [4, 6, 9]);
    let tail = json!([null, row("4", "7"), row("6", "5")]);
    assert_eq!(samples(&scored(&tail, &Value::Null)), [4, 6, 9]);
}

#[test]
fn ties_special_tokens_and_cached_rows_are_left_undecided() {
    let sure = json!({"4": {"logprob": -0.1}, "7": {"logprob": -3.0}});
    let tie = json!({"5": {"logprob": -0.7}, "6": {"logprob": -0.7}});
    let end = json!({"0": {"logprob": -0.1}, "6": {"logprob": -2.7}});
    assert_eq!(samples(&scored(&json!([null, null, null, sure, tie]), &Value::Null)), [4]);
    assert_eq!(samples(&scored(&json!([null, null, null, sure, end]), &Value::Null)), [4]);
    assert!(samples(&scored(&json!([null, sure]), &Value::Null)).is_empty());
    assert!(samples(&scored(&Value::Null, &Value::Null)).is_empty());
    let usage = json!({"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 3}});
    assert!(samples(&scored(&json!([null, null, null, sure, sure]), &usage)).is_empty());
}

#[test]
fn a_temperature_that_the_engine_raises_is_raised_before_a_distribution_is_rebuilt() {
    // vLLM samples 0 < T < 0.01 at T = 0.01: e² to 1 here, and e⁴ to 1 at the temperature that was
    // asked for.
    let top = json!({"4": {"logprob": -1.0}, "5": {"logprob": -1.02}, "6": {"logprob": -9.0}});
    let body = json!({"choices": [{"token_ids": [9], "finish_reason": "length"}], "prompt_logprobs": [null, null, null, top]});
    let (draft, body) = (chain(&[4]), body.to_string().into_bytes());
    let first = |temperature: f64| {
        let sampling = Sampling { temperature, top_k: Some(2), ..Sampling::default() };
        let round = round(&[1, 2, 3], &draft, &sampling, VerifyMethod::Score);
        let result = token_endpoint::score_result(&engine(), &round, 1, &body).unwrap();
        let dist = result.rows[0].dist.clone().unwrap();
        assert!(dist.complete);
        dist.top[0]
    };
    for (temperature, odds) in [(0.005, 2.0_f64.exp()), (0.01, 2.0_f64.exp()), (0.02, 1.0_f64.exp())] {
        let (token, p) = first(temperature);
        assert!(token == 4 && (p - odds / (1.0 + odds)).abs() < 1e-9, "T = {temperature}: {p}");
    }
}

#[test]
fn all_prompts_of_a_fan_out_have_the_same_tokens_cached() {
    let choice = |index| json!({"index": index, "token_ids": [7], "finish_reason": "length"});
    // As vLLM 0.32 answers: three prompts of 1,033 to 1,035 tokens, of which 1,024 are cached.
    let usage = json!({"prompt_tokens": 3102, "prompt_tokens_details": {"cached_tokens": 1024}});
    let body = json!({"choices": [choice(0), choice(1), choice(2)], "usage": usage});
    let (prompt, draft, sampling) = (vec![1; 1033], chain(&[4, 5]), greedy());
    let round = round(&prompt, &draft, &sampling, VerifyMethod::FanOut);
    let asked = Vllm.verify(&engine(), &round).unwrap();
    let result = Vllm.result(&engine(), &round, &asked, &[serde_json::to_vec(&body).unwrap()]).unwrap();
    assert_eq!(result.computed, Some(3102 - 3 * 1024));
}

#[test]
fn verification_methods_depend_on_the_sampling() {
    let methods = |sampling: &Sampling, settled: bool| {
        let request = request(&json!({"model": "m", "prompt": "x"}));
        Vllm.methods(&known(), &request, sampling, settled).unwrap()
    };
    let fan_out = vec![VerifyMethod::FanOut];
    assert_eq!(methods(&greedy(), true), [VerifyMethod::Score, VerifyMethod::FanOut]);
    assert_eq!(methods(&greedy(), false), fan_out, "a repetition penalty may be the server's default");
    assert_eq!(methods(&Sampling { repetition_penalty: 1.05, ..greedy() }, true), fan_out);
    assert_eq!(
        methods(&Sampling { min_tokens: 9, ..greedy() }, true),
        [VerifyMethod::Score, VerifyMethod::FanOut]
    );
    let sampled = Sampling { temperature: 0.8, top_k: Some(8), ..Sampling::default() };
    assert_eq!(methods(&sampled, true), [VerifyMethod::Score, VerifyMethod::FanOut]);
    assert_eq!(methods(&Sampling { seed: Some(1), ..sampled.clone() }, true), fan_out);
    let nucleus = Sampling { top_k: None, top_p: 0.9, ..sampled.clone() };
    assert_eq!(methods(&nucleus, true), [VerifyMethod::Score, VerifyMethod::FanOut]);
    assert_eq!(methods(&Sampling { top_k: None, ..sampled }, true), fan_out);
}

#[test]
fn a_chat_without_a_limit_is_not_speculated_on_where_the_limit_is_unknown() {
    let mut chat = request(&json!({"model": "m", "prompt": "x"}));
    chat.route = Route::Chat;
    let limited = |most, chat| Engine { limits: OutputLimits { most, chat, ..QUIRKS.limits }, ..known() };
    let limits = [&engine(), &known(), &limited(None, MaxTokens::Context)].map(|engine| engine.limit(&chat));
    assert_eq!(limits, [MaxTokens::Unknown, MaxTokens::Unknown, MaxTokens::Context]);
    assert_eq!(limited(Some(99), MaxTokens::Context).limit(&chat), MaxTokens::Tokens(99));
    assert_eq!(limited(None, MaxTokens::Tokens(9)).limit(&chat), MaxTokens::Tokens(9));
}

/// `max_new_tokens` of the generation config is a default of chats, not a maximum.
#[test]
fn the_limit_of_a_chat_that_sets_none_is_read_from_its_rendering() {
    let known = |params: &Value| {
        let mut answers = Answers::default();
        let chat = json!({"token_ids": [5, 6, 7], "sampling_params": params});
        let body = chat.to_string().into_bytes();
        answers.add(shared::CHAT_RENDER, crate::recognise::Reply { status: 200, server: None, body });
        chat_limit(&answers, 100)
    };
    assert_eq!(known(&json!({"max_tokens": 97})), None, "what the context leaves");
    assert_eq!(known(&json!({"max_tokens": 40})), Some(40));
    assert_eq!(known(&json!({})), Some(16), "vLLM's own default is left out");
}

#[test]
fn defaults_that_later_requests_would_lose_are_refused() {
    let refused = |engine: &Engine, more: &Value| {
        let mut body = json!({"model": "m", "prompt": "x"});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let request = request(&body);
        let (sampling, settled) = engine.sampling(&request);
        engine.methods_for(&request, &sampling, settled).err().and_then(|refused| refused.parameter)
    };
    let set = json!({"presence_penalty": 0, "frequency_penalty": 0});
    let older = Engine { version: "0.31.0".to_owned(), ..engine() };
    assert_eq!(refused(&engine(), &json!({})), Some("presence_penalty"));
    assert_eq!(refused(&engine(), &json!({"presence_penalty": 0})), Some("frequency_penalty"));
    for (engine, more) in [(&engine(), &set), (&known(), &json!({})), (&older, &json!({}))] {
        assert_eq!(refused(engine, more), None);
    }
    let marking = Engine { watermarks: true, ..known() };
    assert_eq!(refused(&marking, &json!({})), Some("watermarking"));
    assert_eq!(refused(&marking, &json!({"temperature": 0})), None, "there is no mark without sampling");
}

fn request(body: &Value) -> Request {
    match foretell_wire::openai::judge(Route::Completions, body.to_string().as_bytes()) {
        foretell_wire::openai::Judgement::Eligible(request) => *request,
        foretell_wire::openai::Judgement::Passthrough { reason, .. } => panic!("{}", reason.name()),
    }
}
