//! Tensors in JSON: a name, a shape, a datatype, and the numbers of the shape.

use serde_json::{Value, json};

use super::super::fields::Fields;
use super::Refusal;

/// A tensor of the model. The batch dimension comes before these; -1 is any length.
pub(super) struct Tensor {
    pub name: &'static str,
    pub datatype: &'static str,
    dims: &'static [i64],
}

const fn tensor(name: &'static str, datatype: &'static str, dims: &'static [i64]) -> Tensor {
    Tensor { name, datatype, dims }
}

pub(super) const INPUTS: &[Tensor] = &[
    tensor("input_ids", "INT32", &[-1]),
    tensor("input_lengths", "INT32", &[1]),
    tensor("request_output_len", "INT32", &[1]),
    tensor("draft_input_ids", "INT32", &[-1]),
    tensor("draft_logits", "FP32", &[-1, -1]),
    tensor("draft_acceptance_threshold", "FP32", &[1]),
    tensor("end_id", "INT32", &[1]),
    tensor("pad_id", "INT32", &[1]),
    tensor("runtime_top_k", "INT32", &[1]),
    tensor("runtime_top_p", "FP32", &[1]),
    tensor("temperature", "FP32", &[1]),
    tensor("seed", "UINT64", &[1]),
    tensor("presence_penalty", "FP32", &[1]),
    tensor("frequency_penalty", "FP32", &[1]),
    tensor("repetition_penalty", "FP32", &[1]),
    tensor("prompt_ignore_length", "INT32", &[1]),
    tensor("return_log_probs", "BOOL", &[1]),
    tensor("return_context_logits", "BOOL", &[1]),
    tensor("return_generation_logits", "BOOL", &[1]),
    tensor("exclude_input_in_output", "BOOL", &[1]),
    tensor("streaming", "BOOL", &[1]),
    tensor("stop", "BOOL", &[1]),
];

pub(super) const OUTPUTS: &[Tensor] = &[
    tensor("output_ids", "INT32", &[-1, -1]),
    tensor("sequence_length", "INT32", &[-1]),
    tensor("cum_log_probs", "FP32", &[-1]),
    tensor("output_log_probs", "FP32", &[-1, -1]),
    tensor("context_logits", "FP32", &[-1, -1]),
    tensor("generation_logits", "FP32", &[-1, -1, -1]),
];

impl Tensor {
    /// The shape with the batch dimension.
    pub fn told_shape(&self) -> Vec<i64> {
        [&[-1], self.dims].concat()
    }

    /// The numbers of an input, after a check of its shape and datatype.
    fn read(&self, input: &Fields) -> Result<Vec<Value>, Refusal> {
        let name = self.name;
        let of = input.text("datatype")?.unwrap_or_default();
        if of != self.datatype {
            return Err(Refusal::bad(format!(
                "inference input data-type for '{name}' is '{of}', but model expects '{}'",
                self.datatype
            )));
        }
        let shape =
            input.ids("shape")?.ok_or_else(|| Refusal::bad(format!("input '{name}' has no shape")))?;
        let fits = |(own, want): (&u32, &i64)| *want == -1 || i64::from(*own) == *want;
        let own_dims = shape.get(1..).unwrap_or_default();
        if shape.first() != Some(&1)
            || own_dims.len() != self.dims.len()
            || !own_dims.iter().zip(self.dims).all(fits)
        {
            return Err(Refusal::bad(format!(
                "unexpected shape for input '{name}' for model. Expected {:?}, got {shape:?}",
                self.told_shape()
            )));
        }
        let mut data = Vec::new();
        let given = input.get("data").ok_or_else(|| Refusal::bad(format!("input '{name}' has no data")))?;
        flatten(given, &mut data);
        let wanted: u32 = shape.iter().product();
        if data.len() != wanted as usize {
            return Err(Refusal::bad(format!(
                "unable to parse 'data': got {} elements but expected {wanted}",
                data.len()
            )));
        }
        let fits = |value: &Value| match self.datatype {
            "BOOL" => value.is_boolean(),
            "INT32" => value.as_i64().is_some_and(|value| i32::try_from(value).is_ok()),
            "UINT64" => value.is_u64(),
            _ => value.is_number(),
        };
        match data.iter().find(|value| !fits(value)) {
            Some(value) => Err(Refusal::bad(format!("unable to parse 'data' of '{name}': {value}"))),
            None => Ok(data),
        }
    }
}

/// The data may be nested like the shape.
fn flatten(value: &Value, into: &mut Vec<Value>) {
    match value {
        Value::Array(parts) => parts.iter().for_each(|part| flatten(part, into)),
        value => into.push(value.clone()),
    }
}

/// The inputs of a request; any that the model lacks is an error.
pub(super) struct Inputs(Vec<(&'static str, Vec<Value>)>);

impl Inputs {
    pub fn of(fields: &Fields) -> Result<Self, Refusal> {
        let list = fields.get("inputs").and_then(Value::as_array);
        let list = list.ok_or_else(|| Refusal::bad("Unable to parse 'inputs': missing"))?;
        let mut all: Vec<(&'static str, Vec<Value>)> = Vec::new();
        for value in list {
            let input = Fields::from(value, "inputs")?;
            let name = input.text("name")?.unwrap_or_default();
            let tensor = INPUTS.iter().find(|tensor| tensor.name == name).ok_or_else(|| {
                Refusal::bad(format!("unexpected inference input '{name}' for model 'tensorrt_llm'"))
            })?;
            if all.iter().any(|(name, _)| *name == tensor.name) {
                return Err(Refusal::bad(format!("input '{name}' already exists in request")));
            }
            all.push((tensor.name, tensor.read(&input)?));
        }
        Ok(Self(all))
    }

    pub fn all(&self, name: &str) -> Option<&[Value]> {
        self.0.iter().find(|(own, _)| *own == name).map(|(_, data)| data.as_slice())
    }

    pub fn needed(&self, name: &str) -> Result<&[Value], Refusal> {
        self.all(name).ok_or_else(|| {
            Refusal::bad(format!("expected 3 or more inputs but got fewer: '{name}' is not in the request"))
        })
    }

    pub fn ids(&self, name: &str) -> Vec<u32> {
        let data = self.all(name).unwrap_or_default();
        data.iter().map(|value| value.as_u64().map_or(u32::MAX, |id| id as u32)).collect()
    }

    pub fn number(&self, name: &str) -> Option<f64> {
        self.all(name)?.first()?.as_f64()
    }

    pub fn whole(&self, name: &str) -> Option<u64> {
        self.all(name)?.first()?.as_u64()
    }

    pub fn flag(&self, name: &str) -> Option<bool> {
        self.all(name)?.first()?.as_bool()
    }
}

/// An output with its data.
pub(super) fn output(name: &str, shape: &[usize], data: &[Value]) -> Value {
    let of = OUTPUTS.iter().find(|tensor| tensor.name == name).map_or("FP32", |tensor| tensor.datatype);
    json!({"name": name, "datatype": of, "shape": shape, "data": data})
}
