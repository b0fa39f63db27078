//! Delivers the engine's outputs to their callers.

use super::{Broken, Caller, Happening, Request, World};
use crate::sim::later;
use crate::sim::record::Served;
use crate::sim::request::CallKind;
use crate::sim::traffic::Arrivals;
use foretell_core::session::{Event, Finish, Parsed, Summary, Tail};

impl World {
    pub(super) fn answered(&mut self, caller: Caller, number: usize) -> Result<(), Broken> {
        let Some(mut request) = self.taken(caller.request) else { return Ok(()) };
        if request.session.is_none() {
            self.direct(caller.request, request, number);
            return Ok(());
        }
        let Some(call) = request.take(caller.action) else {
            // It was cancelled: its remaining outputs are dropped.
            self.put_back(caller.request, request);
            return Ok(());
        };
        let CallKind::Plain { from, tokens, first } = call.kind else {
            self.no_longer_verifying(request.sidecar, &call);
            let CallKind::Verify { result, .. } = call.kind else { return Ok(()) };
            return self.deliver(caller.request, request, caller.action, [Event::VerifyResult(result)]);
        };
        let token = request.script.truth(from + number);
        let last = number + 1 == tokens;
        if !last {
            request.calls.push(call);
        }
        let prompt = (first && number == 0).then(|| Event::Prompt(request.script.prompt.clone()));
        let tail = if last { Tail::Last } else { Tail::Open };
        let token = Event::Token { tokens: vec![token], parsed: Parsed::default(), tail };
        let end = last.then_some(Event::PlainEnded(Finish::Length));
        let events = prompt.into_iter().chain([token]).chain(end);
        self.deliver(caller.request, request, caller.action, events)
    }

    pub(super) fn direct(&mut self, number: usize, mut request: Box<Request>, token: usize) {
        request.first.get_or_insert(self.now);
        request.done = token + 1;
        if request.done == request.script.output.len() {
            self.ended(&request, None);
        } else {
            self.put_back(number, request);
        }
    }

    pub(super) fn ended(&mut self, request: &Request, summary: Option<Summary>) {
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
