//! An identified engine: everything about one server that decides which requests may be sent to it.

use std::sync::Arc;

use super::confirmation::Confirmation;
use super::quirks::{ChatIds, MaxTokens, Noise, OutputLimits, Quirks};
use super::{
    Additions, Call, Chunk, Context, Dialect, PromptStep, Refusal, RequestKind, Round, Unreadable,
    VerifyRequest, shared,
};
use foretell_core::units::TokenId;
use foretell_core::words::{PassthroughReason, Refused};
use foretell_core::words::{VerifyMethod, VerifyResult};
use foretell_parsers::parse::{Parsers, ToolFormat};
use foretell_wire::openai::{Additive, Defaults, Event, Request, Route, Sampling, call_grammar, is_strict};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;

/// Rows of a list of prompt log-probabilities where a prefix was cached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RowShape {
    /// One for each token of the prompt; those of cached tokens are invalid.
    #[default]
    Full,
    /// Only those that were computed, at the end.
    Tail,
}

impl RowShape {
    /// The rows that an answer to a scored prompt of `prompt` tokens lists, a prefix of which was
    /// cached; `None` if it lists none. vLLM's V2 runner lists only what it computed; the V1 runner
    /// lists all, those of cached tokens being invalid.
    pub fn of(prompt: usize, body: &[u8]) -> Option<Self> {
        #[derive(Deserialize)]
        struct Scored {
            prompt_logprobs: Vec<IgnoredAny>,
        }
        let listed = serde_json::from_slice::<Scored>(body).ok()?.prompt_logprobs.len();
        Some(if listed < prompt { Self::Tail } else { Self::Full })
    }
}

/// Marks of the process that answers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessMarks {
    /// Start time, in microseconds of Unix time; `None` if it does not report that.
    pub started: Option<u64>,
    /// A number that it drew when it started, instead of a start time; `None` if it shows none.
    /// Unlike [`Self::started`] it is on a page that is only requested to recognise it.
    pub drawn: Option<u64>,
    /// Its name in each of its answers (`system_fingerprint`); `None` if they have none.
    pub fingerprint: Option<String>,
    /// The version of its weights, which may be replaced while it runs (SGLang); `None` if it does
    /// not report one.
    pub weights: Option<String>,
}

/// The server's values for fields that a client leaves out.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServerDefaults {
    /// Those of all routes; `None` if they are not known.
    pub sampling: Option<Defaults>,
    /// Those of its chats, where these are the model's and the operator has named the file
    /// ([`super::ModelDefaults::Named`]); `None` otherwise.
    pub chats: Option<Defaults>,
    /// The operator's values apply, which are not known here (SGLang's
    /// `preferred_sampling_params`).
    pub preferred: bool,
    /// Samplers that its operator has switched on. A client may switch one off for its request by a
    /// field that later requests lack (llama.cpp).
    pub samplers: Vec<&'static str>,
    /// It draws with one fixed seed where the client sends none.
    pub seeded: bool,
    /// [`Self::sampling`] is that of a model's file, as far as the server's answers confirm it;
    /// `None` if it reports its defaults itself, or they are not known.
    pub confirmation: Option<Confirmation>,
}

/// The prefix cache of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixCache {
    /// Tokens per block; 1 if it caches single tokens.
    pub block: usize,
    /// The rows of prompt log-probabilities where a prefix was cached.
    pub rows: RowShape,
    /// The server reports how many tokens of a prompt were cached.
    pub reports_hits: bool,
    /// True if hits have been seen; `None` if that was not checked.
    pub works: Option<bool>,
}

impl Default for PrefixCache {
    fn default() -> Self {
        Self { block: 1, rows: RowShape::Full, reports_hits: false, works: None }
    }
}

/// The pages of a server that OpenAI's API lacks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pages {
    /// One renders a chat request to its prompt and sampling ([`Engine::prompt_step`]).
    pub renders: bool,
    /// One parses an output into the parts of a chat ([`Engine::parts_call`]).
    pub derenders: bool,
    /// One aborts an answer under way, which still ends with its usage ([`Engine::abort`]; vLLM
    /// from 0.32).
    pub aborts: bool,
    /// The path at which it reports its load; `None` if it does not.
    pub load: Option<&'static str>,
}

/// The output parsers of a server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OutputParsing {
    /// The output parsers that it was started with.
    pub parsers: Parsers,
    /// It reports that it was started without any, so its text is that of its tokens.
    pub unparsed: bool,
    /// Its unstreamed completions count reasoning tokens; its streams do not (SGLang with a
    /// reasoning parser).
    pub counts_reasoning: bool,
}

/// Tokens of the model's vocabulary that are no text, or may end one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// Ids of the tokens that end an output; empty if the server does not report them.
    pub eos: Vec<TokenId>,
    /// Ids of the tokens that are no text, ascending; taken from the tokenizer, and empty as long
    /// as that is not known.
    pub special: Vec<TokenId>,
    /// Ids of the tokens that may end an output, the special ones among them, ascending; as
    /// [`Self::special`]. Where one may be next, only the engine itself can tell what follows.
    pub may_end: Vec<TokenId>,
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
    /// Marks by which an answer is known to be from this process.
    pub process: ProcessMarks,
    /// Maximum tokens of prompt and output together; `None` if not known.
    pub context: Option<usize>,
    /// The verification methods that this server supports, best first; those for one request are
    /// [`Engine::methods_for`].
    pub methods: Vec<VerifyMethod>,
    /// Verification methods that it also supports, but whose first call may crash it, depending on
    /// what is installed there, which no answer shows. Used only where the operator names them
    /// ([`Engine::enable_named`]).
    pub risky: Vec<VerifyMethod>,
    /// Its values for fields that a client leaves out.
    pub defaults: ServerDefaults,
    /// Maximum output tokens.
    pub limits: OutputLimits,
    /// Inputs of the noise of a seeded request.
    pub noise: Noise,
    /// Its prefix cache.
    pub cache: PrefixCache,
    /// Maximum prompts that it computes at once, each in a slot of a shared cache (llama.cpp);
    /// `None` if it has no slots.
    pub slots: Option<usize>,
    /// Its pages that OpenAI's API lacks.
    pub pages: Pages,
    /// Its output parsers.
    pub parsing: OutputParsing,
    /// A grammar goes on from the output that is sent with a request (the ONNX server), so that a
    /// draft is verified under the grammar of its position.
    pub continues_grammar: bool,
    /// Tokens that a head of its model can propose with an answer; 0 if it has none.
    pub proposes: usize,
    /// Its speculative decoding is switched on.
    pub speculates: bool,
    /// It marks its samples by tokens of the output, which are prompt in later requests (vLLM:
    /// `--watermark-config`).
    pub watermarks: bool,
    /// Tokens that are no text, or may end one.
    pub tokens: SpecialTokens,
}

impl Engine {
    /// True if it identifies its process, so that a connection can be checked to lead to the same
    /// one.
    pub fn shows_itself(&self) -> bool {
        self.process.started.is_some() || self.process.fingerprint.is_some()
    }

    /// An engine of which only these three are known.
    pub fn new(dialect: Dialect, model: impl Into<String>, version: impl Into<String>) -> Self {
        Self {
            dialect,
            model: model.into(),
            version: version.into(),
            process: ProcessMarks::default(),
            context: None,
            methods: Vec::new(),
            risky: Vec::new(),
            defaults: ServerDefaults::default(),
            limits: dialect.quirks().limits,
            noise: Noise::default(),
            cache: PrefixCache::default(),
            slots: None,
            pages: Pages::default(),
            parsing: OutputParsing::default(),
            continues_grammar: false,
            proposes: 0,
            speculates: false,
            watermarks: false,
            tokens: SpecialTokens::default(),
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
        let by_model = if request.route == Route::Chat { self.defaults.chats } else { None };
        let (mut sampling, known) = match &self.defaults.sampling {
            // The route of later requests has other defaults.
            None if let Some(defaults) = &by_model => {
                (request.sampling.with_defaults(defaults).all_set(), true)
            }
            Some(defaults) => (request.sampling.with_defaults(defaults), true),
            None => (request.sampling.clone(), request.sampling.sets_all()),
        };
        if self.continues_grammar
            && self.parsing.parsers.tools == Some(ToolFormat::Hermes)
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

    /// Reason why a request is not eligible, by what all engines have in common; `None` if it is.
    fn refuses(&self, request: &Request, sampling: &Sampling) -> Option<Refused> {
        if let Some(refused) =
            self.refuses_grammar(request, sampling).or_else(|| self.refuses_rendered(request))
        {
            return Some(refused);
        }
        if let Some(doubted) = self.defaults.confirmation.as_ref().and_then(|of| of.doubted(sampling)) {
            return Some(Refused::by(PassthroughReason::DefaultsUnknown, doubted));
        }
        let seeded = sampling.temperature > 0.0 && (sampling.seed.is_some() || self.defaults.seeded);
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
        None
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
        let is_reported = self.pages.renders || self.reports_first_token(request);
        let unknown = if is_reported { None } else { request.rendered.first().copied() };
        unknown.or_else(|| {
            let tools = request.tools && !request.bars_tools;
            let unparsed = tools && self.parsing.parsers.tools.is_none();
            let stops = tools && !request.stop.is_empty();
            let unparsed_message = tools && !request.stream && !self.pages.derenders;
            let names = [(unparsed, "tools"), (stops, "stop"), (unparsed_message, "stream")];
            Refused::by_first(PassthroughReason::Tools, &names)
        })
    }

    /// Maximum output tokens of this request.
    pub fn limit(&self, request: &Request) -> MaxTokens {
        let requested = match (request.max_tokens, request.route) {
            (Some(tokens), _) => MaxTokens::Tokens(tokens),
            (None, Route::Completions) => self.limits.completion,
            (None, Route::Chat) => self.limits.chat,
        };
        match (requested, self.limits.most) {
            (MaxTokens::Tokens(tokens), Some(most)) => MaxTokens::Tokens(tokens.min(most)),
            (MaxTokens::Context, Some(most)) => MaxTokens::Tokens(most),
            (requested, _) => requested,
        }
    }

    /// The verification methods that are exact for this request, best first; `sampling` and
    /// `settled` as [`Self::sampling`] returns them.
    ///
    /// # Errors
    /// The request is not eligible here.
    pub fn methods_for(
        &self,
        request: &Request,
        sampling: &Sampling,
        settled: bool,
    ) -> Result<Vec<VerifyMethod>, Refused> {
        match self.refuses(request, sampling) {
            Some(refused) => Err(refused),
            None => self.dialect.codec().methods(self, request, sampling, settled),
        }
    }

    /// The client's request as a stream with what Foretell needs to know. `prediction` is used by
    /// Foretell and not sent. `seed` may be sent if the client sent none, so that a model drafter
    /// can share the noise.
    pub fn first_request(&self, request: &Request, seed: u64) -> Call {
        let mut body = request.body.clone();
        body.shift_remove("prediction");
        body.insert("stream".into(), Value::Bool(true));
        body.insert("stream_options".into(), self.quirks().usage.stream_options());
        for (name, value) in self.additions(request, seed).members {
            body.insert(name.to_owned(), value);
        }
        Call { path: request.route.path(), body: shared::bytes(&body) }
    }

    /// The traces of [`Self::first_request`], to be taken out of the answer.
    pub fn additive(&self, request: &Request) -> Additive {
        self.additions(request, 0).traces
    }

    fn additions(&self, request: &Request, seed: u64) -> Additions {
        self.dialect.codec().additions(self, request, seed)
    }

    /// The constant properties of its kind.
    pub fn quirks(&self) -> &'static Quirks {
        self.dialect.quirks()
    }

    /// True if the first call of a request on this route brings, or leads to, the ids of its
    /// tokens; otherwise the request decodes plainly to its end.
    pub fn reports_ids(&self, request: &Request) -> bool {
        let streamed = request.route == Route::Completions || self.quirks().chat_ids == ChatIds::Streamed;
        streamed || self.reports_first_token(request)
    }

    /// True if the first token of this chat comes with its ids and those of the prompt as a
    /// separate answer ([`crate::first_token`]), and nothing but a text is made of the tokens.
    /// Usage on every event would have to be made up.
    pub fn reports_first_token(&self, request: &Request) -> bool {
        let counts = request.stream && request.continuous_usage;
        request.route == Route::Chat
            && self.quirks().chat_ids == ChatIds::Unstreamed
            && self.parsing.unparsed
            && !request.tools
            && !counts
    }

    /// See [`super::Codec::prompt_step`].
    ///
    /// # Errors
    /// [`Unreadable`].
    pub fn prompt_step(&self, request: &Request, answer: Option<&[u8]>) -> Result<PromptStep, Unreadable> {
        self.dialect.codec().prompt_step(self, request, answer)
    }

    /// The call in which the engine itself parses an output into the parts of a chat that is not
    /// streamed; `None` if it has no such page. `output` lacks the token that ended it.
    pub fn parts_call(&self, request: &Request, prompt: &[TokenId], output: &[TokenId]) -> Option<Call> {
        self.pages.derenders.then(|| shared::parts_call(request, prompt, output))
    }

    /// The call that aborts an answer under way such that its stream still ends with its usage;
    /// `None` if the engine has no such page. `request_id`: the `x-request-id` of the request.
    pub fn abort(&self, route: Route, request_id: &str) -> Option<Call> {
        self.pages.aborts.then(|| shared::abort_call(route, request_id))
    }

    /// See [`super::Codec::plain_request`].
    pub fn plain_request(&self, context: &Context<'_>, sampling: &Sampling, max_tokens: u32) -> Call {
        self.dialect.codec().plain_request(self, context, sampling, max_tokens)
    }

    /// See [`super::Codec::chunk`].
    ///
    /// # Errors
    /// [`Unreadable`].
    pub fn chunk(&self, kind: RequestKind, event: &Event) -> Result<Chunk, Unreadable> {
        self.dialect.codec().chunk(kind, event)
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

    /// The same round with those nodes only that are decided whatever the engine has cached, where
    /// `request` decided nothing; `None` if these are all, so that the next method is tried.
    pub fn retry(&self, round: &Round<'_>, request: &VerifyRequest) -> Option<VerifyRequest> {
        if request.decidable >= request.nodes {
            return None;
        }
        let mut draft = round.draft.clone();
        draft.truncate(request.decidable);
        self.dialect.codec().verify(self, &Round { draft: &draft, ..*round }).ok()
    }

    /// True if an answer without a verification result only means that this method cannot decide
    /// here, so that the next one is tried.
    pub fn is_undecided(&self, method: VerifyMethod, status: u16, body: &[u8]) -> bool {
        self.quirks().undecided.is_some_and(|undecided| undecided.is(method, status, body))
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
