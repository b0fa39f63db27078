//! One request under way: a real session, or a direct call, with what it has outstanding.

use std::sync::Arc;

use super::engine::JobId;
use super::sidecar::Drawn;
use super::source::{ASTRAY, Script};
use crate::control::Control;
use crate::draft::Tree;
use crate::session::{ActionId, Decode, Ending, Limit, Rules, Session, Start, Summary};
use crate::units::{Dice, Tick, TokenId};
use crate::words::{Plan, Put, RideReason, Row, Verdict};

/// A request under way.
pub struct Request {
    /// The stream that it came from.
    pub stream: usize,
    /// The sidecar that serves it.
    pub sidecar: usize,
    /// Its text.
    pub script: Arc<Script>,
    /// `None` for a direct call.
    pub session: Option<Box<Session>>,
    /// Output tokens that the client has.
    pub done: usize,
    /// Its calls to the engine.
    pub calls: Vec<Call>,
    /// Its questions to the drafter.
    pub asked: Vec<Asked>,
    /// Tokens of prompt and output that the drafter has read.
    pub read: usize,
    /// When it began.
    pub began: Tick,
    /// When its first token came.
    pub first: Option<Tick>,
    /// The earliest deadline that is on the agenda.
    pub alarm: Option<Tick>,
    /// Its group.
    pub drawn: Drawn,
    /// The gate that its session was told of last.
    pub told: Option<RideReason>,
}

/// A call to the engine.
#[derive(Clone, Debug)]
pub struct Call {
    /// The action that it carries out.
    pub action: ActionId,
    /// Its name at the engine.
    pub job: JobId,
    /// What it is.
    pub kind: CallKind,
}

/// What a call is.
#[derive(Clone, Debug)]
pub enum CallKind {
    /// A ride from output place `from` on, for `tokens`.
    Ride {
        /// Its first output place.
        from: usize,
        /// Tokens asked for.
        tokens: usize,
        /// The client's own request.
        first: bool,
    },
    /// A verify call, with its answer.
    Verify {
        /// What will be answered.
        verdict: Verdict,
        /// Sequences that it takes.
        sequences: usize,
    },
}

/// A question to the drafter.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    /// The action that it carries out.
    pub action: ActionId,
    /// What is asked.
    pub what: What,
}

/// What is asked of the drafter.
#[derive(Clone, Copy, Debug)]
pub enum What {
    /// So many tokens, from an output place on; `None`: behind what is not the true text.
    Draft(usize, Option<usize>),
    /// Its choices from this output place on.
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

/// A session that begins.
pub fn session(script: &Script, rules: Rules, control: &Arc<Control>, seed: u64, now: Tick) -> Box<Session> {
    let start = Start {
        prompt: None,
        limit: Limit { max_tokens: Some(script.output.len() as u32), context: None },
        ending: Ending::default(),
        temperature: script.temperature,
        decode: Box::new(NoText),
        marks: Arc::default(),
        rules,
        seed: Dice::mix(seed),
        noise: Dice::mix(seed ^ 1),
    };
    Box::new(Session::new(start, Arc::clone(control), now))
}

impl Request {
    /// Tokens of the context now.
    pub fn context(&self) -> usize {
        self.script.prompt.len() + self.done
    }

    /// How it has gone so far.
    pub fn summary(&self) -> Option<&Summary> {
        self.session.as_ref().map(|session| session.summary())
    }

    /// The target's answer to a draft after this output place; `None`: after something that is not the true text.
    pub fn verdict(&self, draft: &Tree, plan: Plan, place: Option<usize>) -> Verdict {
        let (script, done) = (&self.script, place.unwrap_or(self.script.output.len()));
        // Output places behind each node that is on the true path.
        let mut depths: Vec<Option<usize>> = Vec::with_capacity(draft.len());
        let mut rows = vec![Row::of(script.truth(done))];
        for node in draft.nodes() {
            let above = node.parent.map_or(Some(0), |parent| depths.get(parent).copied().flatten());
            let depth =
                above.filter(|&depth| script.truth(done + depth) == node.token).map(|depth| depth + 1);
            depths.push(depth);
            rows.push(Row::of(depth.map_or(ASTRAY, |depth| script.truth(done + depth))));
        }
        let put = Put { plan, nodes: draft.len() };
        Verdict { rows, put: Some(put), ..Verdict::default() }
    }

    /// Takes a call off the list.
    pub fn take(&mut self, action: ActionId) -> Option<Call> {
        let place = self.calls.iter().position(|call| call.action == action)?;
        Some(self.calls.swap_remove(place))
    }
}
