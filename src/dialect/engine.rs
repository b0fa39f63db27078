//! An engine as it was found: everything about one server that decides how it may be asked.

use super::{Asked, Beside, Call, Chunk, Context, Dialect, Refusal, RideKind, Round, Unreadable};
use crate::openai::{Additive, Defaults, Request, Route, Sampling};
use crate::units::TokenId;
use crate::words::{BypassReason, Refused};
use crate::words::{Plan, Verdict};
use serde_json::Value;

/// What the noise of a seeded request depends on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Noise {
    /// Seed, absolute position and token: continuing by ids gives the same text.
    Place,
    /// It restarts with every call, or what it depends on is not known.
    #[default]
    Call,
    /// A seed is ignored: there is nothing to preserve.
    Ignored,
}

/// Which rows a list of prompt log-probabilities has where a prefix was cached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RowShape {
    /// One for each token of the prompt; those of cached tokens are invalid.
    #[default]
    Full,
    /// Only those that were computed, at the end.
    Tail,
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

/// The load that an engine reports.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// Number of requests being computed.
    pub running: u32,
    /// Number of requests that wait to be computed.
    pub waiting: u32,
    /// Share of the KV memory in use, 0 to 1; `None` if it does not report that.
    pub kv_usage: Option<f64>,
    /// Most requests that it computes at once; `None` if it does not report that.
    pub limit: Option<u32>,
}

/// One server, as it was found.
#[derive(Clone, Debug, PartialEq)]
pub struct Engine {
    /// Its dialect.
    pub dialect: Dialect,
    /// The model that it serves.
    pub model: String,
    /// Its version, as it reports it.
    pub version: String,
    /// When its process began, in microseconds of Unix time; `None` if it does not report that.
    pub started: Option<u64>,
    /// What each of its answers names its process by (`system_fingerprint`); `None` if they do not name it.
    pub mark: Option<String>,
    /// The version of its weights, where it reports one: they may be replaced while it runs.
    pub weights: Option<String>,
    /// Most tokens of prompt and output together; `None` if not known.
    pub context: Option<usize>,
    /// The plans that this server can serve, best first; what a request may use is [`Engine::plans`].
    pub plans: Vec<Plan>,
    /// Plans that it also serves, but whose first call may crash it, depending on what is installed there, which no
    /// answer shows. Used only where the operator names them ([`Engine::enable_named`]).
    pub risky: Vec<Plan>,
    /// Its values for fields that a client leaves out; `None` if they are not known.
    pub defaults: Option<Defaults>,
    /// Most output tokens, whatever a client asks for; `None` if the server is not configured so.
    pub max_tokens: Option<u32>,
    /// What the noise of a seeded request depends on.
    pub noise: Noise,
    /// Tokens per block of its prefix cache; 1 if it caches single tokens.
    pub block: usize,
    /// The rows of its prompt log-probabilities.
    pub rows: RowShape,
    /// Most prompts that it computes at once; `None` if not known.
    pub lanes: Option<usize>,
    /// It reports how many tokens of a prompt were cached.
    pub tells_cached: bool,
    /// An answer under way can be aborted by a call, and then still tells its usage ([`super::Codec::abort`]).
    pub aborts: bool,
    /// Its whole completions count the tokens of reasoning, which their streams do not.
    pub counts_reasoning: bool,
    /// It speculates by itself.
    pub speculates: bool,
    /// Fields that a client leaves out are filled in by rules whose values are not known.
    pub own_defaults: bool,
    /// It draws with one fixed seed where the client sends none.
    pub seeded: bool,
    /// Most output tokens where a client sets no limit; `None` if the server is not configured so.
    pub default_tokens: Option<u32>,
    /// Most tokens of one continued ride, where an answer comes whole; `None` if it is a stream.
    pub segment: Option<u32>,
    /// Its streams leave out an incomplete character at the end of the output.
    pub drops_tail: bool,
    /// Whether its prefix cache was seen at work; `None` if that was not checked.
    pub caches: Option<bool>,
    /// The path at which it reports its load; `None` if it does not.
    pub load_path: Option<&'static str>,
    /// Tokens that end an output.
    pub eos: Vec<TokenId>,
    /// Tokens that may end an output or are no text; filled in from the tokenizer.
    pub special: Vec<TokenId>,
}

impl Engine {
    /// Whether it shows which process it is, so that a connection can be known to lead to the same one.
    pub fn shows_itself(&self) -> bool {
        self.started.is_some() || self.mark.is_some()
    }

    /// An engine of which only these three are known.
    pub fn new(dialect: Dialect, model: impl Into<String>, version: impl Into<String>) -> Self {
        Self {
            dialect,
            model: model.into(),
            version: version.into(),
            started: None,
            mark: None,
            weights: None,
            context: None,
            plans: Vec::new(),
            risky: Vec::new(),
            defaults: None,
            max_tokens: None,
            noise: Noise::default(),
            block: 1,
            rows: RowShape::default(),
            lanes: None,
            tells_cached: false,
            aborts: false,
            counts_reasoning: false,
            speculates: false,
            own_defaults: false,
            seeded: false,
            default_tokens: None,
            segment: None,
            drops_tail: false,
            caches: None,
            load_path: None,
            eos: Vec::new(),
            special: Vec::new(),
        }
    }

    /// Moves the risky plans that the operator has named to the head of [`Engine::plans`].
    pub fn enable_named(&mut self, named: &[Plan]) {
        let (taken, left): (Vec<Plan>, Vec<Plan>) = self.risky.iter().partition(|plan| named.contains(plan));
        self.risky = left;
        self.plans.splice(0..0, taken);
    }

    /// The request's sampling with this server's defaults, and whether nothing in it is a guess.
    pub fn sampling(&self, request: &Request) -> (Sampling, bool) {
        match &self.defaults {
            Some(defaults) => (request.sampling.with_defaults(defaults), true),
            None => (request.sampling.clone(), request.sampling.says_all()),
        }
    }

    /// Whether a drafter can draw with this engine's own noise: it is a function that is known here, of a seed
    /// that it takes as an additive field.
    pub fn shares_noise(&self) -> bool {
        self.dialect == Dialect::Onnx
    }

    /// Why this request may not leap here; `None` if it may.
    pub fn refuses(&self, request: &Request, sampling: &Sampling) -> Option<Refused> {
        let seeded = sampling.temperature > 0.0 && (sampling.seed.is_some() || self.seeded);
        if seeded && self.noise == Noise::Call {
            let seed = sampling.seed.map_or("temperature", |_| "seed");
            return Some(Refused::by(BypassReason::Seed, seed));
        }
        // Until `min_tokens` the target's sampler avoids the stop tokens too, which later calls do not name.
        if sampling.min_tokens > 0 && !request.stop_token_ids.is_empty() {
            return Some(Refused::by(BypassReason::Parameter, "min_tokens"));
        }
        if self.limit(request) == MaxTokens::Unknown {
            return Some(Refused::by(BypassReason::DefaultsUnknown, "max_tokens"));
        }
        self.dialect.codec().refuses(self, request, sampling)
    }

    /// How long the output of this request may become.
    pub fn limit(&self, request: &Request) -> MaxTokens {
        let own = match request.max_tokens {
            Some(tokens) => MaxTokens::Tokens(tokens),
            None => self.dialect.codec().max_tokens(self, request),
        };
        match (own, self.max_tokens) {
            (MaxTokens::Tokens(own), Some(most)) => MaxTokens::Tokens(own.min(most)),
            (MaxTokens::Context, Some(most)) => MaxTokens::Tokens(most),
            (own, _) => own,
        }
    }

    /// The plans that are exact for this request, best first.
    pub fn plans(&self, request: &Request, sampling: &Sampling, settled: bool) -> Vec<Plan> {
        self.dialect.codec().plans(self, request, sampling, settled)
    }

    /// See [`super::Codec::first_ride`].
    pub fn first_ride(&self, request: &Request, seed: u64) -> Call {
        self.dialect.codec().first_ride(self, request, seed)
    }

    /// See [`super::Codec::additive`].
    pub fn additive(&self, request: &Request) -> Additive {
        self.dialect.codec().additive(self, request)
    }

    /// See [`super::Codec::beside`].
    pub fn beside(&self, request: &Request) -> Option<Call> {
        self.dialect.codec().beside(self, request)
    }

    /// See [`super::Codec::read_beside`].
    ///
    /// # Errors
    /// [`Unreadable`].
    pub fn read_beside(&self, request: &Request, body: &[u8]) -> Result<Beside, Unreadable> {
        self.dialect.codec().read_beside(self, request, body)
    }

    /// See [`super::Codec::abort`].
    pub fn abort(&self, route: Route, request_id: &str) -> Option<Call> {
        self.dialect.codec().abort(route, request_id).filter(|_| self.aborts)
    }

    /// See [`super::Codec::ride`].
    pub fn ride(&self, context: &Context<'_>, sampling: &Sampling, max_tokens: u32) -> Call {
        self.dialect.codec().ride(self, context, sampling, max_tokens)
    }

    /// See [`super::Codec::chunk`].
    ///
    /// # Errors
    /// [`Unreadable`].
    pub fn chunk(&self, kind: RideKind, event: &Value) -> Result<Chunk, Unreadable> {
        self.dialect.codec().chunk(self, kind, event)
    }

    /// The calls that verify a draft, together no larger than `bytes_max`.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn verify(&self, round: &Round<'_>, bytes_max: usize) -> Result<Asked, Refusal> {
        let asked = self.dialect.codec().verify(self, round)?;
        let bytes = asked.calls.iter().map(|call| call.body.len()).sum();
        if bytes > bytes_max {
            return Err(Refusal::TooLong { bytes, most: bytes_max });
        }
        Ok(asked)
    }

    /// See [`super::Codec::warm`].
    pub fn warm(&self, round: &Round<'_>) -> Option<Call> {
        self.dialect.codec().warm(self, round)
    }

    /// See [`super::Codec::again`].
    pub fn again(&self, round: &Round<'_>, asked: &Asked) -> Option<Asked> {
        self.dialect.codec().again(self, round, asked)
    }

    /// See [`super::Codec::verdict`].
    ///
    /// # Errors
    /// [`Unreadable`].
    pub fn verdict(
        &self,
        round: &Round<'_>,
        asked: &Asked,
        bodies: &[Vec<u8>],
    ) -> Result<Verdict, Unreadable> {
        self.dialect.codec().verdict(self, round, asked, bodies)
    }
}
