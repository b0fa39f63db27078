//! Reads the sampling fields.

use std::sync::Arc;

use serde_json::{Map, Number, Value};

use crate::target::errors::Refusal;
use crate::target::fields::{Fields, invalid};
use crate::target::wire::Served;
use foretell_core::units::TokenId;
use foretell_wire::openai::{Grammar, RESPONSE_FORMAT, STRUCTURED_OUTPUTS, Sampling};

/// Reads the sampling fields, which are the same on every route.
pub(super) fn sampling(fields: &mut Fields<'_>, served: Served<'_>) -> Result<Sampling, Refusal> {
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
        grammar: grammar(fields, served)?.map(Arc::new),
        ..default
    })
}

/// Reads what constrains the output: `response_format` or `structured_outputs`.
fn grammar(fields: &mut Fields<'_>, served: Served<'_>) -> Result<Option<Grammar>, Refusal> {
    if !served.grammars {
        fields.only(RESPONSE_FORMAT, &[r#"{"type":"text"}"#], "only {\"type\":\"text\"}")?;
        fields.only(STRUCTURED_OUTPUTS, &[], "only null")?;
        return Ok(None);
    }
    let format = fields.take::<Value>(RESPONSE_FORMAT)?.map(|value| Grammar::of_response_format(&value));
    let format = format.transpose().map_err(|why| invalid(RESPONSE_FORMAT, why))?.flatten();
    let outputs =
        fields.take::<Value>(STRUCTURED_OUTPUTS)?.map(|value| Grammar::of_structured_outputs(&value));
    let outputs = outputs.transpose().map_err(|why| invalid(STRUCTURED_OUTPUTS, why))?;
    if format.is_some() && outputs.is_some() {
        return Err(invalid(STRUCTURED_OUTPUTS, "not together with response_format"));
    }
    Ok(format.or(outputs))
}

/// Reads `seed`, 64 bits; a negative one is read as its two's complement.
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
