//! Reads the carried parameters, each within the range in which all backends interpret it alike.
//!
//! A value out of range is not an error here: the request is passed through unchanged, and the
//! backend returns an error.

use std::sync::Arc;

use serde_json::Value;

use super::grammar::Grammar;
use super::messages;
use super::parameters::Field;
use super::request::{Prompt, Request};
use super::sampling::{Sampling, SamplingField};
use super::tool_calls::ForcedCalls;
use foretell_core::units::TokenId;
use foretell_core::words::{PassthroughReason as R, Refused};

/// Reads the value of one carried parameter into the request.
///
/// # Errors
/// Reason why a request with this value is not eligible.
pub fn read(field: Field, value: &Value, request: &mut Request) -> Result<(), R> {
    let sampling = &mut request.sampling;
    if let Some(said) = sampling_field(field) {
        sampling.set_by_client = sampling.set_by_client.with(said);
    }
    match field {
        Field::Model => {
            value.as_str().filter(|id| !id.is_empty()).ok_or(R::Body)?.clone_into(&mut request.model);
        }
        Field::Prompt => request.prompt = prompt(value)?,
        Field::Messages => {
            let rendered = messages::check(value)?;
            request.prompt = Prompt::Messages(value.clone());
            request.rendered.extend(rendered.map(|reason| Refused::by(reason, "messages")));
        }
        Field::Tools => {
            let tools = value.as_array().ok_or(R::Tools)?;
            if !tools.is_empty() {
                request.tools = true;
                request.rendered.push(Refused::by(R::Tools, "tools"));
            }
        }
        Field::ToolChoice => match value.as_str() {
            Some("auto") => {}
            Some("none") => request.bars_tools = true,
            _ => request.forced = Some(ForcedCalls::read(value).ok_or(R::Tools)?),
        },
        Field::ParallelToolCalls => request.single_call = !boolean(value)?,
        // `max_completion_tokens` wins, in any order of the members.
        Field::MaxTokens => {
            let limit = positive(value)?;
            request.max_tokens.get_or_insert(limit);
        }
        Field::MaxCompletionTokens => request.max_tokens = Some(positive(value)?),
        Field::Temperature => sampling.temperature = number(value, 0.0, 2.0)?,
        Field::TopP => sampling.top_p = above_zero(value, 1.0)?,
        Field::TopK => sampling.top_k = top_k(value)?,
        Field::MinP => sampling.min_p = number(value, 0.0, 1.0)?,
        Field::PresencePenalty => sampling.presence_penalty = number(value, -2.0, 2.0)?,
        Field::FrequencyPenalty => sampling.frequency_penalty = number(value, -2.0, 2.0)?,
        Field::RepetitionPenalty => sampling.repetition_penalty = above_zero(value, 2.0)?,
        Field::LogitBias => sampling.logit_bias = logit_bias(value)?,
        Field::Seed => sampling.seed = Some(value.as_u64().ok_or(R::Parameter)?),
        Field::Stop => request.stop = stop(value)?,
        Field::StopTokenIds => request.stop_token_ids = ids(value).ok_or(R::Parameter)?,
        Field::IncludeStop => request.include_stop = boolean(value)?,
        Field::MinTokens => sampling.min_tokens = integer(value)?,
        Field::IgnoreEos => sampling.ignore_eos = boolean(value)?,
        Field::Stream => request.stream = boolean(value)?,
        Field::StreamOptions => {
            value.as_object().ok_or(R::Parameter)?;
        }
        Field::IncludeUsage => request.include_usage = boolean(value)?,
        Field::ContinuousUsage => request.continuous_usage = boolean(value)?,
        Field::ReturnTokenIds => request.return_token_ids = boolean(value)?,
        Field::Prediction => request.prediction = Some(prediction(value)?),
        Field::Choices => choices(value)?,
        Field::ResponseFormat => {
            let grammar = Grammar::of_response_format(value).map_err(|_| R::Structured)?;
            bind(sampling, grammar)?;
        }
        Field::StructuredOutputs => {
            let grammar = Grammar::of_structured_outputs(value).map_err(|_| R::Structured)?;
            bind(sampling, Some(grammar))?;
        }
    }
    Ok(())
}

/// The server decides about two grammars.
fn bind(sampling: &mut Sampling, grammar: Option<Grammar>) -> Result<(), R> {
    match grammar {
        Some(_) if sampling.grammar.is_some() => Err(R::Structured),
        Some(grammar) => {
            sampling.grammar = Some(Arc::new(grammar));
            Ok(())
        }
        None => Ok(()),
    }
}

/// The field for which servers have a default; `None` for others.
fn sampling_field(field: Field) -> Option<SamplingField> {
    match field {
        Field::Temperature => Some(SamplingField::Temperature),
        Field::TopP => Some(SamplingField::TopP),
        Field::TopK => Some(SamplingField::TopK),
        Field::MinP => Some(SamplingField::MinP),
        Field::PresencePenalty => Some(SamplingField::PresencePenalty),
        Field::FrequencyPenalty => Some(SamplingField::FrequencyPenalty),
        Field::RepetitionPenalty => Some(SamplingField::RepetitionPenalty),
        _ => None,
    }
}

fn boolean(value: &Value) -> Result<bool, R> {
    value.as_bool().ok_or(R::Parameter)
}

fn number(value: &Value, low: f64, high: f64) -> Result<f64, R> {
    value.as_f64().filter(|number| (low..=high).contains(number)).ok_or(R::Parameter)
}

fn above_zero(value: &Value, high: f64) -> Result<f64, R> {
    number(value, 0.0, high).and_then(|number| if number > 0.0 { Ok(number) } else { Err(R::Parameter) })
}

fn integer(value: &Value) -> Result<u32, R> {
    value.as_u64().and_then(|number| u32::try_from(number).ok()).ok_or(R::Parameter)
}

fn positive(value: &Value) -> Result<u32, R> {
    integer(value).and_then(|number| if number > 0 { Ok(number) } else { Err(R::Parameter) })
}

/// `-1` and `0` keep all tokens.
fn top_k(value: &Value) -> Result<Option<u32>, R> {
    match value.as_i64() {
        Some(-1 | 0) => Ok(None),
        Some(_) => positive(value).map(Some),
        None => Err(R::Parameter),
    }
}

/// A list of token ids; `None` if the value is anything else.
pub fn ids(value: &Value) -> Option<Vec<TokenId>> {
    value.as_array()?.iter().map(|id| id.as_u64().and_then(|id| TokenId::try_from(id).ok())).collect()
}

fn logit_bias(value: &Value) -> Result<Vec<(TokenId, f32)>, R> {
    let members = value.as_object().ok_or(R::Parameter)?;
    let mut biases = members
        .iter()
        .map(|(id, bias)| {
            // Only the canonical spelling: servers differ in how they read `"+1"` and `"01"`.
            let token = id.parse::<TokenId>().ok().filter(|token| token.to_string() == *id);
            Ok((token.ok_or(R::Parameter)?, number(bias, -100.0, 100.0)? as f32))
        })
        .collect::<Result<Vec<_>, R>>()?;
    biases.sort_unstable_by_key(|&(token, _)| token);
    Ok(biases)
}

fn stop(value: &Value) -> Result<Vec<String>, R> {
    let texts = match value {
        Value::String(text) => vec![text.clone()],
        Value::Array(items) => items
            .iter()
            .map(|item| item.as_str().map(str::to_owned))
            .collect::<Option<Vec<_>>>()
            .ok_or(R::Parameter)?,
        _ => return Err(R::Parameter),
    };
    // An empty stop text ends at once for some servers and never for others.
    if texts.iter().any(String::is_empty) { Err(R::Parameter) } else { Ok(texts) }
}

fn prompt(value: &Value) -> Result<Prompt, R> {
    match value {
        Value::String(text) => text_prompt(text),
        Value::Array(items) => match items.as_slice() {
            [] => Err(R::Body),
            [Value::String(text)] => text_prompt(text),
            [only @ Value::Array(_)] => id_prompt(only),
            [Value::String(_) | Value::Array(_), ..] => Err(R::Choices),
            _ => id_prompt(value),
        },
        _ => Err(R::Body),
    }
}

/// An empty prompt means "begin a document" to some servers and is an error to others.
fn text_prompt(text: &str) -> Result<Prompt, R> {
    if text.is_empty() { Err(R::Parameter) } else { Ok(Prompt::Text(text.to_owned())) }
}

fn id_prompt(value: &Value) -> Result<Prompt, R> {
    ids(value).filter(|ids| !ids.is_empty()).map(Prompt::Ids).ok_or(R::Body)
}

fn prediction(value: &Value) -> Result<String, R> {
    let members = value.as_object().ok_or(R::Parameter)?;
    if members.get("type").and_then(Value::as_str) != Some("content") {
        return Err(R::Parameter);
    }
    members.get("content").and_then(messages::plain_text).ok_or(R::Parameter)
}

fn choices(value: &Value) -> Result<(), R> {
    match value.as_u64() {
        Some(1) => Ok(()),
        Some(_) => Err(R::Choices),
        None => Err(R::Parameter),
    }
}
