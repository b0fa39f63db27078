//! The defaults of a model's `generation_config.json`, as far as a server's answers confirm them.

use foretell_wire::openai::{Sampling, SamplingField as F};

/// Name of the ends of a text in `generation_config.json`.
pub const END_TOKENS: &str = "eos_token_id";
/// Name of the limit of an output in a request.
pub const MAX_TOKENS: &str = "max_tokens";

/// The outcome: the defaults of a model's file, as far as the server follows them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Confirmation {
    /// Fields in which the server contradicts the file.
    pub contradicted: Vec<&'static str>,
    /// Fields that could not be decided.
    pub unconfirmed: Vec<&'static str>,
    /// Number of calls that were made.
    pub calls: u32,
}

impl Confirmation {
    /// The first of these defaults that this request needs, and that is not confirmed.
    pub fn doubted(&self, sampling: &Sampling) -> Option<&'static str> {
        let doubts = |name: &str| {
            let named = |all: &[&'static str]| all.contains(&name);
            named(&self.contradicted) || named(&self.unconfirmed)
        };
        // A greedy choice is truncated to the same token by every value.
        let greedy = sampling.temperature == 0.0
            && (sampling.set_by_client.has(F::Temperature) || !doubts(F::Temperature.name()));
        let needed = |field: &F| {
            !(sampling.set_by_client.has(*field) || greedy && matches!(field, F::TopP | F::TopK | F::MinP))
        };
        let open = F::ALL.into_iter().filter(needed).map(F::name).find(|name| doubts(name));
        open.or_else(|| (doubts(END_TOKENS) && !sampling.ignore_eos).then_some(END_TOKENS))
    }
}

impl Confirmation {
    /// The problem for the operator, with its remedy; `None` if everything is confirmed.
    pub fn problem(&self) -> Option<String> {
        let passed = "requests that leave one of these to the server are passed through (defaults_unknown)";
        match (self.contradicted.join(", "), self.unconfirmed.join(", ")) {
            (fields, _) if !fields.is_empty() => Some(format!(
                "its answers contradict the model's generation_config.json in {fields}: {passed}. Name the folder of the \
                 model that it serves (--tokenizer, or models[].generation_config), or start it without \
                 --generation-config and --override-generation-config, or with --enable-scale-out, by which it \
                 reports its defaults"
            )),
            (_, fields) if !fields.is_empty() => Some(format!(
                "its answers have not confirmed the model's generation_config.json in {fields}: {passed}. They are \
                 retested; started with --enable-scale-out, it reports its defaults"
            )),
            _ => None,
        }
    }
}
