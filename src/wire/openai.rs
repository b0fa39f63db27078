//! The OpenAI API: requests of clients, which of them are eligible, and the form of the
//! answers.
//!
//! PURE.

pub mod answer;
pub mod control_header;
pub mod cut;
pub mod eligibility;
pub mod event;
pub mod fields;
pub mod grammar;
pub mod grammar_key;
pub mod json;
pub mod messages;
pub mod output_tokens;
pub mod parameters;
pub mod parts;
pub mod request;
pub mod sampling;
pub mod sse;
pub mod tool_calls;
pub mod trim;
pub mod usage;

pub use answer::{Additive, Template, fill, order, strip};
pub use control_header::Control;
pub use eligibility::{Finding, Judgement, judge, refusal, understand};
pub use event::Event;
pub use grammar::{Grammar, Language, RESPONSE_FORMAT, STRUCTURED_OUTPUTS};
pub use grammar_key::GrammarKey;
pub use json::parsed_bytes;
pub use output_tokens::OutputTokens;
pub use request::{Api, Prompt, PromptSize, Request, Route};
pub use sampling::{Defaults, GenerationConfig, Sampling, SamplingField, SetFields};
pub use tool_calls::{CALL_GRAMMAR_VERSION, ForcedCalls, call_grammar, is_strict};
pub use trim::Trim;
pub use usage::{Path, SpeculatedUsage, Usage, UsageText};
