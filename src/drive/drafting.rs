//! Asking the model drafter.
//!
//! A session has one seat at its drafter, taken at the first question and kept until the request ends: a question
//! that is given up leaves the seat with everything that the drafter has read in its cache. There is no time limit
//! here: the session decides how long it waits for an answer. No drafter, no free seat, a failed run: each is a draft
//! fault, and the session rides.

#[cfg(feature = "onnx")]
use std::sync::Arc;

use futures_util::future::{BoxFuture, FutureExt};

#[cfg(feature = "onnx")]
use tokio::sync::OnceCell;

#[cfg(feature = "onnx")]
use crate::drive::drafters::Speaker;
#[cfg(feature = "onnx")]
use crate::observe::{DraftKind, DraftLoss, Observer};
#[cfg(feature = "onnx")]
use crate::openai::Sampling;
use crate::session::{ActionId, Event, Fault};
use crate::words::Past;

#[cfg(feature = "onnx")]
use self::tongue::Tongue;
#[cfg(feature = "onnx")]
use crate::runtime::drafter::{DrafterService, Noise, Order, Seat};
#[cfg(feature = "onnx")]
use crate::units::Dice;

#[cfg(feature = "onnx")]
mod tongue;

/// The result of an asynchronous action.
pub struct Reply {
    /// The event for the session.
    pub event: Event,
    /// Seconds from question to answer, for questions to the model drafter; `None` for calls to the backend.
    pub seconds: Option<f64>,
}

impl Reply {
    /// The result of a call to the backend.
    pub fn event(event: Event) -> Self {
        Self { event, seconds: None }
    }
}

/// What is asked of the drafter.
#[cfg(feature = "onnx")]
#[derive(Clone, Copy)]
pub(super) enum Question {
    /// A chain.
    Draft(Order),
    /// The drafter's own choice at each output place from this one on.
    Shadow { from: usize },
}

/// Who is asked, and how one speaks with it.
#[cfg(feature = "onnx")]
#[derive(Clone)]
pub(super) struct Asked {
    service: DrafterService,
    tongue: Tongue,
    /// It takes only a seat that leaves another one free.
    spare: bool,
}

/// The model drafter of one session.
#[cfg(feature = "onnx")]
pub struct Drafting {
    drafter: Option<Asked>,
    noise: Noise,
    /// The seed of the draws of sampled drafts; `None` where drafts are not sampled.
    draws: Option<u64>,
    /// Taken by the first question that finds a free one; kept until the session ends.
    seat: Arc<OnceCell<Seat>>,
    /// The questions under way.
    asked: Vec<(ActionId, DraftKind)>,
    /// The cause under which a question is counted that misses its deadline.
    late: DraftLoss,
    observer: Arc<Observer>,
}

#[cfg(feature = "onnx")]
pub use super::hearing::Hearing;

/// Without the runtime no models are heard.
#[cfg(not(feature = "onnx"))]
pub enum Hearing {}

#[cfg(not(feature = "onnx"))]
impl Hearing {
    /// Never called.
    pub fn hold(self, _: &[crate::units::TokenId], _: &[crate::units::TokenId]) {
        match self {}
    }
}

/// Without the runtime there is no model drafter.
#[cfg(not(feature = "onnx"))]
pub struct Drafting;

#[cfg(not(feature = "onnx"))]
#[expect(clippy::unused_self, reason = "the shape that the drafting with a runtime has")]
impl Drafting {
    /// The only value: there is no drafter.
    pub fn none() -> Self {
        Self
    }

    /// Always false.
    pub fn shares_noise(&self) -> bool {
        false
    }

    /// Always false.
    pub fn goes_back(&self) -> bool {
        false
    }

    /// Does nothing.
    pub fn sample(&mut self, _: u64) {}

    /// Always [`Fault::Draft`].
    pub fn draft(&mut self, _: ActionId, _: Past, _: usize, _: f64) -> BoxFuture<'static, Reply> {
        async { Reply::event(Event::Fault(Fault::Draft)) }.boxed()
    }

    /// Always [`Fault::Draft`].
    pub fn shadow(&mut self, _: ActionId, _: Past, _: usize) -> BoxFuture<'static, Reply> {
        async { Reply::event(Event::Fault(Fault::Draft)) }.boxed()
    }

    /// Does nothing.
    pub fn answered(&mut self, _: ActionId) {}

    /// Does nothing.
    pub fn given_up(&mut self, _: ActionId, _: bool) {}
}

#[cfg(feature = "onnx")]
impl Drafting {
    /// Questions go to `speaker`; `sampling` carries the seed of the noise that the target samples with. `bounded`:
    /// the operator has set how long a draft may take (`timeouts.draft`).
    pub fn new(speaker: Option<Speaker>, sampling: Sampling, bounded: bool, observer: Arc<Observer>) -> Self {
        let noise = Noise { seed: sampling.seed, choice: 0, sampling };
        let late = if bounded { DraftLoss::Timeout } else { DraftLoss::Patience };
        let drafter = speaker.map(|speaker| Asked::new(&speaker));
        Self { drafter, noise, draws: None, seat: Arc::default(), asked: Vec::new(), late, observer }
    }

    /// Whether the drafter may draw with the target's own noise: not where its drafts are translated as text.
    pub fn shares_noise(&self) -> bool {
        self.drafter.as_ref().is_some_and(|drafter| drafter.tongue.shares_noise())
    }

    /// Whether the drafter may be told what then does not come: what is translated is told as it grows.
    pub fn goes_back(&self) -> bool {
        self.drafter.as_ref().is_some_and(|drafter| matches!(drafter.tongue, Tongue::Same))
    }

    /// From now on drafts are sampled, by draws of this seed, which are used for nothing else.
    pub fn sample(&mut self, seed: u64) {
        self.draws = Some(seed);
    }

    /// A chain of at most `gamma` tokens after the past; it ends where it survives with a smaller chance than `least`.
    pub fn draft(&mut self, id: ActionId, past: Past, gamma: usize, least: f64) -> BoxFuture<'static, Reply> {
        let draws = self.draws.map(|seed| Dice::mix(seed ^ Dice::mix(id.0)));
        self.ask(id, past, Question::Draft(Order { gamma, draws, least }))
    }

    /// The drafter's own choice at each output place from `from` on.
    pub fn shadow(&mut self, id: ActionId, past: Past, from: usize) -> BoxFuture<'static, Reply> {
        self.ask(id, past, Question::Shadow { from })
    }

    /// Forgets a question that has been answered.
    pub fn answered(&mut self, id: ActionId) {
        self.asked.retain(|(asked, _)| *asked != id);
    }

    /// Forgets a question that was cancelled. `late`: its deadline has passed, so it is counted as lost.
    pub fn given_up(&mut self, id: ActionId, late: bool) {
        let asked = self.asked.iter().find(|(asked, _)| *asked == id);
        if let Some((_, kind)) = asked.filter(|_| late) {
            self.observer.metrics().draft_lost(*kind, self.late);
        }
        self.answered(id);
    }

    fn ask(&mut self, id: ActionId, past: Past, question: Question) -> BoxFuture<'static, Reply> {
        let kind = question.kind();
        self.asked.push((id, kind));
        self.observer.metrics().draft_asked(kind);
        let (drafter, seat) = (self.drafter.clone(), Arc::clone(&self.seat));
        let (noise, observer) = (self.noise.clone(), Arc::clone(&self.observer));
        async move {
            let started = tokio::time::Instant::now();
            let answer = match drafter {
                Some(drafter) => drafter.answer(&seat, noise, past, question).await,
                None => Err(DraftLoss::NoSeat),
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

#[cfg(feature = "onnx")]
impl Question {
    const fn kind(self) -> DraftKind {
        match self {
            Self::Draft(Order { draws: Some(_), .. }) => DraftKind::Sampled,
            Self::Draft(_) => DraftKind::Draft,
            Self::Shadow { .. } => DraftKind::Shadow,
        }
    }
}

#[cfg(feature = "onnx")]
impl Asked {
    fn new(speaker: &Speaker) -> Self {
        Self { tongue: Tongue::of(speaker), service: speaker.service.clone(), spare: false }
    }

    /// On a seat that no session wants.
    pub(super) fn to_spare(speaker: &Speaker) -> Self {
        Self { spare: true, ..Self::new(speaker) }
    }

    /// Tells the drafter the past, takes a seat if the session has none, and puts the question.
    pub(super) async fn answer(
        self,
        seat: &OnceCell<Seat>,
        noise: Noise,
        past: Past,
        question: Question,
    ) -> Result<Event, DraftLoss> {
        let told = self.tongue.tell(past, &noise).await.ok_or(DraftLoss::Fault)?;
        let seated = seat.get_or_try_init(|| async {
            let seat = self.service.seat_speaking(told.noise(noise), told.voice(), self.spare);
            seat.await.ok_or(DraftLoss::NoSeat)
        });
        let seat = seated.await?;
        let event = match question {
            Question::Draft(order) => tongue::draft(seat, told, order).await.map(Event::Draft),
            Question::Shadow { from } => self.tongue.shadow(seat, told, from).await.map(Event::Shadow),
        };
        event.map_err(|_| DraftLoss::Fault)
    }
}

#[cfg(all(test, feature = "onnx"))]
mod tests {
    use std::future::poll_fn;
    use std::task::Poll;

    use super::*;
    use crate::policy::part::Speech;
    use crate::runtime::fake::Fake;

    fn speaker(service: &DrafterService) -> Speaker {
        Speaker {
            name: "small".to_owned(),
            service: service.clone(),
            speech: Speech::Same,
            translation: None,
        }
    }

    fn counted(observer: &Observer, line: &str) -> bool {
        observer.metrics().text().lines().any(|found| found == line)
    }

    #[tokio::test]
    async fn a_question_that_is_given_up_leaves_the_seat_and_what_was_read() {
        let fake = Fake::new(97, 2_000, 1);
        let controls = fake.controls();
        let service = DrafterService::start_with(Box::new(fake));
        let observer = Arc::new(Observer::new().unwrap());
        let sampling = Sampling::default();
        let mut drafting = Drafting::new(Some(speaker(&service)), sampling, false, Arc::clone(&observer));
        let past = Past::new(&[1; 500], &[2]);
        controls.hold(true);
        let mut reading = drafting.shadow(ActionId(1), past.clone(), 0);
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
        controls.hold(false);
        let reply = drafting.draft(ActionId(2), past, 3, 0.0).await;
        drafting.answered(ActionId(2));
        assert!(matches!(&reply.event, Event::Draft(tree) if !tree.is_empty()), "{:?}", reply.event);
        assert!(controls.tokens() <= 501 + 2, "{} tokens fed: the prompt once", controls.tokens());
        let lost = "foretell_drafts_lost_total{cause=\"patience\",kind=\"shadow\"} 1";
        assert!(counted(&observer, lost) && counted(&observer, "foretell_drafts_total{kind=\"draft\"} 1"));
        let noise = || Noise { seed: None, choice: 0, sampling: Sampling::default() };
        assert!(service.seat(noise()).await.is_none(), "the session has kept its seat");
        drop(drafting);
        assert!(service.seat(noise()).await.is_some(), "and gives it back with its end");
    }

    #[tokio::test]
    async fn what_is_lost_is_counted_by_its_cause_and_what_is_left_is_not() {
        let (fake, observer) = (Fake::new(97, 400, 1), Arc::new(Observer::new().unwrap()));
        let controls = fake.controls();
        let service = DrafterService::start_with(Box::new(fake));
        let session =
            || Drafting::new(Some(speaker(&service)), Sampling::default(), true, Arc::clone(&observer));
        let (mut one, mut other) = (session(), session());
        let past = Past::new(&[1, 2], &[]);
        assert!(matches!(one.draft(ActionId(1), past.clone(), 2, 0.0).await.event, Event::Draft(_)));
        assert_eq!(other.draft(ActionId(1), past.clone(), 2, 0.0).await.event, Event::Fault(Fault::Draft));
        controls.fail(true);
        assert_eq!(one.draft(ActionId(2), past.clone(), 2, 0.0).await.event, Event::Fault(Fault::Draft));
        for (id, late) in [(3, false), (4, true)] {
            drop(one.draft(ActionId(id), past.clone(), 2, 0.0));
            one.given_up(ActionId(id), late);
        }
        for line in ["no_seat", "fault", "timeout"] {
            let line = format!("foretell_drafts_lost_total{{cause=\"{line}\",kind=\"draft\"}} 1");
            assert!(counted(&observer, &line), "{line}");
        }
        assert!(counted(&observer, "foretell_drafts_lost_total{cause=\"patience\",kind=\"draft\"} 0"));
    }
}
