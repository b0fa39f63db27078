//! SGLang.
//!
//! `FanOut` and plain requests use `/v1/completions` with exactly the fields that the client has
//! set: that route fills in OpenAI's defaults, as it does for the client's completion. The chat
//! route takes the model's defaults instead (`--sampling-defaults model`), which no endpoint
//! reports; a chat is speculated on only if it sets every field for which the two differ, or if the
//! operator has named the model's file: then later requests send all of them.
//!
//! `Score` uses `/generate` with `logprob_start_len` at the last token of the context: the radix
//! cache is read up to there, the first entry is always null, and the row of the first drafted
//! token is always computed. Its parameters are sent in full, because `/generate` has other
//! defaults.
//!
//! All three penalties count output only, so none of them stays right when output becomes prompt.

use std::path::Path;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::body::Body;
use super::recognise::{MODELS, SERVER_INFO};
use super::shared;
use super::{
    Additions, AnswerQuirks, Answers, Call, ChatIds, Chunk, Codec, Context, Dialect, Engine, Foreign, Load,
    ModelDefaults, Noise, OutputLimits, OutputParsing, Pages, PrefixCache, ProcessMarks, Question, Quirks,
    Refusal, RequestKind, Round, RowShape, ServerDefaults, StopQuirks, Tokenize, Unreadable, UsageQuirks,
    Usual, VerifyRequest, score,
};
use foretell_core::units::TokenId;
use foretell_core::words::{PassthroughReason, Refused};
use foretell_core::words::{Row, VerifyMethod, VerifyResult};
use foretell_wire::openai::{
    Additive, Defaults, Event, Request, Route, Sampling, SamplingField as F, fill, order,
};

const GENERATE: &str = "/generate";
/// Members of `usage` in the order of unstreamed answers (`UsageInfo`).
const USAGE: [&str; 6] = [
    "prompt_tokens",
    "total_tokens",
    "completion_tokens",
    "prompt_tokens_details",
    "reasoning_tokens",
    "completion_tokens_details",
];
/// Members of a chat's message in the order of unstreamed answers.
const MESSAGE: [&str; 4] = ["role", "content", "reasoning_content", "tool_calls"];
const MODEL_INFO: &str = "/model_info";
const METRICS: &str = "/metrics";
const LOADS: &str = "/v1/loads?include=core&format=json";
/// Maximum log-probabilities per position. The server has no limit; the answer grows with it.
const MAX_LOGPROBS: usize = 64;
/// Maximum prompts of one call: each of them becomes a separate request in the scheduler.
const MAX_PROMPTS: usize = 64;

/// The first version that reports `stop` for a call of one token if that ends the text. Earlier
/// ones (0.5.17 was read) check the limit first and report `length`, so that a round would continue
/// after the end.
const ENDS_FIRST: [u32; 3] = [0, 5, 18];

/// The version that was seen to list the versions of the weights in unstreamed answers; earlier
/// ones were not run.
const LISTS_WEIGHTS: [u32; 3] = [0, 5, 23];

/// The codec of SGLang.
pub struct Sglang;

const QUIRKS: Quirks = Quirks {
    owner: Some("sglang"),
    // `/server_info` waits for the running forward pass (0.5.23: `get_internal_state`).
    same_by: &[MODELS, MODEL_INFO],
    usual: Some(Usual {
        methods: &[VerifyMethod::Score, VerifyMethod::FanOut],
        noise: Noise::Ignored,
        ..Usual::COMMON
    }),
    has_other_apis: true,
    answers: AnswerQuirks { tidies_text: true, bare_end: true, ..AnswerQuirks::COMMON },
    model_defaults: ModelDefaults::Named,
    // A streamed chat brings its ids once, at its end, and is refused if it asks for them (0.5.23,
    // `serving_chat.py`: "return_prompt_token_ids is not supported with streaming").
    chat_ids: ChatIds::Unstreamed,
    tokenize: Some(Tokenize::Prompt),
    limits: OutputLimits::OPENAI,
    stops: StopQuirks {
        field: Some("matched_stop"),
        field_names_end: true,
        in_special: true,
        ..StopQuirks::COMMON
    },
    usage: UsageQuirks {
        has_continuous: true,
        runs_alone: true,
        bare: &[Route::Completions],
        ..UsageQuirks::COMMON
    },
    ..Quirks::COMMON
};

impl Codec for Sglang {
    fn quirks(&self) -> &'static Quirks {
        &QUIRKS
    }

    fn questions(&self, answers: &Answers) -> Vec<Question> {
        answers.unanswered(&[MODEL_INFO, LOADS, METRICS])
    }

    fn engine(&self, answers: &Answers) -> Result<Engine, Foreign> {
        let info = |pointer: &str| answers.at(SERVER_INFO, pointer).filter(|value| !value.is_null());
        let version = answers.word(SERVER_INFO, "/version").ok_or_else(|| Foreign::silent("version"))?;
        let model = answers.model().ok_or_else(|| Foreign::silent("model"))?;
        let context = answers
            .number(MODELS, "/data/0/max_model_len")
            .or_else(|| answers.number(SERVER_INFO, "/context_length"))
            .ok_or_else(|| Foreign::silent("context length"))?;
        let on = |pointer: &str| info(pointer).is_some_and(|value| value == json!(true));
        let reports_ends = shared::version(&version).is_some_and(|version| version >= ENDS_FIRST);
        // Without the cache every call computes its complete prompt.
        let offered = reports_ends && !on("/disable_radix_cache");
        let methods = if offered { vec![VerifyMethod::Score, VerifyMethod::FanOut] } else { vec![] };
        let preferred = info("/preferred_sampling_params").is_some();
        let openai = answers.word(SERVER_INFO, "/sampling_defaults").as_deref() == Some("openai");
        let noise = if on("/enable_deterministic_inference") { Noise::Position } else { Noise::Ignored };
        let defaults = ServerDefaults {
            sampling: (openai && !preferred).then_some(Defaults::OPENAI),
            preferred,
            ..ServerDefaults::default()
        };
        let page = answers.number(SERVER_INFO, "/page_size");
        let block = page.map_or(1, |size| shared::block(usize::try_from(size).unwrap_or(1)));
        let weights = [MODEL_INFO, SERVER_INFO];
        let process = ProcessMarks {
            drawn: drawn(answers),
            weights: weights.into_iter().find_map(|page| answers.word(page, "/weight_version")),
            ..ProcessMarks::default()
        };
        let load = [LOADS, METRICS].into_iter().find(|path| answers.status(path) == Some(200));
        Ok(Engine {
            process,
            context: usize::try_from(context).ok(),
            methods,
            defaults,
            noise,
            cache: PrefixCache { block, rows: RowShape::Tail, ..PrefixCache::default() },
            pages: Pages { load, ..Pages::default() },
            parsing: OutputParsing {
                unparsed: is_unparsed(answers),
                counts_reasoning: info("/reasoning_parser").is_some(),
                ..OutputParsing::default()
            },
            speculates: info("/speculative_algorithm").is_some(),
            ..Engine::new(Dialect::Sglang, model, version)
        })
    }

    fn methods(
        &self,
        engine: &Engine,
        request: &Request,
        sampling: &Sampling,
        _: bool,
    ) -> Result<Vec<VerifyMethod>, Refused> {
        if let Some(refused) = refused(engine, request, sampling) {
            return Err(refused);
        }
        // `/generate` takes an adapter by another name than the model `base:adapter`.
        let adapter = request.model != engine.model && request.model.contains(':');
        let scores = !adapter && sampling_is_known(engine, request) && scores(engine, sampling);
        let may = |method: &VerifyMethod| *method != VerifyMethod::Score || scores;
        Ok(engine.methods.iter().copied().filter(may).collect())
    }

    fn additions(&self, _: &Engine, request: &Request, _: u64) -> Additions {
        let members = match request.route {
            Route::Completions => vec![("return_token_ids", json!(true))],
            Route::Chat => Vec::new(),
        };
        let traces = Additive { usage: true, null_usage: true, ..Additive::of(request) };
        Additions { members, traces }
    }

    /// Unstreamed answers name the version of the weights (0.5.23, `serving_completions.py`);
    /// events do not, and their usage leaves out what is null. The only version of the weights made
    /// all tokens: an answer of several is given up.
    fn complete(&self, engine: &Engine, route: Route, answer: &mut Value) {
        if route == Route::Chat {
            fill(answer, &json!({ "choices": [{ "message": { "reasoning_content": null } }] }));
            order(answer.pointer_mut("/choices/0/message"), &MESSAGE);
        }
        let tokens = answer.pointer("/usage/completion_tokens").cloned();
        let usage = json!({ "prompt_tokens_details": null, "completion_tokens_details": null });
        fill(answer, &json!({ "usage": usage }));
        if let Some(version) = &engine.process.weights {
            let lists = shared::version(&engine.version).is_some_and(|version| version >= LISTS_WEIGHTS);
            let mut metadata = json!({ "weight_version": version });
            if lists {
                let all = json!([{ "version": version, "start": 0, "end": tokens.unwrap_or(json!(0)) }]);
                fill(&mut metadata, &json!({ "weight_versions": all }));
            }
            fill(answer, &json!({ "metadata": metadata }));
        }
        order(answer.get_mut("usage"), &USAGE);
    }

    fn plain_request(&self, _: &Engine, context: &Context<'_>, sampling: &Sampling, max_tokens: u32) -> Call {
        shared::plain_request(context, max_tokens, &shared::client_fields_with_ids(sampling))
    }

    fn chunk(&self, kind: RequestKind, event: &Event) -> Result<Chunk, Unreadable> {
        let chunk = shared::chunk_named(event, "response_token_ids")?;
        Ok(Chunk { ends: shared::ended(kind, &chunk), ..chunk })
    }

    fn verify(&self, engine: &Engine, round: &Round<'_>) -> Result<VerifyRequest, Refusal> {
        match round.method {
            VerifyMethod::FanOut => {
                Ok(shared::fan_out(round, MAX_PROMPTS, &shared::client_fields_with_ids(round.sampling)))
            }
            VerifyMethod::Score => {
                let width = score::width(round.sampling, MAX_LOGPROBS);
                let width = width.ok_or(Refusal::NoVerifyMethod(VerifyMethod::Score.name()))?;
                let nodes = shared::text_stem(&engine.tokens.may_end, round.draft);
                Ok(VerifyRequest::one(score_call(round, nodes, width), nodes))
            }
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
            return score_result(engine, round, request.nodes, body);
        }
        shared::fan_out_result(round, request.nodes, body)
    }

    fn missing(&self, answers: &Answers, method: VerifyMethod) -> String {
        let off = answers.at(SERVER_INFO, "/disable_radix_cache").is_some_and(|off| off == json!(true));
        match method {
            VerifyMethod::Tree => "SGLang has no such endpoint",
            VerifyMethod::Score | VerifyMethod::FanOut if off => "its prefix cache is off",
            VerifyMethod::Score | VerifyMethod::FanOut => "this version does not report where a text ends",
        }
        .to_owned()
    }

    fn load(&self, body: &str) -> Option<Load> {
        match serde_json::from_str::<Loads>(body) {
            Ok(loads) => loads.sum(),
            Err(_) => shared::load(
                body,
                "sglang:num_running_reqs",
                "sglang:num_queue_reqs",
                &["sglang:token_usage"],
            ),
        }
    }
}

/// Reason why the engine cannot carry this request exactly by any verification method.
fn refused(engine: &Engine, request: &Request, sampling: &Sampling) -> Option<Refused> {
    // A vLLM parameter that this server does not know; the chat route has another name for ids.
    let foreign = request.return_token_ids && request.route == Route::Chat;
    // With deterministic inference, min-p fails an assertion in its sampler: such a request must
    // never be sent.
    let deadly = engine.noise == Noise::Position && sampling.min_p > 0.0 && sampling.temperature > 0.0;
    // With `ignore_eos` it ignores stop tokens too.
    let deaf = sampling.ignore_eos && !request.stop_token_ids.is_empty();
    let parameters = [
        (sampling.penalizes_repetition(), "repetition_penalty"),
        (request.include_stop, "include_stop_str_in_output"),
        (foreign, "return_token_ids"),
        (deadly, "min_p"),
        (deaf, "stop_token_ids"),
    ];
    let counted = engine.parsing.counts_reasoning && request.route == Route::Completions && !request.stream;
    Refused::by_first(PassthroughReason::Parameter, &sampling.counting())
        .or_else(|| Refused::by_first(PassthroughReason::Parameter, &parameters))
        .or_else(|| counted.then(|| PassthroughReason::Reasoning.into()))
        .or_else(|| {
            open(engine, request, sampling).map(|name| Refused::by(PassthroughReason::DefaultsUnknown, name))
        })
}

/// A fingerprint of what the process drew and measured when it started: the seed that its operator
/// unset, and how long each part of its start took. A seed alone may be the operator's.
fn drawn(answers: &Answers) -> Option<u64> {
    let startup = answers.at(SERVER_INFO, "/startup_time").filter(has_float)?;
    let seed = answers.at(SERVER_INFO, "/random_seed");
    let digest = Sha256::digest(json!([seed, startup]).to_string());
    digest.first_chunk().map(|bytes| u64::from_be_bytes(*bytes))
}

fn has_float(value: &Value) -> bool {
    match value {
        Value::Number(number) => number.is_f64(),
        Value::Array(items) => items.iter().any(has_float),
        Value::Object(members) => members.values().any(has_float),
        Value::Null | Value::Bool(_) | Value::String(_) => false,
    }
}

/// The answer of `/v1/loads`: one entry for each data-parallel rank. Some versions name the members
/// differently.
#[derive(Deserialize)]
struct Loads {
    /// Time of the answer, ISO 8601.
    timestamp: Option<String>,
    loads: Vec<RankLoad>,
}

#[derive(Deserialize)]
struct RankLoad {
    /// Time at which the scheduler published these figures, by the same clock, seconds of Unix
    /// time: at every prefill and while idle, else once in `--load-snapshot-publish-interval`
    /// steps.
    timestamp: Option<f64>,
    #[serde(alias = "num_reqs")]
    num_running_reqs: u32,
    #[serde(alias = "num_queue_reqs")]
    num_waiting_reqs: u32,
    token_usage: Option<f64>,
}

impl Loads {
    fn sum(&self) -> Option<Load> {
        let sum = |count: fn(&RankLoad) -> u32| self.loads.iter().map(count).fold(0, u32::saturating_add);
        (!self.loads.is_empty()).then(|| Load {
            running: sum(|rank| rank.num_running_reqs),
            waiting: sum(|rank| rank.num_waiting_reqs),
            kv_usage: shared::fullest(self.loads.iter().filter_map(|rank| rank.token_usage)),
            age: self.age(),
            limit: None,
        })
    }

    /// Age of the oldest figures; zero where no times are reported.
    fn age(&self) -> Duration {
        let now = self.timestamp.as_deref();
        let now = now.and_then(|now| OffsetDateTime::parse(now, &Rfc3339).ok());
        let Some(now) = now.map(|now| now.unix_timestamp_nanos() as f64 * 1e-9) else {
            return Duration::ZERO;
        };
        let ages = self.loads.iter().filter_map(|rank| Some(now - rank.timestamp?));
        Duration::try_from_secs_f64(ages.fold(0.0, f64::max)).unwrap_or(Duration::MAX)
    }
}

/// True if the chats of this server are the text of their tokens, as those of its completions are
/// (read in 0.5.23: `serving_chat.py`, `parser/conversation.py`, `function_call/`).
fn is_unparsed(answers: &Answers) -> bool {
    let word = |path: &str, pointer: &str| answers.word(path, pointer).unwrap_or_default().to_lowercase();
    let is = |pointer: &str, value: Value| answers.at(MODEL_INFO, pointer) == Some(value);
    let parser = answers.at(MODEL_INFO, "/tool_call_parser");
    let parser_sleeps = parser.is_some_and(|parser| {
        parser.is_null() || parser.as_str().is_some_and(|name| IDLE_PARSERS.contains(&name))
    });
    let template = word(SERVER_INFO, "/chat_template");
    let is_jinja = Path::new(&template).extension().is_some_and(|extension| extension == "jinja");
    let (model, kind) = (word(MODEL_INFO, "/model_path"), word(MODEL_INFO, "/model_type"));
    // Its built-in conversation templates have stop texts. It takes one by the name of the model,
    // most of them for models that see or hear.
    let guessed = ["vicuna", "points", "unlimited"].iter().any(|name| model.contains(name));
    let converses = guessed || !(template.is_empty() || is_jinja);
    // Their chats are decoded with special tokens.
    let shows_special = kind.is_empty() || ["gpt_oss", "gemma4", "gemma4_unified"].contains(&kind.as_str());
    is("/reasoning_parser", Value::Null)
        && is("/has_image_understanding", json!(false))
        && is("/has_audio_understanding", json!(false))
        && parser_sleeps
        && !converses
        && !shows_special
}

/// Tool parsers that leave chats without tools alone.
const IDLE_PARSERS: [&str; 8] =
    ["hermes", "llama3", "mistral", "pythonic", "qwen", "qwen25", "qwen3_coder", "deepseekv3"];

/// The first field omitted by the client that gets another value on the completions route than on
/// the client's route.
fn open(engine: &Engine, request: &Request, sampling: &Sampling) -> Option<&'static str> {
    if request.route == Route::Completions || engine.defaults.sampling.is_some() {
        return None;
    }
    // The chat route takes these from the model: nothing else differs from the completions route.
    let drawn = sampling.temperature > 0.0 || !sampling.set_by_client.has(F::Temperature);
    let drawing: &[F] = if drawn { &[F::Temperature, F::TopP, F::TopK, F::MinP] } else { &[] };
    let mut differing = drawing.iter().chain(&[F::RepetitionPenalty]);
    differing.find(|field| !sampling.set_by_client.has(**field)).map(|field| field.name())
}

/// True if the effective sampling is known as numbers, so that distributions can be computed here.
fn sampling_is_known(engine: &Engine, request: &Request) -> bool {
    !engine.defaults.preferred || request.sampling.sets_all()
}

/// True if positions can be decided from log-probabilities. Attention backends differ in whether
/// the nucleus is that of all tokens or of the `top_k` retained, so the two together are decided by
/// samples; and where noise is a function of the position, the draw must be that of the server.
fn scores(engine: &Engine, sampling: &Sampling) -> bool {
    let listed = sampling.top_k.is_some_and(|k| (k as usize) < MAX_LOGPROBS);
    let draws_alone = engine.noise == Noise::Ignored && sampling.top_p >= 1.0 && listed;
    !engine.tokens.special.is_empty()
        && (sampling.plainly_greedy() || draws_alone)
        && score::width(sampling, MAX_LOGPROBS).is_some()
}

fn score_call(round: &Round<'_>, nodes: usize, width: usize) -> Call {
    let path = nodes.checked_sub(1).map_or_else(Vec::new, |last| round.draft.path(last));
    let sampling = round.sampling;
    let params = json!({
        "max_new_tokens": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k.map_or(json!(-1), Value::from),
        "min_p": sampling.min_p,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "ignore_eos": sampling.ignore_eos,
    });
    let ids = round.context.ids();
    let mut body = Body::around(&ids, 1)
        .ids("input_ids", &ids, &path)
        .put("sampling_params", params)
        .put("stream", false);
    if nodes > 0 {
        body = body
            .put("return_logprob", true)
            .put("logprob_start_len", round.context.len().saturating_sub(1))
            .put("top_logprobs_num", width)
            .put("return_text_in_logprobs", false);
    }
    Call { path: GENERATE, body: body.end() }
}

#[derive(Deserialize)]
struct Generated {
    text: Option<String>,
    output_ids: Vec<TokenId>,
    meta_info: Meta,
}

#[derive(Deserialize)]
struct Meta {
    finish_reason: Option<Reason>,
    prompt_tokens: u32,
    cached_tokens: Option<u32>,
    #[serde(default)]
    input_top_logprobs: Vec<Option<Vec<LogprobEntry>>>,
}

/// Log-probability, token, and its text if that was requested.
type LogprobEntry = (Option<f64>, TokenId, Option<String>);

#[derive(Deserialize)]
struct Reason {
    #[serde(rename = "type")]
    kind: String,
}

fn score_result(
    engine: &Engine,
    round: &Round<'_>,
    nodes: usize,
    body: &[u8],
) -> Result<VerifyResult, Unreadable> {
    let answer: Generated =
        serde_json::from_slice(body).map_err(|_| Unreadable("not an answer of /generate"))?;
    let [bonus] = answer.output_ids.as_slice() else { return Err(Unreadable("not one token")) };
    let meta = &answer.meta_info;
    if meta.prompt_tokens as usize != round.context.len() + nodes {
        return Err(Unreadable("it counts another prompt"));
    }
    let computed = meta.cached_tokens.map(|cached| meta.prompt_tokens.saturating_sub(cached));
    // The first entry belongs to the last token of the context and is empty.
    let listed = meta.input_top_logprobs.get(1..).unwrap_or_default();
    if listed.len() != nodes {
        return Ok(VerifyResult { rows: Vec::new(), computed, ..VerifyResult::default() });
    }
    let ends = meta.finish_reason.as_ref().is_some_and(|reason| reason.kind == "stop");
    let bonus = Row { ends, text: answer.text, ..Row::of(*bonus) };
    let logprobs =
        listed.iter().map(|row| row.iter().flatten().filter_map(|entry| Some((entry.1, entry.0?))).collect());
    Ok(VerifyResult {
        rows: score::rows(engine, round.sampling, MAX_LOGPROBS, logprobs, round.weighs, bonus),
        computed,
        ..VerifyResult::default()
    })
}

#[cfg(test)]
mod tests;
