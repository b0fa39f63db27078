//! Every engine, with its setup in these tests.

use crate::dialects::table::{Server, Started, TABLE, start};
use crate::fakes::passthrough::{Kind, Passthrough};
use crate::fakes::{Setup, hosted, sglang, vllm};

pub struct Engine {
    pub name: &'static str,
    pub start: fn(Setup) -> Started,
    pub model: &'static str,
    /// More lines of the backend in the config file.
    pub backend: &'static str,
    /// Header lines of every client.
    pub fields: &'static str,
    /// Further fields of requests.
    pub says: &'static str,
    /// Some of its answers are speculated on.
    pub speculates: bool,
    /// It has its own vocabulary and provides it.
    pub own_words: bool,
}

const USUAL: Engine = Engine {
    name: "",
    start: |setup| row("vllm", setup),
    model: "toy",
    backend: "",
    fields: "",
    says: "{}",
    speculates: true,
    own_words: false,
};

/// Starts an engine as the contract tests of the dialects do.
fn row(name: &str, setup: Setup) -> Started {
    let row = TABLE.iter().find(|row| row.name == name).expect("a row of that name");
    (row.start)(setup)
}

const fn passed_through(name: &'static str, start: fn(Setup) -> Started) -> Engine {
    Engine { name, start, speculates: false, ..USUAL }
}

pub const ENGINES: [Engine; 11] = [
    Engine {
        name: "vllm",
        start: |setup| {
            let setup = Setup { block: 16, ..setup };
            let options = vllm::Options {
                prompt_tokens_details: true,
                scale_out: true,
                setup,
                ..vllm::Options::of("0.33.0")
            };
            start(move || vllm::Vllm::new(options))
        },
        ..USUAL
    },
    Engine {
        name: "sglang",
        start: |setup| {
            let plain = sglang::Options::default();
            let setup = Setup { block: 1, blocks: plain.setup.blocks, ..setup };
            start(move || sglang::Sglang::new(sglang::Options { setup, ..plain }))
        },
        says: r#"{"top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}"#,
        ..USUAL
    },
    Engine { name: "llamacpp", start: |setup| row("llamacpp", setup), ..USUAL },
    passed_through("tgi", |setup| start(move || Passthrough::new(Kind::Tgi, setup))),
    passed_through("trtllm", |setup| start(move || Passthrough::new(Kind::Trtllm, setup))),
    passed_through("lmdeploy", |setup| start(move || Passthrough::new(Kind::Lmdeploy, setup))),
    passed_through("triton", |setup| start(move || Passthrough::new(Kind::Triton, setup))),
    passed_through("mlx", |setup| start(move || Passthrough::new(Kind::Mlx, setup))),
    passed_through("ollama", |setup| start(move || Passthrough::new(Kind::Ollama, setup))),
    Engine {
        name: "openai",
        start: |setup| start(move || hosted::Hosted::new(setup)),
        backend: "    engine: openai\n",
        fields: "authorization: Bearer sk-good\r\n",
        speculates: false,
        ..USUAL
    },
    Engine { name: "onnx", start: super::onnx::start, own_words: true, ..USUAL },
];

pub type Running = Box<dyn Server>;
