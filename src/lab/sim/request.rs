//! One active request: a real session or a direct call, with its outstanding calls.

use std::sync::Arc;

use super::engine::JobId;
use super::sidecar::Drawn;
use super::source::{ASTRAY, Script};
use foretell_core::control::Control;
use foretell_core::draft::Tree;
use foretell_core::session::{ActionId, Decode, Ending, Limit, Resources, Rules, Session, Start, Summary};
use foretell_core::units::{SplitMix64, Tick, TokenId};
use foretell_core::words::{PlainReason, Put, Row, VerifyMethod, VerifyResult};

/// An active request.
pub struct Request {
    /// The stream that it came from.
    pub stream: usize,
    /// The sidecar that serves it.
    pub sidecar: usize,
    /// Its text.
    pub script: Arc<Script>,
    /// `None` for a direct call.
    pub session: Option<Box<Session>>,
    /// Output tokens delivered to the client.
    pub done: usize,
    /// Its calls to the engine.
    pub calls: Vec<Call>,
    pub drafter_requests: Vec<PendingAction>,
    /// Tokens of prompt and output that the drafter has read.
    pub read: usize,
    /// Time at which it began.
    pub began: Tick,
    /// Time of its first token.
    pub first: Option<Tick>,
    /// The earliest deadline that is on the agenda.
    pub alarm: Option<Tick>,
    /// Its group.
    pub drawn: Drawn,
    /// The gate last reported to its session.
    pub reported_gate: Option<PlainReason>,
}

/// A call to the engine.
#[derive(Clone, Debug)]
pub struct Call {
    /// The action that it carries out.
    pub action: ActionId,
    /// Its job id at the engine.
    pub job: JobId,
    pub kind: CallKind,
}

#[derive(Clone, Debug)]
pub enum CallKind {
    /// A plain request for `tokens` tokens from output position `from` on.
    Plain {
        /// Its first output position.
        from: usize,
        tokens: usize,
        /// The client's request.
        first: bool,
    },
    /// A verify request, with its result.
    Verify {
        /// The result that will be returned.
        result: VerifyResult,
        /// Sequences that it takes.
        sequences: usize,
    },
}

/// A request to the drafter.
#[derive(Clone, Copy, Debug)]
pub struct PendingAction {
    /// The action that it carries out.
    pub action: ActionId,
    /// Its kind.
    pub task: DrafterTask,
}

/// Kind of a request to the drafter.
#[derive(Clone, Copy, Debug)]
pub enum DrafterTask {
    /// This number of tokens from an output position on.
    Draft(usize, usize),
    /// Its choices from this output position on.
    Shadow(usize),
}

#[derive(Clone, Copy)]
struct NoText;

impl Decode for NoText {
    fn push(&mut self, _: TokenId) -> String {
        String::new()
    }

    fn flush(&mut self) -> String {
        String::new()
    }

    fn fork(&self) -> Box<dyn Decode> {
        Box::new(*self)
    }
}

pub fn session(
    script: &Script,
    (rules, resources): (Rules, Resources),
    control: &Arc<Control>,
    seed: u64,
    now: Tick,
) -> Box<Session> {
    let start = Start {
        prompt: None,
        limit: Limit { max_tokens: Some(script.output.len() as u32), context: None },
        ending: Ending::default(),
        temperature: script.temperature,
        decode: Box::new(NoText),
        marks: Arc::default(),
        parser: None,
        unconfirmed: false,
        rules,
        resources,
        sent: None,
        first_token_alone: false,
        seed: SplitMix64::mix(seed),
        noise: SplitMix64::mix(seed ^ 1),
    };
    Box::new(Session::new(start, Arc::clone(control), now))
}

impl Request {
    /// Tokens of the context now.
    pub fn context(&self) -> usize {
        self.script.prompt.len() + self.done
    }

    /// The session's summary so far.
    pub fn summary(&self) -> Option<&Summary> {
        self.session.as_ref().map(|session| session.summary())
    }

    /// The target's result for a draft after the output so far.
    pub fn result(&self, draft: &Tree, method: VerifyMethod) -> VerifyResult {
        let (script, done) = (&self.script, self.done);
        // Output position after each node that is on the true path.
        let mut depths: Vec<Option<usize>> = Vec::with_capacity(draft.len());
        let mut rows = vec![Row::of(script.truth(done))];
        for node in draft.nodes() {
            let above = node.parent.map_or(Some(0), |parent| depths.get(parent).copied().flatten());
            let depth =
                above.filter(|&depth| script.truth(done + depth) == node.token).map(|depth| depth + 1);
            depths.push(depth);
            rows.push(Row::of(depth.map_or(ASTRAY, |depth| script.truth(done + depth))));
        }
        let put = Put { method, nodes: draft.len() };
        VerifyResult { rows, put: Some(put), ..VerifyResult::default() }
    }

    /// Takes a call off the list.
    pub fn take(&mut self, action: ActionId) -> Option<Call> {
        let position = self.calls.iter().position(|call| call.action == action)?;
        Some(self.calls.swap_remove(position))
    }
}
