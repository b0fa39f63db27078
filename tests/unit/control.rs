//! The controller in virtual time: workloads with expected ranges of speed, leaping and cost.
//!
//! The simulated backend does not share the controller's cost model: its verify cost is a step function, its
//! pace jitters with a heavy tail, tokens come in bursts, and whatever the drafter computes is taken from
//! the backend's own time, as on a machine where both run on the same cores.

use std::collections::HashMap;
use std::sync::Arc;

use foretell::control::Control;
use foretell::draft::{Features, LookupSpec, Ngram, Source, Tree};
use foretell::session::{
    Action, ActionId, Decode, Ending, Event, Finish, Limit, RidePlan, Rules, Session, Start, Summary, Tail,
};
use foretell::units::{Dice, Tick, TokenId};
use foretell::words::{Plan, RideReason, Row, Verdict};
use rstest::rstest;

struct Random(u64);

impl Random {
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(1);
        (Dice::mix(self.0) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Word frequencies of real text: a few tokens make up most of it.
    fn zipf(&mut self) -> TokenId {
        (8000.0_f64.powf(self.unit()) - 1.0) as TokenId
    }
}

/// What the text is like.
#[derive(Clone, Copy, Debug)]
enum Text {
    /// The prompt again, with an edit now and then.
    Rewrite { edits: f64 },
    /// Nothing that was there before, but with common words.
    Fresh,
    /// A rewrite that turns into fresh text after so many tokens.
    Turns { after: usize },
}

/// Times in milliseconds.
#[derive(Clone, Copy, Debug)]
struct Machine {
    /// One target step for one token.
    token: f64,
    /// What four more tokens in a step cost.
    four: f64,
    /// One call over HTTP.
    call: f64,
    /// One token of the model drafter.
    draft: f64,
    /// Share of its tokens that are right; `None` without a model drafter.
    right: Option<f64>,
}

/// The inflated target of the bench.
const SLOW: Machine = Machine { token: 15.5, four: 2.8, call: 0.6, draft: 0.3, right: None };
/// The target as it is.
const FAST: Machine = Machine { token: 1.8, four: 0.5, call: 0.6, draft: 0.3, right: None };

struct NoText;

impl Decode for NoText {
    fn push(&mut self, _: TokenId) -> String {
        String::new()
    }

    fn flush(&mut self) -> String {
        String::new()
    }
}

struct Request {
    prompt: Vec<TokenId>,
    output: Vec<TokenId>,
}

fn request(text: Text, number: u64, len: usize) -> Request {
    let mut random = Random(Dice::mix(number));
    let prompt: Vec<TokenId> = (0..300).map(|_| random.zipf()).collect();
    let output = (0..len)
        .map(|index| {
            let copied = prompt[index % prompt.len()];
            let fresh = random.zipf();
            match text {
                Text::Rewrite { edits } if random.unit() >= edits => copied,
                Text::Turns { after } if index < after => copied,
                Text::Rewrite { .. } | Text::Fresh | Text::Turns { .. } => fresh,
            }
        })
        .collect();
    Request { prompt, output }
}

struct Simulation<'a> {
    machine: Machine,
    request: &'a Request,
    random: Random,
    done: usize,
    /// When things happen: (milliseconds, id, event).
    agenda: Vec<(f64, ActionId, Event)>,
    now: f64,
    ride: Option<ActionId>,
    /// Tokens of the ride that are on the agenda or delivered.
    ridden: usize,
    /// The backend is busy until then.
    busy: f64,
    summary: Option<Summary>,
    shadow_ms: f64,
    /// The model drafter has read the prompt.
    warm: bool,
}

impl Simulation<'_> {
    fn jitter(&mut self) -> f64 {
        let tail = if self.random.unit() < 0.01 { 3.0 } else { 1.0 };
        tail * (0.95 + 0.1 * self.random.unit())
    }

    fn truth(&self, index: usize) -> TokenId {
        self.request.output[index.min(self.request.output.len() - 1)]
    }

    /// The model drafter's choice at an output place, given that the text before it is the real one.
    fn choice(&self, index: usize) -> TokenId {
        let right = self.machine.right.unwrap_or(0.0);
        let hash = Dice::mix(index as u64 ^ Dice::mix(u64::from(self.request.prompt[0])));
        if ((hash % 1000) as f64) < right * 1000.0 { self.truth(index) } else { 100_000 }
    }

    /// Milliseconds until the model drafter knows the context.
    fn warm_up(&mut self) -> f64 {
        if std::mem::replace(&mut self.warm, true) { 0.0 } else { self.machine.draft * 20.0 }
    }

    fn ride_token(&mut self) {
        let Some(id) = self.ride else { return };
        if self.ridden == self.request.output.len() {
            let at = self.busy + 0.01;
            self.agenda.push((at, id, Event::RideEnded(Finish::Length)));
            return;
        }
        let took = self.machine.token * self.jitter();
        self.busy = self.busy.max(self.now) + took;
        let token = self.truth(self.ridden);
        self.ridden += 1;
        self.agenda.push((
            self.busy,
            id,
            Event::Token { tokens: vec![token], text: String::new(), tail: Tail::Open },
        ));
    }

    fn act(&mut self, id: ActionId, action: Action) {
        let call = self.machine.call;
        match action {
            Action::Ride(plan) => {
                self.ride = Some(id);
                self.ridden = self.done;
                self.busy = self.busy.max(self.now) + call;
                if plan == RidePlan::First {
                    let prompt = self.request.prompt.clone();
                    self.agenda.push((self.busy, id, Event::Prompt(prompt)));
                    self.busy += 5.0 * self.machine.token;
                }
                self.ride_token();
            }
            Action::Draft { gamma } => {
                let mut tokens: Vec<TokenId> = Vec::new();
                for index in 0..gamma {
                    let lost = tokens.last() == Some(&100_000);
                    tokens.push(if lost { 100_000 } else { self.choice(self.done + index) });
                }
                let draft = Tree::chain(&tokens, Source::Model, Features::default());
                let cost = self.machine.draft * gamma as f64 + self.warm_up();
                self.busy = self.busy.max(self.now) + cost;
                self.agenda.push((self.busy, id, Event::Draft(draft)));
            }
            Action::Shadow { from } => {
                let choices = (from..=self.done).map(|index| self.choice(index)).collect();
                let cost = self.machine.draft * 2.0 + self.warm_up();
                self.shadow_ms += cost;
                self.busy += cost;
                self.agenda.push((self.now + cost, id, Event::Shadow(choices)));
            }
            Action::Verify(draft, _) => {
                let rows = std::iter::once(None)
                    .chain((0..draft.len()).map(Some))
                    .map(|place| {
                        let path = place.map(|node| draft.path(node)).unwrap_or_default();
                        let index = self.done + path.len();
                        let real = path.iter().enumerate().all(|(i, &t)| t == self.truth(self.done + i));
                        Row::of(if real { self.truth(index) } else { 7 })
                    })
                    .collect();
                let steps = draft.len().div_ceil(4) as f64;
                let took = (self.machine.token + steps * self.machine.four) * self.jitter() + call;
                self.busy = self.busy.max(self.now) + took;
                self.agenda.push((self.busy, id, Event::Verdict(Verdict { rows, ..Verdict::default() })));
            }
            Action::Cancel(gone) => {
                self.agenda.retain(|item| item.1 != gone);
                self.ride = self.ride.filter(|&ride| ride != gone);
            }
            Action::Emit(delta) => {
                assert_eq!(delta.tokens, self.request.output[self.done..self.done + delta.tokens.len()]);
                self.done += delta.tokens.len();
            }
            Action::Finish(summary) => self.summary = Some(summary),
        }
    }
}

/// Milliseconds that a request takes, and how it went.
fn serve(
    machine: Machine,
    request: &Request,
    control: &Arc<Control>,
    rules: Rules,
    clock: &mut f64,
    seed: u64,
) -> (f64, Summary, f64) {
    let begin = *clock;
    let mut world = Simulation {
        machine,
        request,
        random: Random(seed),
        done: 0,
        agenda: Vec::new(),
        now: begin,
        ride: None,
        ridden: 0,
        busy: begin,
        summary: None,
        shadow_ms: 0.0,
        warm: false,
    };
    let tick = |ms: f64| Tick((ms * 1000.0) as u64);
    let start = Start {
        prompt: None,
        limit: Limit { max_tokens: Some(request.output.len() as u32), context: None },
        ending: Ending::default(),
        temperature: 0.0,
        decode: Box::new(NoText),
        marks: Arc::default(),
        rules,
        seed,
        noise: 2,
    };
    let mut session = Session::new(start, Arc::clone(control), tick(begin));
    loop {
        while let Some((id, action)) = session.poll() {
            world.act(id, action);
        }
        if let Some(summary) = world.summary {
            *clock = world.now;
            return (world.now - begin, summary, world.shadow_ms);
        }
        let next = (0..world.agenda.len())
            .min_by(|&a, &b| world.agenda[a].0.total_cmp(&world.agenda[b].0))
            .expect("something is under way");
        let (at, id, event) = world.agenda.remove(next);
        world.now = world.now.max(at);
        // The backend is at its next step already when a token is read: a switch wastes that step.
        if matches!(event, Event::Token { .. }) {
            world.ride_token();
        }
        session.handle(id, event, tick(world.now));
    }
}

struct Measured {
    ratio: f64,
    leapt: usize,
    reasons: HashMap<Option<RideReason>, usize>,
    shadow_share: f64,
}

/// Requests one after the other through one store, against plain rides of the same.
fn run(machine: Machine, text: Text, requests: u64, len: usize) -> Measured {
    run_after(&Arc::new(Control::new()), &mut 0.0, machine, text, requests, len)
}

/// The same with a store and a clock that have seen other times.
fn run_after(
    control: &Arc<Control>,
    clock: &mut f64,
    machine: Machine,
    text: Text,
    requests: u64,
    len: usize,
) -> Measured {
    let rules = Rules {
        plans: vec![Plan::Tree],
        lookups: vec![LookupSpec::PromptLookup(Ngram::default())],
        model: machine.right.is_some(),
        ..Rules::default()
    };
    let ride = Rules { permission: foretell::session::Permission::Ride(RideReason::Policy), ..rules.clone() };
    let (mut plain, mut through, mut shadow) = (0.0, 0.0, 0.0);
    let mut other = 0.0;
    let mut measured = Measured { ratio: 0.0, leapt: 0, reasons: HashMap::new(), shadow_share: 0.0 };
    for number in 0..requests {
        let request = request(text, number, len);
        let alone = Arc::new(Control::new());
        plain += serve(machine, &request, &alone, ride.clone(), &mut other, number).0;
        let (took, summary, shadowed) = serve(machine, &request, control, rules.clone(), clock, number);
        through += took;
        shadow += shadowed;
        measured.leapt += usize::from(summary.speculated);
        *measured.reasons.entry(summary.reason).or_default() += 1;
    }
    measured.ratio = plain / through;
    measured.shadow_share = shadow / through;
    measured
}

/// A backend far away: a call costs more than two tokens.
const FAR: Machine = Machine { token: 15.0, four: 2.0, call: 40.0, draft: 0.3, right: None };
/// A backend for which more tokens in a step cost as much as more steps.
const DEAR: Machine = Machine { token: 15.0, four: 55.0, call: 1.0, draft: 0.3, right: None };

#[rstest]
#[case::far_rewrite(FAR, Text::Rewrite { edits: 0.02 }, 2.0, 5.0)]
#[case::far_completion(Machine { right: Some(0.6), ..FAR }, Text::Fresh, 0.97, 1.01)]
#[case::dear_rewrite(DEAR, Text::Rewrite { edits: 0.05 }, 0.96, 1.2)]
#[case::dear_completion(Machine { right: Some(0.7), ..DEAR }, Text::Fresh, 0.96, 1.1)]
#[case::slow_rewrite(SLOW, Text::Rewrite { edits: 0.05 }, 2.2, 5.0)]
#[case::slow_rewrite_with_model(Machine { right: Some(0.3), ..SLOW }, Text::Rewrite { edits: 0.05 }, 2.2, 5.0)]
#[case::slow_completion(Machine { right: Some(0.65), ..SLOW }, Text::Fresh, 1.25, 2.3)]
#[case::slow_hostile(Machine { right: Some(0.03), ..SLOW }, Text::Fresh, 0.98, 1.01)]
#[case::slow_hostile_lookup(SLOW, Text::Fresh, 0.985, 1.01)]
#[case::slow_turning(SLOW, Text::Turns { after: 100 }, 1.3, 2.5)]
#[case::fast_rewrite(FAST, Text::Rewrite { edits: 0.05 }, 1.3, 5.0)]
#[case::fast_completion(Machine { right: Some(0.65), ..FAST }, Text::Fresh, 0.97, 1.3)]
#[case::fast_hostile(Machine { right: Some(0.03), ..FAST }, Text::Fresh, 0.97, 1.01)]
fn the_speed_is_in_its_range(
    #[case] machine: Machine,
    #[case] text: Text,
    #[case] low: f64,
    #[case] high: f64,
) {
    let measured = run(machine, text, 30, 200);
    let seen = format!(
        "ratio {:.3}, leapt {} of 30, shadow {:.4}, reasons {:?}",
        measured.ratio, measured.leapt, measured.shadow_share, measured.reasons
    );
    println!("{seen}");
    assert!((low..=high).contains(&measured.ratio), "{seen}");
    assert!(measured.shadow_share < 0.02, "{seen}");
}

#[test]
fn a_backend_that_turns_dear_is_left_and_one_that_turns_cheap_is_found_again() {
    let (control, mut clock) = (Arc::new(Control::new()), 0.0);
    let text = Text::Rewrite { edits: 0.05 };
    let mut part = |machine, requests| run_after(&control, &mut clock, machine, text, requests, 200).ratio;
    let cheap = part(SLOW, 10);
    let dear = part(DEAR, 20);
    let again = part(SLOW, 40);
    println!("ratio cheap {cheap:.3}, dear {dear:.3}, again {again:.3}");
    assert!(cheap > 2.0 && dear > 0.96 && again > 1.5, "cheap {cheap}, dear {dear}, again {again}");
}
