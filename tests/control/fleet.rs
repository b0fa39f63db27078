//! The simulated fleet: known results of speculative decoding, and the grid of known costs.

use foretell_lab::sim::drafter::DrafterSpec;
use foretell_lab::sim::engine::EngineSpec;
use foretell_lab::sim::grid::{self, Cell, Drafters, GAMMAS, Size};
use foretell_lab::sim::synthetic::{Agreement, Copied, TextKind};
use foretell_lab::sim::traffic::Stream;
use foretell_lab::sim::workloads::{self, Workload};
use foretell_lab::sim::world::{Mode, Net, Setup, World};
use foretell_onnx::pace::curve::Steps;
use indicatif::ProgressBar;
use rstest::rstest;

fn workload(name: &str) -> Workload {
    Workload { name: name.to_owned(), scripts: workloads::made(name).scripts(6, 7) }
}

#[test]
fn the_grid_finds_what_pays_and_is_reproducible() {
    let workloads = [workload("rewrite"), workload("hostile")];
    let servers = [(1.1, 0.005), (4.0, 0.4)].map(|(base, node)| Steps {
        step: 0.02,
        base,
        node,
        growth: 0.0,
        prompt: 0.0001,
    });
    let cells = grid::cells(&servers, &workloads).expect("policies");
    let size = Size { first: 2, rest: 4, tokens: 0 };
    let outcomes = grid::play(&cells, size, &ProgressBar::hidden()).expect("exact");
    assert_eq!(outcomes.len(), 2 * 2 * Drafters::ALL.len());
    for outcome in &outcomes {
        let (gamma, best) = outcome.best();
        let Cell { paced, workload, drafters, .. } = &outcome.cell;
        match (workload.name.as_str(), drafters, paced.base < 2.0) {
            ("rewrite", Drafters::Lookup, true) => assert!(gamma >= 8 && best > 3.0, "{gamma}: {best}"),
            ("rewrite", Drafters::Model, true) => assert!(gamma >= 4 && best > 1.3, "{gamma}: {best}"),
            ("hostile", _, _) => assert_eq!(gamma, 0, "nothing pays"),
            (_, Drafters::Model, false) => assert_eq!(gamma, 0, "too expensive"),
            _ => {}
        }
        assert_eq!(outcome.fixed.len(), GAMMAS.len());
        assert!(outcome.auto.rest > 0.5);
    }
    let again = grid::play(&cells[..2], size, &ProgressBar::hidden()).expect("exact");
    assert_eq!(grid::table(&outcomes[..2]), grid::table(&again));
}

#[test]
fn plain_decoding_through_foretell_costs_only_its_calls() {
    let rewrite = workload("rewrite");
    let paced = Steps { step: 0.02, base: 1.1, node: 0.005, growth: 0.0, prompt: 0.0001 };
    let permit = Drafters::Both.permit().expect("a policy");
    let cell = Cell { paced, workload: &rewrite, drafters: Drafters::Both, permit };
    let size = Size { first: 0, rest: 6, tokens: 0 };
    let (direct, plain_run) = (cell.play(Mode::Direct, size), cell.play(Mode::Plain, size));
    let more = plain_run.expect("exact").1 - direct.expect("exact").1;
    assert!((more - 6.0 * 0.3e-3).abs() < 1e-9, "{more}");
}

/// Leviathan et al., theorem 3.8: with i.i.d. acceptance α, a verify request as long as a step and
/// c steps per drafted token, the speedup with gamma drafted tokens per round is (1 − α^(γ+1)) /
/// ((1 − α)(γc + 1)).
#[rstest]
fn speed_follows_the_formula(#[values(0.5, 0.7, 0.85)] alpha: f64, #[values(1, 3, 7)] gamma: usize) {
    let output = 8_000;
    let kind =
        TextKind { prompt: 8, output, vary: 0.0, copied: Copied::Fresh, agreement: Agreement::Even(alpha) };
    let scripts = kind.scripts(1, 11);
    // The drawn acceptance, within 0.02 of the requested one.
    let right =
        (0..output).filter(|&position| scripts[0].choice(position, 0) == scripts[0].truth(position)).count();
    let drawn = right as f64 / output as f64;
    assert!((drawn - alpha).abs() < 0.02, "{drawn}");
    let expected = |c: f64| (1.0 - drawn.powi(gamma as i32 + 1)) / ((1.0 - drawn) * (gamma as f64 * c + 1.0));
    let permit = Drafters::Model.permit().expect("a policy");
    for c in [0.0, 0.2] {
        let paced = Steps { step: 0.02, base: 1.0, node: 0.0, growth: 0.0, prompt: 0.0 };
        let drafter = DrafterSpec { token: c * paced.step, read: 0.0, growth: 0.0, slots: 1, shared: false };
        let setup = Setup {
            drafter: Some(drafter),
            net: Net::default(),
            mode: Mode::Fixed(gamma),
            ..Setup::plain(
                EngineSpec::paced(paced),
                permit.clone(),
                vec![Stream::one_client(scripts.clone())],
            )
        };
        let record = World::play(setup).expect("exact");
        let served = &record.served[0];
        let rounds = f64::from(served.summary.as_ref().expect("a session").rounds);
        let seen = paced.step * (served.tokens - 1) as f64 / (served.ended.seconds_since(served.first));
        println!("alpha {alpha}, gamma {gamma}, c {c}: {seen} of {}, {rounds} rounds", expected(c));
        assert!((seen / expected(c) - 1.0).abs() < 0.01, "alpha {alpha}, gamma {gamma}, c {c}: {seen}");
    }
}

/// With acceptance α, verify requests of V seconds and c seconds per drafted token, the best gamma
/// maximises (1 − α^(γ+1)) / ((1 − α)(V + γc)): it grows with the logarithm of the delay
/// (UCB-SpecStop, arXiv 2606.20591).
#[test]
fn drafts_get_longer_with_the_delay_to_the_engine() {
    let kind = TextKind {
        prompt: 8,
        output: 400,
        vary: 0.0,
        copied: Copied::Fresh,
        agreement: Agreement::Even(0.8),
    };
    let permit = Drafters::Model.permit().expect("a policy");
    let paced = Steps { step: 0.1, base: 1.0, node: 0.0, growth: 0.0, prompt: 0.0 };
    let drafter = DrafterSpec { token: 0.005, read: 0.0, growth: 0.0, slots: 1, shared: false };
    let gammas = [0.0, 0.05, 0.2].map(|rtt| {
        let streams = vec![Stream::one_client(kind.scripts(30, 5))];
        let net = Net { rtt, ..Net::default() };
        let plain = Setup::plain(EngineSpec::paced(paced), permit.clone(), streams);
        let record = World::play(Setup { drafter: Some(drafter), net, ..plain }).expect("exact");
        let told = record.served[10..].iter().map(|served| served.summary.as_ref().expect("a session"));
        let (drafted, rounds) = told.fold((0, 0), |sum, one| (sum.0 + one.drafted, sum.1 + one.rounds));
        let seen = f64::from(drafted) / f64::from(rounds);
        let speed = |gamma: &i32| {
            (1.0 - 0.8_f64.powi(gamma + 1))
                / (paced.step + net.call + rtt + f64::from(*gamma) * drafter.token)
        };
        let best = (1..=32).max_by(|a, b| speed(a).total_cmp(&speed(b))).expect("a gamma");
        println!("rtt {rtt}: gamma {seen:.2}, the formula's {best}");
        assert!((seen / f64::from(best) - 1.0).abs() < 0.25, "rtt {rtt}: {seen}, the formula says {best}");
        seen
    });
    assert!(gammas[0] < gammas[1] && gammas[1] < gammas[2], "{gammas:?}");
}
