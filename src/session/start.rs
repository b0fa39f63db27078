//! What a session is started with: everything that the request, the policy and the replica decided.

use std::sync::Arc;
use std::time::Duration;

use super::Decode;
use super::accept::Accept;
use crate::control::Heat;
use crate::draft::{LookupSpec, Shared};
use crate::units::TokenId;
use crate::words::{Plan, RideReason};

/// One request to be served.
pub struct Start {
    /// The prompt's ids, if the client sent ids. Otherwise [`super::Event::Prompt`] brings them.
    pub prompt: Option<Vec<TokenId>>,
    /// How long the output may become.
    pub limit: Limit,
    /// What ends the output before that.
    pub ending: Ending,
    /// Sampling temperature, the server's default included.
    pub temperature: f64,
    /// Turns output tokens into text.
    pub decode: Box<dyn Decode>,
    /// Tokens that a parser of the backend's may take out of its text (added tokens, in a chat), in rising
    /// order. One of them in the first ride is doubt: what the backend makes of it is not known by its id.
    pub marks: Arc<[TokenId]>,
    /// What policy, replica and client allow.
    pub rules: Rules,
    /// Seeds the session's own randomness, which decides what is explored and never what is emitted.
    pub seed: u64,
    /// Seeds what is drawn here for the output, where the backend sends distributions and no samples: fresh for
    /// every request, and used for nothing else.
    pub noise: u64,
}

/// How long the output may become.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limit {
    /// Most output tokens: the client's own, else the server's default; `None` if there is none.
    pub max_tokens: Option<u32>,
    /// Most tokens of prompt and output together that the model takes; `None` if not known.
    pub context: Option<u32>,
}

/// What ends the output, as the backend itself would end it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ending {
    /// Texts that end the output.
    pub stop: Vec<String>,
    /// Which of them counts if one token completes several.
    pub stop_order: StopOrder,
    /// How much text the backend holds back because a stop text may begin in it.
    pub hold: Hold,
    /// A matched stop text (or the text of a stop token) stays in the output.
    pub include_stop: bool,
    /// Tokens that end the output.
    pub stop_token_ids: Vec<TokenId>,
    /// The model's own end-of-text tokens.
    pub eos: Vec<TokenId>,
    /// End-of-text tokens do not end the output.
    pub ignore_eos: bool,
    /// Stop texts count only beyond this many output tokens.
    pub min_tokens: u32,
}

/// Which stop text counts if one token completes several. Engines differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StopOrder {
    /// The one that is complete first; of those complete at the same character the longest (our target).
    #[default]
    FirstComplete,
    /// The first of the list (vLLM).
    Listed,
    /// The one that begins first (llama.cpp).
    FirstBegun,
}

/// What a backend keeps back of its text because a stop text may be in it. Engines differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Hold {
    /// The longest end of the text that is the beginning of a stop text, or nothing at all.
    #[default]
    Beginning,
    /// Always one character less than the longest stop text has (vLLM).
    Longest,
}

/// Whether the session may leap at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Permission {
    /// It may leap.
    Leap,
    /// It rides for this reason, and scores drafts in the shadow.
    Shadow(RideReason),
    /// It rides for this reason and drafts nothing.
    Ride(RideReason),
}

impl Permission {
    /// Why the request will not leap, whatever is measured meanwhile, so that it passes unchanged. `None` if it may,
    /// and if only the comparison with the control group is against it now.
    pub fn never(self) -> Option<RideReason> {
        match self {
            Self::Leap | Self::Shadow(RideReason::GateLatency) => None,
            Self::Shadow(reason) | Self::Ride(reason) => Some(reason),
        }
    }
}

/// What policy, replica and client allow.
#[derive(Clone, Debug)]
pub struct Rules {
    /// Whether the session may leap at all.
    pub permission: Permission,
    /// Verify plans of the replica for this request, best first: a place that one of them cannot decide is
    /// taken by the next. Empty: the session rides.
    pub plans: Vec<Plan>,
    /// How draft tokens are judged.
    pub accept: Accept,
    /// One more than the largest id of a token.
    pub vocabulary: TokenId,
    /// Most draft nodes of one round.
    pub gamma_max: usize,
    /// Leap at every token event with a draft of at most so many nodes, whatever it brings. A round with an
    /// empty draft is one token. Ignores prediction, margins, holdback and the gates for load, staleness,
    /// acceptance, latency and budgets; never context or health.
    pub gamma_fixed: Option<usize>,
    /// Most verify calls that are sent before the one that they rest on is answered. `None` is as many as pay, and none
    /// with `gamma_fixed`; with `gamma_fixed`, so many are sent wherever there is a draft for them.
    pub ahead: Option<usize>,
    /// To begin, leaping must be expected to beat riding by this share (0.10 is 10 % faster).
    pub margin: f64,
    /// To go on leaping, it must be expected to beat riding by this share.
    pub stay: f64,
    /// A number for the kind of the request (its policy, its route): what is learnt of requests of one kind is expected
    /// of the next one.
    pub kind: u64,
    /// Where a smaller share of first draft tokens is accepted and no gain is predicted, the acceptance gate is closed.
    pub acceptance_least: f64,
    /// Longest silence that a round may cause; `None` is without bound.
    pub gap_most: Option<Duration>,
    /// The drafters that need no model, in order of preference.
    pub lookups: Vec<LookupSpec>,
    /// What the lookups use beside the request itself.
    pub shared: Shared,
    /// The number of the model drafter that answers `Draft` and `Shadow` ([`crate::control::Control::model`]); `None` without
    /// one.
    pub model: Option<u8>,
    /// The model drafter draws with the target's own noise.
    pub shares_noise: bool,
    /// The model drafter may be asked to go on from what is assumed to come.
    pub drafts_ahead: bool,
    /// The model drafter's drafts are sampled: drawn with noise of its own, from laws that come with them.
    pub samples: bool,
    /// Most tokens of context and draft that a verify call may carry.
    pub context_max: usize,
    /// This request is in the control group.
    pub holdback: bool,
    /// Longest continued ride in tokens, where rides must be bounded; `None` leaves it to what is measured.
    pub segment: Option<u32>,
    /// Timeout of a verify call.
    pub verify_timeout: Duration,
    /// How long a draft of the model drafter is waited for; `None` is the session's own patience, twice the time of
    /// a ridden token. The first draft of a request, for which the drafter reads the prompt, is then waited for as long
    /// as a verify call.
    pub draft_timeout: Option<Duration>,
}

impl Rules {
    /// The bucket by which drafts of a request with this temperature are learnt of.
    pub fn heat(&self, temperature: f64) -> Heat {
        let heat = Heat::of(temperature);
        if self.accept.is_lossy() { heat.relaxed() } else { heat }
    }
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            permission: Permission::Leap,
            plans: Vec::new(),
            accept: Accept::default(),
            vocabulary: TokenId::MAX,
            gamma_max: 32,
            gamma_fixed: None,
            ahead: None,
            margin: 0.10,
            stay: 0.05,
            kind: 0,
            acceptance_least: 0.0,
            gap_most: None,
            lookups: Vec::new(),
            shared: Shared::default(),
            model: None,
            shares_noise: false,
            drafts_ahead: false,
            samples: false,
            context_max: 8192,
            holdback: false,
            segment: None,
            verify_timeout: Duration::from_secs(2),
            draft_timeout: None,
        }
    }
}
