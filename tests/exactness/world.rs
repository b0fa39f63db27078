//! A world around a session: a backend that samples, a driver that does what the session says, and the plain
//! run to compare with. The reference for text and ending is written independently of the session's own.

use std::collections::VecDeque;
use std::sync::Arc;

use foretell::control::Control;
use foretell::draft::Tree;
use foretell::session::{
    Action, ActionId, Decode, Ending, Event, Fault, Finish, Limit, RidePlan, Rules, Session, Start, Summary,
    Tail,
};
use foretell::units::{Tick, TokenId};
use foretell::words::{RideReason, Row, Verdict};

/// Bytes of every token.
pub type Vocabulary = Arc<Vec<Vec<u8>>>;

/// Incremental decoding by bytes.
pub struct Bytes {
    pub vocabulary: Vocabulary,
    pub held: Vec<u8>,
}

impl Decode for Bytes {
    fn push(&mut self, token: TokenId) -> String {
        self.held.extend(&self.vocabulary[token as usize]);
        let certain = certain_len(&self.held);
        let rest = self.held.split_off(certain);

        String::from_utf8_lossy(&std::mem::replace(&mut self.held, rest)).into_owned()
    }

    fn flush(&mut self) -> String {
        let held = std::mem::take(&mut self.held);
        if held.is_empty() { String::new() } else { "\u{FFFD}".into() }
    }
}

/// Bytes before an unfinished character at the end.
fn certain_len(bytes: &[u8]) -> usize {
    for back in 1..=3.min(bytes.len()) {
        let at = bytes.len() - back;
        let need = match bytes[at] {
            0xC0..=0xDF => 2,
            0xE0..=0xEF => 3,
            0xF0..=0xFF => 4,
            0x80..=0xBF => continue,
            _ => 1,
        };
        return if need > back { at } else { bytes.len() };
    }
    bytes.len()
}

/// The backend's own way to end and to cut an output, from all tokens at once.
#[derive(Clone)]
pub struct Plain {
    pub vocabulary: Vocabulary,
    pub ending: Ending,
    pub max: usize,
    pub tokens: Vec<TokenId>,
    pub sent: usize,
    pub finish: Option<Finish>,
}

impl Plain {
    pub fn new(case: &Case) -> Self {
        Self {
            vocabulary: case.vocabulary.clone(),
            ending: case.ending.clone(),
            max: case.max,
            tokens: Vec::new(),
            sent: 0,
            finish: None,
        }
    }

    /// Takes a token; returns the text that goes out with it.
    pub fn push(&mut self, token: TokenId) -> String {
        assert!(self.finish.is_none(), "a backend does not go on after the end");
        self.tokens.push(token);
        let ended = self.ending.eos.contains(&token) && !self.ending.ignore_eos;
        let shown = self.tokens.len() - usize::from(ended);
        let bytes: Vec<u8> =
            self.tokens[..shown].iter().flat_map(|&token| self.vocabulary[token as usize].clone()).collect();
        let certain = certain_len(&bytes);
        let mut text = String::from_utf8_lossy(&bytes[..certain]).into_owned();
        let stop = self.ending.stop.iter().find_map(|stop| text.find(stop.as_str()));
        if let Some(at) = stop {
            text.truncate(at);
            self.finish = Some(Finish::Stop);
        } else if ended {
            self.finish = Some(Finish::Stop);
        } else if self.tokens.len() >= self.max {
            self.finish = Some(Finish::Length);
        }
        if self.finish.is_some() && stop.is_none() && certain < bytes.len() {
            text.push('\u{FFFD}');
        }
        let hold = self.ending.stop.iter().map(|stop| stop.chars().count() - 1).max().unwrap_or(0);
        let out = if self.finish.is_some() {
            text.len()
        } else {
            text.char_indices()
                .rev()
                .nth(hold.wrapping_sub(1))
                .map_or(if hold == 0 { text.len() } else { 0 }, |(at, _)| at)
        };
        let piece = text.get(self.sent..out).unwrap_or_default().to_owned();
        self.sent = self.sent.max(out);
        piece
    }
}

/// One request.
#[derive(Clone, Debug)]
pub struct Case {
    pub prompt: Vec<TokenId>,
    pub vocabulary: Vocabulary,
    pub ending: Ending,
    pub max: usize,
    pub rules: Rules,
}

/// Where a sample is asked for.
pub struct Ask<'a> {
    /// Prompt and output before the place.
    pub context: &'a [TokenId],
    /// Output index of the place.
    pub position: usize,
    /// Backend calls before this one.
    pub call: usize,
    /// Places between the call's own context and this one.
    pub offset: usize,
}

/// What the world does, and what is wrong with it.
pub struct Hooks<'a> {
    /// The backend's sampler.
    pub sample: &'a mut dyn FnMut(&Ask<'_>) -> TokenId,
    /// The model drafter.
    pub draft: &'a mut dyn FnMut(&[TokenId], usize) -> Tree,
    /// Whether leaping is allowed at the n-th token event. The second argument is what the backend has
    /// sampled and the session has not read; an honest world does not look at it.
    pub allow: &'a mut dyn FnMut(usize, Option<TokenId>) -> bool,
    /// Tokens in the next event of a ride.
    pub chunk: &'a mut dyn FnMut() -> usize,
    /// Something that goes wrong now, if anything does.
    pub chaos: &'a mut dyn FnMut() -> Option<Chaos>,
    /// Redraws a verdict's rows until they match the draft, at most so often.
    pub redraw: usize,
    /// Lets a ride run beside every verify call and takes its token where the verdict rejects at once.
    pub race: bool,
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

struct Riding {
    id: ActionId,
    plain: Option<Plain>,
    context: Vec<TokenId>,
    start: usize,
    asked: usize,
    brought: usize,
    ahead: VecDeque<TokenId>,
    ended: Option<Finish>,
    call: usize,
}

/// The plain run of a case.
pub fn plain(case: &Case, sample: &mut dyn FnMut(&Ask<'_>) -> TokenId) -> (String, Vec<TokenId>, Finish) {
    let mut run = Plain::new(case);
    let mut text = String::new();
    let mut context = case.prompt.clone();
    loop {
        let position = run.tokens.len();
        let token = sample(&Ask { context: &context, position, call: 0, offset: position });
        context.push(token);
        text.push_str(&run.push(token));
        if let Some(finish) = run.finish {
            return (text, run.tokens, finish);
        }
    }
}

/// Plays a request through the session.
pub fn play(case: &Case, hooks: &mut Hooks<'_>) -> Outcome {
    play_knowing(case, Control::new(), hooks)
}

/// The same, with what was learnt before.
pub fn play_knowing(case: &Case, control: Control, hooks: &mut Hooks<'_>) -> Outcome {
    let mut world = World {
        case,
        client: Outcome { text: String::new(), tokens: Vec::new(), summary: empty() },
        ride: None,
        replies: VecDeque::new(),
        calls: 0,
        events: 0,
        done: false,
    };
    let start = Start {
        prompt: None,
        limit: Limit { max_tokens: Some(case.max as u32), context: None },
        ending: case.ending.clone(),
        temperature: 0.0,
        decode: Box::new(Bytes { vocabulary: case.vocabulary.clone(), held: Vec::new() }),
        marks: Arc::default(),
        rules: case.rules.clone(),
        seed: 1,
        noise: 2,
    };
    let mut now = Tick(1);
    let mut session = Session::new(start, Arc::new(control), now);
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

fn empty() -> Summary {
    Summary {
        finish: None,
        speculated: false,
        reason: None,
        rounds: 0,
        drafted: 0,
        accepted: 0,
        output_tokens: 0,
    }
}

struct World<'a> {
    case: &'a Case,
    client: Outcome,
    ride: Option<Riding>,
    replies: VecDeque<(ActionId, Event)>,
    calls: usize,
    events: usize,
    done: bool,
}

impl World<'_> {
    fn context(&self) -> Vec<TokenId> {
        self.case.prompt.iter().chain(&self.client.tokens).copied().collect()
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

    fn disturb(&mut self, chaos: Chaos, session: &mut Session, now: &mut Tick) {
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
                session.handle(id, Event::Draft(Tree::default()), *now);
                session.handle(id, Event::Shadow(vec![1, 2]), *now);
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
                self.ride = Some(Riding {
                    id,
                    plain: first.then(|| Plain::new(self.case)),
                    context: self.context(),
                    start: self.client.tokens.len(),
                    asked,
                    brought: 0,
                    ahead: VecDeque::new(),
                    ended: None,
                    call: self.calls,
                });
                self.calls += 1;
            }
            Action::Draft { gamma } => {
                let draft = (hooks.draft)(&self.context(), gamma);
                self.replies.push_back((id, Event::Draft(draft)));
            }
            Action::Shadow { .. } => self.replies.push_back((id, Event::Shadow(Vec::new()))),
            Action::Verify(draft, _) => {
                let verdict = self.verify(&draft, hooks);
                self.replies.push_back((id, Event::Verdict(verdict)));
                self.calls += 1;
            }
            Action::Cancel(gone) => self.drop_action(gone),
            Action::Emit(delta) => {
                self.client.text.push_str(&delta.text);
                self.client.tokens.extend(delta.tokens);
            }
            Action::Finish(summary) => {
                self.client.summary = summary;
                self.done = true;
            }
        }
    }

    fn verify(&mut self, draft: &Tree, hooks: &mut Hooks<'_>) -> Verdict {
        let context = self.context();
        let position = self.client.tokens.len();
        let mut rows = Vec::new();
        for place in std::iter::once(None).chain((0..draft.len()).map(Some)) {
            let path = place.map(|node| draft.path(node)).unwrap_or_default();
            let full: Vec<TokenId> = context.iter().chain(&path).copied().collect();
            let offset = path.len();
            let ask = Ask { context: &full, position: position + offset, call: self.calls, offset };
            let mut sample = (hooks.sample)(&ask);
            for _ in 0..hooks.redraw {
                if draft.child(place, sample).is_none() {
                    sample = (hooks.sample)(&ask);
                }
            }
            if hooks.race && place.is_none() && draft.child(place, sample).is_none() {
                sample = (hooks.sample)(&ask);
            }
            rows.push(Row::of(sample));
        }
        Verdict { rows, ..Verdict::default() }
    }

    fn next(&mut self, hooks: &mut Hooks<'_>) -> (ActionId, Event) {
        if let Some(reply) = self.replies.pop_front() {
            return reply;
        }
        let ride = self.ride.as_mut().expect("something is under way");
        let id = ride.id;
        if let Some(finish) = ride.ended {
            self.ride = None;
            return (id, Event::RideEnded(finish));
        }
        let mut tokens = Vec::new();
        let mut text = String::new();
        let count = (hooks.chunk)().max(1);
        while tokens.len() < count && ride.ended.is_none() {
            let token = match ride.ahead.pop_front() {
                Some(token) => token,
                None => ride.sample(hooks),
            };
            tokens.push(token);
            ride.brought += 1;
            match &mut ride.plain {
                Some(plain) => {
                    text.push_str(&plain.push(token));
                    ride.ended = plain.finish;
                }
                None if self.case.ending.eos.contains(&token) && !self.case.ending.ignore_eos => {
                    ride.ended = Some(Finish::Stop);
                }
                None if ride.brought >= ride.asked => ride.ended = Some(Finish::Length),
                None => {}
            }
        }
        // The backend is a token ahead of what it has told.
        if ride.ended.is_none() {
            let ahead = ride.sample(hooks);
            ride.ahead.push_back(ahead);
        }
        (id, Event::Token { tokens, text, tail: Tail::Open })
    }
}

impl Riding {
    fn sample(&mut self, hooks: &mut Hooks<'_>) -> TokenId {
        let offset = self.brought + self.ahead.len();
        let ask = Ask { context: &self.context, position: self.start + offset, call: self.call, offset };
        let token = (hooks.sample)(&ask);
        self.context.push(token);
        token
    }
}
