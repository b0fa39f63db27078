//! Requests as they come over the wire, read strictly: a field is understood, refused by name as unsupported,
//! or refused by name as unknown.

use serde_json::value::RawValue;
use serde_json::{Map, Number, Value};

use super::errors::Refusal;
use super::fields::{Fields, invalid};
use super::job::PromptLogprobs;
use crate::openai::{Route, Sampling};
use crate::units::TokenId;

/// Most prompts of one call, as vLLM has it.
const PROMPTS_MAX: usize = 1024;
/// Most choices of one prompt.
const CHOICES_MAX: i64 = 128;
/// Most log-probabilities per place, as vLLM has it.
const LOGPROBS_MAX: usize = 20;

/// What is to be continued.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Prompt {
    /// A text.
    Text(String),
    /// Token ids.
    Ids(Vec<TokenId>),
    /// A chat.
    Messages(Vec<Value>),
}

/// A request for output.
#[derive(Clone, Debug)]
pub(super) struct Ask {
    pub(super) route: Route,
    pub(super) prompts: Vec<Prompt>,
    /// Per prompt, how many of its last tokens are output already.
    pub(super) generated: Vec<usize>,
    pub(super) sampling: Sampling,
    pub(super) choices: usize,
    pub(super) max_tokens: Option<usize>,
    pub(super) stop: Vec<String>,
    pub(super) include_stop: bool,
    pub(super) stop_token_ids: Vec<TokenId>,
    pub(super) stream: bool,
    pub(super) usage: StreamUsage,
    pub(super) show: Show,
    /// Whether a text prompt gets the tokens that the model expects at the beginning.
    pub(super) add_special_tokens: bool,
    /// Whether the chat template opens the answer.
    pub(super) opening: bool,
}

/// Which chunks of a stream carry usage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum StreamUsage {
    /// None.
    #[default]
    Never,
    /// A last one without choices.
    Last,
    /// Every one.
    Every,
}

/// What the answer shows besides the text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Show {
    pub(super) echo: bool,
    pub(super) logprobs: Option<usize>,
    /// Which prompt tokens are scored, for `prompt_logprobs` or for an echo with `logprobs`.
    pub(super) prompt_logprobs: Option<PromptLogprobs>,
    /// The scores are shown as `prompt_logprobs`.
    pub(super) prompt_shown: bool,
    pub(super) token_ids: bool,
    pub(super) tokens_as_ids: bool,
}

/// A draft to be judged.
#[derive(Clone, Debug)]
pub(super) struct VerifyAsk {
    pub(super) context: Vec<TokenId>,
    pub(super) generated: usize,
    pub(super) tokens: Vec<TokenId>,
    pub(super) parents: Vec<Option<usize>>,
    pub(super) top: usize,
    pub(super) sampling: Sampling,
    pub(super) stop_token_ids: Vec<TokenId>,
}

/// What the server knows that a request is checked against.
#[derive(Clone, Copy, Debug)]
pub(super) struct Served<'a> {
    pub(super) model: &'a str,
    pub(super) vocabulary: usize,
}

impl Served<'_> {
    fn check_model(&self, fields: &mut Fields<'_>) -> Result<(), Refusal> {
        match fields.take::<String>("model")? {
            Some(model) if model != self.model => Err(Refusal::NoModel(model)),
            _ => Ok(()),
        }
    }

    fn check_ids(&self, name: &str, ids: &[TokenId]) -> Result<(), Refusal> {
        match ids.iter().find(|&&id| id as usize >= self.vocabulary) {
            Some(id) => Err(invalid(name, format!("token id {id} is not below {}", self.vocabulary))),
            None => Ok(()),
        }
    }
}

/// Reads `POST /v1/completions`.
pub(super) fn completions(body: &[u8], served: Served<'_>) -> Result<Ask, Refusal> {
    let mut fields = Fields::read(body)?;
    served.check_model(&mut fields)?;
    let prompts = prompts(&mut fields, served)?;
    let generated = generated(&mut fields, &prompts)?;
    let logprobs = fields.size("logprobs", LOGPROBS_MAX)?;
    let echo = fields.flag("echo", false)?;
    let max_tokens = fields.size("max_tokens", u32::MAX as usize)?;
    fields.only("suffix", &[r#""""#], "only null")?;
    let add_special_tokens = fields.flag("add_special_tokens", true)?;
    let ask = Ask {
        prompts,
        generated,
        max_tokens,
        add_special_tokens,
        ..common(&mut fields, served, Route::Completions)?
    };
    fields.finish()?;
    if ask.max_tokens == Some(0) && (ask.stream || !(echo || ask.show.prompt_shown)) {
        return Err(invalid("max_tokens", "0 needs echo or prompt_logprobs, and no stream"));
    }
    let mut show = Show { echo, logprobs, ..ask.show };
    // An echoed prompt is scored like the output, from its second token on.
    if let (true, Some(top), None) = (echo, logprobs, show.prompt_logprobs) {
        show.prompt_logprobs = Some(PromptLogprobs { top, start: 0 });
    }
    Ok(Ask { show, ..ask })
}

/// Reads `POST /v1/chat/completions`.
pub(super) fn chat(body: &[u8], served: Served<'_>) -> Result<Ask, Refusal> {
    let mut fields = Fields::read(body)?;
    served.check_model(&mut fields)?;
    let messages: Vec<Map<String, Value>> = fields.take("messages")?.ok_or(Refusal::Missing("messages"))?;
    let messages = messages.into_iter().map(message).collect::<Result<Vec<_>, _>>()?;
    if messages.is_empty() {
        return Err(invalid("messages", "at least one message is needed"));
    }
    let most = fields.size("max_tokens", u32::MAX as usize)?;
    let max_tokens = fields.size("max_completion_tokens", u32::MAX as usize)?.or(most);
    if max_tokens == Some(0) {
        return Err(invalid("max_tokens", "must be at least 1"));
    }
    let wanted = fields.flag("logprobs", false)?;
    let top = fields.size("top_logprobs", LOGPROBS_MAX)?;
    if top.is_some_and(|top| top > 0) && !wanted {
        return Err(invalid("top_logprobs", "needs logprobs: true"));
    }
    let opening = opening(&mut fields)?;
    for (name, allowed) in
        [("tools", "[]"), ("functions", "[]"), ("tool_choice", r#""none""#), ("function_call", r#""none""#)]
    {
        fields.only(name, &[allowed], "this server has no tool calls")?;
    }
    fields.only("echo", &["false"], "only false in a chat")?;
    fields.only("modalities", &[r#"["text"]"#], "only text")?;
    fields.ignore(&["parallel_tool_calls", "prediction", "verbosity"]);
    let add_special_tokens = fields.flag("add_special_tokens", false)?;
    let ask = Ask {
        prompts: vec![Prompt::Messages(messages)],
        generated: vec![0],
        max_tokens,
        opening,
        add_special_tokens,
        ..common(&mut fields, served, Route::Chat)?
    };
    fields.finish()?;
    let logprobs = wanted.then(|| top.unwrap_or(0));
    Ok(Ask { show: Show { logprobs, ..ask.show }, ..ask })
}

/// The fields that both routes have.
fn common(fields: &mut Fields<'_>, served: Served<'_>, route: Route) -> Result<Ask, Refusal> {
    let sampling = sampling(fields, served)?;
    let choices = fields.integer("n", 1..=CHOICES_MAX)?.unwrap_or(1) as usize;
    if let Some(best_of) = fields.size("best_of", usize::MAX >> 1)?
        && best_of != choices
    {
        return Err(Refusal::Unsupported { param: "best_of".to_owned(), message: "only the value of n" });
    }
    let stop = fields.texts("stop")?.unwrap_or_default();
    if stop.iter().any(String::is_empty) {
        return Err(invalid("stop", "a stop string must not be empty"));
    }
    let stop_token_ids: Vec<TokenId> = fields.take("stop_token_ids")?.unwrap_or_default();
    served.check_ids("stop_token_ids", &stop_token_ids)?;
    let stream = fields.flag("stream", false)?;
    let usage = stream_usage(fields)?;
    if usage != StreamUsage::Never && !stream {
        return Err(invalid("stream_options", "is only allowed with stream: true"));
    }
    let prompt_logprobs = prompt_logprobs(fields, stream)?;
    let show = Show {
        prompt_logprobs,
        prompt_shown: prompt_logprobs.is_some(),
        token_ids: fields.flag("return_token_ids", false)?,
        tokens_as_ids: fields.flag("return_tokens_as_token_ids", false)?,
        ..Show::default()
    };
    let include_stop = fields.flag("include_stop_str_in_output", false)?;
    unsupported(fields)?;
    Ok(Ask {
        route,
        prompts: Vec::new(),
        generated: Vec::new(),
        sampling,
        choices,
        max_tokens: None,
        stop,
        include_stop,
        stop_token_ids,
        stream,
        usage,
        show,
        add_special_tokens: true,
        opening: true,
    })
}

/// Fields that are known and not done, or that change nothing here.
fn unsupported(fields: &mut Fields<'_>) -> Result<(), Refusal> {
    let plain = r#"{"type":"text"}"#;
    fields.only("response_format", &[plain], "only {\"type\":\"text\"}")?;
    fields.only("use_beam_search", &["false"], "only false")?;
    fields.only("skip_special_tokens", &["true"], "only true")?;
    fields.only("spaces_between_special_tokens", &["true"], "only true")?;
    for name in [
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "structured_outputs",
        "bad_words",
        "allowed_token_ids",
    ] {
        fields.only(name, &["[]"], "only null")?;
    }
    let silent = [
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "request_id",
        "priority",
    ];
    fields.ignore(&silent);
    Ok(())
}

fn stream_usage(fields: &mut Fields<'_>) -> Result<StreamUsage, Refusal> {
    let Some(options) = fields.take::<Map<String, Value>>("stream_options")? else {
        return Ok(StreamUsage::Never);
    };
    let (mut last, mut every) = (false, false);
    for (name, value) in options {
        let flag = match value {
            Value::Null => false,
            Value::Bool(flag) => flag,
            _ => return Err(invalid(&format!("stream_options.{name}"), "expected a boolean")),
        };
        match name.as_str() {
            "include_usage" => last = flag,
            "continuous_usage_stats" => every = flag,
            // Padding against side channels; there is none here.
            "include_obfuscation" => {}
            _ => return Err(Refusal::Unknown(format!("stream_options.{name}"))),
        }
    }
    Ok(match (last, every) {
        (true, true) => StreamUsage::Every,
        (true, false) => StreamUsage::Last,
        (false, _) => StreamUsage::Never,
    })
}

fn prompt_logprobs(fields: &mut Fields<'_>, stream: bool) -> Result<Option<PromptLogprobs>, Refusal> {
    let top = fields.size("prompt_logprobs", LOGPROBS_MAX)?;
    let start = fields.size("prompt_logprob_start", u32::MAX as usize)?;
    match (top, start) {
        (Some(_), _) if stream => Err(invalid("prompt_logprobs", "is not available with stream: true")),
        (None, Some(_)) => Err(invalid("prompt_logprob_start", "needs prompt_logprobs")),
        (top, start) => Ok(top.map(|top| PromptLogprobs { top, start: start.unwrap_or(0) })),
    }
}

/// How to sample: the same fields on every route.
fn sampling(fields: &mut Fields<'_>, served: Served<'_>) -> Result<Sampling, Refusal> {
    let default = Sampling::default();
    let repetition = fields.number("repetition_penalty", 0.0..=f64::from(f32::MAX))?.unwrap_or(1.0);
    if repetition <= 0.0 {
        return Err(invalid("repetition_penalty", "must be above 0"));
    }
    Ok(Sampling {
        temperature: fields.number("temperature", 0.0..=2.0)?.unwrap_or(default.temperature),
        top_p: fields.number("top_p", 0.0..=1.0)?.unwrap_or(default.top_p),
        top_k: fields.integer("top_k", -1..=i64::from(u32::MAX))?.filter(|&k| k > 0).map(|k| k as u32),
        min_p: fields.number("min_p", 0.0..=1.0)?.unwrap_or(default.min_p),
        presence_penalty: fields.number("presence_penalty", -2.0..=2.0)?.unwrap_or(0.0),
        frequency_penalty: fields.number("frequency_penalty", -2.0..=2.0)?.unwrap_or(0.0),
        repetition_penalty: repetition,
        logit_bias: logit_bias(fields, served)?,
        seed: seed(fields)?,
        min_tokens: fields.size("min_tokens", u32::MAX as usize)?.unwrap_or(0) as u32,
        ignore_eos: fields.flag("ignore_eos", false)?,
    })
}

/// A seed is 64 bits; a negative one means its two's complement.
fn seed(fields: &mut Fields<'_>) -> Result<Option<u64>, Refusal> {
    let Some(number) = fields.take::<Number>("seed")? else { return Ok(None) };
    let seed = number.as_u64().or_else(|| number.as_i64().map(i64::cast_unsigned));
    seed.map(Some).ok_or_else(|| invalid("seed", format!("expected an integer of 64 bits, got {number}")))
}

fn logit_bias(fields: &mut Fields<'_>, served: Served<'_>) -> Result<Vec<(TokenId, f32)>, Refusal> {
    let Some(map) = fields.take::<Map<String, Value>>("logit_bias")? else { return Ok(Vec::new()) };
    let mut biases = Vec::with_capacity(map.len());
    for (id, bias) in map {
        let id: TokenId = id
            .parse()
            .map_err(|_| invalid("logit_bias", format!("expected token ids as keys, got {id:?}")))?;
        served.check_ids("logit_bias", &[id])?;
        match bias.as_f64() {
            Some(bias) if (-100.0..=100.0).contains(&bias) => biases.push((id, bias as f32)),
            _ => {
                return Err(invalid("logit_bias", format!("expected a number from -100 to 100, got {bias}")));
            }
        }
    }
    Ok(biases)
}

/// A prompt is a string, token ids, or a list of either.
fn prompts(fields: &mut Fields<'_>, served: Served<'_>) -> Result<Vec<Prompt>, Refusal> {
    let raw: Box<RawValue> = fields.take("prompt")?.ok_or(Refusal::Missing("prompt"))?;
    let read = |error: serde_json::Error| invalid("prompt", error.to_string());
    let inner = raw.get().strip_prefix('[').map(str::trim_start);
    let prompts = match inner.and_then(|inner| inner.chars().next()) {
        None => vec![Prompt::Text(serde_json::from_str(raw.get()).map_err(read)?)],
        Some('"') => {
            let texts: Vec<String> = serde_json::from_str(raw.get()).map_err(read)?;
            texts.into_iter().map(Prompt::Text).collect()
        }
        Some('[') => {
            let lists: Vec<Vec<TokenId>> = serde_json::from_str(raw.get()).map_err(read)?;
            lists.into_iter().map(Prompt::Ids).collect()
        }
        Some(_) => vec![Prompt::Ids(serde_json::from_str(raw.get()).map_err(read)?)],
    };
    for prompt in &prompts {
        match prompt {
            Prompt::Ids(ids) if ids.is_empty() => return Err(invalid("prompt", "must not be empty")),
            Prompt::Ids(ids) => served.check_ids("prompt", ids)?,
            Prompt::Text(_) | Prompt::Messages(_) => {}
        }
    }
    if prompts.len() > PROMPTS_MAX {
        return Err(invalid("prompt", format!("at most {PROMPTS_MAX} prompts, got {}", prompts.len())));
    }
    Ok(prompts)
}

/// `generated`: one number for all prompts, or one for each.
fn generated(fields: &mut Fields<'_>, prompts: &[Prompt]) -> Result<Vec<usize>, Refusal> {
    let Some(raw) = fields.take::<Box<RawValue>>("generated")? else { return Ok(vec![0; prompts.len()]) };
    let read = |error: serde_json::Error| invalid("generated", error.to_string());
    let counts: Vec<usize> = if raw.get().starts_with('[') {
        serde_json::from_str(raw.get()).map_err(read)?
    } else {
        vec![serde_json::from_str(raw.get()).map_err(read)?; prompts.len()]
    };
    if counts.len() != prompts.len() {
        return Err(invalid("generated", format!("{} numbers for {} prompts", counts.len(), prompts.len())));
    }
    for (prompt, &count) in prompts.iter().zip(&counts) {
        match prompt {
            Prompt::Ids(ids) if count > ids.len() => {
                return Err(invalid(
                    "generated",
                    format!("{count} is more than the {} tokens of the prompt", ids.len()),
                ));
            }
            Prompt::Text(_) if count > 0 => return Err(invalid("generated", "needs prompts of token ids")),
            _ => {}
        }
    }
    Ok(counts)
}

/// A message with its content as one string, which is what text templates expect.
fn message(mut message: Map<String, Value>) -> Result<Value, Refusal> {
    if !message.get("role").is_some_and(Value::is_string) {
        return Err(invalid("messages", "every message needs a role"));
    }
    let content = match message.get("content") {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => {
            let texts = parts.iter().map(text_part).collect::<Result<Vec<_>, _>>()?;
            texts.join("\n")
        }
        _ => return Err(invalid("messages", "content must be a string or a list of text parts")),
    };
    message.insert("content".to_owned(), Value::String(content));
    Ok(Value::Object(message))
}

fn text_part(part: &Value) -> Result<String, Refusal> {
    let text = (part.get("type").and_then(Value::as_str) == Some("text")).then(|| part.get("text")).flatten();
    text.and_then(Value::as_str)
        .map(str::to_owned)
        .ok_or(Refusal::Unsupported { param: "messages".to_owned(), message: "only text parts" })
}

/// How the chat template is used.
fn opening(fields: &mut Fields<'_>) -> Result<bool, Refusal> {
    fields.only("continue_final_message", &["false"], "only false")?;
    fields.only("chat_template", &[], "only the model's own")?;
    fields.only("chat_template_kwargs", &["{}"], "the model's template has no variables")?;
    fields.flag("add_generation_prompt", true)
}

/// Reads `POST /v1/verify`.
pub(super) fn verify(body: &[u8], served: Served<'_>) -> Result<VerifyAsk, Refusal> {
    let mut fields = Fields::read(body)?;
    served.check_model(&mut fields)?;
    let context: Vec<TokenId> = fields.take("context")?.ok_or(Refusal::Missing("context"))?;
    if context.is_empty() {
        return Err(invalid("context", "must not be empty"));
    }
    served.check_ids("context", &context)?;
    let generated = fields.size("generated", context.len())?.unwrap_or(0);
    let tokens: Vec<TokenId> = fields.take("tokens")?.ok_or(Refusal::Missing("tokens"))?;
    served.check_ids("tokens", &tokens)?;
    let parents = parents(fields.take("parents")?, tokens.len())?;
    let top = fields.size("top_logprobs", LOGPROBS_MAX)?.unwrap_or(0);
    let sampling = sampling(&mut fields, served)?;
    let stop_token_ids: Vec<TokenId> = fields.take("stop_token_ids")?.unwrap_or_default();
    served.check_ids("stop_token_ids", &stop_token_ids)?;
    fields.finish()?;
    Ok(VerifyAsk { context, generated, tokens, parents, top, sampling, stop_token_ids })
}

/// Parents from the wire: −1 follows the context; without the field the draft is a chain.
fn parents(parents: Option<Vec<i64>>, nodes: usize) -> Result<Vec<Option<usize>>, Refusal> {
    let Some(parents) = parents else {
        return Ok((0..nodes).map(|node: usize| node.checked_sub(1)).collect());
    };
    if parents.len() != nodes {
        return Err(invalid("parents", format!("{} parents for {nodes} tokens", parents.len())));
    }
    let read = |(node, &parent): (usize, &i64)| match usize::try_from(parent) {
        Ok(parent) if parent < node => Ok(Some(parent)),
        Err(_) if parent == -1 => Ok(None),
        _ => Err(invalid("parents", format!("node {node} must follow -1 or an earlier node, got {parent}"))),
    };
    parents.iter().enumerate().map(read).collect()
}

/// What is to be tokenized.
pub(super) struct TokenizeAsk {
    pub(super) prompt: Prompt,
    pub(super) opening: bool,
    pub(super) add_special_tokens: bool,
    pub(super) token_strings: bool,
}

/// Reads `POST /tokenize`: a `prompt` or `messages`.
pub(super) fn tokenize(body: &[u8], served: Served<'_>) -> Result<TokenizeAsk, Refusal> {
    let mut fields = Fields::read(body)?;
    served.check_model(&mut fields)?;
    let token_strings = fields.flag("return_token_strs", false)?;
    let messages: Option<Vec<Map<String, Value>>> = fields.take("messages")?;
    let text: Option<String> = fields.take("prompt")?;
    let special = fields.take("add_special_tokens")?;
    let opening = opening(&mut fields)?;
    let ask = match (text, messages) {
        (Some(text), None) => {
            let add_special_tokens = special.unwrap_or(true);
            TokenizeAsk { prompt: Prompt::Text(text), opening, add_special_tokens, token_strings }
        }
        (None, Some(messages)) => {
            let prompt = Prompt::Messages(messages.into_iter().map(message).collect::<Result<_, _>>()?);
            TokenizeAsk { prompt, opening, add_special_tokens: special.unwrap_or(false), token_strings }
        }
        (Some(_), Some(_)) => return Err(invalid("prompt", "either prompt or messages, not both")),
        (None, None) => return Err(Refusal::Missing("prompt")),
    };
    fields.finish()?;
    Ok(ask)
}

/// Reads `POST /detokenize`.
pub(super) fn detokenize(body: &[u8], served: Served<'_>) -> Result<Vec<TokenId>, Refusal> {
    let mut fields = Fields::read(body)?;
    served.check_model(&mut fields)?;
    let tokens: Vec<TokenId> = fields.take("tokens")?.ok_or(Refusal::Missing("tokens"))?;
    served.check_ids("tokens", &tokens)?;
    fields.finish()?;
    Ok(tokens)
}
