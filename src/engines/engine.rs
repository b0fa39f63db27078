//! An identified engine: everything about one server that decides which requests may be sent to it.

use std::sync::Arc;
use std::time::Duration;

use super::confirmation::Confirmation;
use super::{
    Call, Chunk, Context, Dialect, PromptAnswer, Refusal, RequestKind, Round, Unreadable, VerifyRequest,
};
use foretell_core::units::TokenId;
use foretell_core::words::{PassthroughReason, Refused};
use foretell_core::words::{VerifyMethod, VerifyResult};
use foretell_parsers::parse::{Parsers, ToolFormat};
use foretell_wire::openai::{Additive, Defaults, Request, Route, Sampling, call_grammar, is_strict};
use serde_json::Value;

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

/// Rows of a list of prompt log-probabilities where a prefix was cached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RowShape {
    /// One for each token of the prompt; those of cached tokens are invalid.
    #[default]
    Full,
    /// Only those that were computed, at the end.
    Tail,
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

/// The load that an engine reports.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// Number of requests being computed.
    pub running: u32,
    /// Number of requests that are waiting.
    pub waiting: u32,
    /// Share of the KV cache in use, 0 to 1; `None` if it does not report that.
    pub kv_usage: Option<f64>,
    /// Maximum requests that it computes at once; `None` if it does not report that.
    pub limit: Option<u32>,
    /// Age of these figures when they were reported; zero where they are of that moment.
    pub age: Duration,
}

/// One server, as identified by its answers.
#[derive(Clone, Debug, PartialEq)]
pub struct Engine {
    /// Its dialect.
    pub dialect: Dialect,
    /// The model that it serves.
    pub model: String,
    /// Its version, as it reports it.
    pub version: String,
    /// Start time of its process, in microseconds of Unix time; `None` if it does not report that.
    pub started: Option<u64>,
    /// A number that its process drew when it started, instead of a start time; `None` if it shows
    /// none. Unlike [`Self::started`] it is on a page that is only requested to recognise it.
    pub process: Option<u64>,
    /// The name of its process in each of its answers (`system_fingerprint`); `None` if they have
    /// none.
    pub mark: Option<String>,
    /// The version of its weights, which may be replaced while it runs (SGLang); `None` if it does
    /// not report one.
    pub weights: Option<String>,
    /// Maximum tokens of prompt and output together; `None` if not known.
    pub context: Option<usize>,
    /// The verification methods that this server supports, best first; those for one request are
    /// [`Engine::methods_for`].
    pub methods: Vec<VerifyMethod>,
    /// Verification methods that it also supports, but whose first call may crash it, depending on
    /// what is installed there, which no answer shows. Used only where the operator names them
    /// ([`Engine::enable_named`]).
    pub risky: Vec<VerifyMethod>,
    /// Its values for fields that a client leaves out; `None` if they are not known.
    pub defaults: Option<Defaults>,
    /// Maximum output tokens, whatever a client asks for; `None` if the server has no such limit.
    pub max_tokens: Option<u32>,
    /// Inputs of the noise of a seeded request.
    pub noise: Noise,
    /// Tokens per block of its prefix cache; 1 if it caches single tokens.
    pub block: usize,
    /// The rows of its prompt log-probabilities.
    pub rows: RowShape,
    /// Maximum prompts that it computes at once; `None` if not known.
    pub lanes: Option<usize>,
    /// It reports how many tokens of a prompt were cached.
    pub reports_cached: bool,
    /// An answer under way can be aborted by a call, and still ends with its usage
    /// ([`super::Codec::abort`]; vLLM from 0.32).
    pub aborts: bool,
    /// Its unstreamed completions count reasoning tokens; its streams do not (SGLang with a
    /// reasoning parser).
    pub counts_reasoning: bool,
    /// It renders a chat request to its prompt and sampling on a separate page
    /// ([`super::Codec::prompt_ids_call`]).
    pub renders: bool,
    /// It parses an output into the parts of a chat on a separate page
    /// ([`super::Codec::parts_call`]).
    pub derenders: bool,
    /// The output parsers that it was started with.
    pub parsers: Parsers,
    /// It reports that it was started without any, so its text is that of its tokens.
    pub unparsed: bool,
    /// A grammar goes on from the output that is sent with a request (the ONNX server), so that a
    /// draft is verified under the grammar of its position.
    pub continues_grammar: bool,
    /// Tokens that a head of its model can propose with an answer; 0 if it has none.
    pub proposes: usize,
    /// Its speculative decoding is switched on.
    pub speculates: bool,
    /// The sampling defaults of its chats, where these are those of the model and the operator has
    /// named the file ([`super::Quirks::model_defaults`]); `None` otherwise.
    pub chat_defaults: Option<Defaults>,
    /// Fields that a client leaves out get the operator's values, which are not known here
    /// (SGLang's `preferred_sampling_params`).
    pub operator_defaults: bool,
    /// Samplers that its operator has switched on. A client may switch one off for its request by a
    /// field that later requests lack (llama.cpp).
    pub operator_samplers: Vec<&'static str>,
    /// It marks its samples by tokens of the output, which are prompt in later requests (vLLM:
    /// `--watermark-config`).
    pub watermarks: bool,
    /// It draws with one fixed seed where the client sends none.
    pub seeded: bool,
    /// Maximum output tokens where a client sets no limit; `None` if the server has no such limit.
    pub default_tokens: Option<u32>,
    /// It is known whether chats have such a limit (vLLM).
    pub limit_known: bool,
    /// The defaults are those of a model's file, as far as the server's answers confirm them;
    /// `None` if it reports them itself, or they are not known.
    pub confirmation: Option<Confirmation>,
    /// Maximum tokens of one later plain request, where its answer is not streamed; `None` if it
    /// is.
    pub segment: Option<u32>,
    /// Its treatment of an incomplete character at the end of the output.
    pub broken_end: BrokenEnd,
    /// True if cache hits of its prefix cache have been seen; `None` if that was not checked.
    pub caches: Option<bool>,
    /// The path at which it reports its load; `None` if it does not.
    pub load_path: Option<&'static str>,
    /// Ids of the tokens that end an output; empty if it does not report them.
    pub eos: Vec<TokenId>,
    /// Ids of the tokens that are no text, ascending; taken from the tokenizer, and empty as long
    /// as that is not known.
    pub special: Vec<TokenId>,
    /// Ids of the tokens that may end an output, the special ones among them, ascending; as
    /// [`Self::special`]. Where one may be next, only the engine itself can tell what follows.
    pub may_end: Vec<TokenId>,
}

impl Engine {
    /// True if it identifies its process, so that a connection can be checked to lead to the same
    /// one.
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
            process: None,
            mark: None,
            weights: None,
            context: None,
            methods: Vec::new(),
            risky: Vec::new(),
            defaults: None,
            max_tokens: None,
            noise: Noise::default(),
            block: 1,
            rows: RowShape::default(),
            lanes: None,
            reports_cached: false,
            aborts: false,
            counts_reasoning: false,
            renders: false,
            derenders: false,
            parsers: Parsers::default(),
            unparsed: false,
            continues_grammar: false,
            proposes: 0,
            speculates: false,
            chat_defaults: None,
            operator_defaults: false,
            operator_samplers: Vec::new(),
            watermarks: false,
            seeded: false,
            default_tokens: None,
            limit_known: false,
            confirmation: None,
            segment: None,
            broken_end: BrokenEnd::default(),
            caches: None,
            load_path: None,
            eos: Vec::new(),
            special: Vec::new(),
            may_end: Vec::new(),
        }
    }

    /// Moves the risky methods that the operator has named to the head of [`Engine::methods`].
    pub fn enable_named(&mut self, named: &[VerifyMethod]) {
        let (taken, remaining): (Vec<VerifyMethod>, Vec<VerifyMethod>) =
            self.risky.iter().partition(|method| named.contains(method));
        self.risky = remaining;
        self.methods.splice(0..0, taken);
    }

    /// The request's sampling with this server's defaults; true if nothing in it is a guess.
    pub fn sampling(&self, request: &Request) -> (Sampling, bool) {
        let by_model = if request.route == Route::Chat { self.chat_defaults } else { None };
        let (mut sampling, known) = match &self.defaults {
            // The route of later requests has other defaults.
            None if let Some(defaults) = &by_model => {
                (request.sampling.with_defaults(defaults).all_set(), true)
            }
            Some(defaults) => (request.sampling.with_defaults(defaults), true),
            None => (request.sampling.clone(), request.sampling.sets_all()),
        };
        if self.continues_grammar
            && self.parsers.tools == Some(ToolFormat::Hermes)
            && request.tools
            && !request.bars_tools
            && let Some(tools) = request.body.get("tools").and_then(Value::as_array)
            && let Some(grammar) = call_grammar(tools, request.forced.as_ref(), request.single_call)
        {
            // Together with another one the server refuses it.
            sampling.grammar = Some(Arc::new(grammar));
        }
        (sampling, known)
    }

    /// Reason why this request is not eligible here; `None` if it is.
    pub fn refuses(&self, request: &Request, sampling: &Sampling) -> Option<Refused> {
        if let Some(refused) =
            self.refuses_grammar(request, sampling).or_else(|| self.refuses_rendered(request))
        {
            return Some(refused);
        }
        if let Some(doubted) = self.confirmation.as_ref().and_then(|of| of.doubted(sampling)) {
            return Some(Refused::by(PassthroughReason::DefaultsUnknown, doubted));
        }
        let seeded = sampling.temperature > 0.0 && (sampling.seed.is_some() || self.seeded);
        if seeded && self.noise == Noise::Call {
            let seed = sampling.seed.map_or("temperature", |_| "seed");
            return Some(Refused::by(PassthroughReason::Seed, seed));
        }
        // Before `min_tokens` the target's sampler excludes the stop tokens too, which later calls
        // do not send.
        if sampling.min_tokens > 0 && !request.stop_token_ids.is_empty() {
            return Some(Refused::by(PassthroughReason::Parameter, "min_tokens"));
        }
        if self.limit(request) == MaxTokens::Unknown {
            return Some(Refused::by(PassthroughReason::DefaultsUnknown, "max_tokens"));
        }
        self.dialect.codec().refuses(self, request, sampling)
    }

    /// Reason for a request whose output a grammar binds: an engine applies it to the client's
    /// request alone, unless it continues grammars.
    fn refuses_grammar(&self, request: &Request, sampling: &Sampling) -> Option<Refused> {
        if self.continues_grammar {
            // A forced call that has no grammar here.
            let unbound = request.forced.is_some() && sampling.grammar.is_none();
            return Refused::by_first(PassthroughReason::Tools, &[(unbound, "tool_choice")]);
        }
        let of_sampling = sampling.grammar.as_ref().map(|grammar| grammar.parameter);
        let strict = || {
            let mut tools = request.body.get("tools").and_then(Value::as_array).into_iter().flatten();
            request.tools && !request.bars_tools && tools.any(is_strict)
        };
        let named = of_sampling.or_else(|| request.forced.is_some().then_some("tool_choice"));
        let named = named.or_else(|| strict().then_some("tools"));
        named.map(|parameter| Refused::by(PassthroughReason::Structured, parameter))
    }

    /// Reason for a request whose prompt or sampling depends on what the engine makes of it, or
    /// whose answer needs an output parser; `None` if it is eligible.
    fn refuses_rendered(&self, request: &Request) -> Option<Refused> {
        // The first token comes with the prompt of exactly this request.
        let is_reported = self.renders || self.reports_first_token(request);
        let unknown = if is_reported { None } else { request.rendered.first().copied() };
        unknown.or_else(|| {
            let tools = request.tools && !request.bars_tools;
            let unparsed = tools && self.parsers.tools.is_none();
            let stops = tools && !request.stop.is_empty();
            let unparsed_message = tools && !request.stream && !self.derenders;
            let names = [(unparsed, "tools"), (stops, "stop"), (unparsed_message, "stream")];
            Refused::by_first(PassthroughReason::Tools, &names)
        })
    }

    /// Maximum output tokens of this request.
    pub fn limit(&self, request: &Request) -> MaxTokens {
        let requested = match request.max_tokens {
            Some(tokens) => MaxTokens::Tokens(tokens),
            None => self.dialect.codec().max_tokens(self, request),
        };
        match (requested, self.max_tokens) {
            (MaxTokens::Tokens(tokens), Some(most)) => MaxTokens::Tokens(tokens.min(most)),
            (MaxTokens::Context, Some(most)) => MaxTokens::Tokens(most),
            (requested, _) => requested,
        }
    }

    /// The verification methods that are exact for this request, best first; `sampling` and
    /// `settled` as [`Self::sampling`] returns them.
    pub fn methods_for(&self, request: &Request, sampling: &Sampling, settled: bool) -> Vec<VerifyMethod> {
        self.dialect.codec().methods_for(self, request, sampling, settled)
    }

    /// See [`super::Codec::first_request`].
    pub fn first_request(&self, request: &Request, seed: u64) -> Call {
        self.dialect.codec().first_request(self, request, seed)
    }

    /// See [`super::Codec::reports_first_token`].
    pub fn reports_first_token(&self, request: &Request) -> bool {
        self.dialect.codec().reports_first_token(self, request)
    }

    /// See [`super::Codec::first_token_request`].
    pub fn first_token_request(&self, request: &Request) -> Call {
        self.dialect.codec().first_token_request(self, request)
    }

    /// See [`super::Codec::additive`].
    pub fn additive(&self, request: &Request) -> Additive {
        self.dialect.codec().additive(self, request)
    }

    /// See [`super::Codec::prompt_ids_call`].
    pub fn prompt_ids_call(&self, request: &Request) -> Option<Call> {
        self.dialect.codec().prompt_ids_call(self, request)
    }

    /// See [`super::Codec::read_prompt_answer`].
    ///
    /// # Errors
    /// [`Unreadable`].
    pub fn read_prompt_answer(&self, request: &Request, body: &[u8]) -> Result<PromptAnswer, Unreadable> {
        self.dialect.codec().read_prompt_answer(self, request, body)
    }

    /// See [`super::Codec::parts_call`].
    pub fn parts_call(&self, request: &Request, prompt: &[TokenId], output: &[TokenId]) -> Option<Call> {
        self.dialect.codec().parts_call(self, request, prompt, output)
    }

    /// See [`super::Codec::abort`].
    pub fn abort(&self, route: Route, request_id: &str) -> Option<Call> {
        if self.aborts { self.dialect.codec().abort(route, request_id) } else { None }
    }

    /// See [`super::Codec::plain_request`].
    pub fn plain_request(&self, context: &Context<'_>, sampling: &Sampling, max_tokens: u32) -> Call {
        self.dialect.codec().plain_request(self, context, sampling, max_tokens)
    }

    /// See [`super::Codec::chunk`].
    ///
    /// # Errors
    /// [`Unreadable`].
    pub fn chunk(&self, kind: RequestKind, event: &Value) -> Result<Chunk, Unreadable> {
        self.dialect.codec().chunk(self, kind, event)
    }

    /// The calls that verify a draft, together at most `bytes_max` bytes.
    ///
    /// # Errors
    /// [`Refusal`]: they would be longer, or the engine cannot verify it by the round's method.
    pub fn verify(&self, round: &Round<'_>, bytes_max: usize) -> Result<VerifyRequest, Refusal> {
        let request = self.dialect.codec().verify(self, round)?;
        let bytes = request.calls.iter().map(|call| call.body.len()).sum();
        if bytes > bytes_max {
            return Err(Refusal::TooLong { bytes, most: bytes_max });
        }
        Ok(request)
    }

    /// See [`super::Codec::warm`].
    pub fn warm(&self, round: &Round<'_>) -> Option<Call> {
        self.dialect.codec().warm(self, round)
    }

    /// See [`super::Codec::retry`].
    pub fn retry(&self, round: &Round<'_>, request: &VerifyRequest) -> Option<VerifyRequest> {
        self.dialect.codec().retry(self, round, request)
    }

    /// See [`super::Codec::result`].
    ///
    /// # Errors
    /// [`Unreadable`].
    pub fn result(
        &self,
        round: &Round<'_>,
        request: &VerifyRequest,
        bodies: &[Vec<u8>],
    ) -> Result<VerifyResult, Unreadable> {
        self.dialect.codec().result(self, round, request, bodies)
    }
}
