//! The fakes that scenes are played with.

use std::any::Any;
use std::net::SocketAddr;
use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;

use crate::fakes::passthrough::{Kind, Passthrough};
use crate::fakes::server::Engine;
use crate::fakes::vllm::{Options, Vllm};
use crate::fakes::{Fake, Front, House, Setup};

/// Running engines; they end when dropped.
pub struct Engines {
    pub addresses: Vec<SocketAddr>,
    /// The house of each.
    pub houses: Vec<Arc<House>>,
    alive: Vec<Box<dyn Any + Send + Sync>>,
}

/// A function that starts engines.
pub type Start = fn() -> BoxFuture<'static, Engines>;

async fn vllm(change: impl FnOnce(&mut Options)) -> Fake<Vllm> {
    crate::probe::house::vllm("0.33.0", change).await
}

fn only<E: Engine>(fake: Fake<E>) -> Engines {
    let (addresses, houses) = (vec![fake.address], vec![Arc::clone(&fake.house)]);
    Engines { addresses, houses, alive: vec![Box::new(fake)] }
}

/// A vLLM that reports everything about itself.
pub fn trace_settings() -> BoxFuture<'static, Engines> {
    async { only(vllm(|_| {}).await) }.boxed()
}

/// One that does not report its defaults for omitted fields, and has others than its model's files
/// say.
pub fn silent() -> BoxFuture<'static, Engines> {
    async {
        let fake = vllm(|options| options.scale_out = false).await;
        fake.house.defaults.lock().max_new_tokens = Some(7);
        only(fake)
    }
    .boxed()
}

/// One that speculates by itself.
pub fn speculating() -> BoxFuture<'static, Engines> {
    async { only(vllm(|options| options.speculates = true).await) }.boxed()
}

/// One that takes reasoning out of its chats, all of whose text is reasoning.
pub fn parsing() -> BoxFuture<'static, Engines> {
    async { only(vllm(|options| options.setup.reasoning_end = Some("</think>".to_owned())).await) }.boxed()
}

/// Two replicas.
pub fn two() -> BoxFuture<'static, Engines> {
    async {
        let (one, two) = (only(vllm(|_| {}).await), only(vllm(|_| {}).await));
        Engines {
            addresses: [one.addresses, two.addresses].concat(),
            houses: [one.houses, two.houses].concat(),
            alive: one.alive.into_iter().chain(two.alive).collect(),
        }
    }
    .boxed()
}

/// Two engines that answer behind one address.
pub fn several_engines() -> BoxFuture<'static, Engines> {
    async {
        let mut both = two().await;
        both.houses[1].renew();
        let front = Front::before(both.addresses.clone()).await;
        both.addresses = vec![front.address];
        both.alive.push(Box::new(front));
        both
    }
    .boxed()
}

/// One that cannot verify drafts.
pub fn planless() -> BoxFuture<'static, Engines> {
    async { only(Fake::start(Passthrough::new(Kind::Tgi, Setup::default())).await) }.boxed()
}
