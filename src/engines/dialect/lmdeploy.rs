//! LMDeploy.
//!
//! `FanOut` is one `/generate` for each node, all at once: the route takes one prompt of ids.
//! Without `--enable-prefix-caching`, which is off by default, each of them would compute the whole
//! context, so the method is available only where cache hits have been seen.
//!
//! `/generate` and OpenAI's routes have different defaults and neither reports them, so a request
//! is speculated on only if it sets every field. No route returns the ids of a chat's prompt: chats
//! decode plainly. Stop texts and stop tokens are matched among tokens by some versions and ignored
//! on some routes: requests with them are relayed.
//!
//! The token that ends a text is neither returned nor counted.

use serde::Deserialize;
use serde_json::{Value, json};

use super::body::{Body, Ids};
use super::shared::{self, COMPLETION_TOKENS, bytes};
use super::{
    Answers, CacheSetting, Call, Chunk, Codec, Context, Dialect, Engine, Foreign, Load, MaxTokens, Noise,
    PromptAnswer, Question, Quirks, Refusal, RequestKind, Round, Unreadable, Usual, VerifyRequest,
};
use crate::openai::{Additive, Prompt, Request, Route, Sampling};
use foretell_core::session::Hold;
use foretell_core::units::TokenId;
use foretell_core::words::{Refused, RelayReason};
use foretell_core::words::{Row, VerifyMethod, VerifyResult};

const GENERATE: &str = "/generate";
const ENCODE: &str = "/v1/encode";
const METRICS: &str = "/metrics";
/// The member of a completion's choice that lists its ids.
const IDS: &str = "gen_tokens";
/// Tokens of one plain request by ids: its text comes at once at its end.
const SEGMENT: u32 = 8;
/// Maximum calls of one round.
const MAX_CALLS: usize = 32;
/// The default of `--cache-block-seq-len`.
const BLOCK: usize = 64;

/// The codec of LMDeploy.
pub struct Lmdeploy;

const QUIRKS: Quirks = Quirks {
    owner: Some("lmdeploy"),
    experimental: true,
    usual: Some(Usual { methods: &[VerifyMethod::FanOut], ..Usual::COMMON }),
    noise_may_be_placed: true,
    cache_setting: CacheSetting::Prefix("its prefix cache is off: start it with --enable-prefix-caching"),
    stop_hold: Hold::Longest,
    usage_counts_end: false,
    tidies_text: true,
    ..Quirks::COMMON
};

impl Codec for Lmdeploy {
    fn quirks(&self) -> &'static Quirks {
        &QUIRKS
    }

    fn questions(&self, answers: &Answers) -> Vec<Question> {
        answers.unasked(&[METRICS])
    }

    fn engine(&self, answers: &Answers) -> Result<Engine, Foreign> {
        let model = answers.model().ok_or_else(|| Foreign::silent("model"))?;
        let metrics = answers.text(METRICS);
        let hits = shared::metric(metrics.unwrap_or_default(), &["lmdeploy:prefix_cache_hit_rate"]);
        Ok(Engine {
            methods: vec![VerifyMethod::FanOut],
            noise: Noise::Call,
            block: BLOCK,
            segment: Some(SEGMENT),
            caches: hits.map(|rate| rate > 0.0),
            load_path: metrics.map(|_| METRICS),
            ..Engine::new(Dialect::Lmdeploy, model, "")
        })
    }

    /// Its repetition penalty counts output only, and `/generate` has none of the others. It
    /// ignores parameters that it does not know (`min_tokens`).
    fn refuses(&self, engine: &Engine, request: &Request, sampling: &Sampling) -> Option<Refused> {
        let parameters = [
            // Another name is an adapter's, which `/generate` does not take.
            (request.model != engine.model, "model"),
            (sampling.penalizes_repetition(), "repetition_penalty"),
            (!sampling.logit_bias.is_empty(), "logit_bias"),
            (request.include_stop, "include_stop_str_in_output"),
            (request.return_token_ids, "return_token_ids"),
            (!request.stop.is_empty(), "stop"),
            (!request.stop_token_ids.is_empty(), "stop_token_ids"),
        ];
        Refused::by_first(RelayReason::Parameter, &sampling.counting())
            .or_else(|| Refused::by_first(RelayReason::Parameter, &parameters))
    }

    fn tells_ids(&self, route: Route) -> bool {
        route == Route::Completions
    }

    fn methods_for(&self, engine: &Engine, _: &Request, _: &Sampling, settled: bool) -> Vec<VerifyMethod> {
        let cached = engine.caches == Some(true) && !engine.special.is_empty();
        if cached && settled { engine.methods.clone() } else { Vec::new() }
    }

    fn max_tokens(&self, _: &Engine, request: &Request) -> MaxTokens {
        match request.route {
            Route::Completions => MaxTokens::Tokens(COMPLETION_TOKENS),
            Route::Chat => MaxTokens::Unknown,
        }
    }

    fn first_request(&self, _: &Engine, request: &Request, _: u64) -> Call {
        let mut body = shared::streamed(request, json!({ "include_usage": true }));
        if self.tells_ids(request.route) {
            body.insert("return_token_ids".into(), Value::Bool(true));
        }
        Call { path: request.route.path(), body: bytes(&body) }
    }

    fn additive(&self, _: &Engine, request: &Request) -> Additive {
        let choice: &[&str] = if self.tells_ids(request.route) { &[IDS] } else { &[] };
        Additive { choice, ..Additive::of(request) }
    }

    fn prompt_ids_call(&self, _: &Engine, request: &Request) -> Option<Call> {
        let Prompt::Text(text) = &request.prompt else { return None };
        let body = json!({ "input": text, "do_preprocess": false, "add_bos": true });
        Some(Call { path: ENCODE, body: bytes(&body) })
    }

    fn read_prompt_answer(&self, _: &Engine, _: &Request, body: &[u8]) -> Result<PromptAnswer, Unreadable> {
        let answer: Value = serde_json::from_slice(body).map_err(|_| Unreadable("not JSON"))?;
        let ids = answer.get("input_ids").and_then(shared::ids);
        ids.map(PromptAnswer::Prompt).ok_or(Unreadable("no input ids"))
    }

    fn plain_request(&self, _: &Engine, context: &Context<'_>, sampling: &Sampling, max_tokens: u32) -> Call {
        generate(&context.ids(), &[], max_tokens, sampling)
    }

    fn chunk(&self, engine: &Engine, kind: RequestKind, event: &Value) -> Result<Chunk, Unreadable> {
        if kind == RequestKind::First {
            let mut chunk = shared::chunk_named(event, IDS)?;
            let count = chunk.usage.as_ref().and_then(|usage| usage.get("prompt_tokens")?.as_u64());
            chunk.prompt_count = count.and_then(|count| u32::try_from(count).ok());
            return Ok(chunk);
        }
        let answer = Generated::deserialize(event).map_err(|_| Unreadable("not an answer of /generate"))?;
        let ends = answer.ends();
        let finish = Some(if ends { "stop" } else { "length" }.to_owned());
        Ok(Chunk { tokens: answer.tokens(engine), finish, ends, ..Chunk::default() })
    }

    fn verify(&self, _: &Engine, round: &Round<'_>) -> Result<VerifyRequest, Refusal> {
        if round.method != VerifyMethod::FanOut {
            return Err(Refusal::NoVerifyMethod(round.method.name()));
        }
        let nodes = round.draft.len().min(MAX_CALLS - 1);
        let ids = round.context.ids();
        let paths = shared::paths(round.draft, nodes);
        let calls = paths.iter().map(|path| generate(&ids, path, 1, round.sampling)).collect();
        Ok(VerifyRequest { calls, nodes })
    }

    fn result(
        &self,
        engine: &Engine,
        round: &Round<'_>,
        asked: &VerifyRequest,
        bodies: &[Vec<u8>],
    ) -> Result<VerifyResult, Unreadable> {
        if bodies.len() != asked.nodes + 1 {
            return Err(Unreadable("not one answer for each call"));
        }
        let paths = shared::paths(round.draft, asked.nodes);
        let row = |(body, path): (&Vec<u8>, Vec<TokenId>)| {
            let answer: Generated =
                serde_json::from_slice(body).map_err(|_| Unreadable("not an answer of /generate"))?;
            let sent = round.context.len() + path.len();
            if answer.meta_info.prompt_tokens.is_some_and(|told| told != sent) {
                return Err(Unreadable("it counts another prompt"));
            }
            match answer.tokens(engine).as_slice() {
                [sample] => Ok(Row { ends: answer.ends(), text: answer.text, ..Row::of(*sample) }),
                _ => Err(Unreadable("not one token per prompt")),
            }
        };
        Ok(VerifyResult {
            rows: bodies.iter().zip(paths).map(row).collect::<Result<_, _>>()?,
            ..VerifyResult::default()
        })
    }

    fn tokenize(&self, _: &Engine, text: &str) -> Option<Question> {
        Some(Question::post(ENCODE, json!({ "input": text, "do_preprocess": false, "add_bos": false })))
    }

    fn tokens(&self, body: &[u8]) -> Option<Vec<TokenId>> {
        let answer: Value = serde_json::from_slice(body).ok()?;
        shared::ids(answer.get("input_ids")?)
    }

    fn load(&self, body: &str) -> Option<Load> {
        let waiting = shared::metric(body, &["lmdeploy:num_requests_waiting"])?
            + shared::metric(body, &["lmdeploy:num_api_requests_waiting"]).unwrap_or(0.0);
        Some(Load {
            running: shared::metric(body, &["lmdeploy:num_requests_running"])? as u32,
            waiting: waiting as u32,
            kv_usage: shared::largest(body, &["lmdeploy:gpu_cache_usage_perc"]),
            ..Load::default()
        })
    }
}

/// One prompt of ids, the context and the ids after it, with every parameter set.
fn generate(ids: &Ids<'_>, path: &[TokenId], most: u32, sampling: &Sampling) -> Call {
    let body = Body::around(ids, 1)
        .ids("input_ids", ids, path)
        .put("max_tokens", most)
        .put("temperature", sampling.temperature)
        .put("top_p", sampling.top_p)
        .put("top_k", sampling.top_k.unwrap_or(0))
        .put("min_p", sampling.min_p)
        .put("repetition_penalty", sampling.repetition_penalty)
        .put("ignore_eos", sampling.ignore_eos)
        .put("stream", false);
    Call { path: GENERATE, body: body.end() }
}

#[derive(Deserialize)]
struct Generated {
    text: Option<String>,
    #[serde(default)]
    output_ids: Option<Vec<TokenId>>,
    meta_info: Meta,
}

#[derive(Deserialize)]
struct Meta {
    finish_reason: Option<Reason>,
    prompt_tokens: Option<usize>,
}

#[derive(Deserialize)]
struct Reason {
    #[serde(rename = "type")]
    kind: String,
}

impl Generated {
    fn ends(&self) -> bool {
        self.meta_info.finish_reason.as_ref().is_some_and(|reason| reason.kind == "stop")
    }

    /// The ids of the answer. If the token that ended the text is left out, a special token takes
    /// its position: it was sampled and must not be sampled again. Any special token will do,
    /// because it adds no text.
    fn tokens(&self, engine: &Engine) -> Vec<TokenId> {
        let mut listed = self.output_ids.clone().unwrap_or_default();
        if self.ends() && listed.last().is_none_or(|last| !engine.special.contains(last)) {
            listed.extend(engine.special.first());
        }
        listed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openai::{Judgement, judge};
    use foretell_core::draft::{Features, Source, Tree};

    fn engine(caches: Option<bool>) -> Engine {
        Engine {
            methods: vec![VerifyMethod::FanOut],
            caches,
            special: vec![2],
            ..Engine::new(Dialect::Lmdeploy, "m", "")
        }
    }

    fn request(more: &Value) -> Request {
        let mut body = json!({"model": "m", "prompt": "x", "temperature": 0.5, "top_p": 1, "top_k": -1, "min_p": 0,
            "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        match judge(Route::Completions, body.to_string().as_bytes()) {
            Judgement::Eligible(request) => *request,
            Judgement::Relay { reason, .. } => panic!("{}", reason.name()),
        }
    }

    fn methods(engine: &Engine, more: &Value) -> Vec<VerifyMethod> {
        let request = request(more);
        let (sampling, settled) = engine.sampling(&request);
        match engine.refuses(&request, &sampling) {
            Some(_) => Vec::new(),
            None => Lmdeploy.methods_for(engine, &request, &sampling, settled),
        }
    }

    #[test]
    fn without_cache_hits_there_is_no_verification_method() {
        assert_eq!(methods(&engine(Some(true)), &json!({})), [VerifyMethod::FanOut]);
        assert!(methods(&engine(Some(false)), &json!({})).is_empty());
        assert!(methods(&engine(None), &json!({})).is_empty());
    }

    #[test]
    fn an_open_field_or_a_count_of_output_is_not_speculated_on() {
        for more in [
            json!({"top_p": null}),
            json!({"repetition_penalty": 1.1}),
            json!({"presence_penalty": 0.1}),
            json!({"logit_bias": {"5": 1.0}}),
            json!({"stop": "x"}),
            json!({"stop_token_ids": [4]}),
            json!({"min_tokens": 3}),
            json!({"seed": 5}),
            json!({"model": "adapter"}),
        ] {
            assert!(methods(&engine(Some(true)), &more).is_empty(), "{more}");
        }
    }

    #[test]
    fn a_fan_out_is_a_call_for_each_node() {
        let (draft, sampling) = (Tree::chain(&[4], Source::Model, Features::default()), Sampling::default());
        let context = Context::new("m", &[1], &[3]);
        let round = Round {
            context,
            draft: &draft,
            sampling: &sampling,
            method: VerifyMethod::FanOut,
            weighs: false,
        };
        let asked = Lmdeploy.verify(&engine(None), &round).unwrap();
        let bodies: Vec<_> =
            asked.calls.iter().map(|call| String::from_utf8(call.body.clone()).unwrap()).collect();
        let rest = r#""max_tokens":1,"temperature":1.0,"top_p":1.0,"top_k":0,"min_p":0.0,"repetition_penalty":1.0,"ignore_eos":false,"stream":false}"#;
        assert_eq!(
            bodies,
            [format!(r#"{{"input_ids":[1,3],{rest}"#), format!(r#"{{"input_ids":[1,3,4],{rest}"#)]
        );
        let answer = |ids: Value, kind: &str| {
            json!({"text": "", "output_ids": ids, "meta_info": {"finish_reason": {"type": kind}}})
                .to_string()
                .into_bytes()
        };
        let read = |bodies: &[Vec<u8>]| Lmdeploy.result(&engine(None), &round, &asked, bodies);
        let result = read(&[answer(json!([4]), "length"), answer(json!([]), "stop")]).unwrap();
        assert_eq!(
            result.rows,
            [
                Row { text: Some(String::new()), ..Row::of(4) },
                Row { ends: true, text: Some(String::new()), ..Row::of(2) }
            ],
            "the end is drawn but not listed"
        );
        assert!(read(&[answer(json!([4]), "length")]).is_err());
        assert!(read(&[answer(json!([]), "length"), answer(json!([4]), "length")]).is_err());
    }

    #[test]
    fn a_plain_request_is_read_whole() {
        let event =
            json!({"text": "ab", "output_ids": [5, 6], "meta_info": {"finish_reason": {"type": "length"}}});
        let chunk = Lmdeploy.chunk(&engine(None), RequestKind::Later, &event).unwrap();
        assert_eq!((chunk.tokens, chunk.finish.as_deref(), chunk.ends), (vec![5, 6], Some("length"), false));
        for ids in [json!([5, 6]), json!([5, 6, 2])] {
            let event =
                json!({"text": "ab", "output_ids": ids, "meta_info": {"finish_reason": {"type": "stop"}}});
            let chunk = Lmdeploy.chunk(&engine(None), RequestKind::Later, &event).unwrap();
            assert_eq!((chunk.tokens, chunk.ends), (vec![5, 6, 2], true), "the end is not listed, or is");
        }
    }

    #[test]
    fn the_ids_of_a_completion_are_read_where_they_are() {
        let event =
            json!({"choices": [{"index": 0, "text": "ab", "gen_tokens": [5, 6], "finish_reason": null}]});
        let chunk = Lmdeploy.chunk(&engine(None), RequestKind::First, &event).unwrap();
        assert_eq!((chunk.tokens, chunk.text.as_str(), chunk.doubtful), (vec![5, 6], "ab", false));
    }
}
