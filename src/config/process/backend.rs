//! A backend as the process file describes it.

use std::path::PathBuf;
use std::time::Duration;

use http::Uri;

use super::Device;
use crate::config::values::Glob;
use crate::words::Plan;

/// How a backend is spoken to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)] // each is the server of its name
pub enum Dialect {
    /// Found out by asking.
    #[default]
    Auto,
    /// `foretell target`.
    Onnx,
    Vllm,
    Sglang,
    LlamaCpp,
    Tgi,
    TrtLlm,
    Triton,
    Ollama,
    Lmdeploy,
    Mlx,
    OpenAi,
}

impl Dialect {
    /// The dialect that is meant; `None` for `auto`.
    pub const fn spoken(self) -> Option<crate::dialect::Dialect> {
        use crate::dialect::Dialect as Spoken;
        Some(match self {
            Self::Auto => return None,
            Self::Onnx => Spoken::Onnx,
            Self::Vllm => Spoken::Vllm,
            Self::Sglang => Spoken::Sglang,
            Self::LlamaCpp => Spoken::LlamaCpp,
            Self::Tgi => Spoken::Tgi,
            Self::TrtLlm => Spoken::TrtLlm,
            Self::Triton => Spoken::Triton,
            Self::Ollama => Spoken::Ollama,
            Self::Lmdeploy => Spoken::Lmdeploy,
            Self::Mlx => Spoken::Mlx,
            Self::OpenAi => Spoken::OpenAi,
        })
    }

    /// All, with their names in files.
    pub const NAMES: &'static [(&'static str, Self)] = &[
        ("auto", Self::Auto),
        ("onnx", Self::Onnx),
        ("vllm", Self::Vllm),
        ("sglang", Self::Sglang),
        ("llamacpp", Self::LlamaCpp),
        ("tgi", Self::Tgi),
        ("trtllm", Self::TrtLlm),
        ("triton", Self::Triton),
        ("ollama", Self::Ollama),
        ("lmdeploy", Self::Lmdeploy),
        ("mlx", Self::Mlx),
        ("openai", Self::OpenAi),
    ];

    /// The name in files, metrics and logs.
    pub fn name(self) -> &'static str {
        super::name_of(Self::NAMES, self)
    }

    /// Whether a model in this process may be spoken to so.
    pub const fn is_here(self) -> bool {
        matches!(self, Self::Auto | Self::Onnx)
    }
}

/// A service of a target.
#[derive(Clone, Debug, PartialEq)]
pub struct Backend {
    /// Its name in policies, metrics and logs.
    pub name: String,
    /// How it is spoken to.
    pub dialect: Dialect,
    /// Where its replicas are.
    pub replicas: Replicas,
    /// Data-parallel ranks at each address, each a replica of its own; 0: none.
    pub ranks: u32,
    /// The models it serves; none means "any".
    pub models: Vec<Model>,
    /// How to connect.
    pub connect: Connect,
    /// Where its load is read.
    pub load: Load,
    /// How drafts may be verified.
    pub plans: Plans,
    /// How it is probed.
    pub probe: Probe,
    /// What leaping may cost its neighbours.
    pub budget: Budget,
    /// It bills per token.
    pub billed: bool,
    /// It takes the models that no backend names.
    pub default: bool,
}

/// Where the replicas of a backend are; each is one KV cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Replicas {
    /// At these addresses.
    Urls(Vec<Uri>),
    /// At every address of a name, asked for again and again.
    Dns {
        /// `HOST:PORT`.
        name: String,
        /// How often.
        every: Duration,
        /// By TLS; the certificate must be the name's.
        https: bool,
    },
    /// In this process: one, without a socket or a byte of HTTP between it and the proxy.
    Here(ServedModel),
}

/// An ONNX model that Foretell runs itself, as `foretell target` does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServedModel {
    /// Its folder.
    pub path: PathBuf,
    /// The id that it answers to; its folder's name if `None`.
    pub name: Option<String>,
    /// Where it runs.
    pub device: Device,
    /// Sequences that are held at once.
    pub lanes: u32,
    /// Most tokens per sequence; all that it was made for if `None`.
    pub context: Option<u32>,
    /// Threads of one step; one per core if 0.
    pub threads: u32,
}

impl ServedModel {
    /// The model of a folder, as it is served if nothing is said.
    pub fn of(path: PathBuf) -> Self {
        Self { path, name: None, device: Device::default(), lanes: 16, context: None, threads: 0 }
    }
}

/// A model of a backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model {
    /// The id as clients send it, or a pattern of ids.
    pub id: Glob,
    /// Other names under which the backend serves it: a request reaches it with the name that it came with.
    pub aliases: Vec<String>,
    /// The model that an adapter is made for; requests for the adapter name the adapter.
    pub base: Option<String>,
    /// Where its tokenizer is found.
    pub tokenizer: TokenizerSource,
}

/// Where the tokenizer of a model is found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum TokenizerSource {
    /// The backend tokenizes.
    #[default]
    Backend,
    /// A `tokenizer.json`, or a folder with one.
    File(PathBuf),
}

/// How to connect to a backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connect {
    /// Which HTTP.
    pub http: HttpVersion,
    /// Which `Host` the backend sees.
    pub host: HostHeader,
    /// The authority of its certificate, PEM; the usual public ones if `None`.
    pub ca: Option<PathBuf>,
    /// The certificate chain and the key that Foretell shows, PEM.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// The client's `Authorization` is passed on; otherwise it is taken out.
    pub pass_auth: bool,
    /// The file with the bearer token that is sent instead of the client's.
    pub token_file: Option<PathBuf>,
    /// The file with the bearer token of Foretell's own calls (who is there, health, load, probe). It is never on a
    /// client's request, nor on a call of a client's session.
    pub own_token_file: Option<PathBuf>,
}

/// Which HTTP a backend is spoken to with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HttpVersion {
    /// HTTP/1.1.
    #[default]
    Http1,
    /// HTTP/2 with prior knowledge, or by ALPN over TLS.
    Http2,
}

/// Which `Host` a backend sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HostHeader {
    /// Its own.
    #[default]
    Backend,
    /// The client's.
    Client,
}

/// Where the load of a backend is read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Load {
    /// A path of the backend.
    pub url: String,
    /// How often.
    pub every: Duration,
}

/// How drafts may be verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plans {
    /// Which plans may be taken, best first.
    pub allow: Vec<PlanName>,
    /// The file lists them (`allow` is present): a plan that the operator names is used even where its first call may
    /// end the engine.
    pub explicit: bool,
    /// Longest context of a verify call, tokens.
    pub context_max: u32,
    /// Most bytes of a verify call, request and answer.
    pub bytes_max: u64,
}

/// Every plan that a file may name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlanName {
    /// One prompt with log-probabilities of its tail.
    Score,
    /// One prompt per node.
    FanOut,
    /// The tree itself.
    Tree,
    /// The engine takes the draft.
    Native,
    /// As OpenAI's `prediction`.
    Prediction,
}

impl PlanName {
    /// The plan, if it is built.
    pub const fn plan(self) -> Option<Plan> {
        match self {
            Self::FanOut => Some(Plan::FanOut),
            Self::Tree => Some(Plan::Tree),
            Self::Score => Some(Plan::Score),
            Self::Native => Some(Plan::Native),
            Self::Prediction => None,
        }
    }
}

/// How a backend is probed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probe {
    /// When.
    pub when: ProbeWhen,
    /// Most calls.
    pub calls: u32,
    /// Longest time for all of them.
    pub within: Duration,
}

/// When a backend is probed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ProbeWhen {
    /// As soon as it is ready.
    #[default]
    Ready,
    /// When the operator asks.
    Never,
}

/// What leaping may cost the neighbours on a replica.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Budget {
    /// Extra computed tokens ÷ tokens that the engine generates.
    pub extra_tokens: f64,
    /// Extra slots ÷ running requests.
    pub slots: f64,
    /// Ride-only windows.
    pub switchback: Option<Switchback>,
}

/// Ride-only windows, as a control group of the whole replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Switchback {
    /// Length of a window.
    pub window: Duration,
    /// One window in this time.
    pub every: Duration,
}
