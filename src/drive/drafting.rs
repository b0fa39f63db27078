//! Asking the model drafter, within its time.
//!
//! A seat is borrowed by one question at a time and comes back with the answer. No drafter, no seat, an
//! answer too late: each is a draft fault, and the session rides.

#[cfg(feature = "onnx")]
use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt};

#[cfg(feature = "onnx")]
use crate::draft::{Features, Node, Source, Tree};
#[cfg(feature = "onnx")]
use crate::openai::Sampling;
use crate::session::{Event, Fault};
use crate::units::TokenId;

#[cfg(feature = "onnx")]
use crate::runtime::drafter::{DraftFault, DrafterService, Noise, Seat};

/// Without the runtime there is no drafter to seat.
#[cfg(not(feature = "onnx"))]
pub enum Seat {}

/// An answer from outside: the event, and the seat if one was borrowed.
pub struct Reply {
    /// What the session is told.
    pub event: Event,
    /// The drafter's seat, back again.
    pub seat: Option<Seat>,
    /// Seconds that the question took, for questions to the drafter.
    pub seconds: Option<f64>,
}

impl Reply {
    /// An answer that borrowed no seat.
    pub fn event(event: Event) -> Self {
        Self { event, seat: None, seconds: None }
    }
}

/// The model drafter of one session.
#[cfg(feature = "onnx")]
pub struct Drafting {
    service: Option<DrafterService>,
    sampling: Sampling,
    within: Duration,
    seat: Option<Seat>,
}

/// Without the runtime there is no model drafter.
#[cfg(not(feature = "onnx"))]
pub struct Drafting;

#[cfg(not(feature = "onnx"))]
#[expect(
    clippy::unused_self,
    clippy::needless_pass_by_value,
    reason = "the shape that the drafting with a runtime has"
)]
impl Drafting {
    /// No drafter.
    pub fn none() -> Self {
        Self
    }

    /// There is none to ask.
    pub fn is_there(&self) -> bool {
        false
    }

    /// There is none to ask.
    pub fn draft(&mut self, _: Vec<TokenId>, _: Vec<TokenId>, _: usize) -> BoxFuture<'static, Reply> {
        async { Reply::event(Event::Fault(Fault::Draft)) }.boxed()
    }

    /// There is none to ask.
    pub fn shadow(&mut self, _: Vec<TokenId>, _: Vec<TokenId>, _: usize) -> BoxFuture<'static, Reply> {
        async { Reply::event(Event::Fault(Fault::Draft)) }.boxed()
    }

    /// There is no seat to take back.
    pub fn give_back(&mut self, seat: Seat) {
        match seat {}
    }
}

#[cfg(feature = "onnx")]
impl Drafting {
    /// Questions go to `service`; `sampling` carries the seed of the noise that the target samples with.
    pub fn new(service: Option<DrafterService>, sampling: Sampling, within: Duration) -> Self {
        Self { service, sampling, within, seat: None }
    }

    /// Whether there is a drafter to ask.
    pub fn is_there(&self) -> bool {
        self.service.is_some()
    }

    /// A chain of at most `gamma` tokens after prompt and output.
    pub fn draft(
        &mut self,
        prompt: Vec<TokenId>,
        output: Vec<TokenId>,
        gamma: usize,
    ) -> BoxFuture<'static, Reply> {
        self.ask(prompt, output, move |mut seat, context, prompt_len| {
            async move {
                let answer = seat.draft(&context, prompt_len, gamma).await;
                (seat, answer.map(|chain| Event::Draft(tree(&chain))))
            }
            .boxed()
        })
    }

    /// The drafter's own choice at each output place from `from` on.
    pub fn shadow(
        &mut self,
        prompt: Vec<TokenId>,
        output: Vec<TokenId>,
        from: usize,
    ) -> BoxFuture<'static, Reply> {
        self.ask(prompt, output, move |mut seat, context, prompt_len| {
            async move {
                let answer = seat.shadow(&context, prompt_len, prompt_len + from).await;
                (seat, answer.map(Event::Shadow))
            }
            .boxed()
        })
    }

    /// Takes a seat back.
    pub fn give_back(&mut self, seat: Seat) {
        self.seat = Some(seat);
    }

    fn ask<Q>(&mut self, prompt: Vec<TokenId>, output: Vec<TokenId>, question: Q) -> BoxFuture<'static, Reply>
    where
        Q: FnOnce(Seat, Vec<TokenId>, usize) -> BoxFuture<'static, (Seat, Result<Event, DraftFault>)>
            + Send
            + 'static,
    {
        let (service, seat, within) = (self.service.clone(), self.seat.take(), self.within);
        let noise = Noise { seed: self.sampling.seed, choice: 0, sampling: self.sampling.clone() };
        async move {
            let seat = match (seat, service) {
                (Some(seat), _) => Some(seat),
                (None, Some(service)) => service.seat(noise).await,
                (None, None) => None,
            };
            let Some(seat) = seat else { return Reply::event(Event::Fault(Fault::Draft)) };
            let started = tokio::time::Instant::now();
            let prompt_len = prompt.len();
            let asked = question(seat, [prompt, output].concat(), prompt_len);
            match tokio::time::timeout(within, asked).await {
                Ok((seat, answer)) => Reply {
                    event: answer.unwrap_or(Event::Fault(Fault::Draft)),
                    seat: Some(seat),
                    seconds: Some(started.elapsed().as_secs_f64()),
                },
                Err(_) => Reply::event(Event::Fault(Fault::Draft)),
            }
        }
        .boxed()
    }
}

/// A chain whose nodes carry the drafter's own margins.
#[cfg(feature = "onnx")]
fn tree(chain: &[(TokenId, f32)]) -> Tree {
    let mut tree = Tree::default();
    for (index, &(token, margin)) in chain.iter().enumerate() {
        let features = Features { margin, ..Features::default() };
        tree.push(Node { token, parent: index.checked_sub(1), source: Source::Model, features });
    }
    tree
}
