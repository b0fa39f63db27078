//! Requests to the model drafter.
//!
//! A session has one drafter slot, from its first request until the session ends: a cancelled
//! request leaves the slot with everything that the drafter has read in its cache. There is no time
//! limit here: the session decides how long it waits for an answer. A missing drafter, no free slot
//! and a failed run are draft faults, after which the session decodes plainly.

use std::sync::Arc;

use futures_util::future::{BoxFuture, FutureExt};

use tokio::sync::OnceCell;

use crate::serving::drafters::SessionModel;
use foretell_core::session::{ActionId, Event, Fault};
use foretell_core::words::TokenContext;
use foretell_observe::{DraftKind, DraftLoss, Observer};
use foretell_wire::openai::Sampling;

use self::bridge::VocabularyBridge;
use foretell_onnx::drafter::{DrafterService, DrafterSlot, Noise, Order};

mod bridge;

/// The result of an asynchronous action.
pub struct Reply {
    /// The event for the session.
    pub event: Event,
    /// Seconds from request to answer, for requests to the model drafter; `None` for calls to the
    /// backend.
    pub seconds: Option<f64>,
}

impl Reply {
    /// The result of a call to the backend.
    pub fn event(event: Event) -> Self {
        Self { event, seconds: None }
    }
}

#[derive(Clone, Copy)]
pub(super) enum DrafterRequest {
    /// Draft a chain.
    Draft(Order),
    /// The drafter's choice at each output position from this one on.
    Shadow { from: usize },
}

/// A drafter, and the vocabulary bridge to it.
#[derive(Clone)]
pub(super) struct DrafterQuery {
    service: DrafterService,
    bridge: VocabularyBridge,
}

pub struct Drafting {
    drafter: Option<DrafterQuery>,
    noise: Noise,
    /// Taken by the first request that finds a free slot, until the session ends.
    drafter_slot: Arc<OnceCell<DrafterSlot>>,
    in_flight: Vec<(ActionId, DraftKind)>,
    /// Cause under which a request that misses its deadline is counted.
    late: DraftLoss,
    observer: Arc<Observer>,
}

impl Drafting {
    /// Requests go to `session_model`; `sampling` carries the seed of the noise that the target
    /// samples with. `bounded`: the operator has set a draft timeout (`timeouts.draft`).
    pub fn new(
        session_model: Option<SessionModel>,
        sampling: Sampling,
        bounded: bool,
        observer: Arc<Observer>,
    ) -> Self {
        let noise = Noise { seed: sampling.seed, choice: 0, sampling };
        let late = if bounded { DraftLoss::Timeout } else { DraftLoss::Patience };
        let drafter = session_model.map(|session_model| DrafterQuery::new(&session_model));
        Self { drafter, noise, drafter_slot: Arc::default(), in_flight: Vec::new(), late, observer }
    }

    /// True if the drafter may sample with the target's noise: not if its drafts are translated as
    /// text.
    pub fn shares_noise(&self) -> bool {
        self.drafter.as_ref().is_some_and(|drafter| drafter.bridge.shares_noise())
    }

    /// A chain of at most `gamma` tokens after the context; it ends where its survival probability
    /// is below `min_survival`.
    pub fn draft(
        &mut self,
        id: ActionId,
        token_context: TokenContext,
        gamma: usize,
        min_survival: f64,
    ) -> BoxFuture<'static, Reply> {
        self.request(id, token_context, DrafterRequest::Draft(Order { gamma, min_survival }))
    }

    /// The drafter's choice at each output position from `from` on.
    pub fn shadow(
        &mut self,
        id: ActionId,
        token_context: TokenContext,
        from: usize,
    ) -> BoxFuture<'static, Reply> {
        self.request(id, token_context, DrafterRequest::Shadow { from })
    }

    /// Removes a request that has been answered.
    pub fn answered(&mut self, id: ActionId) {
        self.in_flight.retain(|(other, _)| *other != id);
    }

    /// Removes a request that was cancelled. `late`: its deadline has passed, so it is counted as
    /// lost.
    pub fn given_up(&mut self, id: ActionId, late: bool) {
        if late && let Some((_, kind)) = self.in_flight.iter().find(|(other, _)| *other == id) {
            self.observer.metrics().draft_lost(*kind, self.late);
        }
        self.answered(id);
    }

    fn request(
        &mut self,
        id: ActionId,
        token_context: TokenContext,
        request: DrafterRequest,
    ) -> BoxFuture<'static, Reply> {
        let kind = request.kind();
        self.in_flight.push((id, kind));
        self.observer.metrics().draft_requested(kind);
        let (drafter, drafter_slot) = (self.drafter.clone(), Arc::clone(&self.drafter_slot));
        let (noise, observer) = (self.noise.clone(), Arc::clone(&self.observer));
        async move {
            let started = tokio::time::Instant::now();
            let answer = match drafter {
                Some(drafter) => drafter.answer(&drafter_slot, noise, token_context, request).await,
                None => Err(DraftLoss::NoSlot),
            };
            let event = answer.unwrap_or_else(|loss| {
                observer.metrics().draft_lost(kind, loss);
                Event::Fault(Fault::Draft)
            });
            Reply { event, seconds: Some(started.elapsed().as_secs_f64()) }
        }
        .boxed()
    }
}

impl DrafterRequest {
    const fn kind(self) -> DraftKind {
        match self {
            Self::Draft(_) => DraftKind::Draft,
            Self::Shadow { .. } => DraftKind::Shadow,
        }
    }
}

impl DrafterQuery {
    fn new(session_model: &SessionModel) -> Self {
        Self { bridge: VocabularyBridge::of(session_model), service: session_model.service.clone() }
    }

    /// Translates the context for the drafter, takes a slot if the session has none, and sends the
    /// request.
    pub(super) async fn answer(
        self,
        drafter_slot: &OnceCell<DrafterSlot>,
        noise: Noise,
        token_context: TokenContext,
        request: DrafterRequest,
    ) -> Result<Event, DraftLoss> {
        let bridged = self.bridge.bridged(token_context).await.ok_or(DraftLoss::Fault)?;
        let drafter_slot = drafter_slot
            .get_or_try_init(|| async {
                self.service.slot(bridged.noise(noise)).await.ok_or(DraftLoss::NoSlot)
            })
            .await?;
        let event = match request {
            DrafterRequest::Draft(order) => {
                bridge::draft(drafter_slot, bridged, order).await.map(Event::Draft)
            }
            DrafterRequest::Shadow { from } => {
                self.bridge.shadow(drafter_slot, bridged, from).await.map(Event::Shadow)
            }
        };
        event.map_err(|_| DraftLoss::Fault)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::task::Poll;

    use super::*;
    use foretell_onnx::fake::Fake;

    fn session_model(service: &DrafterService) -> SessionModel {
        SessionModel { name: "small".to_owned(), service: service.clone(), translation: None }
    }

    fn counted(observer: &Observer, line: &str) -> bool {
        observer.metrics().text().lines().any(|found| found == line)
    }

    #[tokio::test]
    async fn a_cancelled_request_keeps_the_slot_and_its_cache() {
        let fake = Fake::new(97, 2_000, 1);
        let controls = fake.controls();
        let service = DrafterService::start_with(Box::new(fake));
        let observer = Arc::new(Observer::new().unwrap());
        let sampling = Sampling::default();
        let mut drafting =
            Drafting::new(Some(session_model(&service)), sampling, false, Arc::clone(&observer));
        let token_context = TokenContext::new(&[1; 500], &[2]);
        controls.pause(true);
        let mut reading = drafting.shadow(ActionId(1), token_context.clone(), 0);
        while controls.runs() == 0 {
            poll_fn(|context| {
                let _: () = assert!(reading.as_mut().poll(context).is_pending());
                Poll::Ready(())
            })
            .await;
            tokio::task::yield_now().await;
        }
        drop(reading);
        drafting.given_up(ActionId(1), true);
        controls.pause(false);
        let reply = drafting.draft(ActionId(2), token_context, 3, 0.0).await;
        drafting.answered(ActionId(2));
        assert!(matches!(&reply.event, Event::Draft(tree) if !tree.is_empty()), "{:?}", reply.event);
        assert!(controls.tokens() <= 501 + 2, "{} tokens fed: the prompt once", controls.tokens());
        let lost = "foretell_drafts_lost_total{cause=\"patience\",kind=\"shadow\"} 1";
        assert!(counted(&observer, lost) && counted(&observer, "foretell_drafts_total{kind=\"draft\"} 1"));
        let noise = || Noise { seed: None, choice: 0, sampling: Sampling::default() };
        assert!(service.slot(noise()).await.is_none(), "the session has kept its slot");
        drop(drafting);
        assert!(service.slot(noise()).await.is_some(), "and gives it back with its end");
    }

    #[tokio::test]
    async fn lost_drafts_are_counted_by_cause() {
        let (fake, observer) = (Fake::new(97, 400, 1), Arc::new(Observer::new().unwrap()));
        let controls = fake.controls();
        let service = DrafterService::start_with(Box::new(fake));
        let session =
            || Drafting::new(Some(session_model(&service)), Sampling::default(), true, Arc::clone(&observer));
        let (mut one, mut other) = (session(), session());
        let token_context = TokenContext::new(&[1, 2], &[]);
        assert!(matches!(one.draft(ActionId(1), token_context.clone(), 2, 0.0).await.event, Event::Draft(_)));
        assert_eq!(
            other.draft(ActionId(1), token_context.clone(), 2, 0.0).await.event,
            Event::Fault(Fault::Draft)
        );
        controls.fail(true);
        assert_eq!(
            one.draft(ActionId(2), token_context.clone(), 2, 0.0).await.event,
            Event::Fault(Fault::Draft)
        );
        for (id, late) in [(3, false), (4, true)] {
            drop(one.draft(ActionId(id), token_context.clone(), 2, 0.0));
            one.given_up(ActionId(id), late);
        }
        for line in ["no_slot", "fault", "timeout"] {
            let line = format!("foretell_drafts_lost_total{{cause=\"{line}\",kind=\"draft\"}} 1");
            assert!(counted(&observer, &line), "{line}");
        }
        assert!(counted(&observer, "foretell_drafts_lost_total{cause=\"patience\",kind=\"draft\"} 0"));
    }
}
