//! TensorRT-LLM's own server (`trtllm-serve`), 1.x.
//!
//! **Supported**: `FanOut` for completions at temperature 0, set by the client.
//! * The schema forbids unknown fields, so every call is built from fields that it has.
//! * A later call returns ids (`detokenize: false`) or text, never both, and the first call is the
//!   client's own request, so it returns text. Its ids are recovered by the target
//!   ([`super::Quirks::first_request_ids`]). Chat has neither ids nor a way to learn those of its
//!   prompt: no verification method.
//! * Above temperature 0 the C++ sampler draws with a fixed default seed that restarts with every
//!   call, and the server does not report which sampler it runs: such a server is treated as seeded
//!   (relayed, `seed`).
//! * Penalties count prompt and output alike unless `prompt_ignore_length` is sent, and a client
//!   cannot send it (a request with an unknown parameter is relayed). So they count the same tokens
//!   where output has become prompt, as long as no call sends it: the length of the original prompt
//!   would take the prompt's tokens out of a count that includes them. A repetition penalty is
//!   refused: the tokens that it counts are not documented.
//! * The server's defaults need not be known: the same fields are left out on the same route.
//! * Stop texts are matched as token sequences by some versions and as text by others: refused.
//!
//! `GET /metrics` empties a queue that another client may be reading; the load is read from
//! `/prometheus/metrics`, where that is switched on.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::recognise::VERSION;
use super::shared::{self, PromptUsage, bytes, client_fields};
use super::{
    Answers, Call, Chunk, Codec, Context, Dialect, Engine, Foreign, Load, MaxTokens, Noise, PromptAnswer,
    Question, Quirks, Refusal, RequestKind, Round, Unreadable, Usual, VerifyRequest,
};
use crate::openai::{Additive, Prompt, Request, Route, Sampling, SamplingField};
use foretell_core::session::Hold;
use foretell_core::units::TokenId;
use foretell_core::words::{Refused, RelayReason};
use foretell_core::words::{Row, VerifyMethod, VerifyResult};

const TOKENIZE: &str = "/_internal/tokenize";
const METRICS: &str = "/prometheus/metrics";
/// Default number of tokens per block of the KV cache.
const BLOCK: usize = 32;

/// The codec of `trtllm-serve`.
pub struct TrtLlm;

const QUIRKS: Quirks = Quirks {
    owner: Some("tensorrt_llm"),
    experimental: true,
    usual: Some(Usual { methods: &[VerifyMethod::FanOut], seeded: true, ..Usual::COMMON }),
    stop_hold: Hold::Longest,
    first_request_ids: false,
    refuses_prediction: true,
    continuous_usage: true,
    prompt_ids_need_count: true,
    ..Quirks::COMMON
};

impl Codec for TrtLlm {
    fn quirks(&self) -> &'static Quirks {
        &QUIRKS
    }

    fn questions(&self, answers: &Answers) -> Vec<Question> {
        answers.unasked(&[METRICS])
    }

    fn engine(&self, answers: &Answers) -> Result<Engine, Foreign> {
        let version = answers.word(VERSION, "/version").ok_or_else(|| Foreign::silent("version"))?;
        let model = answers.model().ok_or_else(|| Foreign::silent("model"))?;
        let metrics = answers.text(METRICS).unwrap_or_default();
        let block = shared::largest(metrics, &["trtllm_kv_cache_tokens_per_block"]);
        Ok(Engine {
            started: shared::started(metrics),
            methods: vec![VerifyMethod::FanOut],
            noise: Noise::Call,
            block: block.map_or(BLOCK, |block| shared::block(block as usize)),
            load_path: Some(METRICS),
            ..Engine::new(Dialect::TrtLlm, model, version)
        })
    }

    fn start_page(&self) -> Option<&'static str> {
        Some(METRICS)
    }

    fn refuses(&self, _: &Engine, request: &Request, sampling: &Sampling) -> Option<Refused> {
        if request.route == Route::Chat {
            return Some(RelayReason::NoVerifyMethod.into());
        }
        let parameters = [
            (sampling.penalizes_repetition(), "repetition_penalty"),
            (sampling.min_tokens > 0, "min_tokens"),
            (!request.stop.is_empty(), "stop"),
        ];
        Refused::by_first(RelayReason::Parameter, &parameters)
            .or_else(|| shared::refuses_all_but_greedy(sampling))
    }

    /// The end of the context, whose length it does not report.
    fn max_tokens(&self, _: &Engine, _: &Request) -> MaxTokens {
        MaxTokens::Unknown
    }

    fn first_request(&self, _: &Engine, request: &Request, _: u64) -> Call {
        let body = shared::streamed(request, shared::continuous_usage());
        Call { path: request.route.path(), body: bytes(&body) }
    }

    fn additive(&self, _: &Engine, request: &Request) -> Additive {
        Additive { usage: true, nulls: true, ..Additive::of(request) }
    }

    /// A whole completion has a member that events lack (1.2, `openai_protocol.py`).
    fn last_members(&self, _: &Engine, route: Route, whole: bool) -> Value {
        match (route, whole) {
            (Route::Completions, true) => json!({ "choices": [{ "context_logits": null }] }),
            _ => Value::Null,
        }
    }

    fn prompt_ids_call(&self, _: &Engine, request: &Request) -> Option<Call> {
        let Prompt::Text(text) = &request.prompt else { return None };
        Some(Call { path: TOKENIZE, body: bytes(&json!({ "prompt": text })) })
    }

    fn read_prompt_answer(&self, _: &Engine, _: &Request, body: &[u8]) -> Result<PromptAnswer, Unreadable> {
        self.tokens(body).map(PromptAnswer::Prompt).ok_or(Unreadable("no token ids"))
    }

    fn plain_request(&self, _: &Engine, context: &Context<'_>, sampling: &Sampling, max_tokens: u32) -> Call {
        shared::plain_request(context, max_tokens, &fields(sampling))
    }

    fn chunk(&self, engine: &Engine, kind: RequestKind, event: &Value) -> Result<Chunk, Unreadable> {
        if kind == RequestKind::First {
            return shared::chunk_without_ids(event);
        }
        let chunk = shared::chunk(event)?;
        // Some samplers return the token that ends the text and some do not.
        let told = chunk.tokens.last().is_some_and(|token| engine.special.contains(token));
        Ok(Chunk { ends: told && shared::ended(kind, &chunk), ..chunk })
    }

    fn verify(&self, _: &Engine, round: &Round<'_>) -> Result<VerifyRequest, Refusal> {
        if round.method != VerifyMethod::FanOut {
            return Err(Refusal::NoVerifyMethod(round.method.name()));
        }
        Ok(shared::fan_out(round, usize::MAX, &fields(round.sampling)))
    }

    fn result(
        &self,
        _: &Engine,
        round: &Round<'_>,
        asked: &VerifyRequest,
        bodies: &[Vec<u8>],
    ) -> Result<VerifyResult, Unreadable> {
        let body = shared::only(bodies)?;
        read_fan_out(asked.nodes + 1, shared::fan_out_tokens(round, asked.nodes), body)
    }

    fn tokenize(&self, _: &Engine, text: &str) -> Option<Question> {
        Some(Question::post(TOKENIZE, json!({ "prompt": text })))
    }

    fn load(&self, body: &str) -> Option<Load> {
        let kv = ["trtllm_kv_cache_utilization"];
        shared::load(body, "trtllm_num_requests_running", "trtllm_num_requests_waiting", &kv)
    }
}

fn fields(sampling: &Sampling) -> Map<String, Value> {
    let mut fields = client_fields(sampling);
    // This server writes "all tokens" as 0.
    if sampling.set_by_client.has(SamplingField::TopK) && sampling.top_k.is_none() {
        fields.insert("top_k".into(), 0.into());
    }
    fields.insert("detokenize".into(), false.into());
    fields
}

#[derive(Deserialize)]
struct FanOut {
    choices: Vec<Choice>,
    usage: Option<PromptUsage>,
}

#[derive(Deserialize)]
struct Choice {
    index: usize,
    token_ids: Option<Vec<TokenId>>,
    finish_reason: Option<String>,
}

/// One token per prompt, up to the first that is missing because it ended the text: at temperature
/// 0 the next call returns the same token, so leaving it out does not change the distribution.
fn read_fan_out(prompts: usize, sent: usize, body: &[u8]) -> Result<VerifyResult, Unreadable> {
    let mut answer: FanOut =
        serde_json::from_slice(body).map_err(|_| Unreadable("not a completion with token ids"))?;
    shared::check_prompt(answer.usage.as_ref(), sent)?;
    answer.choices.sort_by_key(|choice| choice.index);
    if answer.choices.len() != prompts
        || answer.choices.iter().enumerate().any(|(position, choice)| choice.index != position)
    {
        return Err(Unreadable("not one choice for each prompt"));
    }
    let mut rows = Vec::with_capacity(prompts);
    for choice in &answer.choices {
        let ends = choice.finish_reason.as_deref() == Some("stop");
        match choice.token_ids.as_deref().unwrap_or_default() {
            [sample] => rows.push(Row { ends, ..Row::of(*sample) }),
            [] if ends => break,
            _ => return Err(Unreadable("not one token per prompt")),
        }
    }
    Ok(VerifyResult {
        rows,
        computed: answer.usage.as_ref().and_then(PromptUsage::computed),
        ..VerifyResult::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dialect::recognise::{MODELS, Reply};
    use crate::openai::{Judgement, SetFields, judge};
    use foretell_core::draft::{Features, Source, Tree};
    use proptest::prelude::*;

    /// The fields of `CompletionRequest` that may be sent; any other is a 400.
    const KNOWN: [&str; 19] = [
        "model",
        "prompt",
        "max_tokens",
        "stream",
        "stream_options",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "seed",
        "ignore_eos",
        "detokenize",
        "stop_token_ids",
        "user",
        "include_stop_str_in_output",
    ];

    fn engine() -> Engine {
        Engine {
            methods: vec![VerifyMethod::FanOut],
            special: vec![0],
            ..Engine::new(Dialect::TrtLlm, "m", "1.2.0")
        }
    }

    fn request(body: &Value) -> Request {
        let route = if body.get("messages").is_some() { Route::Chat } else { Route::Completions };
        match judge(route, body.to_string().as_bytes()) {
            Judgement::Eligible(request) => *request,
            Judgement::Relay { reason, .. } => panic!("{}", reason.name()),
        }
    }

    fn refused(more: &Value) -> Option<RelayReason> {
        let mut body = json!({"model": "m", "prompt": "Once", "max_tokens": 9});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let request = request(&body);
        engine().refuses(&request, &engine().sampling(&request).0).map(|refused| refused.reason)
    }

    fn text(call: &Call) -> &str {
        std::str::from_utf8(&call.body).unwrap()
    }

    fn greedy() -> Sampling {
        Sampling {
            temperature: 0.0,
            set_by_client: SetFields::default().with(SamplingField::Temperature),
            ..Sampling::default()
        }
    }

    #[test]
    fn only_what_is_exact_is_offered() {
        assert_eq!(refused(&json!({"temperature": 0})), None);
        assert_eq!(
            refused(&json!({"temperature": 0, "presence_penalty": 0.5, "frequency_penalty": 1})),
            None
        );
        assert_eq!(refused(&json!({"temperature": 0, "seed": 4})), None);
        assert_eq!(refused(&json!({})), Some(RelayReason::DefaultsUnknown));
        assert_eq!(refused(&json!({"temperature": 0.5})), Some(RelayReason::Seed));
        assert_eq!(
            refused(&json!({"temperature": 0, "max_tokens": null})),
            Some(RelayReason::DefaultsUnknown)
        );
        for more in [json!({"stop": "x"}), json!({"repetition_penalty": 1.1}), json!({"min_tokens": 2})] {
            let mut more = more;
            more["temperature"] = json!(0);
            assert_eq!(refused(&more), Some(RelayReason::Parameter), "{more}");
        }
        let chat = json!({"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 9, "temperature": 0});
        let chat = request(&chat);
        assert_eq!(engine().refuses(&chat, &chat.sampling), Some(RelayReason::NoVerifyMethod.into()));
    }

    #[test]
    fn a_fan_out_asks_for_ids_and_leaves_the_count_of_penalties_alone() {
        let draft = Tree::chain(&[4, 5], Source::Model, Features::default());
        let set_by_client =
            SetFields::default().with(SamplingField::Temperature).with(SamplingField::PresencePenalty);
        let sampling = Sampling { presence_penalty: 0.5, set_by_client, ..greedy() };
        let context = Context::new("m", &[1, 2], &[3]);
        let round = Round {
            context,
            draft: &draft,
            sampling: &sampling,
            method: VerifyMethod::FanOut,
            weighs: false,
        };
        let asked = TrtLlm.verify(&engine(), &round).unwrap();
        assert_eq!(asked.calls[0].path, "/v1/completions");
        assert_eq!(
            text(&asked.calls[0]),
            r#"{"model":"m","prompt":[[1,2,3],[1,2,3,4],[1,2,3,4,5]],"max_tokens":1,"stream":false,"temperature":0.0,"presence_penalty":0.5,"detokenize":false}"#
        );
        let score = Round { method: VerifyMethod::Score, ..round };
        assert_eq!(TrtLlm.verify(&engine(), &score), Err(Refusal::NoVerifyMethod("score")));
    }

    #[test]
    fn a_later_plain_request_asks_for_ids() {
        let set_by_client = SetFields::default().with(SamplingField::Temperature).with(SamplingField::TopK);
        let sampling = Sampling { set_by_client, ..greedy() };
        let context = Context::new("m", &[1], &[3]);
        assert_eq!(
            text(&TrtLlm.plain_request(&engine(), &context, &sampling, 7)),
            r#"{"model":"m","prompt":[[1,3]],"max_tokens":7,"stream":true,"temperature":0.0,"top_k":0,"detokenize":false}"#
        );
    }

    #[test]
    fn the_first_call_is_the_client_s_request() {
        let request = request(&json!({"model": "m", "prompt": "Once", "temperature": 0, "top_p": 0.5}));
        assert_eq!(
            text(&TrtLlm.first_request(&engine(), &request, 1)),
            r#"{"model":"m","prompt":"Once","temperature":0,"top_p":0.5,"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}}"#
        );
        let prompt_ids_call = TrtLlm.prompt_ids_call(&engine(), &request).unwrap();
        assert_eq!(
            (prompt_ids_call.path, text(&prompt_ids_call)),
            ("/_internal/tokenize", r#"{"prompt":"Once"}"#)
        );
        let ids = TrtLlm.read_prompt_answer(&engine(), &request, br#"{"count":2,"tokens":[1,7]}"#);
        assert_eq!(ids, Ok(PromptAnswer::Prompt(vec![1, 7])));
    }

    #[test]
    fn the_first_call_may_have_no_ids_and_the_last_token_shows_the_end() {
        let event =
            json!({"choices": [{"index": 0, "text": "ab", "token_ids": null, "finish_reason": null}]});
        let chunk = TrtLlm.chunk(&engine(), RequestKind::First, &event).unwrap();
        assert_eq!((chunk.text.as_str(), chunk.doubtful, chunk.tokens.len()), ("ab", false, 0));
        let ends = |ids: &Value| {
            let event =
                json!({"choices": [{"index": 0, "text": "", "token_ids": ids, "finish_reason": "stop"}]});
            TrtLlm.chunk(&engine(), RequestKind::Later, &event).unwrap().ends
        };
        assert!(ends(&json!([5, 0])) && !ends(&json!([5])) && !ends(&json!([])));
        let error = json!({"object": "error", "message": "x", "type": "y", "param": null, "code": 400});
        assert!(TrtLlm.chunk(&engine(), RequestKind::Later, &error).is_err());
    }

    #[test]
    fn an_end_that_is_not_listed_is_left_open() {
        let read = |body: &Value| read_fan_out(2, 6, body.to_string().as_bytes());
        let choice = |index: u32, ids: &Value, finish: &str| json!({"index": index, "text": "", "token_ids": ids, "finish_reason": finish});
        let both = json!({"choices": [choice(1, &json!([5]), "stop"), choice(0, &json!([4]), "length")]});
        assert_eq!(read(&both).unwrap().rows, [Row::of(4), Row { ends: true, ..Row::of(5) }]);
        let open = json!({"choices": [choice(0, &json!([4]), "length"), choice(1, &json!([]), "stop")]});
        assert_eq!(read(&open).unwrap().rows, [Row::of(4)]);
        let text = json!({"choices": [choice(0, &json!([4]), "length"), choice(1, &Value::Null, "length")]});
        assert!(read(&text).is_err());
        assert!(read(&json!({"choices": [choice(0, &json!([4]), "length")]})).is_err());
        let twice = json!({"choices": [choice(0, &json!([4]), "length"), choice(0, &json!([4]), "length")]});
        assert!(read(&twice).is_err());
    }

    #[test]
    fn the_engine_is_found_without_the_queue_that_reading_empties() {
        let mut answers = Answers::default();
        let mut tell = |path: &str, body: &str| {
            answers.add(path, Reply { status: 200, server: None, body: body.into() });
        };
        tell(MODELS, r#"{"data":[{"id":"m","owned_by":"tensorrt_llm"}]}"#);
        tell(VERSION, r#"{"version":"1.2.0"}"#);
        let metrics = "trtllm_kv_cache_tokens_per_block{e=\"a\"} 64\ntrtllm_num_requests_running 2\n\
            trtllm_num_requests_waiting 1\ntrtllm_kv_cache_utilization 0.5\nprocess_start_time_seconds 17.5\n";
        let asked: Vec<_> = TrtLlm.questions(&answers).into_iter().map(|question| question.path).collect();
        assert_eq!(asked, ["/prometheus/metrics"]);
        answers.add(METRICS, Reply { status: 200, server: None, body: metrics.into() });
        assert!(TrtLlm.questions(&answers).is_empty());
        let engine = TrtLlm.engine(&answers).unwrap();
        assert_eq!((engine.block, engine.started, engine.defaults), (64, Some(17_500_000), None));
        assert_eq!(engine.load_path, Some("/prometheus/metrics"));
        assert_eq!(
            TrtLlm.load(metrics),
            Some(Load { running: 2, waiting: 1, kv_usage: Some(0.5), ..Load::default() })
        );
    }

    proptest! {
        #[test]
        fn no_call_has_a_field_that_the_server_forbids(
            temperature in prop::option::of(0.0_f64..2.0),
            top_k in prop::option::of(-1_i64..50),
            presence in prop::option::of(-2.0_f64..2.0),
            bias in prop::collection::btree_map(0_u32..99, -5.0_f64..5.0, 0..3),
            seed in prop::option::of(any::<u32>()),
            ignore_eos in any::<bool>(),
            draft in prop::collection::vec(0_u32..99, 0..9),
        ) {
            let bias: Map<String, Value> =
                bias.into_iter().map(|(token, bias)| (token.to_string(), bias.into())).collect();
            let request = request(&json!({"model": "m", "prompt": [5], "temperature": temperature, "top_k": top_k,
                "presence_penalty": presence, "logit_bias": bias, "seed": seed, "ignore_eos": ignore_eos}));
            let draft = Tree::chain(&draft, Source::Model, Features::default());
            let context = Context::new("m", &[5], &[]);
            let round =
                Round { context, draft: &draft, sampling: &request.sampling, method: VerifyMethod::FanOut, weighs: false };
            let mut calls = TrtLlm.verify(&engine(), &round).unwrap().calls;
            calls.push(TrtLlm.plain_request(&engine(), &context, &request.sampling, 3));
            calls.push(TrtLlm.first_request(&engine(), &request, 3));
            for call in calls {
                let body: Map<String, Value> = serde_json::from_slice(&call.body).unwrap();
                prop_assert!(body.keys().all(|name| KNOWN.contains(&name.as_str())), "{}", text(&call));
            }
        }
    }
}
