//! Serves one fake engine on a port, for manual tests and scripts.
//!
//! ```text
//! cargo run --example fake -- vllm --port 8000 --version 0.29.0 --pace-us 5000 --per-token-us 50
//! cargo run --example fake -- llamacpp --port 8001 --slots 9
//! ```
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::net::SocketAddr;
use std::time::Duration;

use clap::{Parser, ValueEnum};

use foretell_fakes::{Engine, Fake, Pace, Setup, Temper};
use foretell_fakes::{hosted, llamacpp, passthrough, sglang, vllm};

#[derive(Clone, Copy, ValueEnum)]
enum Kind {
    Vllm,
    Sglang,
    Llamacpp,
    Tgi,
    Trtllm,
    Triton,
    Lmdeploy,
    Hosted,
    Ollama,
    Mlx,
}

#[derive(Parser)]
struct Arguments {
    engine: Kind,
    #[arg(long, default_value_t = 8000)]
    port: u16,
    /// Microseconds per step of the engine.
    #[arg(long, default_value_t = 0)]
    pace_us: u64,
    /// Microseconds per token that a step computes.
    #[arg(long, default_value_t = 0)]
    per_token_us: u64,
    /// Name of the model.
    #[arg(long, default_value = "toy")]
    model: String,
    /// One row in this number prefers the end of text; 0 for never.
    #[arg(long, default_value_t = 400)]
    eos_every: u64,
    /// vLLM: version.
    #[arg(long, default_value = "0.33.0")]
    version: String,
    /// vLLM: `--enable-scale-out`.
    #[arg(long)]
    scale_out: bool,
    /// vLLM: `--enable-prompt-tokens-details`.
    #[arg(long)]
    prompt_tokens_details: bool,
    /// SGLang and llama-server: `--enable-metrics`, `--metrics`.
    #[arg(long)]
    metrics: bool,
    /// llama-server: `-np`.
    #[arg(long, default_value_t = 4)]
    slots: usize,
    /// llama-server: `--no-cache-idle-slots`.
    #[arg(long)]
    no_cache_idle_slots: bool,
}

impl Arguments {
    fn fill(&self, setup: &mut Setup) {
        setup.model.clone_from(&self.model);
        setup.pace = Pace {
            step: Duration::from_micros(self.pace_us),
            per_token: Duration::from_micros(self.per_token_us),
            ..Pace::default()
        };
        setup.temper =
            Temper { eos_every: Some(self.eos_every).filter(|every| *every > 0), ..Temper::default() };
    }

    async fn passed(&self, kind: passthrough::Kind) {
        let mut setup = Setup::default();
        self.fill(&mut setup);
        self.serve(passthrough::Passthrough::new(kind, setup)).await;
    }

    async fn serve(&self, engine: impl Engine) {
        let fake = Fake::start_at(engine, SocketAddr::from(([127, 0, 0, 1], self.port))).await;
        println!("{}", fake.url());
        std::future::pending::<()>().await;
    }
}

#[tokio::main]
async fn main() {
    let arguments = Arguments::parse();
    match arguments.engine {
        Kind::Vllm => {
            let mut options = vllm::Options::of(arguments.version.clone().leak());
            arguments.fill(&mut options.setup);
            options.scale_out = arguments.scale_out;
            options.prompt_tokens_details = arguments.prompt_tokens_details;
            arguments.serve(vllm::Vllm::new(options)).await;
        }
        Kind::Sglang => {
            let mut options = sglang::Options::default();
            arguments.fill(&mut options.setup);
            options.metrics = arguments.metrics;
            arguments.serve(sglang::Sglang::new(options)).await;
        }
        Kind::Llamacpp => {
            let mut options = llamacpp::Options { slots: arguments.slots, ..llamacpp::Options::default() };
            arguments.fill(&mut options.setup);
            options.metrics = arguments.metrics;
            options.cache_idle_slots = !arguments.no_cache_idle_slots;
            arguments.serve(llamacpp::Llama::new(options)).await;
        }
        Kind::Trtllm => arguments.passed(passthrough::Kind::Trtllm).await,
        Kind::Triton => arguments.passed(passthrough::Kind::Triton).await,
        Kind::Lmdeploy => arguments.passed(passthrough::Kind::Lmdeploy).await,
        Kind::Tgi => arguments.passed(passthrough::Kind::Tgi).await,
        Kind::Ollama => arguments.passed(passthrough::Kind::Ollama).await,
        Kind::Mlx => arguments.passed(passthrough::Kind::Mlx).await,
        Kind::Hosted => {
            let mut setup = Setup::default();
            arguments.fill(&mut setup);
            arguments.serve(hosted::Hosted::new(setup)).await;
        }
    }
}
