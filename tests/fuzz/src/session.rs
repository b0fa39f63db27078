//! The session in a world that sends any event in any order.
//!
//! Input: the rules, then events. For all events: the emitted tokens are the output, nothing
//! follows the end, ids rise, no expired deadline is set again, and only one call at a time decides
//! the next token.

use std::sync::Arc;
use std::time::Duration;

use foretell_core::control::Control;
use foretell_core::draft::{Features, LookupSpec, Ngram, Node, Scope, Shared, Source, Tree, Vote};
use foretell_core::session::Parsed;
use foretell_core::session::{
    Action, ActionId, Decode, Ending, Event, Fault, Finish, Limit, Permission, Resources, Rules, Session,
    Start, Tail, Timeouts,
};
use foretell_core::units::{Tick, TokenId};
use foretell_core::words::{PlainReason, Proposal, Row, VerifyMethod, VerifyResult};

use crate::bytes::Bytes;

/// Maximum size of an input, bytes.
const MAX_LEN: usize = 4 << 10;
/// Tokens of the vocabulary.
const WORDS: u8 = 24;
/// Token that ends a text.
const END: TokenId = 23;
/// Maximum number of output tokens.
const LIMIT: u32 = 200;

/// Token n is the n-th letter.
struct Letters;

impl Decode for Letters {
    fn push(&mut self, token: TokenId) -> String {
        if token == END { String::new() } else { char::from(b'a' + token as u8).to_string() }
    }

    fn flush(&mut self) -> String {
        String::new()
    }

    fn fork(&self) -> Box<dyn Decode> {
        Box::new(Self)
    }
}

/// Runs one input.
pub fn run(input: &[u8]) {
    if input.len() > MAX_LEN {
        return;
    }
    let mut input = Bytes(input);
    let control = Arc::new(Control::new());
    // The second session uses the learnt state of the first.
    for _ in 0..2 {
        let mut world = World::new(&mut input, &control);
        while !world.over && !input.is_empty() {
            world.step(&mut input);
        }
        world.end();
    }
}

/// A session and its observed actions.
struct World {
    session: Session,
    now: Tick,
    /// Requested actions with their kinds.
    asked: Vec<(ActionId, Kind)>,
    emitted: Vec<TokenId>,
    last: u64,
    over: bool,
    vocabulary: TokenId,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Plain,
    Draft(usize),
    Shadow,
    Verify(usize),
}

fn rules(input: &mut Bytes<'_>) -> Rules {
    let methods: &[&[VerifyMethod]] = &[
        &[VerifyMethod::Tree],
        &[VerifyMethod::FanOut],
        &[VerifyMethod::Score, VerifyMethod::FanOut],
        &[],
        &[VerifyMethod::Score],
    ];
    let lookups = [
        vec![LookupSpec::PromptLookup(Ngram { min: 1, max: 4 })],
        vec![LookupSpec::Suffix(Scope::Request), LookupSpec::Head],
        Vec::new(),
    ];
    let reasons = [PlainReason::Client, PlainReason::Observe, PlainReason::ControlGroup];
    let permission = match input.below(6) {
        0..4 => Permission::Speculate,
        4 => Permission::Shadow(input.one(&reasons)),
        _ => Permission::Plain(input.one(&reasons)),
    };
    Rules {
        permission,
        methods: input.one(methods).to_vec(),
        gamma_fixed: input.one(&[Some(2), None, Some(0), Some(8)]),
        gamma_max: input.one(&[32, 1, 4]),
        lookups: lookups[input.below(3)].clone(),
        control_group: input.byte() & 1 > 0,
        segment: input.one(&[None, Some(1), Some(5)]),
        context_max: input.one(&[8192, 12]),
        max_gap: input.one(&[None, Some(Duration::from_millis(30))]),
        ..Rules::default()
    }
}

fn resources(input: &mut Bytes<'_>) -> Resources {
    Resources {
        model: input.one(&[None, Some(0), Some(1)]),
        vocabulary: input.one(&[TokenId::from(WORDS), TokenId::MAX]),
        shared: Shared { proposes: true, ..Shared::default() },
        timeouts: Timeouts {
            draft: input.one(&[None, Some(Duration::from_millis(5))]),
            ..Timeouts::default()
        },
        ..Resources::default()
    }
}

fn ending(input: &mut Bytes<'_>) -> Ending {
    let stops: &[&[&str]] = &[&[], &["ab"], &["c", "cab"], &["aaaa"]];
    Ending {
        stop: input.one(stops).iter().map(|stop| (*stop).to_owned()).collect(),
        include_stop: input.one(&[false, true]),
        stop_token_ids: input.one(&[&[][..], &[5]]).to_vec(),
        eos: vec![END],
        ignore_eos: input.one(&[false, true]),
        ..Ending::default()
    }
}

impl World {
    fn new(input: &mut Bytes<'_>, control: &Arc<Control>) -> Self {
        let (rules, resources) = (rules(input), resources(input));
        let ending = ending(input);
        let vocabulary = resources.vocabulary;
        let start = Start {
            prompt: input.one(&[None, Some(&[0, 1, 2, 0, 1, 2][..])]).map(<[TokenId]>::to_vec),
            limit: Limit {
                max_tokens: input.one(&[Some(LIMIT), Some(12), Some(0), Some(1)]),
                context: input.one(&[None, Some(16)]),
            },
            ending,
            temperature: input.one(&[0.0, 1.0]),
            decode: Box::new(Letters),
            marks: Arc::from(input.one(&[&[][..], &[3]])),
            parser: None,
            unconfirmed: false,
            rules,
            resources,
            sent: None,
            first_token_alone: false,
            seed: 3,
            noise: 2,
        };
        let now = Tick(1_000_000);
        let session = Session::new(start, Arc::clone(control), now);
        let mut world =
            Self { session, now, asked: Vec::new(), emitted: Vec::new(), last: 0, over: false, vocabulary };
        world.poll();
        world
    }

    /// Takes the session's actions.
    fn poll(&mut self) {
        let mut polled = 0;
        while let Some((id, action)) = self.session.poll() {
            polled += 1;
            assert!(polled < 1000, "one event, and no end of actions");
            assert!(!self.over, "{action:?} after the end");
            assert!(id.0 > self.last, "ids rise");
            self.last = id.0;
            match action {
                Action::Plain(_) => {
                    assert!(
                        self.asked.iter().all(|(_, kind)| !matches!(kind, Kind::Plain)),
                        "one plain request at a time"
                    );
                    self.asked.push((id, Kind::Plain));
                }
                Action::Draft { gamma, .. } => self.asked.push((id, Kind::Draft(gamma))),
                Action::Shadow { from } => {
                    assert!(from <= self.emitted.len());
                    self.asked.push((id, Kind::Shadow));
                }
                Action::Verify(draft, ..) => {
                    let is_plain = self.asked.iter().any(|(_, kind)| *kind == Kind::Plain);
                    assert!(
                        !is_plain,
                        "a plain request and a verify request would both decide the next token"
                    );
                    self.asked.push((id, Kind::Verify(draft.len())));
                }
                Action::Cancel(gone) => self.asked.retain(|(id, _)| *id != gone),
                Action::Emit(delta) | Action::Passed(delta) => self.emitted.extend(delta.tokens),
                Action::Finish(summary) => {
                    self.over = true;
                    assert_eq!(summary.output_tokens as usize, self.emitted.len());
                    assert!(summary.accepted <= summary.drafted);
                }
            }
        }
        assert_eq!(self.emitted, self.session.output(), "what was emitted is the output");
        assert!(self.emitted.iter().all(|&token| token < self.vocabulary), "{:?}", self.emitted);
        if self.over {
            assert_eq!(self.session.deadline(), None, "nothing is due after the end");
        }
    }

    fn tell(&mut self, id: ActionId, event: Event) {
        // A finished action gets no more events.
        let ends =
            !matches!(event, Event::Token { .. } | Event::Prompt(_) | Event::Proposal(_) | Event::Doubt);
        if ends {
            self.asked.retain(|(asked, _)| *asked != id);
        }
        let before = self.emitted.clone();
        self.session.handle(id, event, self.now);
        self.poll();
        assert!(self.emitted.starts_with(&before), "emitted tokens stay");
        assert!(self.emitted.len() < 4096);
    }

    fn step(&mut self, input: &mut Bytes<'_>) {
        self.now = Tick(self.now.0 + 1000 * u64::from(input.byte()));
        let choice = input.below(16);
        let known = self.asked.get(input.below(self.asked.len().max(1))).copied();
        let (id, kind) = match (choice, known) {
            (0..13, Some(known)) => known,
            // Events of actions that are finished or never existed.
            (13, _) => (
                ActionId(u64::from(input.byte())),
                input.one(&[Kind::Plain, Kind::Draft(2), Kind::Shadow, Kind::Verify(2)]),
            ),
            _ => return self.world(input),
        };
        let event = match input.below(8) {
            0 => Event::Fault(fault(input)),
            _ => answer(kind, input),
        };
        let tail = matches!(event, Event::Token { tail: Tail::Last | Tail::Stop, .. });
        let is_plain = kind == Kind::Plain && self.asked.contains(&(id, kind));
        self.tell(id, event);
        // `PlainEnded` follows the last event.
        if tail && is_plain && !self.over {
            self.tell(id, Event::PlainEnded(input.one(&[Finish::Stop, Finish::Length])));
        }
    }

    /// Events that answer no action.
    fn world(&mut self, input: &mut Bytes<'_>) {
        match input.below(8) {
            0 => self.tell(ActionId::WORLD, Event::ClientGone),
            1 | 2 => self.tell(ActionId::WORLD, Event::Mode(input.one(&[None, Some(PlainReason::GateLoad)]))),
            _ => {
                if let Some(due) = self.session.deadline() {
                    self.now = self.now.max(due);
                    self.tell(ActionId::WORLD, Event::Timeout);
                    assert!(
                        self.session.deadline().is_none_or(|next| next >= due),
                        "a deadline that was kept comes again"
                    );
                }
            }
        }
    }

    /// The client leaves; nothing may follow.
    fn end(&mut self) {
        self.session.handle(ActionId::WORLD, Event::ClientGone, self.now);
        self.poll();
        assert!(self.over, "a session that its client has left ends");
        self.session.handle(ActionId(1), Event::Prompt(vec![1]), self.now);
        self.session.handle(
            ActionId(1),
            Event::Token { tokens: vec![1], parsed: Parsed::content("b".into()), tail: Tail::Open },
            self.now,
        );
        assert_eq!(self.session.poll(), None);
    }
}

fn fault(input: &mut Bytes<'_>) -> Fault {
    let pause = Fault::RetryAfter(Duration::from_millis(100 * u64::from(input.byte())));
    input.one(&[Fault::Draft, Fault::Verify, Fault::TooLong, pause, Fault::Plain, Fault::Silence])
}

fn token(input: &mut Bytes<'_>) -> TokenId {
    match input.byte() {
        255 => TokenId::MAX,
        byte => TokenId::from(byte % WORDS),
    }
}

fn answer(kind: Kind, input: &mut Bytes<'_>) -> Event {
    match (kind, input.below(8)) {
        (_, 7) => odd(input),
        (Kind::Plain, 0) => Event::Prompt(input.one(&[&[0, 1, 2, 0, 1, 2][..], &[], &[3, 3]]).to_vec()),
        (Kind::Plain, 1) => Event::PlainEnded(input.one(&[Finish::Stop, Finish::Length])),
        (Kind::Plain, 2) => Event::Doubt,
        (Kind::Plain, 3) => Event::Proposal(proposal(input)),
        (Kind::Plain, _) => tokens(input),
        (Kind::Draft(gamma), _) => Event::Draft(tree(gamma, input)),
        (Kind::Shadow, _) => {
            Event::Shadow((0..input.below(5)).map(|_| Some(token(input)).filter(|&t| t != 7)).collect())
        }
        (Kind::Verify(nodes), _) => result(nodes, input),
    }
}

/// An answer of another kind than requested.
fn odd(input: &mut Bytes<'_>) -> Event {
    match input.below(6) {
        0 => Event::Draft(tree(4, input)),
        1 => Event::Shadow(vec![None; input.below(4)]),
        2 => result(input.below(4), input),
        3 => Event::PlainEnded(Finish::Length),
        4 => Event::Doubt,
        _ => Event::Token { tokens: vec![0; input.below(40)], parsed: Parsed::default(), tail: Tail::Open },
    }
}

fn tokens(input: &mut Bytes<'_>) -> Event {
    let tokens: Vec<TokenId> =
        (0..input.one(&[1, 1, 1, 2, 3, 0])).map(|_| TokenId::from(input.byte() % WORDS)).collect();
    let mut letters = Letters;
    let text = match input.below(8) {
        0 => "x".to_owned(),
        _ => tokens.iter().map(|&token| letters.push(token)).collect(),
    };
    let tail = input.one(&[Tail::Open, Tail::Open, Tail::Open, Tail::Open, Tail::Last, Tail::Stop]);
    Event::Token { tokens, parsed: Parsed::content(text), tail }
}

fn proposal(input: &mut Bytes<'_>) -> Proposal {
    let behind = (0..input.below(4)).map(|_| token(input)).collect();
    let share = |input: &mut Bytes<'_>| input.one(&[0.5, 0.9, 0.0, f32::NAN]);
    let step = |input: &mut Bytes<'_>| (0..input.below(3)).map(|_| (token(input), share(input))).collect();
    Proposal { behind, steps: (0..input.below(5)).map(|_| step(input)).collect() }
}

fn tree(most: usize, input: &mut Bytes<'_>) -> Tree {
    let mut tree = Tree::default();
    for _ in 0..input.below(most.min(8) + 1) {
        let parent = tree.len().checked_sub(1 + input.below(2));
        let features = Features { match_len: 1, margin: 0.5, share: 0.5 };
        tree.push(Node::new(token(input), parent, Vote::new(Source::Model, features)));
    }
    tree
}

fn result(nodes: usize, input: &mut Bytes<'_>) -> Event {
    let rows = match input.below(8) {
        0 => input.below(40),
        1 => 0,
        _ => nodes + 1,
    };
    let row = |_| {
        let sample = Some(token(input)).filter(|_| input.below(8) > 0);
        let dist = Row::undrawn(vec![(token(input), 0.75), (2, 0.25)]).dist.filter(|_| sample.is_none());
        Row { sample, dist, ends: input.below(16) == 1, ..Row::default() }
    };
    let rows = (0..rows).map(row).collect();
    let proposal = (input.below(2) == 1).then(|| proposal(input));
    Event::VerifyResult(VerifyResult { rows, proposal, ..VerifyResult::default() })
}
