//! The loop of virtual time: clients, sidecars, drafter and engine on one agenda.
//!
//! The world takes the part of `serving` in a real process: it carries out a session's actions and
//! delivers the resulting events after the simulated time. It makes no decisions for the session.

mod answers;
mod machines;
mod sessions;
mod traffic;

use std::collections::HashMap;
use std::sync::Arc;

use serde::Deserialize;

use super::agenda::Agenda;
use super::drafter::{Drafter, DrafterSpec};
use super::engine::{Engine, EngineSpec, Job, JobId, Produced};
use super::permit::Permit;
use super::record::Record;
use super::request::Request;
use super::sidecar::{Reported, Sidecar, SignalSpec};
use super::traffic::{Arrivals, Stream};
use super::values::seconds;
use super::{at, later};
use foretell_core::control::Control;
use foretell_core::session::ActionId;
use foretell_core::units::{SplitMix64, Tick};

/// Mode in which our requests are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Without Foretell.
    Direct,
    /// By sessions that never speculate.
    Plain,
    /// With the controller's decisions.
    Auto,
    Fixed(usize),
}

/// Network delays between client, Foretell and engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(default = "Net::usual", deny_unknown_fields)]
pub struct Net {
    /// Round-trip seconds between Foretell and the engine; half of it each way.
    #[serde(deserialize_with = "seconds::<_, 0, 10>")]
    pub rtt: f64,
    /// Additional seconds per call, for requests that go through Foretell.
    #[serde(deserialize_with = "seconds::<_, 0, 10>")]
    pub call: f64,
}

impl Net {
    /// Foretell and the engine in one data centre.
    pub const fn usual() -> Self {
        Self { rtt: 0.5e-3, call: 0.3e-3 }
    }
}

/// A complete setting.
#[derive(Clone, Debug)]
pub struct Setup {
    pub engine: EngineSpec,
    /// The model drafter; `None` if there is none.
    pub drafter: Option<DrafterSpec>,
    pub net: Net,
    /// Number of Foretell processes in front of the engine; our requests go to them in turn.
    pub sidecars: usize,
    /// Load reports of the engine.
    pub signal: SignalSpec,
    pub permit: Permit,
    /// Mode in which our requests are served.
    pub mode: Mode,
    pub streams: Vec<Stream>,
    /// No request begins after this second; active ones are served to the end. `None`: only their
    /// number ends it.
    pub until: Option<f64>,
    /// Seconds of an interval of the record.
    pub interval: f64,
    /// Seed of all random numbers.
    pub seed: u64,
}

impl Setup {
    /// One Foretell without a model drafter in front of an engine that reports no load; the
    /// controller decides.
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

/// A session produced a wrong output or none. Not a missed expectation of a table, but a defect of
/// Foretell.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// An emitted token is not the target's.
    #[error("request {request}: tokens from output position {position} on are not the target's text")]
    Inexact {
        request: usize,
        /// Output position of the first token of the piece.
        position: usize,
    },
    /// A session ended before the end of its text.
    #[error("request {request}: ended after {tokens} of {all} tokens")]
    Short {
        request: usize,
        tokens: usize,
        /// Tokens of the text.
        all: usize,
    },
    /// A session waits, and there are no more events.
    #[error("request {0}: waits for nothing")]
    Stuck(usize),
}

/// Events of the simulation.
#[derive(Clone, Copy)]
enum Happening {
    /// The next request of a stream arrives.
    Arrive(usize),
    /// A closed loop changes its number of clients.
    Change(usize),
    /// A call reaches the API server.
    Reach(Job),
    /// A call reaches the engine.
    Submit(Job),
    /// A cancel takes effect at the engine.
    Leave(JobId),
    /// The engine's step ends.
    Stepped,
    /// The drafter's run ends.
    Drafted,
    /// An output of the engine reaches its caller.
    Answer(Caller, usize),
    Deadline(usize),
    Report(Reported),
    Sample,
}

#[derive(Clone, Copy)]
struct Caller {
    request: usize,
    /// [`ActionId::WORLD`] for a direct call.
    action: ActionId,
}

struct Loop {
    rng: SplitMix64,
    sent: usize,
    active: usize,
}

/// State of a running simulation.
pub struct World {
    setup: Setup,
    agenda: Agenda<Happening>,
    now: Tick,
    engine: Engine,
    /// Time until which the API server is busy.
    front: Tick,
    drafter: Option<Drafter>,
    /// With a shared processor: the engine, not the drafter, computed last.
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
    /// A session that emitted a token that is not the target's, or did not finish.
    pub fn play(setup: Setup) -> Result<Record, Broken> {
        Self::play_from(setup, |_| {}).map(|(record, _)| record)
    }

    /// As [`Self::play`], from the state that `begin` gives each Foretell's controller; also
    /// returns that of the first one at the end.
    ///
    /// # Errors
    /// See [`Self::play`].
    pub fn play_from(
        setup: Setup,
        begin: impl Fn(&Control),
    ) -> Result<(Record, Option<Arc<Control>>), Broken> {
        let mut world = Self::new(setup);
        world.sidecars.iter().for_each(|sidecar| begin(&sidecar.control));
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
        let control = world.sidecars.first().map(|sidecar| Arc::clone(&sidecar.control));
        Ok((world.record, control))
    }

    fn new(setup: Setup) -> Self {
        let seed = setup.seed;
        let a_loop = |number: usize| Loop {
            rng: SplitMix64::new(SplitMix64::mix(seed) ^ number as u64),
            sent: 0,
            active: 0,
        };
        Self {
            engine: Engine::new(setup.engine.clone(), seed),
            front: Tick(0),
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

    /// True if every stream has sent all its requests, and every one is answered.
    fn is_over(&self) -> bool {
        let late = self.setup.until.is_some_and(|until| self.now >= at(until));
        let done =
            |(stream, a_loop): (&Stream, &Loop)| stream.requests.is_some_and(|most| a_loop.sent >= most);
        self.under_way == 0 && (late || self.setup.streams.iter().zip(&self.loops).all(done))
    }

    /// True if no request has made progress for an hour of simulated time.
    fn waits_for_nothing(&self) -> bool {
        const PATIENCE: f64 = 3_600.0;
        self.under_way > 0 && self.now > later(self.record.latest(), PATIENCE)
    }

    fn happen(&mut self, happening: Happening) -> Result<(), Broken> {
        match happening {
            Happening::Arrive(stream) => self.arrive(stream)?,
            Happening::Change(stream) => self.change(stream),
            Happening::Reach(job) => {
                let taken = self.front(self.setup.engine.front.request);
                if taken > self.now {
                    self.agenda.put(taken, Happening::Submit(job));
                } else {
                    self.engine.submit(job);
                }
            }
            Happening::Submit(job) => self.engine.submit(job),
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
                self.sidecars.iter_mut().for_each(|sidecar| sidecar.set_load(report));
            }
            Happening::Sample => self.sample(),
        }
        self.go_on();
        Ok(())
    }
}
