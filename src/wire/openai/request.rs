//! A parsed eligible request.

use serde_json::{Map, Value};

use super::messages;
use super::sampling::Sampling;
use super::tool_calls::ForcedCalls;
use foretell_core::units::TokenId;
use foretell_core::words::Refused;

/// The two routes whose requests are speculated on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Route {
    /// `POST /v1/completions`
    Completions,
    /// `POST /v1/chat/completions`
    Chat,
}

impl Route {
    /// The name in policies, metrics and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Completions => "completions",
            Self::Chat => "chat",
        }
    }

    /// The route of that name; `None` if there is none.
    pub fn parse(name: &str) -> Option<Self> {
        [Self::Completions, Self::Chat].into_iter().find(|route| route.name() == name)
    }

    /// The path on the server.
    pub const fn path(self) -> &'static str {
        match self {
            Self::Completions => "/v1/completions",
            Self::Chat => "/v1/chat/completions",
        }
    }
}

/// The APIs whose requests ask for generated text: two that are speculated on, and two that are
/// passed through, unless they are translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Api {
    /// A completion, which can be eligible.
    Completion(Route),
    /// `POST /v1/responses`, of OpenAI
    Responses,
    /// `POST /v1/messages`, of Anthropic
    Messages,
}

impl Api {
    /// The APIs that are passed through, unless they are translated.
    pub const PASSTHROUGH: [Self; 2] = [Self::Responses, Self::Messages];

    /// The name in metrics and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Completion(route) => route.name(),
            Self::Responses => "responses",
            Self::Messages => "messages",
        }
    }

    /// The path on the server.
    pub const fn path(self) -> &'static str {
        match self {
            Self::Completion(route) => route.path(),
            Self::Responses => "/v1/responses",
            Self::Messages => "/v1/messages",
        }
    }
}

impl From<Route> for Api {
    fn from(route: Route) -> Self {
        Self::Completion(route)
    }
}

/// The prompt that is continued.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// A text prompt.
    Text(String),
    /// One sequence of token ids.
    Ids(Vec<TokenId>),
    /// The messages of a chat, as they stand in the body.
    Messages(Value),
}

/// An eligible completion request.
#[derive(Clone, Debug)]
pub struct Request {
    /// The route it came in on.
    pub route: Route,
    /// The model id as sent.
    pub model: String,
    /// The prompt that is continued.
    pub prompt: Prompt,
    /// The client's explicit sampling fields over OpenAI's defaults.
    pub sampling: Sampling,
    /// Maximum output tokens (`max_completion_tokens` wins over `max_tokens`); `None` if the client
    /// sent no limit.
    pub max_tokens: Option<u32>,
    /// Texts that end the output and are not part of it.
    pub stop: Vec<String>,
    /// Token ids that end the output.
    pub stop_token_ids: Vec<TokenId>,
    /// A matched stop text stays in the output.
    pub include_stop: bool,
    /// True if the client requested a stream.
    pub stream: bool,
    /// True if the client's stream ends with a usage chunk (`stream_options.include_usage`).
    pub include_usage: bool,
    /// The client requested usage on every event of the stream, too
    /// (`stream_options.continuous_usage_stats`).
    pub continuous_usage: bool,
    /// Reasoning tokens are read in the usage of each event, and not of the last one only.
    pub reads_reasoning_usage: bool,
    /// The client requested `return_token_ids`, so they are not removed from its answer.
    pub return_token_ids: bool,
    /// The client's predicted output; `None` if it sent none.
    pub prediction: Option<String>,
    /// Tools are offered.
    pub tools: bool,
    /// No tool may be called (`tool_choice: none`).
    pub bars_tools: bool,
    /// All calls but the first are dropped (`parallel_tool_calls: false`).
    pub single_call: bool,
    /// Calls that must be made; `None` if none must.
    pub forced: Option<ForcedCalls>,
    /// Parameters that change the prompt, and perhaps more, each with the reason to pass it through
    /// where the engine does not tell the prompt and the sampling of exactly this request.
    pub rendered: Vec<Refused>,
    /// The body as received, in its key order.
    pub body: Map<String, Value>,
}

/// The length of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptSize {
    /// Length, tokens: exact for ids, else an estimate.
    pub tokens: usize,
    /// True if they were counted; otherwise they are a quarter of the bytes, rounded up.
    pub exact: bool,
}

impl PromptSize {
    /// Tokens that the prompt has in any case: text has at most eight bytes a token, but for runs
    /// of the same character.
    pub const fn at_least(self) -> usize {
        if self.exact { self.tokens } else { self.tokens / 2 }
    }
}

impl Request {
    /// The length of the prompt: counted if the body has ids, else estimated from its text.
    pub fn prompt_size(&self) -> PromptSize {
        let bytes = match &self.prompt {
            Prompt::Ids(ids) => return PromptSize { tokens: ids.len(), exact: true },
            Prompt::Text(text) => text.len(),
            Prompt::Messages(messages) => messages::text_bytes(messages),
        };
        PromptSize { tokens: bytes.div_ceil(4), exact: false }
    }
}
