//! vLLM.
//!
//! `FanOut` uses `/v1/completions`, which takes many prompts of token ids and returns the sampled
//! ids; fields that the client did not set stay unset, so that the server's `generation_config`
//! applies to it as it does to the client's request. It cannot for penalties on output, which in a
//! later request is prompt: where the server may have defaults (`QUIRKS`) and does not
//! render requests, they are confirmed by its answers ([`super::confirm`]), or the client has to
//! send them. `Score` uses the token endpoint (`/inference/v1/generate`), the only one that reads
//! the prefix cache for prompt log-probabilities.
//!
//! **The call that crashes the engine**: prompt log-probabilities with `detokenize` on. Cached rows
//! of the V1 runner are uninitialised memory, whose ids reach the tokenizer in the output loop that
//! all requests share. `token_endpoint::score_call` is the only function that asks for prompt
//! log-probabilities, and a property test checks that it sends `detokenize: false`.
//!
//! **The first call that may crash the engine**: any with log-probabilities, where no C++ compiler
//! works. The V1 runner ranks tokens by a function that it compiles at that call. A server without
//! `--enforce-eager` has compiled its model before it answers, so it has a compiler; a CPU build
//! with that flag may have none, and none of its answers shows that. So `Score` is risky
//! ([`Engine::risky`]) on every server that may be the CPU build (`build`). `FanOut` asks for no
//! log-probabilities and is not.

mod build;
mod minimum;
mod token_endpoint;

use serde_json::{Map, Value, json};

use super::recognise::{MODELS, VERSION};
use super::shared::{self, COMPLETION_TOKENS};
use super::{
    Additions, AnswerQuirks, Answers, BrokenEnd, Call, Chunk, Codec, Context, Dialect, Engine, Foreign, Load,
    MaxTokens, ModelDefaults, Noise, OutputLimits, Pages, PrefixCache, ProbeQuirks, ProcessMarks, Question,
    Quirks, Refusal, RequestKind, Round, ServerDefaults, StopQuirks, Tokenize, Undecided, Unreadable,
    UsageQuirks, Usual, VerifyRequest, score,
};
use foretell_core::session::StopBuffer;
use foretell_core::words::{PassthroughReason, Refused};
use foretell_core::words::{VerifyMethod, VerifyResult};
use foretell_wire::openai::{
    Additive, Defaults, Event, Request, Route, Sampling, SamplingField, fill, order,
};
use foretell_wire::translation::Thinking;
use token_endpoint::{GENERATE, MAX_LOGPROBS};

const METRICS: &str = "/metrics";
/// Maximum prompts of one call: vLLM's `VLLM_MAX_COMPLETION_PROMPTS`.
const MAX_PROMPTS: usize = 1024;
/// Tokens per block where the server does not report it.
const BLOCK: usize = 16;
/// Versions whose token endpoint was read or run, first and last.
const SCORED: ([u32; 2], [u32; 2]) = ([0, 15], [0, 33]);
/// The first version that aborts requests ([`shared::abort_call`]) and has the token endpoint.
const ABORTS: [u32; 2] = [0, 32];
/// The first version that parses a complete output on a separate page.
const DERENDERS: [u32; 2] = [0, 24];
/// The first version whose answers carry token ids.
const TOKEN_IDS: [u32; 2] = [0, 11];

/// The order of the fields of unstreamed answers, of both routes.
const ANSWER: [&str; 14] = [
    "id",
    "object",
    "created",
    "model",
    "choices",
    "service_tier",
    "system_fingerprint",
    "usage",
    "prompt_logprobs",
    "prompt_token_ids",
    "prompt_text",
    "kv_transfer_params",
    "ec_transfer_params",
    "metrics",
];
const CHOICE: [&str; 10] = [
    "index",
    "message",
    "text",
    "logprobs",
    "finish_reason",
    "stop_reason",
    "token_ids",
    "prompt_logprobs",
    "prompt_token_ids",
    "routed_experts",
];
const MESSAGE: [&str; 8] =
    ["role", "content", "refusal", "annotations", "audio", "function_call", "tool_calls", "reasoning"];
const USAGE: [&str; 5] = [
    "prompt_tokens",
    "total_tokens",
    "completion_tokens",
    "prompt_tokens_details",
    "completion_tokens_details",
];

/// The codec of vLLM.
pub struct Vllm;

/// With `return_token_ids` the chat route sends an event for every token, with an empty delta where
/// its parsers return nothing (0.32, `chat_completion/serving.py`: `if delta_message is None`).
const QUIRKS: Quirks = Quirks {
    owner: Some("vllm"),
    usual: Some(Usual { methods: &[VerifyMethod::Score, VerifyMethod::FanOut], ..Usual::COMMON }),
    probe: ProbeQuirks { places_noise: true, rows_may_change: true, ..ProbeQuirks::COMMON },
    thinking: Thinking::Effort,
    has_other_apis: true,
    answers: AnswerQuirks { hollow_deltas: true, broken_end: BrokenEnd::Omitted, ..AnswerQuirks::COMMON },
    model_defaults: ModelDefaults::Confirmed { penalties: [0, 32] },
    start_page: Some(METRICS),
    tokenize: Some(Tokenize::Prompt),
    limits: OutputLimits { chat: MaxTokens::Unknown, ..OutputLimits::OPENAI },
    // The rows of cached tokens are uninitialised memory on the V1 runner. Where that holds a
    // number that JSON cannot express, the answer is this error, whatever the request was.
    undecided: Some(Undecided {
        method: VerifyMethod::Score,
        status: 400,
        text: "Out of range float values",
    }),
    render_setting: Some("--enable-scale-out"),
    stops: StopQuirks { hold: StopBuffer::Longest, field: Some("stop_reason"), ..StopQuirks::COMMON },
    usage: UsageQuirks { has_continuous: true, runs: true, ..UsageQuirks::COMMON },
    ..Quirks::COMMON
};

impl Codec for Vllm {
    fn quirks(&self) -> &'static Quirks {
        &QUIRKS
    }

    fn questions(&self, answers: &Answers) -> Vec<Question> {
        let mut questions = answers.unanswered(&[METRICS]);
        let (Some(model), Some(context)) = (answers.model(), context(answers)) else { return questions };
        if !answers.has(shared::RENDER) {
            // Renders the request to the engine's sampling parameters, and computes nothing.
            let body = json!({ "model": model, "prompt": [1], "max_tokens": context.saturating_sub(1) });
            questions.push(Question::post(shared::RENDER, body));
        }
        if !answers.has(shared::CHAT_RENDER) {
            let chat = json!([{ "role": "user", "content": "." }]);
            // Without a limit, so that the answer shows the server's.
            let body = json!({ "model": model, "messages": chat });
            questions.push(Question::post(shared::CHAT_RENDER, body));
        }
        if !answers.has(GENERATE) && scored(answers) {
            // 403: switched off; 404: not there; 400 or 422: open, and the required fields are
            // missing.
            questions.push(Question::post(GENERATE, json!({})));
        }
        questions
    }

    fn engine(&self, answers: &Answers) -> Result<Engine, Foreign> {
        let version = answers.word(VERSION, "/version").ok_or_else(|| Foreign::silent("version"))?;
        let model = answers.model().ok_or_else(|| Foreign::silent("model"))?;
        let context = context(answers).ok_or_else(|| Foreign::silent("context length"))?;
        let fan_out = shared::version(&version).is_some_and(|version| version >= TOKEN_IDS);
        let score = scored(answers) && is_open(answers);
        let metrics = answers.text(METRICS).unwrap_or_default();
        let safe = score && build::may_be_cpu(metrics).is_none();
        let methods = [(safe, VerifyMethod::Score), (fan_out, VerifyMethod::FanOut)];
        let block = shared::label(metrics, "vllm:cache_config_info", "block_size");
        let rendered = rendered(answers);
        let renders = answers
            .text(shared::CHAT_RENDER)
            .is_some_and(|body| shared::read_render(body.as_bytes()).is_ok());
        let limits = OutputLimits {
            most: rendered.as_ref().and_then(|params| limit_in(params, context.saturating_sub(1))),
            chat: match chat_limit(answers, context) {
                // `max_new_tokens` of a generation config that is not known may be lower.
                _ if !renders || rendered.is_none() => MaxTokens::Unknown,
                limit => limit.map_or(MaxTokens::Context, MaxTokens::Tokens),
            },
            ..QUIRKS.limits
        };
        let defaults =
            ServerDefaults { sampling: rendered.as_ref().map(defaults), ..ServerDefaults::default() };
        let since = |first: [u32; 2]| shared::version(&version).is_some_and(|version| version >= first);
        let started = shared::started(metrics);
        let pages = Pages {
            renders,
            derenders: renders && since(DERENDERS),
            // With several API servers, each knows only its requests; together they show no start
            // time.
            aborts: since(ABORTS) && is_open(answers) && started.is_some(),
            load: Some(METRICS),
        };
        let block = block.and_then(|block| block.parse().ok()).map_or(BLOCK, shared::block);
        Ok(Engine {
            process: ProcessMarks { started, ..ProcessMarks::default() },
            context: Some(context),
            methods: methods.into_iter().filter_map(|(has, method)| has.then_some(method)).collect(),
            risky: if score && !safe { vec![VerifyMethod::Score] } else { Vec::new() },
            defaults,
            limits,
            noise: Noise::Call,
            cache: PrefixCache { block, ..PrefixCache::default() },
            pages,
            speculates: shared::metric(metrics, &["vllm:spec_decode_num_drafts_total"]).is_some(),
            watermarks: shared::metric(metrics, &["vllm:watermark_requests_total"]).is_some(),
            ..Engine::new(Dialect::Vllm, model, version)
        })
    }

    fn methods(
        &self,
        engine: &Engine,
        _: &Request,
        sampling: &Sampling,
        settled: bool,
    ) -> Result<Vec<VerifyMethod>, Refused> {
        if let Some(refused) = refused(engine, sampling) {
            return Err(refused);
        }
        let is_sampled = settled && sampling.seed.is_none() && !engine.tokens.special.is_empty();
        let greedy = settled && sampling.plainly_greedy() && !engine.tokens.special.is_empty();
        let scores = (is_sampled || greedy) && score::width(sampling, MAX_LOGPROBS).is_some();
        let may = |method: &VerifyMethod| *method != VerifyMethod::Score || scores;
        Ok(engine.methods.iter().copied().filter(may).collect())
    }

    fn additions(&self, _: &Engine, request: &Request, _: u64) -> Additions {
        let traces = Additive { usage: true, nulls: true, ..Additive::of(request) };
        Additions { members: vec![("return_token_ids", json!(true))], traces }
    }

    /// Unstreamed answers are written with every field (`model_dump`), events only with those that
    /// were set, and without nulls in the details of usage (0.32, `chat_completion/protocol.py` and
    /// `completion/protocol.py`).
    fn complete(&self, _: &Engine, route: Route, answer: &mut Value) {
        fill(answer, &unset(route));
        if let Some(details @ Value::Object(_)) = answer.pointer_mut("/usage/prompt_tokens_details") {
            fill(details, &json!({ "created_cache_tokens": null, "multimodal_tokens": null }));
        }
        order(answer.pointer_mut("/choices/0/message"), &MESSAGE);
        order(answer.pointer_mut("/choices/0"), &CHOICE);
        order(answer.pointer_mut("/usage"), &USAGE);
        order(Some(answer), &ANSWER);
    }

    fn plain_request(&self, _: &Engine, context: &Context<'_>, sampling: &Sampling, max_tokens: u32) -> Call {
        let sampling = minimum::behind(sampling, context.output.len(), max_tokens);
        shared::plain_request(context, max_tokens, &shared::client_fields_with_ids(&sampling))
    }

    fn chunk(&self, kind: RequestKind, event: &Event) -> Result<Chunk, Unreadable> {
        let chunk = shared::chunk(event)?;
        Ok(Chunk { ends: shared::ended(kind, &chunk), ..chunk })
    }

    fn verify(&self, engine: &Engine, round: &Round<'_>) -> Result<VerifyRequest, Refusal> {
        match round.method {
            VerifyMethod::FanOut => {
                let sampling = minimum::behind(round.sampling, round.context.output.len(), 1);
                let most = MAX_PROMPTS.min(minimum::nodes(round).saturating_add(1));
                Ok(shared::fan_out(round, most, &shared::client_fields_with_ids(&sampling)))
            }
            VerifyMethod::Score => token_endpoint::score_request(engine, round),
            VerifyMethod::Tree => Err(Refusal::NoVerifyMethod(round.method.name())),
        }
    }

    fn result(
        &self,
        engine: &Engine,
        round: &Round<'_>,
        request: &VerifyRequest,
        bodies: &[Vec<u8>],
    ) -> Result<VerifyResult, Unreadable> {
        let body = shared::only(bodies)?;
        if round.method == VerifyMethod::Score {
            return token_endpoint::score_result(engine, round, request.nodes, body);
        }
        let result = shared::fan_out_result(round, request.nodes, body)?;
        Ok(shared_cache(round, request.nodes, result))
    }

    fn missing(&self, answers: &Answers, method: VerifyMethod) -> String {
        match method {
            VerifyMethod::Score if !scored(answers) => {
                "its token endpoint is not known in this version".to_owned()
            }
            VerifyMethod::Score if is_open(answers) => {
                build::caution(answers.text(METRICS).unwrap_or_default())
            }
            VerifyMethod::Score => match answers.status(GENERATE) {
                Some(403) => {
                    "its token endpoint is switched off: start it with --enable-scale-out".to_owned()
                }
                Some(status) => format!("its token endpoint answers {status}"),
                None => "its token endpoint was not tried".to_owned(),
            },
            VerifyMethod::FanOut => "its answers carry no token ids in this version".to_owned(),
            VerifyMethod::Tree => "vLLM has no such endpoint".to_owned(),
        }
    }

    fn load(&self, body: &str) -> Option<Load> {
        let kv = ["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"];
        shared::load(body, "vllm:num_requests_running", "vllm:num_requests_waiting", &kv)
    }
}

fn context(answers: &Answers) -> Option<usize> {
    answers.number(MODELS, "/data/0/max_model_len").and_then(|length| usize::try_from(length).ok())
}

fn scored(answers: &Answers) -> bool {
    let version = answers.word(VERSION, "/version");
    version
        .as_deref()
        .and_then(shared::version)
        .is_some_and(|version| (SCORED.0..=SCORED.1).contains(&version))
}

/// True if the token endpoint is open: it refuses the empty request for missing fields.
fn is_open(answers: &Answers) -> bool {
    matches!(answers.status(GENERATE), Some(400 | 422))
}

/// The engine's sampling parameters for a request that does not set them; `None` if it does not
/// show them.
fn rendered(answers: &Answers) -> Option<Map<String, Value>> {
    let rendered = answers.json(shared::RENDER)?;
    let one = rendered.as_array().and_then(|all| all.first()).unwrap_or(&rendered);
    one.get("sampling_params")?.as_object().cloned()
}

/// Reason why the engine cannot continue a request with this sampling. Penalties on output tokens
/// miss those that have become prompt. A bias instead of them rounds otherwise, and cannot replace
/// a penalty on presence where a later request goes on for more than one token. The repetition
/// penalty counts prompt and output; `min_tokens` is counted here.
fn refused(engine: &Engine, sampling: &Sampling) -> Option<Refused> {
    let marked = (engine.watermarks && sampling.temperature > 0.0, "watermarking");
    Refused::by_first(PassthroughReason::Parameter, &sampling.output_penalties())
        .or_else(|| Refused::by_first(PassthroughReason::Parameter, &[marked]))
        .or_else(|| unknown_penalty(engine, sampling))
}

/// The members of an unstreamed answer that are null where they do not apply.
fn unset(route: Route) -> Value {
    let mut answer = json!({
        "service_tier": null, "system_fingerprint": null, "kv_transfer_params": null,
        "ec_transfer_params": null, "metrics": null,
        "usage": { "prompt_tokens_details": null, "completion_tokens_details": null },
    });
    let more = match route {
        Route::Chat => json!({
            "choices": [{
                "message": { "refusal": null, "annotations": null, "audio": null, "function_call": null,
                    "reasoning": null },
                "stop_reason": null, "token_ids": null, "routed_experts": null,
            }],
            "prompt_logprobs": null, "prompt_token_ids": null, "prompt_text": null,
        }),
        Route::Completions => json!({
            "choices": [{ "stop_reason": null, "token_ids": null, "prompt_logprobs": null,
                "prompt_token_ids": null, "routed_experts": null }],
        }),
    };
    fill(&mut answer, &more);
    answer
}

/// The first penalty on output that the client does not set, and whose default at the server is not
/// known.
fn unknown_penalty(engine: &Engine, sampling: &Sampling) -> Option<Refused> {
    let fields = [SamplingField::PresencePenalty, SamplingField::FrequencyPenalty];
    if engine.defaults.sampling.is_some() || !QUIRKS.model_defaults.has_penalties(&engine.version) {
        return None;
    }
    let open = fields.into_iter().find(|&field| !sampling.set_by_client.has(field));
    open.map(|field| Refused::by(PassthroughReason::DefaultsUnknown, field.name()))
}

/// The limit of the output in the engine's parameters, if it is below `room`, what the context
/// leaves. Members with vLLM's default are omitted.
fn limit_in(params: &Map<String, Value>, room: usize) -> Option<u32> {
    let tokens = params.get("max_tokens").map_or(Some(u64::from(COMPLETION_TOKENS)), Value::as_u64)?;
    u32::try_from(tokens).ok().filter(|&tokens| (tokens as usize) < room)
}

/// The limit of a chat that sets none: `max_new_tokens` of the model's generation config
/// (`get_max_tokens`, 0.32). It does not limit a chat that sets one.
fn chat_limit(answers: &Answers, context: usize) -> Option<u32> {
    let chat = answers.json(shared::CHAT_RENDER)?;
    let prompt = chat.get("token_ids")?.as_array()?.len();
    limit_in(chat.get("sampling_params")?.as_object()?, context.saturating_sub(prompt))
}

/// The defaults in the engine's parameters; a parameter that is not listed has OpenAI's default.
fn defaults(params: &Map<String, Value>) -> Defaults {
    let number = |name: &str, plain: f64| params.get(name).and_then(Value::as_f64).unwrap_or(plain);
    let top_k = params.get("top_k").and_then(Value::as_i64).filter(|&k| k > 0);
    let plain = Defaults::OPENAI;
    Defaults {
        temperature: number("temperature", plain.temperature),
        top_p: number("top_p", plain.top_p),
        top_k: top_k.and_then(|k| u32::try_from(k).ok()),
        min_p: number("min_p", plain.min_p),
        presence_penalty: number("presence_penalty", plain.presence_penalty),
        frequency_penalty: number("frequency_penalty", plain.frequency_penalty),
        repetition_penalty: number("repetition_penalty", plain.repetition_penalty),
    }
}

/// For several prompts the usage counts all tokens, but the cached tokens of one prompt only; the
/// other prompts, which begin with the same context, have as many cached.
fn shared_cache(round: &Round<'_>, nodes: usize, result: VerifyResult) -> VerifyResult {
    let all = VerifyMethod::FanOut.prompt_tokens(round.context.len(), nodes);
    let others = |computed: u32| nodes * all.saturating_sub(computed as usize);
    let computed = result.computed.map(|computed| computed.saturating_sub(others(computed) as u32));
    VerifyResult { computed, ..result }
}

#[cfg(test)]
mod tests;
