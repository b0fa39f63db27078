//! Starts requests on arrival, and the next one of a client when one ends.

use super::{Broken, Happening, Mode, Request, World};
use crate::sim::at;
use crate::sim::engine::Work;
use crate::sim::request::session;
use crate::sim::sidecar::Drawn;
use crate::sim::traffic::{Arrivals, Owner};
use foretell_core::session::{ActionId, Permission, Resources};
use foretell_core::units::{SplitMix64, Tick};
use foretell_core::words::PlainReason;

impl World {
    pub(super) fn next_arrival(&mut self, number: usize) {
        let Some((stream, a_loop)) = self.setup.streams.get(number).zip(self.loops.get_mut(number)) else {
            return;
        };
        let now = self.now.seconds_since(Tick(0));
        if let Some(next) = stream.next(now, &mut a_loop.rng) {
            self.agenda.put(at(next), Happening::Arrive(number));
        }
    }

    /// Starts clients until the loop has its number.
    pub(super) fn change(&mut self, number: usize) {
        let missing =
            self.wanted(number).saturating_sub(self.loops.get(number).map_or(0, |a_loop| a_loop.active));
        for _ in 0..missing {
            if let Some(a_loop) = self.loops.get_mut(number) {
                a_loop.active += 1;
            }
            self.agenda.put(self.now, Happening::Arrive(number));
        }
    }

    /// Number of clients of a closed loop at this moment.
    pub(super) fn wanted(&self, number: usize) -> usize {
        match self.setup.streams.get(number).map(|stream| &stream.arrivals) {
            Some(Arrivals::Closed { clients, .. }) => clients.at(self.now.seconds_since(Tick(0))) as usize,
            Some(Arrivals::Poisson(_)) | None => 0,
        }
    }

    pub(super) fn arrive(&mut self, number: usize) -> Result<(), Broken> {
        let Some((stream, a_loop)) = self.setup.streams.get(number).zip(self.loops.get_mut(number)) else {
            return Ok(());
        };
        let late = self.setup.until.is_some_and(|until| self.now >= at(until));
        let over = stream.requests.is_some_and(|most| a_loop.sent >= most);
        let script =
            a_loop.sent.checked_rem(stream.scripts.len()).and_then(|position| stream.scripts.get(position));
        let Some(script) = script.cloned() else { return Ok(()) };
        if late || over {
            return Ok(());
        }
        a_loop.sent += 1;
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
            drafter_requests: Vec::new(),
            read: 0,
            began: self.now,
            first: None,
            alarm: None,
            drawn: Drawn::default(),
            reported_gate: None,
        };
        self.under_way += 1;
        self.serve(Box::new(request), whose)
    }

    pub(super) fn serve(&mut self, mut request: Box<Request>, whose: Owner) -> Result<(), Broken> {
        let number = self.requests.len();
        self.requests.push(None);
        if whose == Owner::Others || self.setup.mode == Mode::Direct {
            let work = Work::Stream(request.script.output.len());
            self.call(number, &request, ActionId::WORLD, work, 0.0);
            self.put_back(number, request);
            return Ok(());
        }
        let mode = self.setup.mode;
        let Some(sidecar) = self.sidecars.get_mut(request.sidecar) else { return Ok(()) };
        let (mut rules, drawn) = sidecar.rules(self.now);
        let drafts_by_model = sidecar.has_model() && request.script.has_model() && self.drafter.is_some();
        let resources = Resources { model: drafts_by_model.then_some(0), ..Resources::default() };
        match mode {
            Mode::Direct | Mode::Auto => request.drawn = drawn,
            Mode::Plain => rules.permission = Permission::Plain(PlainReason::Policy),
            Mode::Fixed(gamma) => {
                rules.gamma_max = rules.gamma_max.max(gamma);
                rules.gamma_fixed = Some(gamma);
            }
        }
        let seed = self.setup.seed ^ SplitMix64::mix(number as u64);
        request.session =
            Some(session(&request.script, (rules, resources), &sidecar.control, seed, self.now));
        self.carry_out(number, request)
    }
}
