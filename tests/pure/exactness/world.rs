//! A world around a session: a backend, a drafter, a client, and a runner that carries out the
//! session's actions.

use std::collections::VecDeque;
use std::sync::Arc;

use super::backend::{Ask, Bytes, Manner, Plain, PlainDecoding, Put, Vocabulary, proposed};
use foretell_core::control::Control;
use foretell_core::draft::Tree;
use foretell_core::session::Parsed;
use foretell_core::session::accept::{Accept, Judge, Walk};
use foretell_core::session::{
    Action, ActionId, Ending, Event, Fault, Finish, Limit, PlainRequest, Resources, Rules, Session, Start,
    Summary, Tail,
};
use foretell_core::units::{Tick, TokenId};
use foretell_core::words::{PlainReason, Row, VerifyResult};

/// One request.
#[derive(Clone, Debug)]
pub struct Case {
    pub temperature: f64,
    pub prompt: Vec<TokenId>,
    pub vocabulary: Vocabulary,
    pub ending: Ending,
    pub max: usize,
    pub rules: Rules,
    pub resources: Resources,
    pub manner: Manner,
}

impl Case {
    /// True if this token ends a text.
    pub fn is_end(&self, token: TokenId) -> bool {
        self.ending.eos.contains(&token) && !self.ending.ignore_eos
    }
}

/// Behaviour of the world, and its faults.
pub struct Hooks<'a> {
    /// The backend's sampler.
    pub sample: &'a mut dyn FnMut(&Ask<'_>) -> TokenId,
    /// The backend's row for a position of a scored prompt.
    pub told: &'a mut dyn FnMut(&[TokenId]) -> Option<Row>,
    /// The distribution that it returns with a sample, if a lossy rule requests it.
    pub distribution: &'a mut dyn FnMut(&[TokenId]) -> Option<Vec<f64>>,
    /// The model drafter.
    pub draft: &'a mut dyn FnMut(&[TokenId], usize) -> Tree,
    /// True if speculation is allowed at the n-th token event. The second argument is a token that
    /// the backend has sampled and the session has not read; a correct world ignores it.
    pub allow: &'a mut dyn FnMut(usize, Option<TokenId>) -> bool,
    /// Number of tokens in the next event of a plain request.
    pub chunk: &'a mut dyn FnMut() -> usize,
    /// A fault at this moment, if any.
    pub chaos: &'a mut dyn FnMut() -> Option<Chaos>,
    pub wrong: Wrong,
}

/// Bugs of a world that selects samples, or of its runner.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wrong {
    /// Maximum number of redraws of a verification result's rows until they match the draft.
    pub redraw: usize,
    /// Runs a plain request concurrently with every verify request and takes its token if the first
    /// draft token is rejected.
    pub race: bool,
    /// Treats a verification result as a fault if it samples this token anywhere.
    pub refuse: Option<TokenId>,
    /// Tokens that the session allows beyond the backend's limit.
    pub slack: usize,
    /// Of several tokens in one event the last does not reach the client.
    pub lossy: bool,
    /// Does not report the end of a plain request with the token that ended it.
    pub tailless: bool,
}

/// Faults during a session.
#[derive(Clone, Copy, Debug)]
pub enum Chaos {
    /// The current action fails.
    Fault(Fault),
    /// An event of a past action arrives, with invented tokens.
    Stale(u64),
    /// The current action gets an answer of another kind.
    Misfit,
    /// A verification result lacks a row.
    Torn,
    /// No event for this number of seconds.
    Silence(u64),
    /// The token ids become untrusted.
    Doubt,
    /// The client leaves.
    Gone,
}

/// Output that the client received.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    pub text: String,
    pub tokens: Vec<TokenId>,
    pub summary: Summary,
}

/// Plays a request through the session.
pub fn play(case: &Case, hooks: &mut Hooks<'_>) -> Outcome {
    play_judged(case, Control::new(), Judge::new(Accept::default(), 7), hooks)
}

/// As [`play`], with earlier learnt state, and rounds that `judge` verifies.
pub fn play_judged(case: &Case, control: Control, judge: impl Walk, hooks: &mut Hooks<'_>) -> Outcome {
    let mut world = World {
        case,
        client: Outcome { text: String::new(), tokens: Vec::new(), summary: Summary::default() },
        token_context: Vec::new(),
        plain_request: None,
        replies: VecDeque::new(),
        calls: 0,
        events: 0,
        done: false,
    };
    let eos = if case.manner.ends { Vec::new() } else { case.ending.eos.clone() };
    let start = Start {
        prompt: None,
        limit: Limit { max_tokens: Some((case.max + hooks.wrong.slack) as u32), context: None },
        ending: Ending { eos, ..case.ending.clone() },
        temperature: case.temperature,
        decode: Box::new(Bytes { vocabulary: case.vocabulary.clone(), held: Vec::new() }),
        marks: Arc::default(),
        parser: None,
        unconfirmed: false,
        rules: case.rules.clone(),
        resources: case.resources.clone(),
        sent: None,
        first_token_alone: case.manner.first_token_alone,
        seed: 1,
        noise: 2,
    };
    let mut now = Tick(1);
    let mut session = Session::judged_by(judge, start, Arc::new(control), now);
    for _ in 0..100_000 {
        while let Some((id, action)) = session.poll() {
            world.act(id, action, hooks);
        }
        if world.done {
            return world.client;
        }
        now = Tick(now.0 + 1000);
        if let Some(chaos) = (hooks.chaos)() {
            world.disturb(chaos, &mut session, &mut now);
            continue;
        }
        if world.idle() {
            now = session.deadline().expect("something is under way or a deadline is set").max(now);
            session.handle(ActionId::WORLD, Event::Timeout, now);
            continue;
        }
        let (id, event) = world.next(hooks);
        if matches!(event, Event::Token { .. } | Event::VerifyResult(_)) {
            let unread =
                world.plain_request.as_ref().and_then(|plain_request| plain_request.ahead.front().copied());
            let allowed = (hooks.allow)(world.events, unread);
            world.events += 1;
            session.handle(ActionId::WORLD, Event::Mode((!allowed).then_some(PlainReason::Observe)), now);
        }
        if let (Event::Token { tokens, tail: Tail::Open, .. }, true) =
            (&event, case.resources.shared.proposes)
        {
            let proposal = proposed(&world.context(), tokens.clone(), case.vocabulary.len());
            if let Some(proposal) = proposal {
                session.handle(id, Event::Proposal(proposal), now);
            }
        }
        session.handle(id, event, now);
    }
    panic!("the session does not end");
}

struct World<'a> {
    case: &'a Case,
    client: Outcome,
    /// Every token that the session has emitted.
    token_context: Vec<TokenId>,
    plain_request: Option<PlainDecoding>,
    replies: VecDeque<(ActionId, Event)>,
    calls: usize,
    events: usize,
    done: bool,
}

impl World<'_> {
    fn context(&self) -> Vec<TokenId> {
        self.case.prompt.iter().chain(&self.token_context).copied().collect()
    }

    fn idle(&self) -> bool {
        self.replies.is_empty() && self.plain_request.is_none()
    }

    /// The current action.
    fn under_way(&self) -> Option<ActionId> {
        self.replies
            .front()
            .map(|reply| reply.0)
            .or(self.plain_request.as_ref().map(|plain_request| plain_request.id))
    }

    fn live(&self, id: ActionId) -> bool {
        self.plain_request.as_ref().is_some_and(|plain_request| plain_request.id == id)
            || self.replies.iter().any(|reply| reply.0 == id)
    }

    fn drop_action(&mut self, id: ActionId) {
        self.replies.retain(|reply| reply.0 != id);
        self.plain_request = self.plain_request.take().filter(|plain_request| plain_request.id != id);
    }

    fn disturb(&mut self, chaos: Chaos, session: &mut Session<impl Walk>, now: &mut Tick) {
        let junk = || Event::Token {
            tokens: vec![0, 0, 0],
            parsed: Parsed::content("junk".into()),
            tail: Tail::Open,
        };
        match (chaos, self.under_way()) {
            (Chaos::Fault(fault), Some(id)) => {
                self.drop_action(id);
                session.handle(id, Event::Fault(fault), *now);
            }
            (Chaos::Stale(age), Some(id)) if age < id.0 && !self.live(ActionId(id.0 - age)) => {
                session.handle(ActionId(id.0 - age), junk(), *now);
                session.handle(ActionId(id.0 - age), Event::PlainEnded(Finish::Stop), *now);
            }
            (Chaos::Misfit, Some(id))
                if self.plain_request.as_ref().is_some_and(|plain_request| plain_request.id == id) =>
            {
                session.handle(id, Event::VerifyResult(VerifyResult::default()), *now);
                session.handle(id, Event::Draft(Tree::default()), *now);
                session.handle(id, Event::Shadow(vec![Some(1), None]), *now);
            }
            (Chaos::Misfit, Some(id)) => {
                session.handle(id, junk(), *now);
                session.handle(id, Event::PlainEnded(Finish::Stop), *now);
            }
            (Chaos::Torn, Some(id)) => {
                if let Some((_, Event::VerifyResult(result))) = self.replies.front_mut() {
                    result.rows.pop();
                    let (_, event) = self.replies.pop_front().expect("there");
                    session.handle(id, event, *now);
                }
            }
            (Chaos::Silence(seconds), _) => {
                *now = Tick(now.0 + seconds * 1_000_000);
                session.handle(ActionId::WORLD, Event::Timeout, *now);
            }
            (Chaos::Doubt, Some(id)) => session.handle(id, Event::Doubt, *now),
            (Chaos::Gone, _) => session.handle(ActionId::WORLD, Event::ClientGone, *now),
            _ => {}
        }
    }

    fn act(&mut self, id: ActionId, action: Action, hooks: &mut Hooks<'_>) {
        match action {
            Action::Plain(method) => {
                let first = method == PlainRequest::First;
                let asked = match method {
                    PlainRequest::First => self.case.max,
                    PlainRequest::Continue { max_tokens } => max_tokens as usize,
                };
                if first {
                    self.replies.push_back((id, Event::Prompt(self.case.prompt.clone())));
                }
                let start = self.token_context.len();
                let mut plain_request = PlainDecoding::new(id, self.context(), start, asked, self.calls);
                plain_request.alone = first && self.case.manner.first_token_alone;
                plain_request.plain = (first && !plain_request.alone).then(|| Plain::new(self.case));
                self.plain_request = Some(plain_request);
                self.calls += 1;
            }
            Action::Draft { gamma, .. } => {
                let draft = (hooks.draft)(&self.context(), gamma);
                self.replies.push_back((id, Event::Draft(draft)));
            }
            Action::Shadow { .. } => self.replies.push_back((id, Event::Shadow(Vec::new()))),
            Action::Verify(draft, method) => {
                let (position, call) = (self.token_context.len(), self.calls);
                let put =
                    Put { case: self.case, draft: &draft, method, context: self.context(), position, call };
                self.replies.push_back((id, put.answer(hooks)));
                self.calls += 1;
            }
            Action::Cancel(gone) => self.drop_action(gone),
            Action::Emit(delta) | Action::Passed(delta) => {
                self.client.text.push_str(&delta.parsed.text);
                let lost = usize::from(hooks.wrong.lossy && delta.tokens.len() > 1);
                self.client.tokens.extend(&delta.tokens[..delta.tokens.len() - lost]);
                self.token_context.extend(delta.tokens);
            }
            Action::Finish(summary) => {
                self.client.summary = summary;
                self.done = true;
            }
        }
    }

    fn next(&mut self, hooks: &mut Hooks<'_>) -> (ActionId, Event) {
        if let Some(reply) = self.replies.pop_front() {
            return reply;
        }
        let plain_request = self.plain_request.as_mut().expect("something is under way");
        let (id, over) = (plain_request.id, plain_request.is_over());
        let event = plain_request.next(self.case, hooks);
        let over = over || (plain_request.alone && !plain_request.is_over());
        self.plain_request = self.plain_request.take().filter(|_| !over);
        (id, event)
    }
}
