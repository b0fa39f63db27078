//! The constant properties in which engines differ: one constant of each dialect, read wherever one
//! of them decides, so that no engine's name does.

use super::{Question, shared};
use foretell_core::session::{StopBuffer, StopOrder};
use foretell_core::words::VerifyMethod;
use foretell_wire::openai::Route;
use foretell_wire::translation::Thinking;
use serde_json::{Value, json};

/// Inputs of the noise of a seeded request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Noise {
    /// Seed, absolute position and token: continuing by ids gives the same text.
    Position,
    /// It restarts with every call, or its inputs are unknown.
    #[default]
    Call,
    /// A seed is ignored: there is nothing to preserve.
    Ignored,
}

/// Treatment of an incomplete character at the end of the output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BrokenEnd {
    /// It is sent as U+FFFD.
    #[default]
    Sent,
    /// Streams omit it, other answers have U+FFFD (llama.cpp).
    OmittedInStreams,
    /// It is omitted (vLLM: `v1/engine/detokenizer.py` never flushes its decoder).
    Omitted,
}

impl BrokenEnd {
    /// True if it is omitted from an answer; `stream`: the answer is a stream.
    pub const fn is_omitted(self, stream: bool) -> bool {
        match self {
            Self::Sent => false,
            Self::OmittedInStreams => stream,
            Self::Omitted => true,
        }
    }
}

/// The limit of an output where the client sets none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaxTokens {
    /// This many tokens.
    Tokens(u32),
    /// Up to the end of the context.
    Context,
    /// Not known: neither the request nor the engine sets one.
    Unknown,
}

/// Maximum output tokens of a server's answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutputLimits {
    /// Whatever a client asks for; `None` if the server has no such limit.
    pub most: Option<u32>,
    /// Of a completion whose client sets no limit.
    pub completion: MaxTokens,
    /// Of a chat whose client sets no limit.
    pub chat: MaxTokens,
}

impl OutputLimits {
    /// Nothing is known.
    pub const UNKNOWN: Self = Self { most: None, completion: MaxTokens::Unknown, chat: MaxTokens::Unknown };
    /// OpenAI's: few tokens of a completion, a chat up to the end of the context.
    pub const OPENAI: Self = Self {
        most: None,
        completion: MaxTokens::Tokens(shared::COMPLETION_TOKENS),
        chat: MaxTokens::Context,
    };
}

/// The constant properties in which engines differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quirks {
    /// The `owned_by` of its list of models, which identifies it; `None` if it is recognised by
    /// other answers.
    pub owner: Option<&'static str>,
    /// The pages by which a known engine is checked for being the same one; empty: those of the
    /// introduction that it answered. Needed where one of these waits for the model: a late answer
    /// would look like an outage during every long prefill.
    pub same_by: &'static [&'static str],
    /// The most common configuration, for the page of guarantees; `None` if requests to it are only
    /// passed through.
    pub usual: Option<Usual>,
    /// The setting without which a later fan-out recomputes most of its prompt, so that no
    /// verification method can pay; the text tells the operator. `None` if there is no such
    /// setting.
    pub cache_setting: Option<&'static str>,
    /// The setting without which it does not report the prompt and the sampling of a request
    /// ([`super::Pages::renders`]); `None` if it never does.
    pub render_setting: Option<&'static str>,
    /// Its relation to the defaults of the model's `generation_config.json`.
    pub model_defaults: ModelDefaults,
    /// The page that reports the start time of its process; `None` if none does.
    pub start_page: Option<&'static str>,
    /// The page that tokenizes a text; `None` if it has none.
    pub tokenize: Option<Tokenize>,
    /// Maximum output tokens, as far as no answer of the server says more.
    pub limits: OutputLimits,
    /// The answers to chats that have the ids of their tokens.
    pub chat_ids: ChatIds,
    /// Maximum tokens of one later plain request, where its answer is not streamed; `None` if it
    /// is.
    pub segment: Option<u32>,
    /// The error answer that says no more than that a draft cannot be decided; `None` if it has
    /// none.
    pub undecided: Option<Undecided>,
    /// How it finds stop texts, and reports them.
    pub stops: StopQuirks,
    /// How it reports usage.
    pub usage: UsageQuirks,
    /// The form of its answers.
    pub answers: AnswerQuirks,
    /// Properties that its probe has to test, or to prepare for.
    pub probe: ProbeQuirks,
    /// A drafter can draw with this engine's noise: it is a function that is known here, of a seed
    /// that the engine takes as an additive field.
    pub shares_noise: bool,
    /// How reasoning is requested.
    pub thinking: Thinking,
    /// It has the Responses and the Messages API itself in its newest version, so what Foretell
    /// cannot translate is passed through to it.
    pub has_other_apis: bool,
}

/// The relation of an engine to the defaults of the model's `generation_config.json`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelDefaults {
    /// It reports its defaults, whatever they are.
    Reported,
    /// Its chats take them, which no answer shows: those of the file that the operator has named
    /// are sent with every later request (SGLang).
    Named,
    /// It may follow the file, which its answers confirm where it does not report its defaults
    /// (vLLM).
    Confirmed {
        /// The first version known to take `presence_penalty` and `frequency_penalty` from it
        /// (0.32, `config/model.py`).
        penalties: [u32; 2],
    },
}

impl ModelDefaults {
    /// True if a server of this version takes penalties on output from the model's file.
    pub fn has_penalties(self, version: &str) -> bool {
        let Self::Confirmed { penalties } = self else { return false };
        shared::version(version).is_some_and(|version| version >= penalties)
    }
}

/// The question for the ids of a text, without special tokens, by the member that holds the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tokenize {
    /// `prompt`, with the model (vLLM, SGLang).
    Prompt,
    /// `content` (llama.cpp).
    Content,
}

impl Tokenize {
    /// The question for the ids of a text.
    pub fn question(self, model: &str, text: &str) -> Question {
        let body = match self {
            Self::Prompt => json!({ "model": model, "prompt": text, "add_special_tokens": false }),
            Self::Content => json!({ "content": text, "add_special": false, "parse_special": true }),
        };
        Question::post(shared::TOKENIZE, body)
    }
}

/// The answers to chats that have the ids of their tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChatIds {
    /// All.
    Streamed,
    /// Those that are not streamed (SGLang): see [`super::first_token`].
    Unstreamed,
}

/// An error answer that says no more than that a draft cannot be decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Undecided {
    /// The verification method whose answer it is.
    pub method: VerifyMethod,
    /// Its status.
    pub status: u16,
    /// A part of its body.
    pub text: &'static str,
}

impl Undecided {
    /// True if an answer to a verify request of this method is that one.
    pub fn is(&self, method: VerifyMethod, status: u16, body: &[u8]) -> bool {
        let says = |text: &[u8]| body.windows(text.len()).any(|part| part == text);
        method == self.method && status == self.status && says(self.text.as_bytes())
    }
}

/// How an engine finds stop texts, and reports them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StopQuirks {
    /// The stop text that counts if one token completes several.
    pub order: StopOrder,
    /// Stop texts are looked for in a text with special tokens, which its answers do not show
    /// (SGLang).
    pub in_special: bool,
    /// The part of a streamed text that the engine withholds because a stop text may begin there.
    pub hold: StopBuffer,
    /// The member of a choice that names the stop that ended it (vLLM: `stop_reason`, SGLang:
    /// `matched_stop`); `None` if there is none.
    pub field: Option<&'static str>,
    /// That member also names the token that is the end of the text itself.
    pub field_names_end: bool,
}

impl StopQuirks {
    /// Properties that most engines have in common.
    pub const COMMON: Self = Self {
        order: StopOrder::Listed,
        in_special: false,
        hold: StopBuffer::Beginning,
        field: None,
        field_names_end: false,
    };
}

/// The form of an engine's answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnswerQuirks {
    /// The `content-type` of its unstreamed answers.
    pub json_type: &'static str,
    /// The last event of a chat's text has an empty delta (llama.cpp).
    pub bare_end: bool,
    /// Requesting token ids adds events with an empty delta, which otherwise do not exist (vLLM
    /// 0.32, `chat_completion/serving.py`).
    pub hollow_deltas: bool,
    /// The member in which the engine reports the time of an answer, at its end (llama.cpp:
    /// `timings`); `None` if there is none. No single call has the time of a speculated output, so
    /// there it is omitted.
    pub time_report: Option<&'static str>,
    /// Its texts are made by Hugging Face's code, which removes spaces before punctuation unless
    /// the model's configuration forbids that (SGLang).
    pub tidies_text: bool,
    /// Its treatment of an incomplete character at the end of the output.
    pub broken_end: BrokenEnd,
}

impl AnswerQuirks {
    /// Properties that most engines have in common.
    pub const COMMON: Self = Self {
        json_type: "application/json",
        bare_end: false,
        hollow_deltas: false,
        time_report: None,
        tidies_text: false,
        broken_end: BrokenEnd::Sent,
    };
}

/// Properties that the probe of an engine has to test, or to prepare for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeQuirks {
    /// The noise of a seeded request may be a function of the position in some version or setting
    /// (vLLM: the V2 model runner), so the probe tests for it.
    pub places_noise: bool,
    /// Rows that it scores after a cached prefix were wrong in some builds (vLLM's for CPUs), so
    /// the probe asks for the same rows twice.
    pub rows_may_change: bool,
    /// The sequences of a fan-out are slots that read a prompt one after the other and keep it
    /// (llama.cpp), so the probe fills them before it measures.
    pub fills_slots: bool,
}

impl ProbeQuirks {
    /// Properties that most engines have in common.
    pub const COMMON: Self = Self { places_noise: false, rows_may_change: false, fills_slots: false };
}

/// How an engine reports usage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UsageQuirks {
    /// The route on which the last chunk of a stream has usage that was not requested (llama.cpp:
    /// completions); `None` if there is none.
    pub unrequested: Option<Route>,
    /// The route whose streams have no event for usage, though the client asks for it (llama.cpp:
    /// completions); `None` if there is none.
    pub no_event: Option<Route>,
    /// Routes whose streams leave the members that are null out of their last usage (SGLang:
    /// completions).
    pub bare: &'static [Route],
    /// Its first calls ask for usage in every event, and every event has it (vLLM): where it is
    /// missing, the ids are not trusted.
    pub runs: bool,
    /// `continuous_usage_stats` puts usage on every event even without `include_usage` (SGLang).
    pub runs_alone: bool,
    /// It knows `stream_options.continuous_usage_stats`: others may refuse the request for it.
    pub has_continuous: bool,
}

impl UsageQuirks {
    /// Properties that most engines have in common.
    pub const COMMON: Self = Self {
        unrequested: None,
        no_event: None,
        bare: &[],
        runs: false,
        runs_alone: false,
        has_continuous: false,
    };
}

impl UsageQuirks {
    /// The `stream_options` for usage, on every event if the engine can, so that its count of the
    /// prompt is known however early the stream is aborted.
    pub fn stream_options(&self) -> Value {
        if self.has_continuous {
            json!({ "include_usage": true, "continuous_usage_stats": true })
        } else {
            json!({ "include_usage": true })
        }
    }
}

/// An engine in its most common configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usual {
    /// Its verification methods, best first.
    pub methods: &'static [VerifyMethod],
    /// Inputs of the noise of a seeded request.
    pub noise: Noise,
    /// It takes a grammar together with the ids that the grammar has read.
    pub continues_grammar: bool,
}

impl Usual {
    /// Properties that most engines have in common.
    pub const COMMON: Self = Self { methods: &[], noise: Noise::Call, continues_grammar: false };
}

impl Quirks {
    /// Properties that most engines have in common.
    pub const COMMON: Self = Self {
        owner: None,
        same_by: &[],
        usual: None,
        cache_setting: None,
        render_setting: None,
        model_defaults: ModelDefaults::Reported,
        start_page: None,
        tokenize: None,
        limits: OutputLimits::UNKNOWN,
        chat_ids: ChatIds::Streamed,
        segment: None,
        undecided: None,
        stops: StopQuirks::COMMON,
        usage: UsageQuirks::COMMON,
        answers: AnswerQuirks::COMMON,
        probe: ProbeQuirks::COMMON,
        shares_noise: false,
        thinking: Thinking::Template,
        has_other_apis: false,
    };
}
