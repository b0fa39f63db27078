//! The constant properties in which engines differ: one constant of each dialect, read wherever one
//! of them decides, so that no engine's name does.

use super::Noise;
use crate::openai::Route;
use crate::translation::Thinking;
use foretell_core::session::{Hold, StopOrder};
use foretell_core::words::VerifyMethod;

/// The constant properties in which engines differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quirks {
    /// The `owned_by` of its list of models, which identifies it; `None` if it is recognised by
    /// other answers.
    pub owner: Option<&'static str>,
    /// Foretell speculates on it and has never run with the real engine, only with a strict fake
    /// built from its source.
    pub experimental: bool,
    /// The pages by which a known engine is checked for being the same one; empty: those of the
    /// introduction that it answered. Needed where one of these waits for the model: a late answer
    /// would look like an outage during every long prefill.
    pub same_by: &'static [&'static str],
    /// The most common configuration, for the page of guarantees; `None` if it is only relayed to.
    pub usual: Option<Usual>,
    /// The noise of a seeded request may be a function of the position in some version or setting
    /// (vLLM: the V2 model runner), so the probe tests for it.
    pub noise_may_be_placed: bool,
    /// The setting without which every prompt is computed anew.
    pub cache_setting: CacheSetting,
    /// The setting without which it does not tell the prompt and the sampling of a request
    /// ([`super::Engine::renders`]); `None` if it never does.
    pub render_setting: Option<&'static str>,
    /// Its chats take sampling defaults from the model's files, and it does not tell them.
    pub model_defaults: bool,
    /// The first call's answer has the ids of its tokens. Where it has not, requests are speculated
    /// on at temperature 0 only, and the ids are recovered: the text, cut into tokens, is verified
    /// by the engine like any other draft, and the accepted tokens are the ids that it sampled.
    pub first_request_ids: bool,
    /// The stop text that counts if one token completes several.
    pub stop_order: StopOrder,
    /// Stop texts are looked for in a text with special tokens, which its answers do not show
    /// (SGLang).
    pub stops_in_special: bool,
    /// The part of a streamed text that the engine holds back because a stop text may begin there.
    pub stop_hold: Hold,
    /// The member of a choice that names the stop that ended it (vLLM: `stop_reason`, SGLang:
    /// `matched_stop`); `None` if there is none.
    pub stop_field: Option<&'static str>,
    /// That member also names the token that is the end of the text itself.
    pub stop_field_names_end: bool,
    /// `completion_tokens` includes the token that is the end of the text itself (not LMDeploy).
    pub usage_counts_end: bool,
    /// The route on which the last chunk of a stream brings usage that was not asked for
    /// (llama.cpp: completions); `None` if there is none.
    pub unasked_usage: Option<Route>,
    /// Routes whose streams have no event for usage, though the client asks for it (llama.cpp:
    /// completions, Triton: both).
    pub no_usage_event: &'static [Route],
    /// Routes whose streams leave the members that are null out of their last usage (SGLang:
    /// completions).
    pub bare_usage: &'static [Route],
    /// The `content-type` of its whole answers.
    pub json_type: &'static str,
    /// Its first calls ask for usage in every event, and every event has it (vLLM): where it is
    /// missing, the ids are not trusted.
    pub usage_runs: bool,
    /// `continuous_usage_stats` puts usage on every event even without `include_usage` (SGLang).
    pub usage_runs_alone: bool,
    /// The last event of a chat's text has an empty delta (llama.cpp).
    pub bare_end: bool,
    /// Asking for token ids adds events with an empty delta, which otherwise do not exist (vLLM
    /// 0.32, `chat_completion/serving.py`).
    pub hollow_deltas: bool,
    /// The member in which the engine reports the time of an answer, at its end (llama.cpp:
    /// `timings`); `None` if there is none. No single call has the time of a speculated output, so
    /// there it is left out.
    pub time_report: Option<&'static str>,
    /// The engine refuses the whole request for the client's own `prediction`, so it must not
    /// receive it (TensorRT-LLM: its schema forbids unknown fields).
    pub refuses_prediction: bool,
    /// The engine does not report whether it puts special tokens in front of a prompt: the ids from
    /// [`super::Codec::prompt_ids_call`] are used only once the first call has counted as many.
    pub prompt_ids_need_count: bool,
    /// Its texts are made by Hugging Face's own code, which removes spaces before punctuation
    /// unless the model's configuration forbids that (SGLang, LMDeploy).
    pub tidies_text: bool,
    /// A drafter can draw with this engine's own noise: it is a function that is known here, of a
    /// seed that the engine takes as an additive field.
    pub shares_noise: bool,
    /// Rows that it scores after a cached prefix were wrong in some builds (vLLM's for CPUs), so
    /// the probe asks for the same rows twice.
    pub rows_may_change: bool,
    /// The sequences of a fan-out are slots that read a prompt one after the other and keep it
    /// (llama.cpp), so the probe fills them before it measures.
    pub fills_slots: bool,
    /// How it is told to reason.
    pub thinking: Thinking,
    /// It knows `stream_options.continuous_usage_stats`: others may refuse the request for it.
    pub continuous_usage: bool,
    /// It has the Responses and the Messages API itself in its newest version, so what Foretell
    /// cannot translate is left to it.
    pub has_other_apis: bool,
}

/// An engine in its most common configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usual {
    /// Its verification methods, best first.
    pub methods: &'static [VerifyMethod],
    /// Inputs of the noise of a seeded request.
    pub noise: Noise,
    /// It draws with a fixed seed of its own where the client sends none, and reports no defaults.
    pub seeded: bool,
    /// It takes a grammar together with the ids that the grammar has read.
    pub continues_grammar: bool,
}

impl Usual {
    /// Properties that most engines have in common.
    pub const COMMON: Self =
        Self { methods: &[], noise: Noise::Call, seeded: false, continues_grammar: false };
}

/// The setting of an engine without which every prompt is computed anew, so that no verification
/// method can pay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheSetting {
    /// There is none, or its absence does not rule out verification.
    None,
    /// It shows in the prefix cache; the text tells the operator.
    Prefix(&'static str),
    /// It shows in a later fan-out that computes most of its prompt again; the text tells the
    /// operator.
    FanOut(&'static str),
}

impl Quirks {
    /// Properties that most engines have in common.
    pub const COMMON: Self = Self {
        owner: None,
        experimental: false,
        same_by: &[],
        usual: None,
        noise_may_be_placed: false,
        cache_setting: CacheSetting::None,
        render_setting: None,
        model_defaults: false,
        first_request_ids: true,
        stop_order: StopOrder::Listed,
        stops_in_special: false,
        stop_hold: Hold::Beginning,
        stop_field: None,
        stop_field_names_end: false,
        usage_counts_end: true,
        unasked_usage: None,
        no_usage_event: &[],
        bare_usage: &[],
        json_type: "application/json",
        usage_runs: false,
        usage_runs_alone: false,
        bare_end: false,
        hollow_deltas: false,
        time_report: None,
        refuses_prediction: false,
        prompt_ids_need_count: false,
        tidies_text: false,
        shares_noise: false,
        rows_may_change: false,
        fills_slots: false,
        thinking: Thinking::Template,
        continuous_usage: false,
        has_other_apis: false,
    };
}
