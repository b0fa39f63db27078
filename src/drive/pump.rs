//! The loop of one session: do what it says, tell it what happened.
//!
//! There is no decision here. The pump owns the sockets, the drafter's seat and the client's sink; the
//! session owns every choice.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::future::{AbortHandle, Abortable};
use futures_util::stream::{FuturesUnordered, StreamExt};
use futures_util::{Future, FutureExt};
use serde_json::Value;

use crate::clock::Clock;
use crate::drive::calls::Calls;
use crate::drive::drafting::{Drafting, Reply};
use crate::drive::failure::Failure;
use crate::drive::naming::Naming;
use crate::drive::ride::{Heard, Ride};
use crate::drive::sink::{Gone, Outcome, Sink};
use crate::drive::watcher::Watcher;
use crate::openai::usage::Usage;
use crate::session::{Action, ActionId, Event, Fault, Finish, RidePlan, Session, Summary, Tail};
use crate::words::{Past, RideReason};

/// Events of the world that answer no action.
const WORLD: ActionId = ActionId::WORLD;

/// What happened while the pump waited.
enum Happened {
    Heard(Heard),
    /// An answer; none if it was cancelled.
    Done(ActionId, Option<Reply>),
    ClientGone,
    Deadline,
}

type Pending = FuturesUnordered<BoxFuture<'static, (ActionId, Option<Reply>)>>;

/// One session and everything it moves.
pub struct Pump {
    session: Session,
    calls: Calls,
    drafting: Drafting,
    watcher: Watcher,
    clock: Clock,
    sink: Sink,
    /// What the session has read and emitted, as it is shared with calls and drafter.
    past: Past,
    /// A deadline of the session has just come: what it cancels now was too late.
    late: bool,
    ride: Option<Ride>,
    first: bool,
    ended: Option<Finish>,
    usage: Option<Value>,
    /// Output tokens of the first ride, as the engine counted them.
    counted: Option<u32>,
    pending: Pending,
    aborts: Vec<(ActionId, AbortHandle)>,
    closed: Box<dyn Fn() -> Option<RideReason> + Send + Sync>,
    told: Option<RideReason>,
    /// The last ride brought nothing for too long.
    silent: bool,
    round: u32,
    /// The first ride tells no ids.
    untold: bool,
    naming: Option<Naming>,
    /// The ids of what was heard are being asked for, and the ride is not read meanwhile.
    held: Option<ActionId>,
    /// The prompt's ids were learnt beside the ride, and are yet to be held against the backend's own count.
    uncounted: bool,
}

impl Pump {
    /// A pump whose first ride has begun to answer.
    #[expect(clippy::too_many_arguments, reason = "everything that one session moves")]
    pub fn new(
        session: Session,
        ride: Ride,
        calls: Calls,
        drafting: Drafting,
        watcher: Watcher,
        clock: Clock,
        sink: Sink,
        closed: Box<dyn Fn() -> Option<RideReason> + Send + Sync>,
    ) -> Self {
        let untold = !calls.engine().dialect.quirks().ride_ids;
        Self {
            session,
            untold,
            naming: None,
            held: None,
            uncounted: false,
            calls,
            drafting,
            watcher,
            clock,
            sink,
            past: Past::default(),
            late: false,
            ride: Some(ride),
            first: true,
            ended: None,
            usage: None,
            counted: None,
            pending: FuturesUnordered::new(),
            aborts: Vec::new(),
            closed,
            told: None,
            silent: false,
            round: 0,
        }
    }

    /// Learns the prompt's ids beside the first ride, where that does not tell them.
    pub fn ask_beside(&mut self, ride: ActionId, asked: impl Future<Output = Event> + Send + 'static) {
        self.uncounted = true;
        self.pend(ride, asked.map(Reply::event));
    }

    /// Learns the ids of the first ride, where that does not tell them.
    pub fn name_by(&mut self, naming: Naming) {
        self.naming = Some(naming);
    }

    /// Runs the session to its end. Returns the account, and the bytes of a whole answer.
    pub async fn run(mut self, policy: String) -> (Outcome, Watcher, Result<Option<Vec<u8>>, Gone>) {
        let mut summary = loop {
            match self.settle().await {
                Ok(Some(summary)) => break summary,
                Ok(None) => self.name(),
                Err(Gone) => self.session.handle(WORLD, Event::ClientGone, self.clock.now()),
            }
            let happened = self.wait().await;
            self.tell(happened).await;
        };
        let prompt_tokens = self.session.prompt().len() as u64;
        let usage = self.usage.as_ref().and_then(Usage::from_backend);
        let usage = usage.unwrap_or_else(|| Usage::new(prompt_tokens));
        if self.first && !summary.speculated {
            // Tokens that the stream did not tell are counted by the engine.
            let told = self.usage.as_ref().and_then(|usage| usage.get("completion_tokens")?.as_u64());
            let told = told.and_then(|count| u32::try_from(count).ok()).max(self.counted);
            summary.output_tokens = summary.output_tokens.max(told.unwrap_or(0));
        }
        let stopped = self.session.stopped().cloned();
        let broken = if self.silent { Failure::WentSilent } else { Failure::BrokeOff };
        let outcome = Outcome { summary, stopped, policy, usage, broken };
        let answer = self.sink.finish(&outcome).await;
        (outcome, self.watcher, answer)
    }

    /// Does everything that the session has to say now.
    async fn settle(&mut self) -> Result<Option<Summary>, Gone> {
        while let Some((id, action)) = self.session.poll() {
            match action {
                Action::Ride(plan) => self.start_ride(id, plan),
                Action::Draft { gamma } => self.start_draft(id, gamma),
                Action::Shadow { from } => self.start_shadow(id, from),
                Action::Verify(draft, plan) => {
                    self.round += 1;
                    self.watcher.verifying(&draft, self.clock.now());
                    let past = self.past.for_call(self.session.prompt(), self.session.output());
                    let call = self.calls.clone().verify(past, draft, plan, self.round);
                    self.pend(id, call.map(Reply::event));
                }
                Action::Cancel(target) => self.cancel(target),
                // Ids that were learnt after their text.
                Action::Emit(delta) if self.untold && delta.text.is_empty() => {}
                Action::Emit(delta) => {
                    self.watcher.emitted(self.clock.now());
                    self.sink.emit(delta).await?;
                }
                Action::Finish(summary) => return Ok(Some(summary)),
            }
        }
        self.late = false;
        self.sink.release().await?;
        Ok(None)
    }

    /// Asks for the ids of what the first ride has brought, if that is due.
    fn name(&mut self) {
        let Some(ride) = self.ride.as_ref().filter(|_| self.first && self.held.is_none()) else { return };
        let id = ride.id;
        let unknown = self.session.prompt().is_empty();
        let Some(naming) = self.naming.as_mut().filter(|_| !unknown) else { return };
        let counts = self.uncounted && self.calls.engine().dialect.quirks().prompt_ids_need_count;
        if counts || !naming.is_due() {
            return;
        }
        let asked =
            naming.ask(self.calls.clone(), self.past.for_call(self.session.prompt(), self.session.output()));
        self.held = Some(id);
        self.pend(id, asked.map(Reply::event));
    }

    /// Holds the prompt's ids against the backend's own count, once both are there: a token that the backend
    /// puts in front would be another prompt.
    fn count_prompt(&mut self, ride: ActionId) {
        let told = self.usage.as_ref().and_then(|usage| usage.get("prompt_tokens")?.as_u64());
        let known = self.session.prompt().len() as u64;
        if let (true, Some(told), 1..) = (self.uncounted, told, known) {
            self.uncounted = false;
            if told != known {
                self.naming = None;
                self.session.handle(ride, Event::Doubt, self.clock.now());
            }
        }
    }

    fn start_ride(&mut self, id: ActionId, plan: RidePlan) {
        let RidePlan::Continue { max_tokens } = plan else { return };
        self.round += 1;
        self.first = false;
        self.silent = false;
        self.ended = None;
        let past = self.past.for_call(self.session.prompt(), self.session.output());
        let opening = self.calls.clone().ride(past, max_tokens, self.round).boxed();
        self.ride = Some(Ride::opening(id, Arc::clone(self.calls.engine()), max_tokens, opening));
    }

    fn start_draft(&mut self, id: ActionId, gamma: usize) {
        self.past.follow(self.session.prompt(), self.session.output());
        let reply = self.drafting.draft(id, self.past.clone(), gamma);
        self.pend(id, reply);
    }

    fn start_shadow(&mut self, id: ActionId, from: usize) {
        self.past.follow(self.session.prompt(), self.session.output());
        let reply = self.drafting.shadow(id, self.past.clone(), from);
        self.pend(id, reply);
    }

    fn pend(&mut self, id: ActionId, reply: impl Future<Output = Reply> + Send + 'static) {
        let (handle, registration) = AbortHandle::new_pair();
        self.aborts.push((id, handle));
        let reply = Abortable::new(reply, registration).map(move |reply| (id, reply.ok()));
        self.pending.push(reply.boxed());
    }

    /// Dropping a call closes its connection; dropping a question to the drafter frees its thread.
    fn cancel(&mut self, target: ActionId) {
        self.drafting.given_up(target, self.late);
        if self.ride.as_ref().is_some_and(|ride| ride.id == target) {
            self.ride = None;
        }
        for (_, handle) in self.aborts.iter().filter(|(id, _)| *id == target) {
            handle.abort();
        }
    }

    async fn wait(&mut self) -> Happened {
        let deadline = self.session.deadline().map(|deadline| self.clock.until(deadline));
        let ride = async {
            match &mut self.ride {
                Some(ride) if self.held.is_none() => ride.next().await,
                _ => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = self.sink.gone() => Happened::ClientGone,
            Some((id, reply)) = self.pending.next() => Happened::Done(id, reply),
            heard = ride => Happened::Heard(heard),
            () = sleep(deadline) => Happened::Deadline,
        }
    }

    async fn tell(&mut self, happened: Happened) {
        let now = self.clock.now();
        let closed = (self.closed)();
        if closed != self.told {
            self.told = closed;
            self.session.handle(WORLD, Event::Mode(closed), now);
        }
        match happened {
            Happened::Heard(heard) => self.heard(heard).await,
            Happened::Done(id, reply) => {
                self.aborts.retain(|(pending, _)| *pending != id);
                self.held.take_if(|held| *held == id);
                let Some(reply) = reply else { return };
                self.drafting.answered(id);
                self.watcher.answered(&reply, now);
                self.session.handle(id, reply.event, now);
                self.count_prompt(id);
                self.watcher.counted(self.session.summary());
            }
            Happened::ClientGone => self.session.handle(WORLD, Event::ClientGone, now),
            Happened::Deadline => {
                self.late = true;
                self.session.handle(WORLD, Event::Timeout, now);
            }
        }
    }

    async fn heard(&mut self, heard: Heard) {
        let Some(id) = self.ride.as_ref().map(|ride| ride.id) else { return };
        let now = self.clock.now();
        match heard {
            Heard::Chunk(event, chunk) => {
                if self.first && self.passed_on(&event, &chunk).await.is_err() {
                    return self.session.handle(WORLD, Event::ClientGone, now);
                }
                self.first_only(id, &chunk);
                if !chunk.tokens.is_empty() || !chunk.text.is_empty() {
                    let ended = chunk.finish.as_deref().map(finish);
                    let tail = match (&ended, chunk.ends) {
                        (None, _) => Tail::Open,
                        (Some(_), true) => Tail::Stop,
                        (Some(_), false) => Tail::Last,
                    };
                    if tail != Tail::Open {
                        self.read_usage().await;
                    }
                    self.session.handle(
                        id,
                        Event::Token { tokens: chunk.tokens, text: chunk.text, tail },
                        now,
                    );
                    self.end_if(id, ended);
                } else if let Some(reason) = chunk.finish.as_deref() {
                    let ended = finish(reason);
                    self.read_usage().await;
                    self.end_if(id, Some(ended));
                }
            }
            Heard::End => self.session.handle(id, Event::Fault(Fault::Ride), now),
            Heard::Broken(fault) => {
                self.silent = fault == Fault::Silence;
                self.session.handle(id, Event::Fault(fault), now);
            }
        }
    }

    /// What of an event of the first ride is not the session's.
    async fn passed_on(&mut self, event: &Value, chunk: &crate::dialect::Chunk) -> Result<(), Gone> {
        self.sink.first(event).await?;
        if let Some(after) = &chunk.after {
            self.sink.hear_end(after);
        }
        if chunk.more.is_empty() { Ok(()) } else { self.sink.other(&chunk.more).await }
    }

    /// What only the first ride tells: ids of the prompt, usage, and whether ids can be trusted.
    fn first_only(&mut self, id: ActionId, chunk: &crate::dialect::Chunk) {
        if !self.first {
            return;
        }
        let now = self.clock.now();
        if let Some(prompt) = &chunk.prompt {
            self.session.handle(id, Event::Prompt(prompt.clone()), now);
        }
        let known = self.session.prompt().len();
        let other = chunk.prompt_count.is_some_and(|count| known > 0 && count as usize != known);
        if chunk.doubtful || other {
            self.session.handle(id, Event::Doubt, now);
        }
        self.counted = chunk.count.or(self.counted);
        if chunk.usage.is_some() {
            self.usage.clone_from(&chunk.usage);
            self.count_prompt(id);
        }
        if let Some(naming) = &mut self.naming {
            naming.hear(&chunk.text);
        }
    }

    fn end_if(&mut self, id: ActionId, ended: Option<Result<Finish, Fault>>) {
        let now = self.clock.now();
        match ended {
            Some(Ok(finish)) => self.session.handle(id, Event::RideEnded(finish), now),
            Some(Err(fault)) => self.session.handle(id, Event::Fault(fault), now),
            None => {}
        }
    }

    /// After `finish_reason` a first ride still brings the backend's own usage.
    async fn read_usage(&mut self) {
        if !self.first {
            return;
        }
        let (Some(ride), sink) = (&mut self.ride, &mut self.sink) else { return };
        let rest = async {
            while let Heard::Chunk(event, chunk) = ride.next().await {
                sink.hear_end(&event);
                if chunk.usage.is_some() {
                    return chunk.usage;
                }
            }
            None
        };
        // The end of the text is not worth waiting long for numbers that can be counted here.
        if let Ok(Some(usage)) = tokio::time::timeout(Duration::from_secs(1), rest).await {
            self.usage = Some(usage);
        }
    }
}

fn finish(reason: &str) -> Result<Finish, Fault> {
    match reason {
        "stop" => Ok(Finish::Stop),
        "length" => Ok(Finish::Length),
        _ => Err(Fault::Ride),
    }
}

async fn sleep(duration: Option<Duration>) {
    match duration {
        Some(duration) => tokio::time::sleep(duration).await,
        None => std::future::pending().await,
    }
}
