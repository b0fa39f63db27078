//! The engines under test. One row puts one engine (or one way to run it) through every test of
//! this folder.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;

use crate::fakes::sample::Pipeline;
use crate::fakes::server::Engine;
use crate::fakes::{Fake, House, Setup, llamacpp, sglang, vllm};

/// Effect of a client's seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seeds {
    /// The same text as without the proxy, speculated on or not.
    Kept,
    /// The server ignores it.
    Ignored,
}

/// A running fake of any engine.
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
    /// The dialect that `auto` finds.
    pub dialect: &'static str,
    /// Starts it with this setup.
    pub start: fn(Setup) -> Started,
    pub seeds: Seeds,
    /// Its sampling pipeline.
    pub pipeline: Pipeline,
    /// Paths of verify requests.
    pub verifies: &'static [&'static str],
}

/// All engines.
pub const TABLE: &[Row] = &[
    Row {
        name: "vllm",
        dialect: "vllm",
        start: |setup| start(move || vllm::Vllm::new(vllm(setup, false))),
        seeds: Seeds::Kept,
        pipeline: Pipeline::VLLM,
        verifies: &["/v1/completions"],
    },
    // As `vllm serve MODEL` starts it.
    Row {
        name: "vllm-stock",
        dialect: "vllm",
        start: |setup| {
            let options = |setup| vllm::Options { setup, ..vllm::Options::of("0.33.0") };
            start(move || vllm::Vllm::new(options(setup)))
        },
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

pub fn start<E: Engine>(engine: impl FnOnce() -> E + Send + 'static) -> Started {
    async move { Box::new(Fake::start(engine()).await) as Box<dyn Server> }.boxed()
}

/// Without the token endpoint: a version before it. Newer ones that are started without that flag
/// may have penalties of their own, which they do not show.
fn vllm(setup: Setup, scale_out: bool) -> vllm::Options {
    let version = if scale_out { "0.33.0" } else { "0.14.0" };
    vllm::Options { scale_out, setup: Setup { block: 16, ..setup }, ..vllm::Options::of(version) }
}

fn sglang(setup: Setup, page: usize, deterministic: bool) -> sglang::Options {
    let plain = sglang::Options::default();
    let setup = Setup { block: page, blocks: plain.setup.blocks / page, ..setup };
    sglang::Options { deterministic, setup, ..plain }
}

/// The ids of the prompt come from calls concurrent with the first call, which has to last longer
/// than they do.
fn llamacpp(mut setup: Setup) -> llamacpp::Options {
    setup.pace.step = setup.pace.step.max(Duration::from_millis(1));
    setup.max_len = 4096;
    llamacpp::Options { slots: 9, cache_idle_slots: false, setup, ..llamacpp::Options::default() }
}
