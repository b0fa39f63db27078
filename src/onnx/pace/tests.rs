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
    let expected = Pace {
        step: Duration::from_millis(60),
        base: 1.35,
        node: 0.025,
        growth: 0.02,
        prompt: Duration::from_micros(80),
    };
    assert_eq!(full, expected);
    assert_eq!(full.to_string(), "step=60ms,base=1.35,node=0.025,growth=0.02,prompt=0.08ms");
    assert_eq!(pace(&full.to_string()), full);
    let least = pace("step=2.5ms");
    assert_eq!((least.step, least.base, least.node), (Duration::from_micros(2_500), 1.0, 0.0));
    assert_eq!((least.growth, least.prompt), (0.0, Duration::ZERO));
}

#[test]
fn malformed_paces_are_refused_with_the_offending_key() {
    let refused = |text: &str| text.parse::<Pace>().unwrap_err().to_string();
    assert_eq!(
        refused("stepp=60ms"),
        "no such key, allowed step, base, node, growth, prompt (KEY=VALUE with commas between), got \"stepp=60ms\""
    );
    assert_eq!(refused("base=2"), "step is missing: how long a plain step takes, such as step=60ms");
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
    ] {
        assert!(wrong.parse::<Pace>().is_err(), "{wrong}");
    }
}

#[test]
fn a_run_takes_its_costliest_feed_and_grows_with_concurrency() {
    let pace = pace("step=100ms,base=1.5,node=0.1,growth=0.2,prompt=1ms");
    let took = |feeds: &[Feed<'_>]| pace.run(feeds).as_micros() as u64;
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
    let took = |feeds: &[Feed<'_>]| pace.run(feeds).as_micros() as u64;
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

impl Watch for Hand {
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
