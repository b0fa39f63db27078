//! The inputs of a session: everything that the request, the policy and the replica decided.

use std::sync::Arc;
use std::time::Duration;

use super::accept::Accept;
use super::{Decode, MakeParser};
use crate::control::{MARGIN, Presence, TemperatureBucket};
use crate::draft::{LookupSpec, Shared};
use crate::units::{Tick, TokenId};
use crate::words::{PlainReason, VerifyMethod};

/// One request to be served.
pub struct Start {
    /// The prompt's ids, if the client sent ids. Otherwise [`super::Event::Prompt`] delivers them.
    pub prompt: Option<Vec<TokenId>>,
    /// Maximum length of the output.
    pub limit: Limit,
    /// Conditions that end the output before that.
    pub ending: Ending,
    /// Sampling temperature, the server's default included; 0 is greedy.
    pub temperature: f64,
    /// Turns output tokens into text.
    pub decode: Box<dyn Decode>,
    /// Tokens that a parser of the backend may take out of its text (added tokens, in a chat), in
    /// ascending order. With one of them in the first plain request the ids are in doubt: its
    /// effect on the backend's text is not known by its id.
    pub marks: Arc<[TokenId]>,
    /// Makes the parser of its output, where the backend parses it; then there are no stop texts.
    /// `None` where it sends text only.
    pub parser: Option<MakeParser>,
    /// The first plain request brings the first token alone, and the rest is requested by ids: the
    /// backend reports no ids in a stream of this request.
    pub first_token_alone: bool,
    /// The backend may constrain the sampling by a grammar that it does not apply to later
    /// requests: plain until [`super::Event::Rendered`] reports that it does not.
    pub unconfirmed: bool,
    /// The rules of policy, replica and client.
    pub rules: Rules,
    /// Data and limits of the session runner.
    pub resources: Resources,
    /// Time at which the client's request was sent, and its presence among the requests of the
    /// engine from then on; `None`: now. Some engines send no head before their first token.
    pub sent: Option<(Presence, Tick)>,
    /// Seeds the random numbers of the session, which decide what is explored and never what is
    /// emitted.
    pub seed: u64,
    /// Seeds the random numbers drawn here for the output, where the backend sends distributions
    /// and no samples: fresh for every request, and used for nothing else.
    pub noise: u64,
}

/// Maximum length of the output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limit {
    /// Maximum output tokens: the client's limit, else the server's default; `None` if there is
    /// none.
    pub max_tokens: Option<u32>,
    /// Maximum tokens of prompt and output together that the model takes; `None` if not known.
    pub context: Option<u32>,
}

/// Conditions that end the output, as the backend itself would end it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ending {
    /// Texts that end the output.
    pub stop: Vec<String>,
    /// Selects the stop text that counts if one token completes several.
    pub stop_order: StopOrder,
    /// Amount of text that the backend withholds because a stop text may begin in it.
    pub stop_buffer: StopBuffer,
    /// A matched stop text (or the text of a stop token) stays in the output.
    pub include_stop: bool,
    /// Tokens that end the output.
    pub stop_token_ids: Vec<TokenId>,
    /// The model's end-of-text tokens.
    pub eos: Vec<TokenId>,
    /// End-of-text tokens do not end the output.
    pub ignore_eos: bool,
    /// Stop texts count only beyond this many output tokens.
    pub min_tokens: u32,
}

/// Selects the stop text that counts if one token completes several. Engines differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StopOrder {
    /// The one that is complete first; of those complete at the same character the longest (our
    /// target).
    #[default]
    FirstComplete,
    /// The first of the list (vLLM).
    Listed,
    /// The one that begins first (llama.cpp).
    FirstBegun,
}

/// The end of the text that a backend withholds because a stop text may be in it. Engines differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StopBuffer {
    /// The longest end of the text that is the beginning of a stop text, or nothing at all.
    #[default]
    Beginning,
    /// Always one character less than the longest stop text has (vLLM).
    Longest,
}

/// The permission of a session to speculate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Permission {
    /// It may speculate.
    Speculate,
    /// It decodes plainly for this reason, and scores drafts in the shadow.
    Shadow(PlainReason),
    /// It decodes plainly for this reason and drafts nothing.
    Plain(PlainReason),
}

impl Permission {
    /// Reason for which it does not allow speculation now; `None` if it does.
    pub const fn reason(self) -> Option<PlainReason> {
        match self {
            Self::Speculate => None,
            Self::Shadow(reason) | Self::Plain(reason) => Some(reason),
        }
    }

    /// Reason why the request will never be speculated on, whatever is measured meanwhile, so that
    /// it passes unchanged. `None` if it may be, or if only the comparison with the control group
    /// prevents it now, or a parser that has not proved itself yet.
    pub fn never(self) -> Option<PlainReason> {
        match self {
            Self::Speculate | Self::Shadow(PlainReason::GateControl | PlainReason::Parser) => None,
            Self::Shadow(reason) | Self::Plain(reason) => Some(reason),
        }
    }
}

/// Maximum draft nodes of one round, and a policy's default.
pub const GAMMA_MAX: usize = 32;
/// Default timeout of a verify request.
pub const VERIFY_TIMEOUT: Duration = Duration::from_secs(2);

/// Timeouts of requests in a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// Timeout of a verify request.
    pub verify: Duration,
    /// Timeout of a draft of the model drafter; `None` is twice the time of a plain token, and the
    /// timeout of a verify request for the first draft, for which the drafter reads the prompt.
    pub draft: Option<Duration>,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { verify: VERIFY_TIMEOUT, draft: None }
    }
}

/// The rules of policy, replica and client.
#[derive(Clone, Debug)]
pub struct Rules {
    /// The permission to speculate.
    pub permission: Permission,
    /// Verification methods of the replica for this request, best first: a position that one of
    /// them cannot decide is passed to the next. Empty: the session decodes plainly.
    pub methods: Vec<VerifyMethod>,
    /// The acceptance rule.
    pub accept: Accept,
    /// Maximum draft nodes of one round.
    pub gamma_max: usize,
    /// Speculate at every token event with a draft of at most this many nodes, whatever it yields.
    /// A round with an empty draft is one token. Ignores predictions, margins, the control group
    /// and the gates `load`, `stale`, `acceptance`, `control` and the budgets; never context or
    /// health.
    pub gamma_fixed: Option<usize>,
    /// To start, speculation must be expected to beat plain decoding by this share (0.10 is 10 %
    /// faster), and by half of it to go on.
    pub margin: f64,
    /// A number for the kind of the request (its policy, its route): measurements of requests of
    /// one kind apply to the next one.
    pub kind: u64,
    /// Share of accepted first draft tokens, 0 to 1, below which the acceptance gate is closed,
    /// where no gain is predicted.
    pub min_acceptance: f64,
    /// Longest pause in the stream that a round may cause; `None` is without limit.
    pub max_gap: Option<Duration>,
    /// Greatest ratio of the times to the first tokens of other requests, with drafts in flight and
    /// without; 20 ms more are always allowed.
    pub first_token: f64,
    /// The drafters that need no model, in order of preference.
    pub lookups: Vec<LookupSpec>,
    /// Maximum tokens of context and draft in a verify request.
    pub context_max: usize,
    /// This request is in the control group.
    pub control_group: bool,
    /// Maximum tokens of a continued plain request, where they must be limited; `None` decides by
    /// measurement.
    pub segment: Option<u32>,
}

/// Data and limits that a session gets besides its rules.
#[derive(Clone, Debug)]
pub struct Resources {
    /// The target's largest token id plus one; a result with an id that is not below it is refused.
    pub vocabulary: TokenId,
    /// Data of the lookups beyond the request itself.
    pub shared: Shared,
    /// The number of the model drafter that answers `Draft` and `Shadow`
    /// ([`crate::control::Control::model`]); `None` without one.
    pub model: Option<u8>,
    /// The model drafter, or the head of the target, draws with the target's noise.
    pub shares_noise: bool,
    /// Timeouts of requests in a round.
    pub timeouts: Timeouts,
}

impl Default for Resources {
    fn default() -> Self {
        Self {
            vocabulary: TokenId::MAX,
            shared: Shared::default(),
            model: None,
            shares_noise: false,
            timeouts: Timeouts::default(),
        }
    }
}

impl Rules {
    /// The bucket under which drafts of a request with this temperature are counted.
    pub fn bucket(&self, temperature: f64) -> TemperatureBucket {
        let bucket = TemperatureBucket::of(temperature);
        if self.accept.is_lossy() { bucket.relaxed() } else { bucket }
    }
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            permission: Permission::Speculate,
            methods: Vec::new(),
            accept: Accept::default(),
            gamma_max: GAMMA_MAX,
            gamma_fixed: None,
            margin: MARGIN,
            kind: 0,
            min_acceptance: 0.0,
            max_gap: None,
            first_token: 1.10,
            lookups: Vec::new(),
            context_max: 8192,
            control_group: false,
            segment: None,
        }
    }
}
