//! A world around a session: a backend, a drafter, a client, and a driver that does what the session says.

use std::collections::VecDeque;
use std::sync::Arc;

use super::backend::{Ask, Bytes, Manner, Plain, Put, Riding, Vocabulary};
use foretell::control::Control;
use foretell::draft::{Draft, Sampled, Tree};
use foretell::session::accept::{Accept, Judge, Walk};
use foretell::session::{
    Action, ActionId, Ending, Event, Fault, Finish, Limit, RidePlan, Rules, Session, Start, Summary, Tail,
};
use foretell::units::{Tick, TokenId};
use foretell::words::{RideReason, Row, Verdict};

/// One request.
#[derive(Clone, Debug)]
pub struct Case {
    pub temperature: f64,
    pub prompt: Vec<TokenId>,
    pub vocabulary: Vocabulary,
    pub ending: Ending,
    pub max: usize,
    pub rules: Rules,
    pub manner: Manner,
}

impl Case {
    /// Whether this token ends a text.
    pub fn is_end(&self, token: TokenId) -> bool {
        self.ending.eos.contains(&token) && !self.ending.ignore_eos
    }
}

/// What the world does, and what is wrong with it.
pub struct Hooks<'a> {
    /// The backend's sampler.
    pub sample: &'a mut dyn FnMut(&Ask<'_>) -> TokenId,
    /// What the backend tells of a place of a scored prompt.
    pub told: &'a mut dyn FnMut(&[TokenId]) -> Option<Row>,
    /// The law that it tells beside a sample, where a lossy rule asks for it.
    pub law: &'a mut dyn FnMut(&[TokenId]) -> Option<Vec<f64>>,
    /// The model drafter.
    pub draft: &'a mut dyn FnMut(&[TokenId], usize) -> Draft,
    /// What the backend says to a sampled draft.
    pub kept: &'a mut dyn FnMut(&[TokenId], &Sampled) -> Vec<Row>,
    /// Whether leaping is allowed at the n-th token event. The second argument is what the backend has
    /// sampled and the session has not read; an honest world does not look at it.
    pub allow: &'a mut dyn FnMut(usize, Option<TokenId>) -> bool,
    /// Whether the answer to a call that is sent ahead comes before that of the one before it.
    pub overtakes: bool,
    /// Tokens in the next event of a ride.
    pub chunk: &'a mut dyn FnMut() -> usize,
    /// Something that goes wrong now, if anything does.
    pub chaos: &'a mut dyn FnMut() -> Option<Chaos>,
    pub wrong: Wrong,
}

/// What is wrong with a world that selects samples, or with its driver.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wrong {
    /// Redraws a verdict's rows until they match the draft, at most so often.
    pub redraw: usize,
    /// Lets a ride run beside every verify call and takes its token where the verdict rejects at once.
    pub race: bool,
    /// Takes a verdict for a fault that samples this token anywhere.
    pub refuse: Option<TokenId>,
    /// Tokens that the session allows beyond the backend's limit.
    pub slack: usize,
    /// Of several tokens that come at once the last does not reach the client.
    pub lossy: bool,
    /// Where a call is sent ahead, the one before it brings what that assumed.
    pub granted: bool,
    /// A call fails if the one sent behind it does not follow its own draft.
    pub retried: bool,
    /// A call that is sent ahead is answered behind another token than the one that it assumes.
    pub astray: bool,
    /// Does not tell the session how a ride ended with the token that ended it.
    pub tailless: bool,
}

/// What can go wrong.
#[derive(Clone, Copy, Debug)]
pub enum Chaos {
    /// What is under way fails.
    Fault(Fault),
    /// An event of an action long gone comes, with tokens that never were.
    Stale(u64),
    /// What is under way gets an answer that is not its own.
    Misfit,
    /// A verdict misses a row.
    Torn,
    /// Nothing comes for so many seconds.
    Silence(u64),
    /// The ids become doubtful.
    Doubt,
    /// The client leaves.
    Gone,
}

/// What the client got.
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

/// The same, with what was learnt before, and rounds that `judge` judges.
pub fn play_judged(case: &Case, control: Control, judge: impl Walk, hooks: &mut Hooks<'_>) -> Outcome {
    let mut world = World {
        case,
        client: Outcome { text: String::new(), tokens: Vec::new(), summary: Summary::default() },
        past: Vec::new(),
        ride: None,
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
        rules: case.rules.clone(),
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
        if matches!(event, Event::Token { .. } | Event::Verdict(_)) {
            let unread = world.ride.as_ref().and_then(|ride| ride.ahead.front().copied());
            let allowed = (hooks.allow)(world.events, unread);
            world.events += 1;
            session.handle(ActionId::WORLD, Event::Mode((!allowed).then_some(RideReason::Observe)), now);
        }
        session.handle(id, event, now);
    }
    panic!("the session does not end");
}

struct World<'a> {
    case: &'a Case,
    client: Outcome,
    /// Every token that the session has emitted.
    past: Vec<TokenId>,
    ride: Option<Riding>,
    replies: VecDeque<(ActionId, Event)>,
    calls: usize,
    events: usize,
    done: bool,
}

impl World<'_> {
    fn context(&self) -> Vec<TokenId> {
        self.case.prompt.iter().chain(&self.past).copied().collect()
    }

    fn idle(&self) -> bool {
        self.replies.is_empty() && self.ride.is_none()
    }

    /// The action under way.
    fn under_way(&self) -> Option<ActionId> {
        self.replies.front().map(|reply| reply.0).or(self.ride.as_ref().map(|ride| ride.id))
    }

    fn live(&self, id: ActionId) -> bool {
        self.ride.as_ref().is_some_and(|ride| ride.id == id) || self.replies.iter().any(|reply| reply.0 == id)
    }

    fn drop_action(&mut self, id: ActionId) {
        self.replies.retain(|reply| reply.0 != id);
        self.ride = self.ride.take().filter(|ride| ride.id != id);
    }

    fn disturb(&mut self, chaos: Chaos, session: &mut Session<impl Walk>, now: &mut Tick) {
        let junk = || Event::Token { tokens: vec![0, 0, 0], text: "junk".into(), tail: Tail::Open };
        match (chaos, self.under_way()) {
            (Chaos::Fault(fault), Some(id)) => {
                self.drop_action(id);
                session.handle(id, Event::Fault(fault), *now);
            }
            (Chaos::Stale(age), Some(id)) if age < id.0 && !self.live(ActionId(id.0 - age)) => {
                session.handle(ActionId(id.0 - age), junk(), *now);
                session.handle(ActionId(id.0 - age), Event::RideEnded(Finish::Stop), *now);
            }
            (Chaos::Misfit, Some(id)) if self.ride.as_ref().is_some_and(|ride| ride.id == id) => {
                session.handle(id, Event::Verdict(Verdict::default()), *now);
                session.handle(id, Event::Draft(Tree::default().into()), *now);
                session.handle(id, Event::Shadow(vec![Some(1), None]), *now);
            }
            (Chaos::Misfit, Some(id)) => {
                session.handle(id, junk(), *now);
                session.handle(id, Event::RideEnded(Finish::Stop), *now);
            }
            (Chaos::Torn, Some(id)) => {
                if let Some((_, Event::Verdict(verdict))) = self.replies.front_mut() {
                    verdict.rows.pop();
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
            Action::Ride(plan) => {
                let first = plan == RidePlan::First;
                let asked = match plan {
                    RidePlan::First => self.case.max,
                    RidePlan::Continue { max_tokens } => max_tokens as usize,
                };
                if first {
                    self.replies.push_back((id, Event::Prompt(self.case.prompt.clone())));
                }
                let start = self.past.len();
                let mut ride = Riding::new(id, self.context(), start, asked, self.calls);
                ride.plain = first.then(|| Plain::new(self.case));
                self.ride = Some(ride);
                self.calls += 1;
            }
            Action::Draft { gamma, assumed, .. } => {
                let ahead = !assumed.is_empty();
                let draft = (hooks.draft)(&[self.context(), assumed].concat(), gamma);
                let reply = (id, Event::Draft(draft));
                if ahead && hooks.overtakes {
                    self.replies.push_front(reply);
                } else {
                    self.replies.push_back(reply);
                }
            }
            Action::Shadow { .. } => self.replies.push_back((id, Event::Shadow(Vec::new()))),
            Action::Verify(draft, plan, mut assumed) => {
                if let Some(guess) = assumed.last_mut().filter(|_| hooks.wrong.astray) {
                    *guess = (*guess + 1) % 2;
                }
                let (position, call) = (self.past.len() + assumed.len(), self.calls);
                let context = [self.context(), assumed.clone()].concat();
                let put = Put { case: self.case, draft: &draft, plan, context, position, call };
                let answer = put.answer(hooks);
                if !assumed.is_empty() {
                    self.taint(&draft, &assumed, &answer, hooks.wrong);
                }
                if hooks.overtakes && !assumed.is_empty() {
                    self.replies.push_front((id, answer));
                } else {
                    self.replies.push_back((id, answer));
                }
                self.calls += 1;
            }
            Action::Cancel(gone) => self.drop_action(gone),
            Action::Emit(delta) | Action::Passed(delta) => {
                self.client.text.push_str(&delta.text);
                let lost = usize::from(hooks.wrong.lossy && delta.tokens.len() > 1);
                self.client.tokens.extend(&delta.tokens[..delta.tokens.len() - lost]);
                self.past.extend(delta.tokens);
            }
            Action::Finish(summary) => {
                self.client.summary = summary;
                self.done = true;
            }
        }
    }

    /// Lets a call that is sent ahead change what the first call under way is answered.
    fn taint(&mut self, draft: &Tree, assumed: &[TokenId], answer: &Event, wrong: Wrong) {
        let Some((_, first)) = self.replies.iter_mut().find(|reply| matches!(reply.1, Event::Verdict(_)))
        else {
            return;
        };
        if let (Event::Verdict(verdict), true) = (&mut *first, wrong.granted)
            && let Some(row) = verdict.rows.get_mut(assumed.len() - 1)
            && row.sample.is_some()
        {
            row.sample = assumed.last().copied();
        }
        if let (Event::Verdict(verdict), true) = (answer, wrong.retried)
            && let Some(sample) = verdict.rows.first().and_then(|row| row.sample)
            && draft.child(None, sample).is_none()
        {
            *first = Event::Fault(Fault::Verify);
        }
    }

    fn next(&mut self, hooks: &mut Hooks<'_>) -> (ActionId, Event) {
        if let Some(reply) = self.replies.pop_front() {
            return reply;
        }
        let ride = self.ride.as_mut().expect("something is under way");
        let (id, over) = (ride.id, ride.is_over());
        let event = ride.next(self.case, hooks);
        self.ride = self.ride.take().filter(|_| !over);
        (id, event)
    }
}
