//! The controller with one engine and one client at a time: ranges of speed, share of speculated
//! requests and cost.
//!
//! The cost of a verify request rises in steps of four tokens, step times have a heavy tail, and
//! the drafter shares the engine's processor, as on a machine where both run on the same cores.
//! Fleets are tested by `fleet` and by the tables of this folder.

use foretell_core::units::Tick;
use foretell_lab::sim::drafter::DrafterSpec;
use foretell_lab::sim::engine::EngineSpec;
use foretell_lab::sim::grid::Drafters;
use foretell_lab::sim::profile::{Jitter, Shape};
use foretell_lab::sim::record::{Record, Served};
use foretell_lab::sim::source::Scripts;
use foretell_lab::sim::synthetic::{Agreement, Copied, TextKind};
use foretell_lab::sim::traffic::Stream;
use foretell_lab::sim::world::{Mode, Net, Setup, World};
use foretell_onnx::pace::curve::{Curve, Steps, Table};
use rstest::rstest;

/// Times in milliseconds.
#[derive(Clone, Copy, Debug)]
struct Machine {
    /// One target step for one token.
    token: f64,
    /// Cost of four more tokens in a step.
    four: f64,
    /// One call over HTTP.
    call: f64,
    /// Share of the model drafter's tokens that are right; `None` without a model drafter.
    right: Option<f64>,
}

/// The inflated target of the bench.
const SLOW: Machine = Machine { token: 15.5, four: 2.8, call: 0.6, right: None };
/// The target without inflation.
const FAST: Machine = Machine { token: 1.8, four: 0.5, call: 0.6, right: None };
/// A backend far away: a call costs more than two tokens.
const FAR: Machine = Machine { token: 15.0, four: 2.0, call: 40.0, right: None };
/// A backend for which more tokens in a step cost as much as more steps.
const EXPENSIVE: Machine = Machine { token: 15.0, four: 55.0, call: 1.0, right: None };

impl Machine {
    fn curve(self) -> Curve {
        let stair = |step: usize| (1 + 4 * step, self.token + self.four * step as f64);
        let points = (0..64).map(stair).collect::<Vec<_>>().leak();
        Curve::Table(Table { points, stairs: true, sequence: 0.0, context: 0.0 })
    }

    fn setup(self, copied: Copied, requests: usize) -> Setup {
        let agreement = self.right.map_or(Agreement::Never, Agreement::Even);
        let scripts =
            TextKind { prompt: 300, output: 200, vary: 0.0, copied, agreement }.scripts(requests, 5);
        let shape = Shape { pace: self.curve(), sequences: 8, kv: 1 << 20, chunk: 1 << 12, block: 1 };
        let jitter = Jitter { spread: 0.05, rare: 0.01, tail: 3.0 };
        let engine = EngineSpec { shape, jitter, ..EngineSpec::paced(Steps::default()) };
        let permit = if self.right.is_some() { Drafters::Both } else { Drafters::Lookup }.permit();
        Setup {
            drafter: Some(DrafterSpec { token: 0.3e-3, shared: true, ..DrafterSpec::BUNDLED }),
            net: Net { rtt: self.call * 1e-3, call: 0.0 },
            ..Setup::plain(engine, permit.expect("a policy"), vec![Stream::one_client(scripts)])
        }
    }
}

fn played(setup: &Setup, mode: Mode) -> Record {
    World::play(Setup { mode, ..setup.clone() }).expect("exact")
}

/// Seconds from the first token to the last: prefill is the same for all modes, and long where
/// tokens are expensive.
fn writing(served: &Served) -> f64 {
    served.ended.seconds_since(served.first)
}

fn seconds(served: &[Served]) -> f64 {
    served.iter().map(writing).sum()
}

fn speculations(served: &[Served]) -> usize {
    served.iter().filter(|served| served.summary.as_ref().is_some_and(|summary| summary.speculated)).count()
}

const FRESH: Copied = Copied::Fresh;
const REWRITE: Copied = Copied::Rewrite(0.05);

#[rstest]
#[case::far_rewrite(FAR, Copied::Rewrite(0.02), 2.0, 6.0)]
#[case::far_completion(Machine { right: Some(0.6), ..FAR }, FRESH, 0.97, 1.02)]
#[case::expensive_rewrite(EXPENSIVE, REWRITE, 0.96, 1.3)]
#[case::expensive_completion(Machine { right: Some(0.7), ..EXPENSIVE }, FRESH, 0.96, 1.1)]
#[case::slow_rewrite(SLOW, REWRITE, 2.2, 6.0)]
#[case::slow_rewrite_with_model(Machine { right: Some(0.3), ..SLOW }, REWRITE, 2.2, 6.0)]
#[case::slow_completion(Machine { right: Some(0.65), ..SLOW }, FRESH, 1.25, 2.3)]
#[case::slow_hostile(Machine { right: Some(0.03), ..SLOW }, FRESH, 0.98, 1.02)]
#[case::slow_hostile_lookup(SLOW, FRESH, 0.985, 1.02)]
#[case::slow_turning(SLOW, Copied::Until(100), 1.3, 2.5)]
#[case::fast_rewrite(FAST, REWRITE, 1.3, 4.5)]
#[case::fast_completion(Machine { right: Some(0.65), ..FAST }, FRESH, 0.97, 1.3)]
#[case::fast_hostile(Machine { right: Some(0.03), ..FAST }, FRESH, 0.97, 1.02)]
fn the_speed_is_in_its_range(
    #[case] machine: Machine,
    #[case] text: Copied,
    #[case] low: f64,
    #[case] high: f64,
) {
    let setup = machine.setup(text, 30);
    let (plain_run, auto) = (played(&setup, Mode::Plain), played(&setup, Mode::Auto));
    let ratio = seconds(&plain_run.served) / seconds(&auto.served);
    let speculations = speculations(&auto.served);
    let seen = format!("ratio {ratio:.3}, {speculations} of 30 speculated, drafter {:.2} s", auto.drafting);
    println!("{seen}");
    assert!((low..=high).contains(&ratio), "{seen}");
    // Without speculation the drafter has computed only shadow drafts.
    assert!(speculations > 0 || auto.drafting < 0.02 * seconds(&auto.served), "{seen}");
}

#[test]
fn speculation_stops_when_a_backend_becomes_expensive_and_resumes_when_inexpensive() {
    let setup = SLOW.setup(REWRITE, 70);
    let plain = played(&setup, Mode::Plain);
    // Ten requests, a minute and a half in which tokens are expensive, and the rest.
    let speculating = played(&setup, Mode::Auto);
    let expensive = speculating.served[9].ended;
    let inexpensive = Tick(expensive.0 + 90_000_000);
    let mut changing = setup.clone();
    changing.engine.changes = vec![(expensive, EXPENSIVE.curve()), (inexpensive, SLOW.curve())];
    let auto = played(&changing, Mode::Auto);
    let during = |from: Tick, until: Tick| {
        let within = |served: &&Served| served.began >= from && served.ended <= until;
        let (count, took) = auto
            .served
            .iter()
            .filter(within)
            .fold((0, 0.0), |(count, took), served| (count + 1, took + writing(served)));
        (count, took / f64::from(count))
    };
    let plain = seconds(&plain.served) / 70.0;
    let (first, second, third) =
        (during(Tick(0), expensive), during(expensive, inexpensive), during(inexpensive, auto.ended));
    println!("plain {plain:.2} s; inexpensive {first:?}, expensive {second:?}, again {third:?}");
    assert!(plain / first.1 > 2.0 && first.0 >= 8, "inexpensive {first:?}");
    assert!(plain / second.1 > 0.94 && second.0 >= 10, "expensive {second:?}");
    assert!(plain / third.1 > 1.5 && third.0 >= 20, "again {third:?}");
}

#[test]
fn texts_are_the_same_in_every_mode() {
    let scripts: Scripts =
        TextKind { prompt: 50, output: 60, vary: 0.5, copied: REWRITE, agreement: Agreement::Even(0.5) }
            .scripts(20, 1);
    let mut setup = Machine { right: Some(0.5), ..FAST }.setup(REWRITE, 1);
    setup.streams = vec![Stream::one_client(scripts)];
    for mode in [Mode::Direct, Mode::Plain, Mode::Auto, Mode::Fixed(0), Mode::Fixed(3)] {
        let tokens = played(&setup, mode).served.iter().map(|served| served.tokens).sum::<usize>();
        assert_eq!(tokens, setup.streams[0].scripts.iter().map(|script| script.output.len()).sum::<usize>());
    }
}
