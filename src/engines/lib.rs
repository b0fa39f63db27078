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
pub mod first_token;
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
use foretell_wire::openai::{Additive, Event, Request, Route, Sampling};

use body::Ids;
pub use chunk::Chunk;
pub use confirmation::{Confirmation, END_TOKENS, MAX_TOKENS};
pub use engine::{
    Engine, OutputParsing, Pages, PrefixCache, ProcessMarks, RowShape, ServerDefaults, SpecialTokens,
};
pub use first_token::FirstToken;
pub use origin::Origin;
pub use quirks::{
    AnswerQuirks, BrokenEnd, ChatIds, MaxTokens, ModelDefaults, Noise, OutputLimits, ProbeQuirks, Quirks,
    StopQuirks, Tokenize, Undecided, UsageQuirks, Usual,
};
pub use recognise::{Answers, Foreign, Question};
pub use shared::Load;

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
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VerifyRequest {
    /// The calls, in the order in which their answers are read.
    pub calls: Vec<Call>,
    /// Number of the draft's nodes that they verify, from the first on.
    pub nodes: usize,
    /// Number of these that are decided whatever the engine has cached, from the first on.
    pub decidable: usize,
}

impl VerifyRequest {
    /// One call that decides all of `nodes` nodes.
    pub fn one(call: Call, nodes: usize) -> Self {
        Self { calls: vec![call], nodes, decidable: nodes }
    }
}

/// Members that are added to the client's request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Additions {
    /// Members of the request.
    pub members: Vec<(&'static str, Value)>,
    /// The members that they add to the answer.
    pub traces: Additive,
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

/// One step to the ids of a prompt, concurrent with the first call.
#[derive(Clone, Debug, PartialEq)]
pub enum PromptStep {
    /// The first call brings them, or nothing can.
    Nothing,
    /// A call has to be made.
    Call(Call),
    /// The ids of the prompt.
    Prompt(Vec<TokenId>),
    /// The request as the engine renders it.
    Rendered {
        /// The ids of its prompt.
        prompt: Vec<TokenId>,
        /// A grammar constrains its sampling.
        has_grammar: bool,
    },
}

/// Builds the calls to one kind of engine, and reads its answers. The identified engine is an
/// argument wherever it matters.
pub trait Codec: Sync {
    /// The constant properties of the engine.
    fn quirks(&self) -> &'static Quirks;

    /// Further questions to the server about itself, given its answers so far; empty when all is
    /// known. Every question must be safe on every version and cost at most one token.
    fn questions(&self, answers: &Answers) -> Vec<Question>;

    /// The engine that gave these answers.
    ///
    /// # Errors
    /// [`Foreign`]: the answers lack something that has to be known to verify there.
    fn engine(&self, answers: &Answers) -> Result<Engine, Foreign>;

    /// Reason why a verification method is not among those of the engine that gave these answers.
    fn missing(&self, answers: &Answers, method: VerifyMethod) -> String {
        let _ = (answers, method);
        "this engine has no such verification method".to_owned()
    }

    /// The verification methods that are exact for this request, best first. `sampling` is the
    /// effective one; `settled`: nothing in it is a guess about the server's defaults.
    ///
    /// # Errors
    /// No method can carry the request exactly.
    fn methods(
        &self,
        engine: &Engine,
        request: &Request,
        sampling: &Sampling,
        settled: bool,
    ) -> Result<Vec<VerifyMethod>, Refused>;

    /// The additions to the client's request. `seed` may be sent if the client sent none.
    fn additions(&self, engine: &Engine, request: &Request, seed: u64) -> Additions;

    /// Completes an unstreamed answer that has the form of a stream's chunk: adds the members that
    /// only such answers have, each with the value that it has if it does not apply, and sorts all.
    fn complete(&self, engine: &Engine, route: Route, answer: &mut Value) {
        let _ = (engine, route, answer);
    }

    /// The next step to the prompt's ids, or to whether a grammar constrains the sampling: the
    /// first one, or the one after `answer`. Where [`Pages::renders`], it is only taken for a
    /// request whose prompt or sampling may depend on more than its text: the first event of the
    /// answer has the prompt's ids too, but does not report a grammar.
    ///
    /// # Errors
    /// [`Unreadable`]: the answer has neither ids nor what the next call needs.
    fn prompt_step(
        &self,
        engine: &Engine,
        request: &Request,
        answer: Option<&[u8]>,
    ) -> Result<PromptStep, Unreadable> {
        match answer {
            Some(body) => shared::read_render(body),
            None if engine.pages.renders && !request.rendered.is_empty() => {
                Ok(PromptStep::Call(shared::render_call(request)))
            }
            None => Ok(PromptStep::Nothing),
        }
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
    fn chunk(&self, kind: RequestKind, event: &Event) -> Result<Chunk, Unreadable>;

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

    /// A call to be made once before the first round of a session, so that the engine computes the
    /// context for all of the round's prompts together; `None` where that would not help. Its
    /// answer is not used.
    fn warm(&self, engine: &Engine, round: &Round<'_>) -> Option<Call> {
        let _ = (engine, round);
        None
    }

    /// Reads the answer at [`Pages::load`]; `None` if it cannot be read.
    fn load(&self, body: &str) -> Option<Load>;
}
