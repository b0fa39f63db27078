//! Runs of the engine and the drafter: their start, and the delivery of their outputs.

use super::{Happening, World};
use crate::sim::drafter::Drafter;
use crate::sim::engine::Produced;
use crate::sim::sidecar::{Reported, SignalSpec};
use crate::sim::{at, later};
use foretell_core::session::ActionId;
use foretell_core::units::Tick;
use foretell_core::words::VerifyMethod;

impl World {
    /// Starts the engine and the drafter if they have work. On a shared processor they take turns.
    pub(super) fn go_on(&mut self) {
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

    pub(super) fn start_drafter(&mut self) {
        if let Some(seconds) = self.drafter.as_mut().and_then(Drafter::start) {
            self.record.drafting += seconds;
            self.agenda.put(later(self.now, seconds), Happening::Drafted);
        }
    }

    pub(super) fn start_engine(&mut self) {
        if let Some(ends) = self.engine.start(self.now) {
            self.agenda.put(ends, Happening::Stepped);
        }
    }

    pub(super) fn stepped(&mut self) {
        let mut produced = std::mem::take(&mut self.produced);
        self.engine.step_ended(self.now, &mut produced);
        let front = self.setup.engine.front;
        for Produced { job, number, last, rows } in produced.drain(..) {
            let sent = self.front(front.event + front.row * rows as f64);
            let arrives = later(sent, self.setup.net.rtt / 2.0);
            let Some(&caller) = self.callers.get(&job) else { continue };
            if last {
                self.callers.remove(&job);
            }
            // For a direct call only the first and the last token are recorded.
            let direct = caller.action == ActionId::WORLD;
            if direct {
                self.record.emitted(arrives, 1);
            }
            if !direct || last || number == 0 {
                self.agenda.put(arrives, Happening::Answer(caller, number));
            }
        }
        self.produced = produced;
    }

    /// Gives the API server this many seconds of work; returns the time at which it is done.
    pub(super) fn front(&mut self, seconds: f64) -> Tick {
        self.front = later(self.now.max(self.front), seconds);
        self.front
    }

    pub(super) fn sample(&mut self) {
        let SignalSpec { every, age, until } = self.setup.signal;
        let Some(every) = every else { return };
        // The servers with nothing but fan-out report their slots, as llama-server does.
        let slots = self.setup.permit.rules.methods == [VerifyMethod::FanOut];
        let report = Reported {
            at: self.now,
            running: self.engine.running(),
            waiting: self.engine.waiting(),
            kv: self.engine.kv_usage(),
            limit: slots.then_some(self.setup.engine.shape.sequences as u32),
        };
        if until.is_none_or(|until| self.now < at(until)) {
            self.agenda.put(later(self.now, age), Happening::Report(report));
        }
        self.agenda.put(later(self.now, every), Happening::Sample);
    }
}
