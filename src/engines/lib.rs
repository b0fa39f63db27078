//! Codecs of the engines: the requests to send and how to read the answers.
//!
//! PURE codecs; one file per engine, one variant of [`Dialect`], one implementation of [`Codec`]. A
//! dialect does no I/O: it turns a context and a draft into [`Call`]s, and the bytes of the answers
//! into a [`Chunk`] or a [`VerifyResult`]. Adding an engine takes one file, one variant and one
//! golden set; the compiler lists the rest.

pub mod body;
mod chunk;
pub mod confirm;
mod confirmation;
pub mod engine;
pub mod guarantees;
pub mod llamacpp;
pub mod onnx;
pub mod origin;
pub mod passthrough;
pub mod probe;
mod quirks;
pub mod recognise;
pub mod score;
pub mod sglang;
pub mod shared;
pub mod vllm;

use serde_json::Value;

use foretell_core::draft::Tree;
use foretell_core::units::TokenId;
use foretell_core::words::Refused;
use foretell_core::words::{TokenContext, VerifyMethod, VerifyResult};
use foretell_wire::openai::{Additive, GenerationConfig, Request, Route, Sampling};

use body::Ids;
pub use chunk::{Chunk, FirstToken};
use confirm::Confirmer;
pub use confirmation::{Confirmation, END_TOKENS, MAX_TOKENS};
pub use engine::{BrokenEnd, Engine, Load, MaxTokens, Noise, RowShape};
pub use origin::Origin;
pub use quirks::{Quirks, StopQuirks, UsageQuirks, Usual};
pub use recognise::{Answers, Foreign, Question};

/// True if the page at `path` renders requests or parses outputs: a server without the model, such
/// as `vllm launch render`, has it too.
pub fn is_rendering(path: &str) -> bool {
    [shared::RENDER, shared::CHAT_RENDER, shared::CHAT_DERENDER].contains(&path)
}

/// The question that shows whether a server has these pages: it answers 400 or 422.
pub fn rendering_question() -> Question {
    Question::post(shared::CHAT_DERENDER, serde_json::json!({}))
}

/// The engines that Foretell knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// The ONNX server (`foretell target`).
    Onnx,
    /// vLLM.
    Vllm,
    /// SGLang.
    Sglang,
    /// The server of llama.cpp.
    LlamaCpp,
    /// Hugging Face TGI.
    Tgi,
    /// `trtllm-serve` of TensorRT-LLM.
    TrtLlm,
    /// Triton with TensorRT engines.
    Triton,
    /// LMDeploy.
    Lmdeploy,
    /// OpenAI's API, other hosted ones, and unknown servers.
    OpenAi,
    /// Ollama.
    Ollama,
    /// The server of mlx-lm.
    Mlx,
}

impl Dialect {
    /// Every dialect, in the order of the documentation.
    pub const ALL: [Self; 11] = [
        Self::Onnx,
        Self::Vllm,
        Self::Sglang,
        Self::LlamaCpp,
        Self::Tgi,
        Self::TrtLlm,
        Self::Triton,
        Self::Lmdeploy,
        Self::OpenAi,
        Self::Ollama,
        Self::Mlx,
    ];

    /// The name in configuration, metrics and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Onnx => "onnx",
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
            Self::LlamaCpp => "llamacpp",
            Self::Tgi => "tgi",
            Self::TrtLlm => "trtllm",
            Self::Triton => "triton",
            Self::Lmdeploy => "lmdeploy",
            Self::OpenAi => "openai",
            Self::Ollama => "ollama",
            Self::Mlx => "mlx",
        }
    }

    /// The dialect of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dialect| dialect.name() == name)
    }

    /// The constant properties of its engine.
    pub fn quirks(self) -> &'static Quirks {
        self.codec().quirks()
    }

    /// Its codec.
    pub const fn codec(self) -> &'static dyn Codec {
        match self {
            Self::Onnx => &onnx::Onnx,
            Self::Vllm => &vllm::Vllm,
            Self::Sglang => &sglang::Sglang,
            Self::LlamaCpp => &llamacpp::LlamaCpp,
            Self::Tgi => &passthrough::Passthrough(Self::Tgi),
            Self::TrtLlm => &passthrough::Passthrough(Self::TrtLlm),
            Self::Triton => &passthrough::Passthrough(Self::Triton),
            Self::Lmdeploy => &passthrough::Passthrough(Self::Lmdeploy),
            Self::OpenAi => &passthrough::Passthrough(Self::OpenAi),
            Self::Ollama => &passthrough::Passthrough(Self::Ollama),
            Self::Mlx => &passthrough::Passthrough(Self::Mlx),
        }
    }
}

/// All tokens that the target conditions on.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// The model id as the client sent it.
    pub model: &'a str,
    /// Token ids of the prompt.
    pub prompt: &'a [TokenId],
    /// The output so far.
    pub output: &'a [TokenId],
    /// Both as JSON text; `None` if not written yet.
    json: Option<&'a str>,
}

impl<'a> Context<'a> {
    /// Prompt and output for `model`.
    pub const fn new(model: &'a str, prompt: &'a [TokenId], output: &'a [TokenId]) -> Self {
        Self { model, prompt, output, json: None }
    }

    /// The context of a request for `model`, with its JSON text if that has been written.
    pub fn of(model: &'a str, token_context: &'a TokenContext) -> Self {
        Self {
            model,
            prompt: token_context.prompt(),
            output: token_context.output(),
            json: token_context.json(),
        }
    }

    /// Prompt and output as JSON text, written once for all positions of a round.
    pub fn ids(&self) -> Ids<'a> {
        Ids::new(self.json, self.prompt, self.output)
    }

    /// Number of tokens of prompt and output together.
    pub fn len(&self) -> usize {
        self.prompt.len() + self.output.len()
    }

    /// True if there is no token at all.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A draft to be verified by the engine.
#[derive(Clone, Copy, Debug)]
pub struct Round<'a> {
    /// Prompt and output that the draft follows.
    pub context: Context<'a>,
    /// The draft to be verified.
    pub draft: &'a Tree,
    /// How the target samples.
    pub sampling: &'a Sampling,
    /// How the draft is verified.
    pub method: VerifyMethod,
    /// A lossy accept rule asks for the target's probabilities, where the verification method can
    /// report them.
    pub weighs: bool,
}

/// One HTTP call: `POST path` with a JSON body.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// Path on the server, below its base path.
    pub path: &'static str,
    /// JSON text of the body.
    pub body: Vec<u8>,
}

/// The verify requests of a draft: all calls have to be answered, in any order.
#[derive(Clone, Debug, PartialEq)]
pub struct VerifyRequest {
    /// The calls, in the order in which their answers are read.
    pub calls: Vec<Call>,
    /// Number of the draft's nodes that they verify, from the first on.
    pub nodes: usize,
}

/// Reason why this engine cannot verify a draft by this method.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The call would be larger than a round may be.
    #[error("the call takes {bytes} bytes, more than {most}")]
    TooLong {
        /// Bytes of all calls of the round together.
        bytes: usize,
        /// Maximum bytes of one round's requests.
        most: usize,
    },
    /// The engine's memory does not hold several prompts of this many tokens.
    #[error("no room for several prompts of {0} tokens")]
    NoRoom(usize),
    /// The engine has no verification method of this name, or cannot use it for this request.
    #[error("this engine has no verification method {0}")]
    NoVerifyMethod(&'static str),
}

/// An answer that this dialect cannot read; the text says why.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unreadable answer: {0}")]
pub struct Unreadable(pub &'static str);

/// The plain request that an event belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestKind {
    /// The client's request, on its route.
    First,
    /// A later one that continues from the complete context, by [`Codec::plain_request`].
    Later,
}

/// The answer to a call for the prompt's ids, concurrent with the first call.
#[derive(Clone, Debug, PartialEq)]
pub enum PromptAnswer {
    /// The ids of the prompt.
    Prompt(Vec<TokenId>),
    /// The request as the engine renders it.
    Rendered {
        /// The ids of its prompt.
        prompt: Vec<TokenId>,
        /// A grammar constrains its sampling.
        has_grammar: bool,
    },
    /// One more call has to be made.
    Call(Call),
}

/// Builds the calls to one kind of engine, and reads its answers. The identified engine is an
/// argument everywhere.
pub trait Codec: Sync {
    /// The constant properties of the engine.
    fn quirks(&self) -> &'static Quirks {
        &Quirks::COMMON
    }

    /// True if the first call of a request on this route brings, or leads to, the ids of its
    /// tokens; otherwise the request decodes plainly to its end.
    fn reports_ids(&self, route: Route) -> bool {
        let _ = route;
        true
    }

    /// Further questions to the server about itself, given its answers so far; empty when all is
    /// known. Every question must be safe on every version and cost at most one token.
    fn questions(&self, answers: &Answers) -> Vec<Question>;

    /// The confirmation of defaults that the engine does not report, where it may take them from
    /// this file; `None` where it reports them, or never takes any. `text`: ids of real text.
    fn confirmer(
        &self,
        engine: &Engine,
        config: &GenerationConfig,
        text: &[TokenId],
        seed: u64,
    ) -> Option<Confirmer> {
        let _ = (engine, config, text, seed);
        None
    }

    /// The engine that gave these answers.
    ///
    /// # Errors
    /// [`Foreign`]: the answers lack something that has to be known to verify there.
    fn engine(&self, answers: &Answers) -> Result<Engine, Foreign>;

    /// Path of the page that reports the start time; `None` if none does.
    fn start_page(&self) -> Option<&'static str> {
        None
    }

    /// Reason why this engine cannot carry this request exactly by any verification method; `None`
    /// if it can. `sampling` is the effective one.
    fn refuses(&self, engine: &Engine, request: &Request, sampling: &Sampling) -> Option<Refused>;

    /// The verification methods that are exact for this request, best first: all of the engine's,
    /// unless the dialect says otherwise. `sampling` is the effective one; `settled`: nothing in it
    /// is a guess about the server's defaults.
    fn methods_for(
        &self,
        engine: &Engine,
        request: &Request,
        sampling: &Sampling,
        settled: bool,
    ) -> Vec<VerifyMethod> {
        let _ = (request, sampling, settled);
        engine.methods.clone()
    }

    /// Maximum output tokens of this request if the client sets no limit.
    fn max_tokens(&self, engine: &Engine, request: &Request) -> MaxTokens;

    /// The client's request with the additive fields that this dialect needs. `seed` may be sent if
    /// the client sent none, so that a model drafter can share the noise.
    fn first_request(&self, engine: &Engine, request: &Request, seed: u64) -> Call;

    /// True if the first token of this chat comes with its ids and those of the prompt as a
    /// separate answer, where streams report none ([`Codec::reports_ids`]), and nothing but a text
    /// is made of the tokens.
    fn reports_first_token(&self, engine: &Engine, request: &Request) -> bool {
        let _ = (engine, request);
        false
    }

    /// The client's chat as one answer of one token with its ids, where
    /// [`Codec::reports_first_token`].
    fn first_token_request(&self, engine: &Engine, request: &Request) -> Call {
        self.first_request(engine, request, 0)
    }

    /// Reads the answer to [`Codec::first_token_request`]; `None` if the server broke it off.
    ///
    /// # Errors
    /// It is not as expected, and no other answer of this server will be.
    fn first_token(&self, answer: &Value) -> Result<Option<FirstToken>, Unreadable> {
        let _ = answer;
        Err(Unreadable("no first token is requested"))
    }

    /// The fields that [`Codec::first_request`] added, to be taken out of the answer.
    fn additive(&self, engine: &Engine, request: &Request) -> Additive;

    /// Members that this engine puts into an unstreamed answer, or (`unstreamed` is false) into the
    /// last chunk of a stream, and not into the first chunk, which is the template for all else;
    /// each with the value that it has if it does not apply. `null` if there are none. See
    /// [`foretell_wire::openai::fill`].
    fn last_members(&self, engine: &Engine, route: Route, unstreamed: bool) -> Value {
        let _ = (engine, route, unstreamed);
        Value::Null
    }

    /// Corrects an unstreamed answer where [`Codec::last_members`] does not suffice.
    fn complete(&self, answer: &mut Value) {
        let _ = answer;
    }

    /// The call that brings the prompt's ids, or whether a grammar constrains the sampling; `None`
    /// if the first call brings them, or nothing can. Where [`Engine::renders`], only for a request
    /// whose prompt or sampling may depend on more than its text: the first event of the answer has
    /// the prompt's ids too, but does not report a grammar.
    fn prompt_ids_call(&self, engine: &Engine, request: &Request) -> Option<Call> {
        let is_needed = engine.renders && !request.rendered.is_empty();
        is_needed.then(|| shared::render_call(request))
    }

    /// Reads the answer to a call of [`Codec::prompt_ids_call`], or of [`PromptAnswer::Call`].
    ///
    /// # Errors
    /// [`Unreadable`]: it has neither ids nor what the next call needs.
    fn read_prompt_answer(
        &self,
        engine: &Engine,
        request: &Request,
        body: &[u8],
    ) -> Result<PromptAnswer, Unreadable> {
        let _ = (engine, request);
        shared::read_render(body)
    }

    /// The call in which the engine itself parses an output into the parts of a chat that is not
    /// streamed, where [`Engine::derenders`]; `None` if it has no such call. `output` lacks the
    /// token that ended it.
    fn parts_call(
        &self,
        engine: &Engine,
        request: &Request,
        prompt: &[TokenId],
        output: &[TokenId],
    ) -> Option<Call> {
        engine.derenders.then(|| shared::parts_call(request, prompt, output))
    }

    /// The call that aborts an answer under way such that its stream still ends with its usage,
    /// where [`Engine::aborts`]; `None` if the engine has no such call. `request_id`: the
    /// `x-request-id` of the request.
    fn abort(&self, route: Route, request_id: &str) -> Option<Call> {
        let _ = (route, request_id);
        None
    }

    /// A plain request of at most `max_tokens` output tokens that continues from the complete
    /// context, by token ids.
    fn plain_request(
        &self,
        engine: &Engine,
        context: &Context<'_>,
        sampling: &Sampling,
        max_tokens: u32,
    ) -> Call;

    /// Reads one event of a plain request's stream.
    ///
    /// # Errors
    /// [`Unreadable`]: it carries an error, or has another form.
    fn chunk(&self, engine: &Engine, kind: RequestKind, event: &Value) -> Result<Chunk, Unreadable>;

    /// The calls that verify a draft.
    ///
    /// # Errors
    /// [`Refusal`]: the engine cannot verify it by the method of the round.
    fn verify(&self, engine: &Engine, round: &Round<'_>) -> Result<VerifyRequest, Refusal>;

    /// Reads the answers to the calls of [`Codec::verify`], in their order.
    ///
    /// # Errors
    /// [`Unreadable`]: one has another form, or belongs to another prompt.
    fn result(
        &self,
        engine: &Engine,
        round: &Round<'_>,
        request: &VerifyRequest,
        bodies: &[Vec<u8>],
    ) -> Result<VerifyResult, Unreadable>;

    /// True if an answer without a verification result only means that this method cannot decide
    /// here, so that the next one is tried.
    fn is_undecided(&self, method: VerifyMethod, status: u16, body: &[u8]) -> bool {
        let _ = (method, status, body);
        false
    }

    /// The same round by the same method, changed so that it can be decided where `request` decided
    /// nothing; `None` if there is no such change, so that the next method is tried.
    fn retry(&self, engine: &Engine, round: &Round<'_>, request: &VerifyRequest) -> Option<VerifyRequest> {
        let _ = (engine, round, request);
        None
    }

    /// A call to be made once before the first round of a session, so that the engine computes the
    /// context for all of the round's prompts together; `None` where that would not help. Its
    /// answer is not used.
    fn warm(&self, engine: &Engine, round: &Round<'_>) -> Option<Call> {
        let _ = (engine, round);
        None
    }

    /// The rows that this answer to a scored prompt of `prompt` tokens lists, a prefix of which was
    /// cached; `None` if it does not show that.
    fn rows(&self, prompt: usize, body: &[u8]) -> Option<RowShape> {
        let _ = (prompt, body);
        None
    }

    /// Reason why a verification method is not among those of the engine that gave these answers.
    fn missing(&self, answers: &Answers, method: VerifyMethod) -> String {
        let _ = (answers, method);
        "this engine has no such verification method".to_owned()
    }

    /// The question for the ids of a text, without special tokens; `None` if there is none.
    fn tokenize(&self, engine: &Engine, text: &str) -> Option<Question> {
        let _ = (engine, text);
        None
    }

    /// Reads the answer to [`Codec::tokenize`]; `None` if it has no ids.
    fn tokens(&self, body: &[u8]) -> Option<Vec<TokenId>> {
        let answer: Value = serde_json::from_slice(body).ok()?;
        shared::ids(answer.get("tokens")?)
    }

    /// Reads the answer at [`Engine::load_path`]; `None` if it cannot be read.
    fn load(&self, body: &str) -> Option<Load> {
        let _ = body;
        None
    }
}
