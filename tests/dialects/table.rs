//! Who is asked. One row makes one engine (or one way to run it) subject to everything in this crate.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;

use crate::fakes::sample::Pipeline;
use crate::fakes::server::Engine;
use crate::fakes::{Fake, House, Setup, llamacpp, sglang, vllm};

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

type Started = BoxFuture<'static, Box<dyn Server>>;

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
}

/// Everyone.
pub const TABLE: &[Row] = &[
    Row {
        name: "vllm",
        dialect: "vllm",
        start: |setup| start(move || vllm::Vllm::new(vllm(setup, false))),
        seeds: Seeds::Kept,
        pipeline: Pipeline::VLLM,
        verifies: &["/v1/completions"],
    },
    Row {
        name: "vllm-scale-out",
        dialect: "vllm",
        start: |setup| start(move || vllm::Vllm::new(vllm(setup, true))),
        seeds: Seeds::Kept,
        pipeline: Pipeline::VLLM,
        verifies: &["/inference/v1/generate"],
    },
    Row {
        name: "sglang",
        dialect: "sglang",
        start: |setup| start(move || sglang::Sglang::new(sglang(setup, 1, false))),
        seeds: Seeds::Ignored,
        pipeline: Pipeline::SGLANG,
        verifies: &["/generate"],
    },
    Row {
        name: "sglang-deterministic",
        dialect: "sglang",
        start: |setup| start(move || sglang::Sglang::new(sglang(setup, 64, true))),
        seeds: Seeds::Kept,
        pipeline: Pipeline::SGLANG,
        verifies: &["/generate"],
    },
    Row {
        name: "llamacpp",
        dialect: "llamacpp",
        start: |setup| start(move || llamacpp::Llama::new(llamacpp(setup))),
        seeds: Seeds::Kept,
        pipeline: Pipeline::LLAMA,
        verifies: &["/completion"],
    },
];

fn start<E: Engine>(engine: impl FnOnce() -> E + Send + 'static) -> Started {
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

/// The ids of the prompt come from calls beside the first ride, which has to last longer than they do.
fn llamacpp(mut setup: Setup) -> llamacpp::Options {
    setup.pace.step = setup.pace.step.max(Duration::from_millis(1));
    setup.max_len = 4096;
    llamacpp::Options { slots: 9, cache_idle_slots: false, setup, ..llamacpp::Options::default() }
}
