//! Inputs and outputs of a foreign graph: their meaning, type and size.

use std::path::Path;

use ort::session::Session;
use ort::value::{Outlet, TensorElementType, ValueType};

use super::files::{Facts, GenaiConfig, GenaiInputs, GenaiOutputs};
use crate::open_error::DescriptionError;

/// Input of Foretell's exports that no other tool's exports have: the cache row that a token is
/// written to.
const WRITE_INDEX: &str = "write_index";
/// Input of merged decoders that selects which of their two graphs runs.
const BRANCH: &str = "use_cache_branch";

/// Names of a foreign graph's inputs and outputs.
#[derive(Clone, Debug, Default)]
pub struct Names {
    pub inputs: GenaiInputs,
    pub outputs: GenaiOutputs,
}

/// One key or value tensor: `[1, heads, tokens, width]`.
#[derive(Clone, Debug)]
pub struct Slot {
    /// Name of the input with the tokens before the run.
    pub past: String,
    /// Name of the output with the tokens after the run.
    pub present: String,
    pub element: TensorElementType,
    /// Key and value heads.
    pub heads: usize,
    /// Elements of one key or value of one head.
    pub width: usize,
}

/// Inputs and outputs of a foreign graph.
#[derive(Clone, Debug)]
pub struct Signature {
    pub names: Names,
    /// True if it takes the positions of the tokens.
    pub positions: bool,
    /// Name of the branch input, if it is a merged decoder.
    pub branch: Option<&'static str>,
    /// Keys and values of layer 0, of layer 1, ….
    pub slots: Vec<Slot>,
    pub logits: TensorElementType,
    /// True if a run returns only the row after the last token.
    pub last_only: bool,
    /// Number of token ids, if the graph declares it.
    pub vocabulary: Option<usize>,
}

impl Names {
    /// The names in a folder's `genai_config.json`, else the usual ones; `None` if the graph is one
    /// of Foretell's exports.
    ///
    /// # Errors
    /// `genai_config.json` cannot be read.
    pub fn find(folder: &Path, session: &Session) -> Result<Option<Self>, DescriptionError> {
        if outlet(session.inputs(), WRITE_INDEX).is_some() {
            return Ok(None);
        }
        let config = GenaiConfig::read(folder)?.map(|config| config.model.decoder);
        Ok(Some(config.map_or_else(Self::default, |it| Self { inputs: it.inputs, outputs: it.outputs })))
    }
}

fn outlet<'a>(outlets: &'a [Outlet], name: &str) -> Option<&'a Outlet> {
    outlets.iter().find(|outlet| outlet.name() == name)
}

fn list(outlets: &[Outlet]) -> String {
    outlets.iter().map(Outlet::name).collect::<Vec<_>>().join(", ")
}

fn element(outlet: &Outlet) -> Result<TensorElementType, String> {
    outlet.dtype().tensor_type().ok_or_else(|| format!("{} is no tensor", outlet.name()))
}

fn size(kind: &ValueType, dimension: usize) -> Option<usize> {
    usize::try_from(*kind.tensor_shape()?.get(dimension)?).ok()
}

impl Signature {
    /// Reads the signature of a graph.
    ///
    /// # Errors
    /// Describes what is missing or unknown.
    pub fn read(session: &Session, names: Names, facts: &Facts) -> Result<Self, String> {
        let (inputs, outputs) = (session.inputs(), session.outputs());
        for name in [&names.inputs.input_ids, &names.inputs.attention_mask] {
            let Some(found) = outlet(inputs, name) else {
                return Err(unknown(name, session));
            };
            if element(found)? != TensorElementType::Int64 {
                return Err(format!("{name} is {}, expected an i64 tensor", found.dtype()));
            }
        }
        let logits = outlet(outputs, &names.outputs.logits);
        let logits = logits.ok_or_else(|| unknown(&names.outputs.logits, session))?;
        let signature = Self {
            positions: outlet(inputs, &names.inputs.position_ids).is_some(),
            branch: outlet(inputs, BRANCH).map(|_| BRANCH),
            slots: slots(session, &names, facts)?,
            logits: element(logits)?,
            last_only: size(logits.dtype(), 1) == Some(1),
            vocabulary: size(logits.dtype(), 2),
            names,
        };
        signature.check_logits()?;
        signature.check_all(inputs)?;
        Ok(signature)
    }

    fn check_logits(&self) -> Result<(), String> {
        use TensorElementType::{Bfloat16, Float16, Float32};
        match self.logits {
            Float32 | Float16 | Bfloat16 => Ok(()),
            other => Err(format!("{} is {other}, expected f32, f16 or bf16", self.names.outputs.logits)),
        }
    }

    /// Checks that every input is one that is fed.
    fn check_all(&self, inputs: &[Outlet]) -> Result<(), String> {
        let names = &self.names.inputs;
        let known = |name: &str| {
            [names.input_ids.as_str(), &names.attention_mask, &names.position_ids, BRANCH].contains(&name)
                || self.slots.iter().any(|slot| slot.past == name)
        };
        match inputs.iter().find(|input| !known(input.name())) {
            Some(other) => Err(format!(
                "the graph takes the unknown input {}; a drafter is fed {}, {}, {} and its \
                 keys and values",
                other.name(),
                names.input_ids,
                names.attention_mask,
                names.position_ids
            )),
            None => Ok(()),
        }
    }
}

fn unknown(missing: &str, session: &Session) -> String {
    format!(
        "the graph has no {missing}; it takes {} and gives {}. Expected is a decoder with its cache, as optimum \
         (--task text-generation-with-past) or the model builder of onnxruntime-genai writes it, or an export of \
         onnx/train/export.py",
        list(session.inputs()),
        list(session.outputs())
    )
}

/// The key and value tensors, layer by layer.
fn slots(session: &Session, names: &Names, facts: &Facts) -> Result<Vec<Slot>, String> {
    let patterns = [
        (&names.inputs.past_key_names, &names.outputs.present_key_names),
        (&names.inputs.past_value_names, &names.outputs.present_value_names),
    ];
    let at = |pattern: &str, layer: usize| pattern.replace("%d", &layer.to_string());
    let has = |layer: usize| {
        let named = |outlets: &[Outlet], name: &str| outlet(outlets, &at(name, layer)).is_some();
        patterns
            .iter()
            .any(|(past, present)| named(session.inputs(), past) || named(session.outputs(), present))
    };
    let layers = (0..session.inputs().len()).take_while(|&layer| has(layer)).count();
    if layers == 0 {
        return Err(unknown(&at(&names.inputs.past_key_names, 0), session));
    }
    if let Some(described) = facts.layers.filter(|&described| described != layers) {
        return Err(format!("the graph has a cache of {layers} layers, its description {described}"));
    }
    let mut slots = Vec::with_capacity(layers * 2);
    for layer in 0..layers {
        for (past, present) in patterns {
            slots.push(slot(session, at(past, layer), at(present, layer), facts)?);
        }
    }
    Ok(slots)
}

fn slot(session: &Session, past: String, present: String, facts: &Facts) -> Result<Slot, String> {
    let input = outlet(session.inputs(), &past).ok_or_else(|| format!("the graph does not take {past}"))?;
    let output =
        outlet(session.outputs(), &present).ok_or_else(|| format!("the graph does not give {present}"))?;
    let (kind, element) = (input.dtype(), element(input)?);
    if kind.tensor_shape().map(|shape| shape.len()) != Some(4) {
        return Err(format!("{past} is {kind}, expected [batch, heads, tokens, head size]"));
    }
    if output.dtype().tensor_type() != Some(element) {
        return Err(format!("{past} is {kind}, but {present} is {}", output.dtype()));
    }
    let declared = |dimension: usize, described: Option<usize>, what: &str| {
        let found = size(kind, dimension).or(described);
        found.ok_or_else(|| format!("neither {past} nor a file next to the graph declares the {what}"))
    };
    let heads = declared(1, facts.heads, "number of heads")?;
    let width = declared(3, facts.width, "size of a head")?;
    Ok(Slot { past, present, element, heads, width })
}
