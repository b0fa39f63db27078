//! Parses requests strictly: every field is either used, refused as unsupported, or refused as
//! unknown, always by name.

use std::sync::Arc;

use serde_json::{Map, Value};

mod prompt;
mod sampling;
mod tokens;

use crate::target::errors::Refusal;
use crate::target::fields::{Fields, invalid};
use crate::target::parts::ParseOptions;
use crate::target::wire::prompt::{generated, message, opening, parse_options, prompts};
use crate::target::wire::sampling::sampling;
pub(super) use crate::target::wire::tokens::{TokenizeRequest, VerifyRequest, detokenize, tokenize, verify};
use foretell_core::units::TokenId;
use foretell_parsers::parse::{Parsers, ToolFormat};
use foretell_wire::openai::{Route, Sampling, call_grammar, is_strict};

/// Maximum number of choices per prompt (`n`).
const CHOICES_MAX: i64 = 128;
/// Maximum number of choices of a request, all prompts together: as many as one choice of each of
/// the most prompts. Every choice is a separate job.
const JOBS_MAX: usize = prompt::PROMPTS_MAX;
/// Maximum number of stop strings: each of them is compared with the end of the text at every
/// token of every choice. Far above the dozens that chat frontends send.
const STOPS_MAX: usize = 256;
/// Maximum length of all stop strings together, bytes: each choice may withhold as much text, and
/// looks through it at every token.
const STOPS_LENGTH_MAX: usize = 16 << 10;
/// Maximum number of log-probabilities per position, as in vLLM.
const LOGPROBS_MAX: usize = 20;

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Prompt {
    Text(String),
    Ids(Vec<TokenId>),
    Messages(Vec<Value>),
}

impl Prompt {
    /// Name of the request field that it comes from.
    pub(super) fn field(&self) -> &'static str {
        match self {
            Self::Text(_) | Self::Ids(_) => "prompt",
            Self::Messages(_) => "messages",
        }
    }
}

/// A parsed completion or chat request.
#[derive(Clone, Debug)]
pub(super) struct GenerateRequest {
    pub(super) route: Route,
    pub(super) prompts: Vec<Prompt>,
    /// For each prompt, the number of its last tokens that are output of an earlier request.
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
    /// True if the tokens that the model expects at the beginning are added to a text prompt.
    pub(super) add_special_tokens: bool,
    /// True if the chat template ends with the start of the assistant's message.
    pub(super) opening: bool,
    /// Decides how the answer to a chat is parsed.
    pub(super) parse_options: ParseOptions,
    /// Tokens that the head is to draft now and then; 0: none.
    pub(super) propose: usize,
}

impl GenerateRequest {
    /// Variables of the chat template besides the messages.
    pub(super) fn variables(&self) -> Map<String, Value> {
        let mut variables = self.parse_options.template.clone().unwrap_or_default();
        if !self.parse_options.tools.is_empty() {
            variables.insert("tools".to_owned(), Value::Array(self.parse_options.tools.clone()));
        }
        variables
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum StreamUsage {
    #[default]
    Never,
    /// An additional last event without choices.
    Last,
    Every,
}

/// Content of the answer besides the text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Show {
    pub(super) echo: bool,
    pub(super) logprobs: Option<usize>,
    /// Number of best tokens to report in addition to each token of the prompt, for
    /// `prompt_logprobs` or for `echo` with `logprobs`; `None`: the prompt is not scored.
    pub(super) prompt_logprobs: Option<usize>,
    /// True if the scores are sent as `prompt_logprobs`.
    pub(super) prompt_shown: bool,
    pub(super) token_ids: bool,
    pub(super) tokens_as_ids: bool,
}

/// Properties of the served model that requests are checked against.
#[derive(Clone, Copy, Debug)]
pub(super) struct Served<'a> {
    pub(super) model: &'a str,
    pub(super) vocabulary: usize,
    /// Output parsers; tools are refused without one.
    pub(super) parsers: Parsers,
    /// A grammar can constrain an output.
    pub(super) grammars: bool,
    /// Number of tokens that the model's head drafts; 0 if it has none.
    pub(super) proposes: usize,
}

impl Served<'_> {
    /// Reads `propose`: the tokens that the head is to draft, at most as many as it can.
    fn propose(&self, fields: &mut Fields<'_>) -> Result<usize, Refusal> {
        Ok(fields.size("propose", u32::MAX as usize)?.unwrap_or(0).min(self.proposes))
    }

    fn check_model(&self, fields: &mut Fields<'_>) -> Result<(), Refusal> {
        match fields.take::<String>("model")? {
            Some(model) if model != self.model => Err(Refusal::NoModel(model)),
            _ => Ok(()),
        }
    }

    pub(super) fn check_ids(&self, name: &str, ids: &[TokenId]) -> Result<(), Refusal> {
        match ids.iter().find(|&&id| id as usize >= self.vocabulary) {
            Some(id) => Err(invalid(name, format!("token id {id} is not below {}", self.vocabulary))),
            None => Ok(()),
        }
    }
}

/// Parses the body of `POST /v1/completions`.
pub(super) fn completions(body: &[u8], served: Served<'_>) -> Result<GenerateRequest, Refusal> {
    let mut fields = Fields::read(body)?;
    served.check_model(&mut fields)?;
    let prompts = prompts(&mut fields, served)?;
    let generated = generated(&mut fields, &prompts)?;
    let logprobs = fields.size("logprobs", LOGPROBS_MAX)?;
    let echo = fields.flag("echo", false)?;
    let max_tokens = fields.size("max_tokens", u32::MAX as usize)?;
    fields.only("suffix", &[r#""""#], "only null")?;
    let add_special_tokens = fields.flag("add_special_tokens", true)?;
    let request = GenerateRequest {
        prompts,
        generated,
        max_tokens,
        add_special_tokens,
        ..common(&mut fields, served, Route::Completions)?
    };
    fields.finish()?;
    let jobs = request.prompts.len() * request.choices;
    if jobs > JOBS_MAX {
        return Err(invalid("n", format!("at most {JOBS_MAX} choices of all prompts, got {jobs}")));
    }
    if request.max_tokens == Some(0) && (request.stream || !(echo || request.show.prompt_shown)) {
        return Err(invalid("max_tokens", "0 needs echo or prompt_logprobs, and no stream"));
    }
    let mut show = Show { echo, logprobs, ..request.show };
    // An echoed prompt is scored like the output, from its second token on.
    if echo {
        show.prompt_logprobs = show.prompt_logprobs.or(logprobs);
    }
    Ok(GenerateRequest { show, ..request })
}

/// Parses the body of `POST /v1/chat/completions`.
pub(super) fn chat(body: &[u8], served: Served<'_>) -> Result<GenerateRequest, Refusal> {
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
    let parse_options = parse_options(&mut fields, served.parsers)?;
    let opening = opening(&mut fields)?;
    for (name, allowed) in [("functions", "[]"), ("function_call", r#""none""#)] {
        fields.only(name, &[allowed], "only tools")?;
    }
    fields.only("echo", &["false"], "only false in a chat")?;
    fields.only("modalities", &[r#"["text"]"#], "only text")?;
    fields.ignore(&["prediction", "verbosity"]);
    let add_special_tokens = fields.flag("add_special_tokens", false)?;
    let request = GenerateRequest {
        prompts: vec![Prompt::Messages(messages)],
        generated: vec![0],
        max_tokens,
        opening,
        parse_options,
        add_special_tokens,
        ..common(&mut fields, served, Route::Chat)?
    };
    fields.finish()?;
    let request = with_call_grammar(request, served)?;
    let logprobs = wanted.then(|| top.unwrap_or(0));
    Ok(GenerateRequest { show: Show { logprobs, ..request.show }, ..request })
}

/// A chat with the grammar of its calls, where they are forced or strict.
fn with_call_grammar(mut request: GenerateRequest, served: Served<'_>) -> Result<GenerateRequest, Refusal> {
    let unsupported = |param: &str, message| Err(Refusal::Unsupported { param: param.to_owned(), message });
    let ParseOptions { tools, may_call, single_call, forced, .. } = &request.parse_options;
    let requested = request.sampling.grammar.as_ref().map(|grammar| grammar.parameter);
    let strict = *may_call && tools.iter().any(is_strict);
    let calls = forced.as_ref().map(|_| "tool_choice").or(strict.then_some("tools"));
    let Some(parameter) = requested.or(calls) else { return Ok(request) };
    if served.parsers.reasoning.is_some() {
        return unsupported(parameter, "not with --reasoning-parser: it would bind the reasoning");
    }
    if requested.is_some() {
        let message = "not with tools that may be called";
        return if *may_call { unsupported(parameter, message) } else { Ok(request) };
    }
    if !served.grammars || served.parsers.tools != Some(ToolFormat::Hermes) {
        return unsupported(parameter, "calls are constrained with --tool-parser hermes only");
    }
    let grammar = call_grammar(tools, forced.as_ref(), *single_call);
    let grammar = grammar.ok_or_else(|| invalid(parameter, "no such function is offered"))?;
    request.sampling.grammar = Some(Arc::new(grammar));
    Ok(request)
}

/// Reads the fields that both routes share.
fn common(fields: &mut Fields<'_>, served: Served<'_>, route: Route) -> Result<GenerateRequest, Refusal> {
    let sampling = sampling(fields, served)?;
    let choices = fields.integer("n", 1..=CHOICES_MAX)?.unwrap_or(1) as usize;
    if let Some(best_of) = fields.size("best_of", usize::MAX >> 1)?
        && best_of != choices
    {
        return Err(Refusal::Unsupported { param: "best_of".to_owned(), message: "only the value of n" });
    }
    let stop = stops(fields)?;
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
    Ok(GenerateRequest {
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
        parse_options: ParseOptions::default(),
        propose: served.propose(fields)?,
    })
}

fn stops(fields: &mut Fields<'_>) -> Result<Vec<String>, Refusal> {
    let stop = fields.texts("stop")?.unwrap_or_default();
    if stop.iter().any(String::is_empty) {
        return Err(invalid("stop", "a stop string must not be empty"));
    }
    if stop.len() > STOPS_MAX {
        return Err(invalid("stop", format!("at most {STOPS_MAX} stop strings, got {}", stop.len())));
    }
    let length: usize = stop.iter().map(String::len).sum();
    if length > STOPS_LENGTH_MAX {
        let message = format!("at most {STOPS_LENGTH_MAX} bytes of stop strings, got {length}");
        return Err(invalid("stop", message));
    }
    Ok(stop)
}

/// Reads fields that are known but not supported, or that have no effect here.
fn unsupported(fields: &mut Fields<'_>) -> Result<(), Refusal> {
    fields.only("use_beam_search", &["false"], "only false")?;
    fields.only("skip_special_tokens", &["true"], "only true")?;
    fields.only("spaces_between_special_tokens", &["true"], "only true")?;
    for name in
        ["guided_json", "guided_regex", "guided_choice", "guided_grammar", "bad_words", "allowed_token_ids"]
    {
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
            // Obfuscation pads events against side channels; this server never sends it.
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

fn prompt_logprobs(fields: &mut Fields<'_>, stream: bool) -> Result<Option<usize>, Refusal> {
    match fields.size("prompt_logprobs", LOGPROBS_MAX)? {
        Some(_) if stream => Err(invalid("prompt_logprobs", "is not available with stream: true")),
        top => Ok(top),
    }
}
