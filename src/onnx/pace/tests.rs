use std::sync::Arc;

use parking_lot::Mutex;

use super::*;
use crate::fake::Fake;

const MS: u64 = 1_000;

fn pace(text: &str) -> Pace {
    text.parse().unwrap()
}

fn feed(tokens: &[u32], rows: Rows, draft: Option<usize>) -> Feed<'_> {
    Feed { lane: Lane(0), tokens, parents: None, rows, draft }
}

#[test]
fn a_pace_is_read_as_written_and_written_as_read() {
    let full = pace("step=60ms,base=1.35,node=0.025,growth=0.02,prompt=80us");
    let steps = Steps { step: 0.06, base: 1.35, node: 0.025, growth: 0.02, prompt: 80e-6 };
    assert_eq!(full, Pace { costs: Costs::Steps(steps), slow: 1.0 });
    assert_eq!(full.to_string(), "step=60ms,base=1.35,node=0.025,growth=0.02,prompt=0.08ms");
    let least = pace("slow=2.5,step=2.5ms");
    assert_eq!(least.to_string(), "step=2.5ms,base=1,node=0,growth=0,prompt=0ms,slow=2.5");
    let named = pace("profile=h100-70b,slow=10");
    assert_eq!(named, Pace { costs: Costs::Profile(Profile::H100With70b), slow: 10.0 });
    assert_eq!(pace("profile=cpu").to_string(), "profile=cpu");
    for pace in [full, least, named] {
        assert_eq!(pace.to_string().parse(), Ok(pace));
    }
}

#[test]
fn malformed_paces_are_refused_with_the_offending_key() {
    let refused = |text: &str| text.parse::<Pace>().unwrap_err().to_string();
    assert_eq!(
        refused("stepp=60ms"),
        "no such key, allowed profile, slow, step, base, node, growth, prompt (KEY=VALUE with commas between), \
         got \"stepp=60ms\""
    );
    assert_eq!(
        refused("base=2"),
        "step is missing: how long a plain step takes, such as step=60ms; or profile, such as profile=h100-8b"
    );
    assert_eq!(refused("profile=cpu,node=0.1"), "profile: goes with slow alone, got node too");
    assert_eq!(refused("slow=0.5"), "slow: allowed 1 to 1000, got \"0.5\"");
    let unknown = refused("profile=h200");
    assert!(unknown.starts_with("profile: allowed l4-7b, l4-8b, h100-8b,"), "{unknown}");
    assert_eq!(refused("step=60ms,step=60ms"), "step: given twice");
    assert_eq!(refused("step=60ms,base=0.5"), "base: allowed 1 to 100, got \"0.5\"");
    assert_eq!(refused("step=60"), "step: allowed a number with us, ms or s, up to 60s, got \"60\"");
    for wrong in [
        "",
        "60ms",
        "step",
        "step=",
        "step=ms",
        "step=0ms",
        "step=0.0001us",
        "step=-1ms",
        "step=61s",
        "step=infs",
        "step=60ms,",
        "step=60ms, base=2",
        "step=60ms;base=2",
        "step=60ms,base=NaN",
        "step=60ms,base=1e3",
        "step=60ms,node=+1",
        "step=60ms,node=.",
        "step=60ms,growth=-0.1",
        "step=60ms,growth=inf",
        "step=60ms,prompt=1",
        "STEP=60ms",
        "profile=",
        "slow=2",
        "profile=cpu,profile=cpu",
    ] {
        assert!(wrong.parse::<Pace>().is_err(), "{wrong}");
    }
}

/// Time of a run on empty lanes.
fn micros(pace: Pace, feeds: &[Feed<'_>]) -> u64 {
    pace.run(&mut Batch::default(), feeds.iter().map(|feed| (*feed, 0))).as_micros() as u64
}

#[test]
fn profiles_see_all_tokens_and_the_context_and_can_be_slowed() {
    let (short, long) = (feed(&[1], Rows::Last, None), [1; 2_048]);
    let took = |text: &str, held: usize| {
        pace(text).run(&mut Batch::default(), [(short, held)].into_iter()).as_secs_f64()
    };
    let (fast, far) = (took("profile=h100-8b", 0), took("profile=h100-8b", 100_000));
    assert!((0.006..0.008).contains(&fast) && far > 1.5 * fast, "13 GB more are read: {fast} {far}");
    assert!((took("profile=h100-8b,slow=10", 0) / fast - 10.0).abs() < 1e-6);
    let read = micros(pace("profile=h100-8b"), &[feed(&long, Rows::None, None)]);
    assert!(read > 50 * MS, "2,048 tokens are bound by arithmetic: {read}");
}

#[test]
fn runs_of_a_turn_are_one_step_on_a_gpu_and_several_elsewhere() {
    let (short, long) = (feed(&[1], Rows::Last, None), [1; 100]);
    let both = |text: &str| {
        let (pace, mut turn) = (pace(text), Batch::default());
        let first = pace.run(&mut turn, [(short, 0)].into_iter());
        (first, pace.run(&mut turn, [(feed(&long, Rows::None, None), 0)].into_iter()))
    };
    let (step, reading) = both("profile=h100-70b");
    assert!(reading < step / 100, "101 tokens take no longer than reading the weights: {reading:?}");
    let (step, reading) = both("profile=onnx");
    assert!(reading > step * 5, "{reading:?}");
}

#[test]
fn a_run_takes_its_costliest_feed_and_grows_with_concurrency() {
    let pace = pace("step=100ms,base=1.5,node=0.1,growth=0.2,prompt=1ms");
    let took = |feeds: &[Feed<'_>]| micros(pace, feeds);
    let step = feed(&[1], Rows::Last, None);
    let verify = feed(&[1, 2, 3, 4], Rows::From(0), Some(3));
    let empty = feed(&[1], Rows::From(0), Some(0));
    assert_eq!(took(&[step]), 100 * MS);
    assert_eq!(took(&[verify]), 180 * MS, "1.5 + 3 · 0.1");
    assert_eq!(took(&[empty]), 150 * MS);
    assert_eq!(took(&[step, step, step]), 140 * MS);
    assert_eq!(took(&[step, verify, empty]), 180 * MS * 14 / 10);
    assert_eq!(took(&[]), 0);
}

#[test]
fn prompt_tokens_are_read_one_by_one_and_the_last_is_a_step() {
    let pace = pace("step=100ms,base=2,node=0.5,prompt=1ms,growth=0.5");
    let took = |feeds: &[Feed<'_>]| micros(pace, feeds);
    let tokens = [7; 40];
    let chunk = feed(&tokens, Rows::None, None);
    let end = feed(&tokens, Rows::Last, None);
    let scored = feed(&tokens, Rows::From(0), None);
    let verify = feed(&tokens, Rows::From(35), Some(4));
    assert_eq!(took(&[chunk]), 40 * MS);
    assert_eq!(took(&[end]), 139 * MS);
    assert_eq!(took(&[scored]), 139 * MS, "rows of a prompt are no draft");
    assert_eq!(took(&[verify]), (400 + 35) * MS);
    assert_eq!(took(&[chunk, end]), (40 + 139) * MS, "a chunk is no sequence that runs");
}

/// A clock that moves only when it is waited on or a test advances it.
#[derive(Clone, Default)]
struct Hand(Arc<Mutex<Vec<u64>>>);

impl Hand {
    fn micros(&self) -> u64 {
        self.0.lock().last().copied().unwrap_or(0)
    }

    fn pass(&self, micros: u64) {
        let moment = self.micros() + micros;
        self.0.lock().push(moment);
    }
}

impl Clock for Hand {
    fn now(&self) -> Tick {
        Tick(self.micros())
    }

    fn wait_until(&mut self, moment: Tick) {
        let moment = moment.0.max(self.micros());
        self.0.lock().push(moment);
    }
}

/// A model that takes this many microseconds of the clock's time for each token.
struct Slow(Fake, Hand, u64);

impl Forward for Slow {
    fn config(&self) -> &ModelConfig {
        self.0.config()
    }
    fn reserve(&mut self) -> Option<Lane> {
        self.0.reserve()
    }
    fn release(&mut self, lane: Lane) {
        self.0.release(lane);
    }
    fn len(&self, lane: Lane) -> usize {
        self.0.len(lane)
    }
    fn rewind(&mut self, lane: Lane, len: usize) {
        self.0.rewind(lane, len);
    }
    fn commit(&mut self, lane: Lane, base: usize, path: &[usize]) -> Result<(), ModelError> {
        self.0.commit(lane, base, path)
    }
    fn fork(&mut self, from: Lane, to: Lane, len: usize) -> Result<(), ModelError> {
        self.0.fork(from, to, len)
    }
    fn run(&mut self, feeds: &[Feed<'_>]) -> Result<Logits, ModelError> {
        self.1.pass(self.2 * feeds.iter().map(|feed| feed.tokens.len() as u64).sum::<u64>());
        self.0.run(feeds)
    }
}

fn paced(text: &str, per_token: u64) -> (Paced, Hand) {
    let hand = Hand::default();
    let mut model = Slow(Fake::new(50, 1_000, 1), hand.clone(), per_token);
    model.reserve().unwrap();
    (Paced::by(Box::new(model), pace(text), Box::new(hand.clone())), hand)
}

#[test]
fn late_wake_ups_and_gaps_between_the_runs_of_a_busy_model_do_not_add_up() {
    let (mut model, hand) = paced("step=10ms", MS);
    hand.pass(5 * MS);
    for step in 1..=100 {
        model.run(&[feed(&[step], Rows::Last, None)]).unwrap();
        assert_eq!(hand.micros(), (5 + 10 * u64::from(step)) * MS, "computing is a part of the step");
        hand.pass(300);
    }
}

#[test]
fn a_model_that_was_idle_begins_at_the_request() {
    let (mut model, hand) = paced("step=10ms,base=2", 0);
    model.run(&[feed(&[1], Rows::Last, None)]).unwrap();
    model.rest();
    hand.pass(3 * MS);
    model.run(&[feed(&[2], Rows::From(0), Some(0))]).unwrap();
    assert_eq!(hand.micros(), (10 + 3 + 20) * MS);
}

#[test]
fn a_model_that_is_slower_than_its_pace_takes_its_own_time_and_does_not_hurry_afterwards() {
    let (mut model, hand) = paced("step=10ms", 4 * MS);
    model.run(&[feed(&[1; 5], Rows::Last, None)]).unwrap();
    assert_eq!(hand.micros(), 20 * MS);
    model.run(&[feed(&[1], Rows::Last, None)]).unwrap();
    assert_eq!(hand.micros(), 30 * MS);
    model.run(&[feed(&[1; 30], Rows::None, None)]).unwrap();
    assert_eq!(hand.micros(), 150 * MS, "a prompt is read as fast as the model can");
}

#[test]
fn a_run_that_fails_says_so_at_any_pace() {
    let fake = Fake::new(50, 100, 1);
    fake.controls().fail(true);
    let mut model = Paced::by(Box::new(fake), pace("step=10ms"), Box::new(Hand::default()));
    let lane = model.reserve().unwrap();
    let failed = model.run(&[Feed { lane, tokens: &[1], parents: None, rows: Rows::Last, draft: None }]);
    assert!(matches!(failed, Err(ModelError::Runtime(_))));
}

#[test]
fn the_clock_on_the_wall_is_waited_for() {
    let mut clock = SystemClock(Instant::now());
    let moment = clock.now().after(Duration::from_millis(2));
    clock.wait_until(moment);
    assert!(clock.now() >= moment);
}
