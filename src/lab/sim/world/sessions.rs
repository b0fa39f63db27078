//! Sessions: delivers events to them and carries out their actions.

use super::{Broken, Caller, Happening, Request, World};
use crate::sim::drafter::{Drafter, Question};
use crate::sim::engine::{Job, JobId, Verify, Work};
use crate::sim::later;
use crate::sim::request::{Call, CallKind, DrafterTask, PendingAction};
use foretell_core::draft::Tree;
use foretell_core::session::{Action, ActionId, Event, Fault, PlainRequest};
use foretell_core::words::VerifyMethod;

impl World {
    pub(super) fn put_back(&mut self, number: usize, request: Box<Request>) {
        if let Some(position) = self.requests.get_mut(number) {
            *position = Some(request);
        }
    }

    pub(super) fn taken(&mut self, number: usize) -> Option<Box<Request>> {
        self.requests.get_mut(number)?.take()
    }

    /// Delivers an event to a session and carries out its actions.
    pub(super) fn deliver(
        &mut self,
        number: usize,
        mut request: Box<Request>,
        action: ActionId,
        events: impl IntoIterator<Item = Event>,
    ) -> Result<(), Broken> {
        let closed = self.sidecars.get(request.sidecar).and_then(|sidecar| sidecar.closed(self.now));
        if let Some(session) = &mut request.session {
            if closed != request.reported_gate {
                request.reported_gate = closed;
                session.handle(ActionId::WORLD, Event::Mode(closed), self.now);
            }
            for event in events {
                session.handle(action, event, self.now);
            }
        }
        self.carry_out(number, request)
    }

    /// Carries out the actions of a session.
    pub(super) fn carry_out(&mut self, number: usize, mut request: Box<Request>) -> Result<(), Broken> {
        while let Some((id, action)) = request.session.as_mut().and_then(|session| session.poll()) {
            match action {
                Action::Plain(method) => self.plain_request(number, &mut request, id, method),
                Action::Verify(draft, method) => self.verify(number, &mut request, id, &draft, method),
                Action::Draft { gamma, .. } => {
                    let position = request.done;
                    self.submit_draft(number, &mut request, id, DrafterTask::Draft(gamma, position));
                }
                Action::Shadow { from } => {
                    self.submit_draft(number, &mut request, id, DrafterTask::Shadow(from));
                }
                Action::Cancel(gone) => self.cancel(number, &mut request, gone),
                Action::Emit(delta) | Action::Passed(delta) => {
                    let position = request.done;
                    let end = position + delta.tokens.len();
                    if request.script.output.get(position..end) != Some(delta.tokens.as_slice()) {
                        return Err(Broken::Inexact { request: number, position });
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

    /// Moves the agenda's alarm to the session's deadline if that is earlier.
    pub(super) fn set_alarm(&mut self, number: usize, request: &mut Request) {
        let Some(deadline) = request.session.as_ref().and_then(|session| session.deadline()) else { return };
        if request.alarm.is_none_or(|alarm| deadline < alarm) {
            request.alarm = Some(deadline);
            self.agenda.put(deadline.max(self.now), Happening::Deadline(number));
        }
    }

    pub(super) fn deadline(&mut self, number: usize) -> Result<(), Broken> {
        let Some(mut request) = self.taken(number) else { return Ok(()) };
        if request.alarm.is_some_and(|alarm| alarm <= self.now) {
            request.alarm = None;
        }
        let due = request.session.as_ref().and_then(|session| session.deadline());
        if due.is_some_and(|due| due <= self.now) {
            return self.deliver(number, request, ActionId::WORLD, [Event::Timeout]);
        }
        self.set_alarm(number, &mut request);
        self.put_back(number, request);
        Ok(())
    }

    pub(super) fn plain_request(
        &mut self,
        number: usize,
        request: &mut Request,
        action: ActionId,
        method: PlainRequest,
    ) {
        let rest = request.script.output.len() - request.done;
        let (tokens, first) = match method {
            PlainRequest::First => (rest, true),
            PlainRequest::Continue { max_tokens } => (rest.min(max_tokens as usize), false),
        };
        let job = self.call(number, request, action, Work::Stream(tokens), self.setup.net.call);
        let kind = CallKind::Plain { from: request.done, tokens, first };
        request.calls.push(Call { action, job, kind });
    }

    /// Sends a session's draft to the engine.
    fn verify(
        &mut self,
        number: usize,
        request: &mut Request,
        action: ActionId,
        draft: &Tree,
        method: VerifyMethod,
    ) {
        let sequences = method.sequences(draft.len());
        let computed = match method {
            VerifyMethod::FanOut => (0..draft.len()).map(|node| draft.path(node).len()).sum(),
            VerifyMethod::Tree | VerifyMethod::Score => draft.len(),
        };
        let followed = request.script.followed(draft, request.done);
        let rows = if method == VerifyMethod::Score { request.context() + draft.len() } else { 0 };
        let verify = Verify { nodes: draft.len(), sequences, computed, followed, rows };
        let more = self.setup.net.call;
        let job = self.call(number, request, action, Work::Verify(verify), more);
        let result = request.result(draft, method);
        request.calls.push(Call { action, job, kind: CallKind::Verify { result, sequences } });
        if let Some(sidecar) = self.sidecars.get_mut(request.sidecar) {
            sidecar.verifying += sequences;
        }
        self.record.round(self.now, draft.len(), followed);
    }

    /// Sends a call to the engine.
    pub(super) fn call(
        &mut self,
        number: usize,
        request: &Request,
        action: ActionId,
        work: Work,
        more: f64,
    ) -> JobId {
        let id = self.next_job;
        self.next_job += 1;
        self.callers.insert(id, Caller { request: number, action });
        let job = Job { id, text: number as u64, context: request.context(), work };
        self.agenda.put(later(self.now, self.setup.net.rtt / 2.0 + more), Happening::Reach(job));
        id
    }

    pub(super) fn submit_draft(
        &mut self,
        number: usize,
        request: &mut Request,
        action: ActionId,
        task: DrafterTask,
    ) {
        let context = request.context();
        let runs = if let DrafterTask::Draft(gamma, _) = task { gamma } else { 1 };
        // At least the last token is read: its row gives the first choice.
        let unread = context.saturating_sub(request.read).max(1);
        let question = Question { request: number, action, runs, unread };
        let in_slots = self.drafter.as_mut().is_some_and(|drafter| drafter.submit(question));
        request.read = context;
        request.drafter_requests.push(PendingAction { action, task });
        if !in_slots {
            request.drafter_requests.retain(|pending| pending.action != action);
            if let Some(session) = &mut request.session {
                session.handle(action, Event::Fault(Fault::Draft), self.now);
            }
        }
    }

    pub(super) fn cancel(&mut self, number: usize, request: &mut Request, gone: ActionId) {
        if let Some(call) = request.take(gone) {
            let arrives = self.setup.net.rtt / 2.0 + self.setup.engine.cancel;
            self.agenda.put(later(self.now, arrives), Happening::Leave(call.job));
            self.no_longer_verifying(request.sidecar, &call);
        }
        request.drafter_requests.retain(|pending| pending.action != gone);
        if let Some(drafter) = &mut self.drafter {
            drafter.cancel(number, gone);
        }
    }

    pub(super) fn no_longer_verifying(&mut self, sidecar: usize, call: &Call) {
        if let (CallKind::Verify { sequences, .. }, Some(sidecar)) =
            (&call.kind, self.sidecars.get_mut(sidecar))
        {
            sidecar.verifying = sidecar.verifying.saturating_sub(*sequences);
        }
    }

    pub(super) fn drafted(&mut self) -> Result<(), Broken> {
        for question in self.drafter.as_mut().map(Drafter::finish).unwrap_or_default() {
            let Some(mut request) = self.taken(question.request) else { continue };
            let position =
                request.drafter_requests.iter().position(|pending| pending.action == question.action);
            let Some(pending) = position.map(|position| request.drafter_requests.swap_remove(position))
            else {
                self.put_back(question.request, request);
                continue;
            };
            let event = match pending.task {
                DrafterTask::Draft(gamma, position) => Event::Draft(request.script.draft(position, gamma)),
                DrafterTask::Shadow(from) => Event::Shadow(request.script.shadow(from, request.done)),
            };
            self.deliver(question.request, request, question.action, [event])?;
        }
        Ok(())
    }
}
