//! The state machine of one speculated request.
//!
//! PURE and sans-IO: four verbs ([`Session::new`], [`Session::handle`], [`Session::poll`],
//! [`Session::deadline`]) and a view ([`Session::summary`]), time as an argument, every event
//! naming the action that it answers. The session runner in `serving` executes the actions of
//! [`Session::poll`] and reports their events.

pub mod accept;
mod controller;
mod machine;
mod output;
pub mod parse;
mod shadow;
pub mod start;

pub use machine::Session;
pub use parse::{CallDelta, Difference, MakeParser, Parse, Parsed};
pub use start::{
    Ending, GAMMA_MAX, Limit, Permission, Resources, Rules, Start, StopBuffer, StopOrder, Timeouts,
    VERIFY_TIMEOUT,
};

use crate::control::costs::Basis;
use crate::draft::Tree;
use crate::units::TokenId;
use crate::words::{Conditions, Ledger, PlainReason, Proposal, VerifyMethod, VerifyResult};

/// Estimated memory of a session with `tokens` tokens of prompt and output, bytes, without its
/// lookups, which report theirs: the ids, their text, and a verify request in flight.
fn footprint(tokens: usize) -> u64 {
    const SESSION: u64 = 32 << 10;
    const TOKEN: u64 = 96;
    SESSION + TOKEN * tokens as u64
}

/// Names one action, and ties every event to the action that it answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ActionId(pub u64);

impl ActionId {
    /// The id in events that answer no action: `ClientGone`, `Timeout`, `Mode`. No action carries
    /// it.
    pub const WORLD: Self = Self(0);
}

/// An event. Each comes with the [`ActionId`] that it answers; an event of a cancelled action is
/// ignored.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The ids of the prompt are known, from the first plain request or from a request concurrent
    /// with it.
    Prompt(Vec<TokenId>),
    /// A plain request yielded tokens. `parsed` is what the backend itself emitted with them (it
    /// may withhold text).
    Token {
        /// New output tokens in order; several at once only if the backend itself sent them in one
        /// event.
        tokens: Vec<TokenId>,
        /// The text that came with them, and what a parser of the backend has taken out of it.
        parsed: Parsed,
        /// Marks the last event of the plain request; `PlainEnded` follows then.
        tail: Tail,
    },
    /// The backend proposes what follows the tokens of the next [`Event::Token`].
    Proposal(Proposal),
    /// The ids of this request cannot be trusted: decode plainly to the end, never speculate.
    Doubt,
    /// The backend has rendered the request ([`Start::unconfirmed`]).
    Rendered {
        /// The ids of its prompt.
        prompt: Vec<TokenId>,
        /// A grammar constrains its sampling.
        constrained: bool,
    },
    /// A plain request has ended.
    PlainEnded(Finish),
    /// The model drafter's answer to `Draft`.
    Draft(Tree),
    /// The model drafter's answer to `Shadow`: its choice at each requested position; `None` where
    /// that is no token of the target's.
    Shadow(Vec<Option<TokenId>>),
    /// The answer to `Verify`.
    VerifyResult(VerifyResult),
    /// An action failed.
    Fault(Fault),
    /// The client has disconnected.
    ClientGone,
    /// A deadline of the session has passed.
    Timeout,
    /// The gates have changed: the reason why speculation is not allowed now, by the operator's
    /// mode or the replica; `None` if it is allowed.
    Mode(Option<PlainReason>),
}

/// Marks the last event of a plain request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tail {
    /// More may follow.
    #[default]
    Open,
    /// It ends here.
    Last,
    /// It ends here, and its last token is the end of the text, which adds no text.
    Stop,
}

/// An action for the session runner.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Stream plainly from the backend.
    Plain(PlainRequest),
    /// Request a chain of at most `gamma` tokens from the model drafter, after the complete
    /// context; fewer where it is uncertain.
    Draft {
        /// Maximum number of tokens.
        gamma: usize,
        /// Minimum survival probability with which one more token is worth its time; 0: every token
        /// is.
        min_survival: f64,
    },
    /// Request the model drafter's choice at each output position `from..` (teacher-forced).
    Shadow {
        /// First output index requested.
        from: usize,
    },
    /// Send a draft to the backend by a verification method, after the complete context.
    Verify(Tree, VerifyMethod),
    /// Stop an action in flight; its events are ignored from now on.
    Cancel(ActionId),
    /// Send this to the client.
    Emit(Delta),
    /// The first plain request yielded this: a client that streams has it from the backend's event.
    Passed(Delta),
    /// The session has ended.
    Finish(Summary),
}

/// The kind of a plain request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlainRequest {
    /// The client's request, on the endpoint that it chose.
    First,
    /// Continues from the complete context, by token ids, for at most this many tokens.
    Continue {
        /// Maximum output tokens of this plain request.
        max_tokens: u32,
    },
}

/// A piece of output.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Delta {
    /// Tokens that this piece adds to the context.
    pub tokens: Vec<TokenId>,
    /// Text to send, never half a character; with a parser also reasoning and tool calls.
    pub parsed: Parsed,
}

/// Reason for the end of the output, in OpenAI's terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// End-of-text or a stop string.
    Stop,
    /// The limit of output tokens, or of the context.
    Length,
    /// End-of-text after a tool call.
    ToolCalls,
}

impl Finish {
    /// The value of `finish_reason`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::ToolCalls => "tool_calls",
        }
    }
}

/// The end of the output before its limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stopped {
    /// This stop text.
    Text(String),
    /// This stop token of the client's.
    Token(TokenId),
    /// The end of the text itself, which this token is.
    TextEnd(TokenId),
}

/// The failure of an action. The request continues plainly, or ends if no plain request is
/// possible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The drafter failed or is not there.
    Draft,
    /// A verify request failed: refused or unreadable.
    Verify,
    /// The round would be larger than its method allows.
    TooLong,
    /// The backend requested a pause (429 or 503 with `Retry-After`).
    RetryAfter(std::time::Duration),
    /// A plain request broke off.
    Plain,
    /// A plain request yielded no token for too long.
    Silence,
    /// Another process, or another model, answered than the one that began the answer.
    Changed,
    /// The connection of a later request was lost, and the engine does not show if a new one leads
    /// to it.
    Lost,
}

/// The result of a session.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Summary {
    /// Reason for the end of the output; `None` if the backend broke off and the output cannot be
    /// continued.
    pub finish: Option<Finish>,
    /// True if the request was speculated on in at least one round.
    pub speculated: bool,
    /// Reason for the present, or last, plain decoding; `None` while it speculates.
    pub reason: Option<PlainReason>,
    /// Rounds whose verification result decided at least one token.
    pub rounds: u32,
    /// Tokens drafted in them.
    pub drafted: u32,
    /// Tokens accepted in them.
    pub accepted: u32,
    /// Each of these rounds, in order.
    pub each: Vec<Judging>,
    /// Drift from the target's distribution by the acceptance rule; zero by the exact rule.
    pub drift: Ledger,
    /// Number of output tokens.
    pub output_tokens: u32,
    /// Seconds per token from the first piece of output to the last; `None` where the session was
    /// not free to speculate, or for a short output.
    pub token_seconds: Option<f64>,
    /// Seconds that its rounds and switches have won and lost.
    pub balance: Balance,
    /// The token ids in doubt, which prevent speculation; `None` if none are.
    pub doubted: Option<Doubted>,
    /// The parts that the backend's complete answer was parsed to, alike there and here; `None` if
    /// it was parsed differently, or is not all of one call, or there is no parser.
    pub parsed: Option<PartsSeen>,
    /// The first difference between the backend's parts and those here; `None` if there is none.
    pub misparsed: Option<Difference>,
    /// Projected speedup by the drafts made in the shadow (plain time ÷ projected time, 1 where it
    /// would not have been speculated on), and its basis; only where the session might not
    /// speculate (shadow, observe, control group) and its output was long enough.
    pub projected_speedup: Option<(f64, Basis)>,
}

/// Kinds of parts in an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PartsSeen {
    pub reasoning: bool,
    /// It has a tool call.
    pub calls: bool,
}

/// A round whose verification result decided at least one token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Judging {
    /// Its verify request.
    pub call: ActionId,
    /// Nodes of its draft.
    pub drafted: u32,
    /// Those that became output.
    pub accepted: u32,
    /// Nodes of its longest branch.
    pub depth: u32,
    /// Its conditions.
    pub conditions: Conditions,
}

/// Token ids of a request that are in doubt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doubted {
    /// Those of its prompt: they are unknown, or were reported in two ways.
    Prompt,
    /// Those of its output: its text differs from the decoded tokens, or one of them has a special
    /// meaning.
    Output,
    /// Not its ids but their parts: the backend parses them differently than they are parsed here.
    Parser,
}

impl Doubted {
    pub const ALL: [Self; 3] = [Self::Prompt, Self::Output, Self::Parser];

    /// The name in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prompt => "prompt",
            Self::Output => "output",
            Self::Parser => "parser",
        }
    }
}

/// Time won and lost by speculation against plain decoding at the measured pace, seconds of the
/// answer, both at least 0.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Balance {
    /// Seconds won, summed over the rounds that won.
    pub saved: f64,
    /// Seconds lost, summed over the rounds, and switches back to plain decoding, that lost.
    pub wasted: f64,
}

impl Balance {
    /// Books the seconds won by a round or switch; negative if it lost.
    pub fn book(&mut self, won: f64) {
        let side = if won < 0.0 { &mut self.wasted } else { &mut self.saved };
        *side += won.abs();
    }
}

impl Summary {
    /// Counts a round.
    pub fn round(&mut self, round: Judging) {
        self.speculated = true;
        self.rounds += 1;
        self.drafted += round.drafted;
        self.accepted += round.accepted;
        self.each.push(round);
    }
}

/// Turns tokens into text, one by one. Implemented by `text`, faked in tests.
pub trait Decode: Send {
    /// Adds a token and returns the text that became certain: never half a character.
    fn push(&mut self, token: TokenId) -> String;
    /// The text still withheld, with U+FFFD for what never became a character.
    fn flush(&mut self) -> String;
    /// A copy that continues independently from here.
    fn fork(&self) -> Box<dyn Decode>;
}
