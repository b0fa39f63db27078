//! Who is asked. One row makes one engine (or one way to run it) subject to everything in this crate.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use foretell::openai::Route;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;

use crate::fakes::sample::Pipeline;
use crate::fakes::server::Engine;
use crate::fakes::{Fake, House, Setup, llamacpp, lmdeploy, sglang, vllm};

/// What becomes of a client's seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seeds {
    /// The same text as without the proxy, leapt or not.
    Kept,
    /// The server does not heed it.
    Ignored,
}

/// A running fake, whatever it is of.
pub trait Server: Send + Sync {
    fn address(&self) -> SocketAddr;
    fn house(&self) -> &Arc<House>;
}

impl<E: Engine> Server for Fake<E> {
    fn address(&self) -> SocketAddr {
        self.address
    }

    fn house(&self) -> &Arc<House> {
        &self.house
    }
}

pub type Started = BoxFuture<'static, Box<dyn Server>>;

/// One engine, as it is run.
pub struct Row {
    pub name: &'static str,
    /// What `auto` finds it to be.
    pub dialect: &'static str,
    /// Starts it, with this model and these habits.
    pub start: fn(Setup) -> Started,
    pub seeds: Seeds,
    /// How it samples.
    pub pipeline: Pipeline,
    /// Calls of these paths verify.
    pub verifies: &'static [&'static str],
    /// The routes on which it leaps; on others it rides.
    pub leaps: &'static [Route],
    /// What requests have to say besides, so that nothing is left to defaults that it does not tell.
    pub says: &'static str,
    /// The `top_k` that takes nothing away.
    pub all_tokens: i64,
    /// A prompt may be a list of token ids.
    pub takes_ids: bool,
    /// Tokens that are ridden before a round can be put to it.
    pub ridden: usize,
    /// That it has cached something is told by the time that a call takes, and by nothing else.
    pub felt: bool,
}

/// What most have in common.
const USUAL: Row = Row {
    name: "",
    dialect: "",
    start: |setup| start(move || vllm::Vllm::new(vllm(setup, false))),
    seeds: Seeds::Kept,
    pipeline: Pipeline::VLLM,
    verifies: &[],
    leaps: &[Route::Completions, Route::Chat],
    says: "{}",
    all_tokens: -1,
    takes_ids: true,
    ridden: 1,
    felt: false,
};

/// Everyone.
pub const TABLE: &[Row] = &[
    Row {
        name: "vllm",
        dialect: "vllm",
        start: |setup| start(move || vllm::Vllm::new(vllm(setup, false))),
        seeds: Seeds::Kept,
        pipeline: Pipeline::VLLM,
        verifies: &["/v1/completions"],
        ..USUAL
    },
    Row {
        name: "vllm-scale-out",
        dialect: "vllm",
        start: |setup| start(move || vllm::Vllm::new(vllm(setup, true))),
        seeds: Seeds::Kept,
        pipeline: Pipeline::VLLM,
        verifies: &["/inference/v1/generate"],
        ..USUAL
    },
    Row {
        name: "sglang",
        dialect: "sglang",
        start: |setup| start(move || sglang::Sglang::new(sglang(setup, 1, false))),
        seeds: Seeds::Ignored,
        pipeline: Pipeline::SGLANG,
        verifies: &["/generate"],
        // A streamed chat is refused if it asks for ids.
        leaps: &[Route::Completions],
        ..USUAL
    },
    Row {
        name: "sglang-deterministic",
        dialect: "sglang",
        start: |setup| start(move || sglang::Sglang::new(sglang(setup, 64, true))),
        seeds: Seeds::Kept,
        pipeline: Pipeline::SGLANG,
        verifies: &["/generate"],
        // A streamed chat is refused if it asks for ids.
        leaps: &[Route::Completions],
        ..USUAL
    },
    Row {
        name: "llamacpp",
        dialect: "llamacpp",
        start: |setup| start(move || llamacpp::Llama::new(llamacpp(setup))),
        seeds: Seeds::Kept,
        pipeline: Pipeline::LLAMA,
        verifies: &["/completion"],
        ..USUAL
    },
    Row {
        name: "lmdeploy",
        dialect: "lmdeploy",
        start: |setup| start(move || lmdeploy::Lmdeploy::new(lmdeploy(setup))),
        seeds: Seeds::Kept,
        pipeline: Pipeline::LMDEPLOY,
        verifies: &["/generate"],
        leaps: &[Route::Completions],
        says: r#"{"top_p": 1, "top_k": 0, "min_p": 0, "presence_penalty": 0, "frequency_penalty": 0}"#,
        all_tokens: 0,
        takes_ids: false,
        // The prompt's ids are asked for when the first token is on its way.
        ridden: 2,
        felt: true,
    },
];

pub fn start<E: Engine>(engine: impl FnOnce() -> E + Send + 'static) -> Started {
    async move { Box::new(Fake::start(engine()).await) as Box<dyn Server> }.boxed()
}

fn vllm(setup: Setup, scale_out: bool) -> vllm::Options {
    vllm::Options { scale_out, setup: Setup { block: 16, ..setup }, ..vllm::Options::of("0.33.0") }
}

fn sglang(setup: Setup, page: usize, deterministic: bool) -> sglang::Options {
    let plain = sglang::Options::default();
    let setup = Setup { block: page, blocks: plain.setup.blocks / page, ..setup };
    sglang::Options { deterministic, setup, ..plain }
}

/// As the one below; and without a cache there is nothing to leap by.
fn lmdeploy(mut setup: Setup) -> lmdeploy::Options {
    setup.pace.step = setup.pace.step.max(Duration::from_millis(5));
    lmdeploy::Options { prefix_caching: true, setup, ..lmdeploy::Options::default() }
}

/// The ids of the prompt come from calls beside the first ride, which has to last longer than they do.
fn llamacpp(mut setup: Setup) -> llamacpp::Options {
    setup.pace.step = setup.pace.step.max(Duration::from_millis(1));
    setup.max_len = 4096;
    llamacpp::Options { slots: 9, cache_idle_slots: false, setup, ..llamacpp::Options::default() }
}
