//! How each engine is spoken to: what to send, how to read the answer.
//!
//! PURE codecs; one file per engine, one variant of [`Dialect`]. A dialect never talks: it turns a context
//! and a draft into a [`Call`], and the bytes that come back into a [`Chunk`] or a
//! [`Verdict`]. Adding an engine is one file, one variant, one golden set; the
//! compiler lists the rest.

pub mod onnx;

use serde_json::Value;

use crate::draft::Tree;
use crate::openai::{Request, Sampling};
use crate::session::{Plan, StopOrder, Verdict};
use crate::units::TokenId;

/// The engines that can be asked to verify. Every other server is relayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// Our own ONNX target (`foretell target`).
    Onnx,
}

/// Everything the target is to condition on.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// The model id as the client sent it.
    pub model: &'a str,
    /// The prompt's ids.
    pub prompt: &'a [TokenId],
    /// The output so far.
    pub output: &'a [TokenId],
}

/// One HTTP call: `POST path` with a JSON body.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// Path on the server, below its base path.
    pub path: &'static str,
    /// The JSON body.
    pub body: Vec<u8>,
}

/// Why a draft cannot be put to this engine in this way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The call would be larger than a round may be.
    #[error("the call takes {bytes} bytes, more than {most}")]
    TooLong {
        /// Size of the call.
        bytes: usize,
        /// The bound.
        most: usize,
    },
}

/// The answer is not what this dialect speaks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unreadable answer: {0}")]
pub struct Unreadable(pub &'static str);

/// One event of a ride.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chunk {
    /// Ids of the prompt, on the first event.
    pub prompt: Option<Vec<TokenId>>,
    /// New output tokens.
    pub tokens: Vec<TokenId>,
    /// The text that the backend sent with them.
    pub text: String,
    /// `finish_reason`, on the last event of the choice.
    pub finish: Option<String>,
    /// The backend's own usage, where it sent one.
    pub usage: Option<Value>,
    /// The event carries text whose ids are not known, or something else that is not plain output.
    pub doubtful: bool,
}

impl Dialect {
    /// The name in configuration, metrics and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Onnx => "onnx",
        }
    }

    /// The plans this engine can serve, best first.
    pub const fn plans(self) -> &'static [Plan] {
        match self {
            Self::Onnx => &[Plan::Tree, Plan::FanOut],
        }
    }

    /// Which stop text counts if one token completes several.
    pub const fn stop_order(self) -> StopOrder {
        match self {
            Self::Onnx => StopOrder::FirstComplete,
        }
    }

    /// Whether a seeded request above temperature 0 may leap: its noise is a function of the place alone.
    pub const fn seeded_leaps(self) -> bool {
        match self {
            Self::Onnx => true,
        }
    }

    /// The client's own request with the additive fields that this dialect needs. `seed` is sent if the
    /// client sent none, so that a model drafter can share the noise.
    pub fn first_ride(self, request: &Request, seed: u64) -> Call {
        match self {
            Self::Onnx => onnx::first_ride(request, seed),
        }
    }

    /// A ride from the whole context, by token ids.
    pub fn ride(self, context: &Context<'_>, sampling: &Sampling, max_tokens: u32) -> Call {
        match self {
            Self::Onnx => onnx::ride(context, sampling, max_tokens),
        }
    }

    /// The call that verifies `draft` after the context.
    pub fn verify(
        self,
        context: &Context<'_>,
        draft: &Tree,
        sampling: &Sampling,
        plan: Plan,
        bytes_max: usize,
    ) -> Result<Call, Refusal> {
        let call = match self {
            Self::Onnx => onnx::verify(context, draft, sampling, plan),
        };
        if call.body.len() > bytes_max {
            return Err(Refusal::TooLong { bytes: call.body.len(), most: bytes_max });
        }
        Ok(call)
    }

    /// Reads one event of a ride.
    pub fn chunk(self, event: &Value) -> Result<Chunk, Unreadable> {
        match self {
            Self::Onnx => onnx::chunk(event),
        }
    }

    /// Reads the answer to a verify call for a draft of `nodes` nodes.
    pub fn verdict(self, plan: Plan, nodes: usize, body: &[u8]) -> Result<Verdict, Unreadable> {
        match self {
            Self::Onnx => onnx::verdict(plan, nodes, body),
        }
    }
}
