//! The state machine of one speculated request.
//!
//! PURE and sans-IO: four verbs ([`Session::new`], [`Session::handle`], [`Session::poll`],
//! [`Session::deadline`]) and a look ([`Session::summary`]), time an argument, every event naming the action
//! it answers.
//! The driver in `drive` does what [`Session::poll`] says and reports back.

pub mod accept;
mod machine;
mod output;
mod pilot;
mod shadow;
pub mod start;

pub use machine::Session;
pub use pilot::AHEAD_MAX;
pub use start::{Ending, Hold, Limit, Permission, Rules, Start, StopOrder};

use crate::control::costs::Basis;
use crate::draft::Draft;
use crate::units::TokenId;
use crate::words::{Ledger, Plan, RideReason, Verdict};

/// Estimated memory of a session with so many tokens of prompt and output, bytes, without its lookups, which are asked for
/// theirs: the ids, their text, and a call under way.
fn footprint(tokens: usize) -> u64 {
    const SESSION: u64 = 32 << 10;
    const TOKEN: u64 = 96;
    SESSION + TOKEN * tokens as u64
}

/// Names one action, and ties every event to the action it answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ActionId(pub u64);

impl ActionId {
    /// The id in events that answer no action: `ClientGone`, `Timeout`, `Mode`. No action carries it.
    pub const WORLD: Self = Self(0);
}

/// What has happened. Each event comes with the [`ActionId`] that it answers; an event of an action that was
/// cancelled is ignored.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The ids of the prompt are known, from the first ride or from a call beside it.
    Prompt(Vec<TokenId>),
    /// A ride brought tokens. `text` is what the backend itself emitted with them (it may hold text back).
    Token {
        /// New output tokens in order; several at once only if the backend itself sent them in one event.
        tokens: Vec<TokenId>,
        /// The text that came with them.
        text: String,
        /// Whether this event ends the ride; `RideEnded` follows then.
        tail: Tail,
    },
    /// The ids of this request cannot be trusted: ride to the end, never leap.
    Doubt,
    /// A ride came to its end.
    RideEnded(Finish),
    /// The model drafter's answer to `Draft`.
    Draft(Draft),
    /// The model drafter's answer to `Shadow`: its own choice at each asked place; `None` where that is no token of the
    /// target's.
    Shadow(Vec<Option<TokenId>>),
    /// The answer to `Verify`.
    Verdict(Verdict),
    /// An action failed.
    Fault(Fault),
    /// The client has left.
    ClientGone,
    /// A deadline of the session has come.
    Timeout,
    /// The gates have changed: why leaping is not allowed now, by the operator's mode or the replica; `None` if it is.
    Mode(Option<RideReason>),
}

/// Whether a ride ends with an event.
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

/// What the driver is to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Stream plainly from the backend.
    Ride(RidePlan),
    /// Ask the model drafter for a chain of at most `gamma` tokens after the whole context and what is assumed to follow it,
    /// fewer where it is unsure.
    Draft {
        /// Most tokens wanted.
        gamma: usize,
        /// Least chance of surviving with which one more token is worth its time; 0: every token is.
        least: f64,
        /// What a round under way is assumed to bring.
        assumed: Vec<TokenId>,
    },
    /// Ask the model drafter what it would have chosen at each output place `from..` (teacher-forced).
    Shadow {
        /// First output index asked for.
        from: usize,
    },
    /// Ask the backend to verify a draft by a plan, after the whole context and these tokens, which earlier calls are
    /// assumed to bring.
    Verify(Draft, Plan, Vec<TokenId>),
    /// Stop an action that is under way; its events are not wanted any more.
    Cancel(ActionId),
    /// Send this to the client.
    Emit(Delta),
    /// The first call brought this: a client that streams has it from the backend's own event.
    Passed(Delta),
    /// Nothing more will come.
    Finish(Summary),
}

/// How to ride.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RidePlan {
    /// The client's own request, on its own endpoint.
    First,
    /// On from the whole context, by token ids, for at most this many tokens.
    Continue {
        /// Most output tokens of this ride.
        max_tokens: u32,
    },
}

/// A piece of output.
#[derive(Clone, Debug, PartialEq)]
pub struct Delta {
    /// Tokens that have become the past with this piece.
    pub tokens: Vec<TokenId>,
    /// Text to send; never half a character.
    pub text: String,
}

/// Why the output ended, as OpenAI calls it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// End-of-text or a stop string.
    Stop,
    /// The limit of output tokens, or of the context.
    Length,
}

impl Finish {
    /// The value of `finish_reason`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

/// What ended the output before its limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stopped {
    /// This stop text.
    Text(String),
    /// This stop token of the client's.
    Token(TokenId),
    /// The end of the text itself, which this token is.
    TextEnd(TokenId),
}

/// What went wrong with an action. The request rides on, or ends if no ride is possible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Drafter failed or is not there.
    Draft,
    /// A verify call failed: refused or unreadable.
    Verify,
    /// The round would be larger than its plan allows.
    TooLong,
    /// The backend asked for a pause (429 or 503 with `Retry-After`).
    RetryAfter(std::time::Duration),
    /// A ride broke off.
    Ride,
    /// A ride brought nothing for too long.
    Silence,
    /// Another process, or another model, has answered than the one that began the answer.
    Changed,
    /// The connection of a later call was lost, and the engine does not show whether a new one leads to it.
    Lost,
}

/// The result of a session.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Summary {
    /// Why the output ended; `None` if the backend broke off and nothing can go on.
    pub finish: Option<Finish>,
    /// Whether at least one round leapt.
    pub speculated: bool,
    /// Why it rides, or rode last; `None` while it leaps.
    pub reason: Option<RideReason>,
    /// Rounds whose verdict decided at least one token.
    pub rounds: u32,
    /// Tokens drafted in them.
    pub drafted: u32,
    /// Tokens accepted in them.
    pub accepted: u32,
    /// Each of these rounds, in order.
    pub each: Vec<Judging>,
    /// Verify calls that were sent before the call before them was answered.
    pub ahead: SentAhead,
    /// Drift from the target's distribution that judging them has cost; zero by the exact rule.
    pub drift: Ledger,
    /// All output tokens.
    pub output_tokens: u32,
    /// Seconds per token from the first piece of output to the last; `None` where leaping was not free to choose, or for a
    /// short output.
    pub token_seconds: Option<f64>,
    /// Its output repeats itself.
    pub loops: bool,
    /// What its rounds have won and lost.
    pub balance: Balance,
    /// The token ids that are not certain, so that it could not leap.
    pub doubted: Option<Doubted>,
    /// How many times as fast leaping would have been by what was drafted in the shadow, and what that rests on; only where
    /// the session might not leap (shadow, observe, control group) and its output was long enough to tell.
    pub would_gain: Option<(f64, Basis)>,
}

/// A round whose verdict decided at least one token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Judging {
    /// Its verify call.
    pub call: ActionId,
    /// Nodes of its draft.
    pub drafted: u32,
    /// Those that became output.
    pub accepted: u32,
    /// Places of its longest branch.
    pub depth: u32,
}

/// Token ids of a request that are in doubt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doubted {
    /// Those of its prompt: they are not known, or were told in two ways.
    Prompt,
    /// Those of its output: its text is not what they decode to, or one of them has a meaning of its own.
    Output,
}

impl Doubted {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Prompt, Self::Output];

    /// The name in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prompt => "prompt",
            Self::Output => "output",
        }
    }
}

/// What leaping has won and lost against riding at the measured pace, seconds of the answer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Balance {
    /// By the rounds that won.
    pub saved: f64,
    /// By the rounds, and switches back to a ride, that lost; at least 0.
    pub wasted: f64,
}

impl Balance {
    /// Books what a round or switch has won, seconds; negative if it lost.
    pub fn book(&mut self, won: f64) {
        let side = if won < 0.0 { &mut self.wasted } else { &mut self.saved };
        *side += won.abs();
    }
}

/// Verify calls that were sent ahead of the verdict that they rest on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SentAhead {
    /// All of them.
    pub sent: u32,
    /// Those that counted, because what they assumed came true.
    pub used: u32,
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
    /// The text still held back, with U+FFFD for what never became a character.
    fn flush(&mut self) -> String;
    /// A second one that goes on from here by itself.
    fn fork(&self) -> Box<dyn Decode>;
}
