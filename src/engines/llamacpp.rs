//! The server of llama.cpp.
//!
//! `FanOut` is an array of prompts on `/completion`, one slot each; the same schema reads both
//! routes, so fields that a client leaves open get the same defaults, and fields that OpenAI's
//! route ignores are ignored here too.
//!
//! Its streams are lossy: an event is written only when the text so far ends in a complete
//! character, and no event reports the tokens in between. Therefore:
//! * the first call asks for the server's counts in addition to the ids (`__verbose` on
//!   completions; on chat log-probabilities, from which the ids are read, and timings), and if a
//!   count differs, the ids are not trusted;
//! * plain requests by ids are not streamed, and ask for a few tokens at a time. Resampling a lost
//!   token would change its distribution.
//!
//! Penalties count prompt and output alike, so they stay right when output becomes prompt. The
//! server has a separate list of tokens that end a text, longer than the model's: only `stop_type`
//! reports the end.

use serde::Deserialize;
use serde_json::{Value, json};

use super::body::Body;
use super::recognise::PROPS;
use super::shared::{self, bytes, client_fields};
use super::{
    Additions, AnswerQuirks, Answers, BrokenEnd, Call, Chunk, Codec, Context, Dialect, Engine, Foreign, Load,
    MaxTokens, Noise, OutputLimits, Pages, PrefixCache, ProbeQuirks, PromptStep, Question, Quirks, Refusal,
    RequestKind, Round, ServerDefaults, StopQuirks, Tokenize, Unreadable, UsageQuirks, Usual, VerifyRequest,
};
use foretell_core::session::StopOrder;
use foretell_core::units::TokenId;
use foretell_core::words::{PassthroughReason, Refused};
use foretell_core::words::{Row, VerifyMethod, VerifyResult};
use foretell_wire::openai::{
    Additive, Defaults, Event, Prompt, Request, Route, Sampling, SamplingField, UsageText, order,
};
use foretell_wire::translation::Thinking;

const COMPLETION: &str = "/completion";
const TEMPLATE: &str = "/apply-template";
const METRICS: &str = "/metrics";
const SLOTS: &str = "/slots";
/// Tokens of one plain request by ids: its text comes at once at its end.
const SEGMENT: u32 = 8;
/// Contexts shorter than this are computed in each slot as fast as they are copied.
const FORKED: usize = 64;
/// The value by which the server draws a seed itself.
const RANDOM_SEED: u64 = u32::MAX as u64;
/// The members wanted of an answer, which would repeat everything otherwise.
const WANTED: [&str; 7] =
    ["index", "content", "tokens", "tokens_evaluated", "stop_type", "timings", SERVER_STOPS];
/// The stop texts of the server, which apply to a call that names none. Its settings do not show
/// them; every answer does.
const SERVER_STOPS: &str = "generation_settings/stop";

/// The codec of the server of llama.cpp.
pub struct LlamaCpp;

/// The order of the fields of unstreamed answers, of both routes.
const ANSWER: [&str; 8] =
    ["choices", "created", "model", "system_fingerprint", "object", "usage", "id", "timings"];

const QUIRKS: Quirks = Quirks {
    owner: Some("llamacpp"),
    usual: Some(Usual { methods: &[VerifyMethod::FanOut], ..Usual::COMMON }),
    cache_setting: Some(
        "its idle slots are cleared, so every prompt is computed anew: start it with --no-cache-idle-slots",
    ),
    probe: ProbeQuirks { fills_slots: true, ..ProbeQuirks::COMMON },
    thinking: Thinking::TemplateAndBudget,
    has_other_apis: true,
    answers: AnswerQuirks {
        json_type: "application/json; charset=utf-8",
        bare_end: true,
        time_report: Some("timings"),
        broken_end: BrokenEnd::OmittedInStreams,
        ..AnswerQuirks::COMMON
    },
    tokenize: Some(Tokenize::Content),
    limits: OutputLimits { completion: MaxTokens::Context, ..OutputLimits::OPENAI },
    segment: Some(SEGMENT),
    stops: StopQuirks { order: StopOrder::FirstBegun, ..StopQuirks::COMMON },
    usage: UsageQuirks {
        unrequested: Some(Route::Completions),
        no_event: Some(Route::Completions),
        ..UsageQuirks::COMMON
    },
    ..Quirks::COMMON
};

impl Codec for LlamaCpp {
    fn quirks(&self) -> &'static Quirks {
        &QUIRKS
    }

    fn questions(&self, answers: &Answers) -> Vec<Question> {
        answers.unanswered(&[METRICS, SLOTS])
    }

    fn engine(&self, answers: &Answers) -> Result<Engine, Foreign> {
        let settings = |name: &str| answers.at(PROPS, &format!("/default_generation_settings/{name}"));
        let model = answers.model().ok_or_else(|| Foreign::silent("model"))?;
        let context = settings("n_ctx").and_then(|length| length.as_u64());
        let context = context.ok_or_else(|| Foreign::silent("context length"))?;
        let slots =
            answers.number(PROPS, "/total_slots").ok_or_else(|| Foreign::silent("number of slots"))?;
        let params = settings("params").ok_or_else(|| Foreign::silent("parameters"))?;
        let number = |name: &str| params.get(name).and_then(Value::as_f64);
        let speculative = answers.at(SLOTS, "/0/speculative").is_some_and(|speculative| speculative == true);
        let native = params.get("speculative.types").and_then(Value::as_str);
        // A single slot computes one prompt after the other.
        let methods = if slots > 1 && !remembers(&params) { vec![VerifyMethod::FanOut] } else { vec![] };
        let most = params.get("n_predict").and_then(Value::as_u64).and_then(|most| u32::try_from(most).ok());
        let most = most.map_or(MaxTokens::Context, MaxTokens::Tokens);
        let defaults = ServerDefaults {
            sampling: defaults(&params),
            samplers: operator_samplers(&params),
            seeded: number("seed").is_some_and(|seed| seed >= 0.0 && seed as u64 != RANDOM_SEED),
            ..ServerDefaults::default()
        };
        let load = [METRICS, SLOTS].into_iter().find(|path| answers.status(path) == Some(200));
        Ok(Engine {
            context: usize::try_from(context).ok(),
            methods,
            defaults,
            limits: OutputLimits { most: None, completion: most, chat: most },
            noise: Noise::Call,
            slots: usize::try_from(slots).ok(),
            cache: PrefixCache { reports_hits: true, ..PrefixCache::default() },
            speculates: speculative || native.is_some_and(|kind| kind != "none"),
            pages: Pages { load, ..Pages::default() },
            ..Engine::new(Dialect::LlamaCpp, model, answers.word(PROPS, "/build_info").unwrap_or_default())
        })
    }

    fn methods(
        &self,
        engine: &Engine,
        request: &Request,
        sampling: &Sampling,
        _: bool,
    ) -> Result<Vec<VerifyMethod>, Refused> {
        match refused(engine, request, sampling) {
            Some(refused) => Err(refused),
            None => Ok(engine.methods.clone()),
        }
    }

    fn additions(&self, _: &Engine, request: &Request, _: u64) -> Additions {
        type Members = &'static [&'static str];
        let (members, top, choice): (_, Members, Members) = match request.route {
            Route::Completions => (vec![("verbose", json!(true))], &["__verbose", "timings"], &[]),
            // Log-probabilities after sampling cost nothing; those before it are a pass over the
            // vocabulary.
            Route::Chat => (
                vec![
                    ("logprobs", json!(true)),
                    ("top_logprobs", json!(1)),
                    ("post_sampling_probs", json!(true)),
                ],
                &["timings"],
                &["logprobs"],
            ),
        };
        let traces = Additive {
            usage: !request.include_usage,
            token_ids: true,
            members: top,
            choice,
            ..Additive::default()
        };
        Additions {
            members: members.into_iter().chain([("timings_per_token", json!(true))]).collect(),
            traces,
        }
    }

    /// A chat's choice is written in alphabetical order, as its objects are; an event's has it
    /// already.
    fn complete(&self, _: &Engine, _: Route, answer: &mut Value) {
        if answer.pointer("/choices/0/message").is_some() {
            order(answer.pointer_mut("/choices/0"), &["finish_reason", "index", "message"]);
        }
        order(Some(answer), &ANSWER);
    }

    fn prompt_step(
        &self,
        _: &Engine,
        request: &Request,
        answer: Option<&[u8]>,
    ) -> Result<PromptStep, Unreadable> {
        let Some(body) = answer else {
            return Ok(match &request.prompt {
                Prompt::Ids(_) => PromptStep::Nothing,
                Prompt::Text(text) => PromptStep::Call(tokenize(text)),
                Prompt::Messages(_) => PromptStep::Call(Call { path: TEMPLATE, body: bytes(&request.body) }),
            });
        };
        let answer: Value = serde_json::from_slice(body).map_err(|_| Unreadable("not JSON"))?;
        if let Some(text) = answer.get("prompt").and_then(Value::as_str) {
            return Ok(PromptStep::Call(tokenize(text)));
        }
        let tokens = answer.get("tokens").and_then(shared::ids);
        tokens.map(PromptStep::Prompt).ok_or(Unreadable("neither a prompt nor tokens"))
    }

    fn plain_request(&self, _: &Engine, context: &Context<'_>, sampling: &Sampling, max_tokens: u32) -> Call {
        native(context, &[Vec::new()], max_tokens, sampling)
    }

    fn chunk(&self, kind: RequestKind, event: &Event) -> Result<Chunk, Unreadable> {
        match kind {
            RequestKind::First => first_chunk(event),
            RequestKind::Later => unstreamed_chunk(event),
        }
    }

    fn verify(&self, engine: &Engine, round: &Round<'_>) -> Result<VerifyRequest, Refusal> {
        if round.method != VerifyMethod::FanOut {
            return Err(Refusal::NoVerifyMethod(round.method.name()));
        }
        let nodes = round.draft.len().min(room(engine, &round.context));
        if nodes == 0 && !round.draft.is_empty() {
            return Err(Refusal::NoRoom(round.context.len()));
        }
        let paths = shared::paths(round.draft, nodes);
        Ok(VerifyRequest::one(native(&round.context, &paths, 1, round.sampling), nodes))
    }

    fn result(
        &self,
        _: &Engine,
        round: &Round<'_>,
        request: &VerifyRequest,
        bodies: &[Vec<u8>],
    ) -> Result<VerifyResult, Unreadable> {
        let body = shared::only(bodies)?;
        let mut answers = Answered::all(body)?;
        // Judged by the server's settings, never by the samples: which answers such a text ends
        // depends on the samples, and to refuse only those would change their distribution.
        if answers.iter().any(Answered::has_server_stops) {
            return Err(Unreadable("the server adds stop texts (--reverse-prompt)"));
        }
        answers.sort_by_key(|answer| answer.index);
        if answers.len() != request.nodes + 1 {
            return Err(Unreadable("not one answer for each prompt"));
        }
        let computed =
            answers.iter().map(|answer| answer.timings.as_ref().map(|timings| timings.computed)).sum();
        let rows = answers
            .iter()
            .enumerate()
            .map(|(position, answer)| answer.row(position))
            .collect::<Result<_, _>>()?;
        let sent = shared::paths(round.draft, request.nodes)
            .into_iter()
            .map(|path| round.context.len() + path.len());
        if answers
            .iter()
            .zip(sent)
            .any(|(answer, sent)| answer.tokens_evaluated.is_some_and(|counted| counted != sent))
        {
            return Err(Unreadable("it counts another prompt"));
        }
        Ok(VerifyResult { rows, computed, ..VerifyResult::default() })
    }

    /// One prompt that is computed once and copied into as many slots as the round needs. Its
    /// sampled tokens are not used.
    fn warm(&self, engine: &Engine, round: &Round<'_>) -> Option<Call> {
        let slots = round.draft.len().min(room(engine, &round.context)) + 1;
        if slots < 2 || round.context.len() < FORKED {
            return None;
        }
        let ids = round.context.ids();
        let body = Body::around(&ids, 1)
            .ids("prompt", &ids, &[])
            .put("n_predict", 1)
            .put("n_cmpl", slots)
            .put("temperature", 0.0)
            .put("cache_prompt", true)
            .put("stream", false)
            .put("response_fields", ["index"]);
        Some(Call { path: COMPLETION, body: body.end() })
    }

    fn load(&self, body: &str) -> Option<Load> {
        if let Ok(slots) = serde_json::from_str::<Vec<Slot>>(body) {
            let running = slots.iter().filter(|slot| slot.is_processing).count();
            let limit = u32::try_from(slots.len()).ok().filter(|&slots| slots > 0);
            return Some(Load { running: u32::try_from(running).ok()?, limit, ..Load::default() });
        }
        let kv = ["llamacpp:kv_cache_usage_ratio"];
        shared::load(body, "llamacpp:requests_processing", "llamacpp:requests_deferred", &kv)
    }
}

/// Reason why the engine cannot carry this request exactly. This server ignores parameters of other
/// servers silently. Where the first call of a chat overwrites a parameter of the client's, the
/// server's error about the client's value would be lost.
fn refused(engine: &Engine, request: &Request, sampling: &Sampling) -> Option<Refused> {
    let fields = &request.sampling;
    let penalized =
        fields.set_by_client.has(SamplingField::RepetitionPenalty) && fields.penalizes_repetition();
    let sets = |name: &str| request.body.get(name).is_some_and(|value| !value.is_null());
    let replaced = |name: &str| request.route == Route::Chat && sets(name);
    let parameters = [
        (penalized, "repetition_penalty"),
        (sampling.min_tokens > 0, "min_tokens"),
        (request.include_stop, "include_stop_str_in_output"),
        (request.return_token_ids, "return_token_ids"),
        (!request.stop_token_ids.is_empty(), "stop_token_ids"),
        (replaced("n_probs"), "n_probs"),
        (replaced("top_logprobs"), "top_logprobs"),
    ];
    let switched_off = engine.defaults.samplers.iter().copied().find(|name| sets(name));
    Refused::by_first(PassthroughReason::Parameter, &parameters)
        .or_else(|| switched_off.map(|name| Refused::by(PassthroughReason::Parameter, name)))
}

#[derive(Deserialize)]
struct Slot {
    is_processing: bool,
}

/// True if one of the server's samplers keeps state from token to token that a new call does not
/// have.
fn remembers(params: &Value) -> bool {
    let number = |name: &str| params.get(name).and_then(Value::as_f64);
    number("mirostat").is_some_and(|kind| kind > 0.0)
        || number("adaptive_target").is_some_and(|target| target >= 0.0)
}

/// The samplers of the server's chain that are switched on by its settings.
fn operator_samplers(params: &Value) -> Vec<&'static str> {
    let is_on = |&(name, off): &(&str, f64)| {
        params.get(name).and_then(Value::as_f64).is_some_and(|value| (value - off).abs() > 1e-6)
    };
    SAMPLERS.iter().filter(|sampler| is_on(sampler)).map(|(name, _)| *name).collect()
}

/// Samplers that have no part in [`Defaults`], or another name there, with the values that switch
/// them off.
const SAMPLERS: [(&str, f64); 9] = [
    ("top_n_sigma", -1.0),
    ("xtc_probability", 0.0),
    ("typical_p", 1.0),
    ("dynatemp_range", 0.0),
    ("repeat_penalty", 1.0),
    ("dry_multiplier", 0.0),
    ("mirostat", 0.0),
    ("adaptive_target", -1.0),
    ("min_keep", 0.0),
];

/// The server's sampling defaults, from its parameter names.
fn defaults(params: &Value) -> Option<Defaults> {
    let number = |name: &str| params.get(name).and_then(Value::as_f64);
    let top_k = params.get("top_k").and_then(Value::as_i64)?;
    Some(Defaults {
        temperature: number("temperature")?,
        top_p: number("top_p")?,
        top_k: u32::try_from(top_k).ok().filter(|&k| k > 0),
        min_p: number("min_p")?,
        presence_penalty: number("presence_penalty")?,
        frequency_penalty: number("frequency_penalty")?,
        repetition_penalty: number("repeat_penalty")?,
    })
}

/// Maximum nodes of a round: one slot each in addition to that of the context, and together no more
/// tokens than the KV cache that the slots share, because the server makes room there by failing
/// other requests.
fn room(engine: &Engine, context: &Context<'_>) -> usize {
    let slots = engine.slots.unwrap_or(1);
    let fit = engine.context.map_or(slots, |most| most / context.len().max(1));
    slots.min(fit).saturating_sub(1)
}

/// The call for the ids of a prompt.
fn tokenize(text: &str) -> Call {
    let body = json!({ "content": text, "add_special": true, "parse_special": true });
    Call { path: shared::TOKENIZE, body: bytes(&body) }
}

/// A prompt of ids for each path that may follow the context, on llama.cpp's native route, not
/// streamed, with exactly the fields that the client has set.
fn native(context: &Context<'_>, paths: &[Vec<TokenId>], most: u32, sampling: &Sampling) -> Call {
    let ids = context.ids();
    let body = Body::around(&ids, paths.len());
    let body = match paths {
        [one] => body.ids("prompt", &ids, one),
        several => body.lists("prompt", &ids, several),
    };
    let body = body
        .put("n_predict", most)
        .put("cache_prompt", true)
        .put("return_tokens", true)
        .put("stream", false)
        .put("response_fields", WANTED)
        .all(&client_fields(sampling));
    Call { path: COMPLETION, body: body.end() }
}

/// The answer of the native route, within one of OpenAI's.
#[derive(Deserialize)]
struct Native {
    tokens: Option<Vec<TokenId>>,
    tokens_predicted: Option<u32>,
    tokens_evaluated: Option<u32>,
}

/// Log-probabilities of a chat, of which only the ids are read.
#[derive(Deserialize)]
struct Logprobs {
    content: Vec<SampledToken>,
}

#[derive(Deserialize)]
struct SampledToken {
    id: TokenId,
}

/// One event of OpenAI's routes.
fn first_chunk(event: &Event) -> Result<Chunk, Unreadable> {
    let mut chunk = shared::chunk(event)?;
    let timings: Option<Timings> = event.top().read("timings");
    if let Some(native) = event.top().read::<Native>("__verbose") {
        chunk.tokens = native.tokens.unwrap_or_default();
        chunk.count = native.tokens_predicted;
        chunk.prompt_count = native.tokens_evaluated;
    } else if let Some(timings) = &timings {
        let listed = event.choice().and_then(|choice| choice.read::<Logprobs>("logprobs"));
        let listed = listed.into_iter().flat_map(|listed| listed.content);
        chunk.tokens = listed.map(|token| token.id).collect();
        chunk.count = timings.output;
        chunk.prompt_count = timings.prompt();
    }
    chunk.usage = chunk.usage.or(timings.and_then(|timings| timings.usage()));
    chunk.doubtful = !chunk.text.is_empty() && chunk.tokens.is_empty();
    // The end of a text arrives as a token like others, before the event that reports it.
    let silent = chunk.text.is_empty() && chunk.more.is_empty();
    chunk.pending = silent && chunk.finish.is_none() && !chunk.tokens.is_empty();
    Ok(chunk)
}

/// The answer to a plain request, which is not streamed.
fn unstreamed_chunk(event: &Event) -> Result<Chunk, Unreadable> {
    let answer: Answered =
        serde_json::from_str(event.json()).map_err(|_| Unreadable("not an answer of /completion"))?;
    let ends = answer.ends()?;
    let finish = Some(if ends { "stop" } else { "length" }.to_owned());
    Ok(Chunk { tokens: answer.tokens, finish, ends, ..Chunk::default() })
}

#[derive(Deserialize)]
struct Answered {
    #[serde(default)]
    index: usize,
    content: Option<String>,
    tokens: Vec<TokenId>,
    tokens_evaluated: Option<usize>,
    stop_type: String,
    timings: Option<Timings>,
    #[serde(default, rename = "generation_settings/stop")]
    server_stops: Vec<String>,
}

/// Tokens and times of a request so far.
#[derive(Deserialize)]
struct Timings {
    /// Tokens of the prompt that were computed.
    #[serde(rename = "prompt_n")]
    computed: u32,
    /// Those that were cached.
    #[serde(rename = "cache_n")]
    cached: Option<u32>,
    /// Output tokens.
    #[serde(rename = "predicted_n")]
    output: Option<u32>,
}

impl Timings {
    /// Tokens of the prompt.
    fn prompt(&self) -> Option<u32> {
        Some(self.cached?.saturating_add(self.computed))
    }

    /// The same as `usage`, which only the last event has: for a call that is aborted before its
    /// end.
    fn usage(&self) -> Option<UsageText> {
        let (prompt, output, cached) = (self.prompt()?, self.output?, self.cached?);
        let total = u64::from(prompt) + u64::from(output);
        Some(UsageText::of(format!(
            "{{\"completion_tokens\":{output},\"prompt_tokens\":{prompt},\"total_tokens\":{total},\
             \"prompt_tokens_details\":{{\"cached_tokens\":{cached}}}}}"
        )))
    }
}

impl Answered {
    /// One prompt is answered by an object, several by a list.
    fn all(body: &[u8]) -> Result<Vec<Self>, Unreadable> {
        let is_list = body.trim_ascii_start().starts_with(b"[");
        let one = || serde_json::from_slice(body).map(|one| vec![one]);
        let all = if is_list { serde_json::from_slice(body) } else { one() };
        all.map_err(|_| Unreadable("not an answer of /completion"))
    }

    fn has_server_stops(&self) -> bool {
        !self.server_stops.is_empty()
    }

    /// True if the text ended. A stop text (`word`) is the server's, because calls send none.
    fn ends(&self) -> Result<bool, Unreadable> {
        match self.stop_type.as_str() {
            "eos" | "word" => Ok(true),
            "limit" => Ok(false),
            _ => Err(Unreadable("unknown reason for its end")),
        }
    }

    fn row(&self, position: usize) -> Result<Row, Unreadable> {
        match self.tokens.as_slice() {
            [sample] if self.index == position => {
                Ok(Row { ends: self.ends()?, text: self.content.clone(), ..Row::of(*sample) })
            }
            _ => Err(Unreadable("not one token per prompt")),
        }
    }
}

#[cfg(test)]
mod tests;
