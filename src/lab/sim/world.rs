//! The loop of virtual time: clients, sidecars, drafter and engine on one agenda.
//!
//! The world does for a session what `drive` does for it in a process: it carries out its actions, and tells it what
//! came of them, after the time that this takes here. It decides nothing for it.

use std::collections::HashMap;

use super::agenda::Agenda;
use super::drafter::{Drafter, DrafterSpec, Question};
use super::engine::{Engine, EngineSpec, Job, JobId, Produced, Verify, Work};
use super::permit::Permit;
use super::record::{Record, Served};
use super::request::{Asked, Call, CallKind, Request, What, session};
use super::sidecar::{Drawn, Reported, Sidecar, SignalSpec};
use super::traffic::{Arrivals, Stream, Whose};
use super::{at, later};
use crate::draft::Tree;
use crate::session::{Action, ActionId, Event, Fault, Finish, Permission, RidePlan, Tail};
use crate::units::{Dice, Tick};
use crate::words::{Plan, RideReason};

/// How our requests are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Without Foretell.
    Direct,
    /// By sessions that never leap.
    Ride,
    /// As the controller decides.
    Auto,
    /// By `gamma.fixed`.
    Fixed(usize),
}

/// The way between client, Foretell and engine.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Net {
    /// Seconds from Foretell to the engine and back; half of it each way.
    pub rtt: f64,
    /// Seconds that a call costs beside it, for requests that go through Foretell.
    pub call: f64,
}

/// A whole setting.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The engine.
    pub engine: EngineSpec,
    /// The model drafter; `None` if there is none.
    pub drafter: Option<DrafterSpec>,
    /// The network.
    pub net: Net,
    /// How many Foretells stand before the engine; our requests go to them in turn.
    pub sidecars: usize,
    /// How the engine reports its load.
    pub signal: SignalSpec,
    /// What sessions may do.
    pub permit: Permit,
    /// How our requests are served.
    pub mode: Mode,
    /// Who asks.
    pub streams: Vec<Stream>,
    /// No request begins after this second; those under way are served to the end. `None`: only their number ends it.
    pub until: Option<f64>,
    /// Seconds of an interval of the record's course of time.
    pub interval: f64,
    /// Seeds everything.
    pub seed: u64,
}

impl Setup {
    /// One Foretell without a model drafter before an engine that reports no load; it decides by itself.
    pub fn plain(engine: EngineSpec, permit: Permit, streams: Vec<Stream>) -> Self {
        Self {
            engine,
            drafter: None,
            net: Net::default(),
            sidecars: 1,
            signal: SignalSpec::ABSENT,
            permit,
            mode: Mode::Auto,
            streams,
            until: None,
            interval: 60.0,
            seed: 1,
        }
    }
}

/// A session said what is not so. No expectation of a table: a defect of Foretell.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// An emitted token is not the target's.
    #[error("request {request}: tokens from output place {place} on are not the target's text")]
    Inexact {
        /// Number of the request.
        request: usize,
        /// Output place of the first token of the piece.
        place: usize,
    },
    /// A session ended without its whole text.
    #[error("request {request}: ended after {tokens} of {all} tokens")]
    Short {
        /// Number of the request.
        request: usize,
        /// Tokens emitted.
        tokens: usize,
        /// Tokens of the text.
        all: usize,
    },
    /// Nothing more can happen, and a session waits.
    #[error("request {0}: waits for nothing")]
    Stuck(usize),
}

/// What can happen.
#[derive(Clone, Copy)]
enum Happening {
    /// A stream has its next request.
    Arrive(usize),
    /// A closed loop changes its number of clients.
    Change(usize),
    /// A call reaches the engine.
    Reach(Job),
    /// A cancel has taken effect there.
    Leave(JobId),
    /// The engine's step ends.
    Stepped,
    /// The drafter's work ends.
    Drafted,
    /// An output of the engine reaches whoever asked for it.
    Answer(Caller, usize),
    Deadline(usize),
    Report(Reported),
    Sample,
}

/// Who made a call.
#[derive(Clone, Copy)]
struct Caller {
    request: usize,
    /// [`ActionId::WORLD`] for a direct call.
    action: ActionId,
}

struct Loop {
    dice: Dice,
    asked: usize,
    /// Requests under way.
    active: usize,
}

/// A fleet under way.
pub struct World {
    setup: Setup,
    agenda: Agenda<Happening>,
    now: Tick,
    engine: Engine,
    drafter: Option<Drafter>,
    /// Of two that share a processor, the engine computed last.
    engine_last: bool,
    sidecars: Vec<Sidecar>,
    loops: Vec<Loop>,
    requests: Vec<Option<Box<Request>>>,
    under_way: usize,
    callers: HashMap<JobId, Caller>,
    next_job: JobId,
    produced: Vec<Produced>,
    record: Record,
}

impl World {
    /// Plays the setting to its end.
    ///
    /// # Errors
    /// A session that emitted a token that is not the target's, or did not come to its end.
    pub fn play(setup: Setup) -> Result<Record, Broken> {
        let mut world = Self::new(setup);
        world.begin();
        while let Some((now, happening)) = world.agenda.take() {
            world.now = now;
            world.happen(happening)?;
            if world.is_over() || world.waits_for_nothing() {
                break;
            }
        }
        if let Some(number) = world.requests.iter().position(Option::is_some) {
            return Err(Broken::Stuck(number));
        }
        world.record.computed = world.engine.computed();
        world.record.ended = world.now;
        Ok(world.record)
    }

    fn new(setup: Setup) -> Self {
        let seed = setup.seed;
        let a_loop =
            |number: usize| Loop { dice: Dice::new(Dice::mix(seed) ^ number as u64), asked: 0, active: 0 };
        Self {
            engine: Engine::new(setup.engine.clone(), seed),
            drafter: setup.drafter.map(Drafter::new),
            engine_last: false,
            sidecars: (0..setup.sidecars.max(1))
                .map(|number| Sidecar::new(setup.permit.clone(), seed ^ number as u64))
                .collect(),
            loops: (0..setup.streams.len()).map(a_loop).collect(),
            agenda: Agenda::default(),
            now: Tick(0),
            requests: Vec::new(),
            under_way: 0,
            callers: HashMap::new(),
            next_job: 0,
            produced: Vec::new(),
            record: Record::new(setup.interval),
            setup,
        }
    }

    fn begin(&mut self) {
        if self.setup.signal.every.is_some() {
            self.agenda.put(Tick(0), Happening::Sample);
        }
        for stream in 0..self.setup.streams.len() {
            match self.setup.streams.get(stream).map(|stream| stream.arrivals.clone()) {
                Some(Arrivals::Closed { clients, .. }) => {
                    for step in clients.0 {
                        self.agenda.put(at(step.0), Happening::Change(stream));
                    }
                }
                Some(Arrivals::Poisson(_)) => self.next_arrival(stream),
                None => {}
            }
        }
    }

    /// Whether every stream has asked all that it will, and everything is answered.
    fn is_over(&self) -> bool {
        let late = self.setup.until.is_some_and(|until| self.now >= at(until));
        let done =
            |(stream, a_loop): (&Stream, &Loop)| stream.requests.is_some_and(|most| a_loop.asked >= most);
        self.under_way == 0 && (late || self.setup.streams.iter().zip(&self.loops).all(done))
    }

    /// Whether nothing has come of any request for longer than one can take.
    fn waits_for_nothing(&self) -> bool {
        const PATIENCE: f64 = 3_600.0;
        self.under_way > 0 && self.now > later(self.record.latest(), PATIENCE)
    }

    fn happen(&mut self, happening: Happening) -> Result<(), Broken> {
        match happening {
            Happening::Arrive(stream) => self.arrive(stream)?,
            Happening::Change(stream) => self.change(stream),
            Happening::Reach(job) => self.engine.submit(job),
            Happening::Leave(job) => {
                self.callers.remove(&job);
                self.engine.cancel(job, self.now);
            }
            Happening::Stepped => self.stepped(),
            Happening::Drafted => self.drafted()?,
            Happening::Answer(caller, number) => self.answered(caller, number)?,
            Happening::Deadline(number) => self.deadline(number)?,
            Happening::Report(report) => {
                self.record.load(self.now, report);
                self.sidecars.iter_mut().for_each(|sidecar| sidecar.hear(report));
            }
            Happening::Sample => self.sample(),
        }
        self.go_on();
        Ok(())
    }

    // ------------------------------------------------------------------------------------------ machines

    /// Lets the engine and the drafter begin what they can. On one processor they take turns.
    fn go_on(&mut self) {
        let shared = self.drafter.as_ref().is_some_and(Drafter::is_shared);
        if !shared {
            self.start_drafter();
            return self.start_engine();
        }
        let busy = self.engine.is_stepping() || self.drafter.as_ref().is_some_and(Drafter::is_running);
        if busy {
            return;
        }
        let drafts = self.drafter.as_ref().is_some_and(Drafter::has_work);
        if drafts && (self.engine_last || !self.engine.has_work()) {
            self.engine_last = false;
            self.start_drafter();
        } else {
            self.engine_last = true;
            self.start_engine();
        }
    }

    fn start_drafter(&mut self) {
        if let Some(seconds) = self.drafter.as_mut().and_then(Drafter::start) {
            self.record.drafting += seconds;
            self.agenda.put(later(self.now, seconds), Happening::Drafted);
        }
    }

    fn start_engine(&mut self) {
        if let Some(ends) = self.engine.start(self.now) {
            self.agenda.put(ends, Happening::Stepped);
        }
    }

    fn stepped(&mut self) {
        self.engine.step_ended(self.now, &mut self.produced);
        let arrives = later(self.now, self.setup.net.rtt / 2.0);
        for Produced { job, number, last } in self.produced.drain(..) {
            let Some(&caller) = self.callers.get(&job) else { continue };
            if last {
                self.callers.remove(&job);
            }
            // Of a direct call nothing but its first and its last token is looked at.
            let direct = caller.action == ActionId::WORLD;
            if direct {
                self.record.emitted(arrives, 1);
            }
            if !direct || last || number == 0 {
                self.agenda.put(arrives, Happening::Answer(caller, number));
            }
        }
    }

    fn sample(&mut self) {
        let SignalSpec { every, age, until } = self.setup.signal;
        let Some(every) = every else { return };
        let report = Reported {
            at: self.now,
            running: self.engine.running(),
            waiting: self.engine.waiting(),
            kv: self.engine.kv_usage(),
        };
        if until.is_none_or(|until| self.now < at(until)) {
            self.agenda.put(later(self.now, age), Happening::Report(report));
        }
        self.agenda.put(later(self.now, every), Happening::Sample);
    }

    // ------------------------------------------------------------------------------------------ traffic

    fn next_arrival(&mut self, number: usize) {
        let Some((stream, a_loop)) = self.setup.streams.get(number).zip(self.loops.get_mut(number)) else {
            return;
        };
        let now = self.now.seconds_since(Tick(0));
        if let Some(next) = stream.next(now, &mut a_loop.dice) {
            self.agenda.put(at(next), Happening::Arrive(number));
        }
    }

    /// Starts the clients that are missing now.
    fn change(&mut self, number: usize) {
        let missing =
            self.wanted(number).saturating_sub(self.loops.get(number).map_or(0, |a_loop| a_loop.active));
        for _ in 0..missing {
            if let Some(a_loop) = self.loops.get_mut(number) {
                a_loop.active += 1;
            }
            self.agenda.put(self.now, Happening::Arrive(number));
        }
    }

    /// Clients that a closed loop has now.
    fn wanted(&self, number: usize) -> usize {
        match self.setup.streams.get(number).map(|stream| &stream.arrivals) {
            Some(Arrivals::Closed { clients, .. }) => clients.at(self.now.seconds_since(Tick(0))) as usize,
            Some(Arrivals::Poisson(_)) | None => 0,
        }
    }

    fn arrive(&mut self, number: usize) -> Result<(), Broken> {
        let Some((stream, a_loop)) = self.setup.streams.get(number).zip(self.loops.get_mut(number)) else {
            return Ok(());
        };
        let late = self.setup.until.is_some_and(|until| self.now >= at(until));
        let over = stream.requests.is_some_and(|most| a_loop.asked >= most);
        let script =
            a_loop.asked.checked_rem(stream.scripts.len()).and_then(|place| stream.scripts.get(place));
        let Some(script) = script.cloned().filter(|_| !late && !over) else { return Ok(()) };
        a_loop.asked += 1;
        let whose = stream.whose;
        if matches!(stream.arrivals, Arrivals::Poisson(_)) {
            self.next_arrival(number);
        }
        let request = Request {
            stream: number,
            sidecar: self.requests.len() % self.sidecars.len().max(1),
            script,
            session: None,
            done: 0,
            calls: Vec::new(),
            asked: Vec::new(),
            read: 0,
            began: self.now,
            first: None,
            alarm: None,
            drawn: Drawn::default(),
            told: None,
        };
        self.under_way += 1;
        self.serve(Box::new(request), whose)
    }

    /// Begins to serve a request.
    fn serve(&mut self, mut request: Box<Request>, whose: Whose) -> Result<(), Broken> {
        let number = self.requests.len();
        self.requests.push(None);
        if whose == Whose::Others || self.setup.mode == Mode::Direct {
            let work = Work::Stream(request.script.output.len());
            self.call(number, &request, ActionId::WORLD, work, 0.0);
            self.put_back(number, request);
            return Ok(());
        }
        let mode = self.setup.mode;
        let Some(sidecar) = self.sidecars.get_mut(request.sidecar) else { return Ok(()) };
        let (mut rules, drawn) = sidecar.rules(self.now);
        rules.model = rules.model && request.script.has_model() && self.drafter.is_some();
        match mode {
            Mode::Direct | Mode::Auto => request.drawn = drawn,
            Mode::Ride => rules.permission = Permission::Ride(RideReason::Policy),
            Mode::Fixed(gamma) => {
                rules.gamma_max = rules.gamma_max.max(gamma);
                rules.gamma_fixed = Some(gamma);
            }
        }
        let seed = self.setup.seed ^ Dice::mix(number as u64);
        request.session = Some(session(&request.script, rules, &sidecar.control, seed, self.now));
        self.carry_out(number, request)
    }

    // ------------------------------------------------------------------------------------------ sessions

    fn put_back(&mut self, number: usize, request: Box<Request>) {
        if let Some(place) = self.requests.get_mut(number) {
            *place = Some(request);
        }
    }

    fn taken(&mut self, number: usize) -> Option<Box<Request>> {
        self.requests.get_mut(number)?.take()
    }

    /// Tells a session what happened, and carries out what it wants then.
    fn tell(
        &mut self,
        number: usize,
        mut request: Box<Request>,
        action: ActionId,
        events: impl IntoIterator<Item = Event>,
    ) -> Result<(), Broken> {
        let closed = self.sidecars.get(request.sidecar).and_then(|sidecar| sidecar.closed(self.now));
        if let Some(session) = &mut request.session {
            if closed != request.told {
                request.told = closed;
                session.handle(ActionId::WORLD, Event::Mode(closed), self.now);
            }
            for event in events {
                session.handle(action, event, self.now);
            }
        }
        self.carry_out(number, request)
    }

    /// Carries out the actions of a session.
    fn carry_out(&mut self, number: usize, mut request: Box<Request>) -> Result<(), Broken> {
        while let Some((id, action)) = request.session.as_mut().and_then(|session| session.poll()) {
            match action {
                Action::Ride(plan) => self.ride(number, &mut request, id, plan),
                Action::Verify(draft, plan) => self.verify(number, &mut request, id, &draft, plan),
                Action::Draft { gamma } => self.ask(number, &mut request, id, What::Draft(gamma)),
                Action::Shadow { from } => self.ask(number, &mut request, id, What::Shadow(from)),
                Action::Cancel(gone) => self.cancel(number, &mut request, gone),
                Action::Emit(delta) => {
                    let place = request.done;
                    let end = place + delta.tokens.len();
                    if request.script.output.get(place..end) != Some(delta.tokens.as_slice()) {
                        return Err(Broken::Inexact { request: number, place });
                    }
                    request.done = end;
                    if !delta.tokens.is_empty() {
                        request.first.get_or_insert(self.now);
                        self.record.emitted(self.now, delta.tokens.len());
                    }
                }
                Action::Finish(summary) => {
                    let all = request.script.output.len();
                    if request.done != all {
                        return Err(Broken::Short { request: number, tokens: request.done, all });
                    }
                    if let Some(drafter) = &mut self.drafter {
                        drafter.leave(number);
                    }
                    self.ended(&request, Some(summary));
                    return Ok(());
                }
            }
        }
        self.set_alarm(number, &mut request);
        self.put_back(number, request);
        Ok(())
    }

    /// Keeps the agenda's alarm no later than the session's deadline.
    fn set_alarm(&mut self, number: usize, request: &mut Request) {
        let Some(deadline) = request.session.as_ref().and_then(|session| session.deadline()) else { return };
        if request.alarm.is_none_or(|alarm| deadline < alarm) {
            request.alarm = Some(deadline);
            self.agenda.put(deadline.max(self.now), Happening::Deadline(number));
        }
    }

    fn deadline(&mut self, number: usize) -> Result<(), Broken> {
        let Some(mut request) = self.taken(number) else { return Ok(()) };
        if request.alarm.is_some_and(|alarm| alarm <= self.now) {
            request.alarm = None;
        }
        let due = request.session.as_ref().and_then(|session| session.deadline());
        if due.is_some_and(|due| due <= self.now) {
            return self.tell(number, request, ActionId::WORLD, [Event::Timeout]);
        }
        self.set_alarm(number, &mut request);
        self.put_back(number, request);
        Ok(())
    }

    fn ride(&mut self, number: usize, request: &mut Request, action: ActionId, plan: RidePlan) {
        let rest = request.script.output.len() - request.done;
        let (tokens, first) = match plan {
            RidePlan::First => (rest, true),
            RidePlan::Continue { max_tokens } => (rest.min(max_tokens as usize), false),
        };
        let job = self.call(number, request, action, Work::Stream(tokens), self.setup.net.call);
        let kind = CallKind::Ride { from: request.done, tokens, first };
        request.calls.push(Call { action, job, kind });
    }

    fn verify(&mut self, number: usize, request: &mut Request, action: ActionId, draft: &Tree, plan: Plan) {
        let sequences = plan.sequences(draft.len());
        let computed = match plan {
            Plan::FanOut => (0..draft.len()).map(|node| draft.path(node).len()).sum(),
            Plan::Tree | Plan::Score | Plan::Native => draft.len(),
        };
        let followed = request.script.followed(draft, request.done);
        let verify = Verify { nodes: draft.len(), sequences, computed, followed };
        let job = self.call(number, request, action, Work::Verify(verify), self.setup.net.call);
        let verdict = request.verdict(draft, plan);
        request.calls.push(Call { action, job, kind: CallKind::Verify { verdict, sequences } });
        if let Some(sidecar) = self.sidecars.get_mut(request.sidecar) {
            sidecar.verifying += sequences;
        }
        self.record.round(self.now, draft.len(), followed);
    }

    /// Sends a call to the engine.
    fn call(&mut self, number: usize, request: &Request, action: ActionId, work: Work, more: f64) -> JobId {
        let id = self.next_job;
        self.next_job += 1;
        self.callers.insert(id, Caller { request: number, action });
        let job = Job { id, text: number as u64, context: request.context(), work };
        self.agenda.put(later(self.now, self.setup.net.rtt / 2.0 + more), Happening::Reach(job));
        id
    }

    fn ask(&mut self, number: usize, request: &mut Request, action: ActionId, what: What) {
        let context = request.context();
        let runs = if let What::Draft(gamma) = what { gamma } else { 1 };
        // At least the last token: its row is the first choice.
        let unread = context.saturating_sub(request.read).max(1);
        let question = Question { request: number, action, runs, unread };
        let seated = self.drafter.as_mut().is_some_and(|drafter| drafter.ask(question));
        request.read = context;
        request.asked.push(Asked { action, what });
        if !seated {
            request.asked.retain(|asked| asked.action != action);
            if let Some(session) = &mut request.session {
                session.handle(action, Event::Fault(Fault::Draft), self.now);
            }
        }
    }

    fn cancel(&mut self, number: usize, request: &mut Request, gone: ActionId) {
        if let Some(call) = request.take(gone) {
            let arrives = self.setup.net.rtt / 2.0 + self.setup.engine.cancel;
            self.agenda.put(later(self.now, arrives), Happening::Leave(call.job));
            self.no_longer_verifying(request.sidecar, &call);
        }
        request.asked.retain(|asked| asked.action != gone);
        if let Some(drafter) = &mut self.drafter {
            drafter.cancel(number, gone);
        }
    }

    fn no_longer_verifying(&mut self, sidecar: usize, call: &Call) {
        if let (CallKind::Verify { sequences, .. }, Some(sidecar)) =
            (&call.kind, self.sidecars.get_mut(sidecar))
        {
            sidecar.verifying = sidecar.verifying.saturating_sub(*sequences);
        }
    }

    fn drafted(&mut self) -> Result<(), Broken> {
        for question in self.drafter.as_mut().map(Drafter::finish).unwrap_or_default() {
            let Some(mut request) = self.taken(question.request) else { continue };
            let place = request.asked.iter().position(|asked| asked.action == question.action);
            let Some(asked) = place.map(|place| request.asked.swap_remove(place)) else {
                self.put_back(question.request, request);
                continue;
            };
            let event = match asked.what {
                What::Draft(gamma) => Event::Draft(request.script.draft(request.done, gamma)),
                What::Shadow(from) => Event::Shadow(request.script.shadow(from, request.done)),
            };
            self.tell(question.request, request, question.action, [event])?;
        }
        Ok(())
    }

    // ------------------------------------------------------------------------------------------ answers

    fn answered(&mut self, caller: Caller, number: usize) -> Result<(), Broken> {
        let Some(mut request) = self.taken(caller.request) else { return Ok(()) };
        if request.session.is_none() {
            self.direct(caller.request, request, number);
            return Ok(());
        }
        let Some(call) = request.take(caller.action) else {
            // It was cancelled: what it still brings is lost.
            self.put_back(caller.request, request);
            return Ok(());
        };
        let CallKind::Ride { from, tokens, first } = call.kind else {
            self.no_longer_verifying(request.sidecar, &call);
            let CallKind::Verify { verdict, .. } = call.kind else { return Ok(()) };
            return self.tell(caller.request, request, caller.action, [Event::Verdict(verdict)]);
        };
        let token = request.script.truth(from + number);
        let last = number + 1 == tokens;
        if !last {
            request.calls.push(call);
        }
        let prompt = (first && number == 0).then(|| Event::Prompt(request.script.prompt.clone()));
        let tail = if last { Tail::Last } else { Tail::Open };
        let token = Event::Token { tokens: vec![token], text: String::new(), tail };
        let end = last.then_some(Event::RideEnded(Finish::Length));
        let events = prompt.into_iter().chain([token]).chain(end);
        self.tell(caller.request, request, caller.action, events)
    }

    /// A token of a request that goes by itself.
    fn direct(&mut self, number: usize, mut request: Box<Request>, token: usize) {
        request.first.get_or_insert(self.now);
        request.done = token + 1;
        if request.done == request.script.output.len() {
            self.ended(&request, None);
        } else {
            self.put_back(number, request);
        }
    }

    fn ended(&mut self, request: &Request, summary: Option<crate::session::Summary>) {
        self.under_way -= 1;
        if let Some((summary, sidecar)) = summary.as_ref().zip(self.sidecars.get_mut(request.sidecar)) {
            sidecar.ended(request.drawn, summary, self.now);
        }
        self.record.add(Served {
            stream: request.stream,
            began: request.began,
            first: request.first.unwrap_or(self.now),
            ended: self.now,
            tokens: request.done,
            summary,
        });
        let wanted = self.wanted(request.stream);
        let Some(stream) = self.setup.streams.get(request.stream) else { return };
        let Arrivals::Closed { think, .. } = stream.arrivals else { return };
        let Some(a_loop) = self.loops.get_mut(request.stream) else { return };
        if a_loop.active <= wanted {
            self.agenda.put(later(self.now, think), Happening::Arrive(request.stream));
        } else {
            a_loop.active -= 1;
        }
    }
}
