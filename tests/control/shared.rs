//! Sidecars that share their measurements: how soon a new one is as fast as one that has settled.

use foretell_core::control::{Control, SharedCosts, SharedModel};
use foretell_lab::sim::drafter::DrafterSpec;
use foretell_lab::sim::engine::EngineSpec;
use foretell_lab::sim::grid::Drafters;
use foretell_lab::sim::record::{Record, Served};
use foretell_lab::sim::source::Scripts;
use foretell_lab::sim::traffic::Stream;
use foretell_lab::sim::workloads;
use foretell_lab::sim::world::{Mode, Net, Setup, World};
use foretell_onnx::pace::curve::Steps;

/// Texts of a workload; a new sidecar serves each of them once.
const TEXTS: usize = 5;
/// Times that they are served until it has settled.
const SETTLED: usize = 8;

fn setup(paced: Steps, scripts: &Scripts, drafters: Drafters, mode: Mode, times: usize) -> Setup {
    let requests = scripts.iter().cycle().take(times * TEXTS).cloned().collect();
    let permit = drafters.permit().expect("a policy");
    let plain = Setup::plain(EngineSpec::paced(paced), permit, vec![Stream::one_client(requests)]);
    Setup { drafter: Some(DrafterSpec::BUNDLED), net: Net::usual(), mode, ..plain }
}

fn seconds(served: &[Served]) -> f64 {
    served.iter().map(Served::seconds).sum()
}

#[test]
fn a_new_replica_of_a_known_model_is_soon_as_fast_as_one_that_has_settled() {
    let paced = Steps { step: 0.02, base: 1.35, node: 0.01, growth: 0.0, prompt: 0.0001 };
    let (name, drafters) = ("rewrite", Drafters::Lookup);
    let scripts = workloads::made(name).scripts(TEXTS, 7);
    let of = |mode, times| setup(paced, &scripts, drafters, mode, times);
    let plain = seconds(&World::play(of(Mode::Plain, 1)).expect("exact").served);
    let (settled, control) = World::play_from(of(Mode::Auto, SETTLED), |_| {}).expect("exact");
    let Record { served, .. } = settled;
    let last = plain / seconds(&served[(SETTLED - 1) * TEXTS..]);
    let (model, costs) = control.expect("a sidecar").shared();
    let speed = |begin: &dyn Fn(&Control)| {
        plain / seconds(&World::play_from(of(Mode::Auto, 1), begin).expect("exact").0.served)
    };
    let alone = speed(&|_| {});
    let sidecar = speed(&|control| control.lend(&model, &costs));
    let probed = SharedCosts::default().or_probed(&costs);
    let replica = speed(&|control| control.lend(&model, &probed));
    let unknown = speed(&|control| control.lend(&SharedModel::default(), &costs));
    println!(
        "{name} {}: settled {last:.2}; first {TEXTS} requests alone {alone:.2}, of a new sidecar {sidecar:.2}, \
         of a new replica {replica:.2}, with the costs alone {unknown:.2}",
        drafters.name()
    );
    let gain = |speed: f64| (speed - 1.0) / (last - 1.0);
    if last > 1.1 {
        assert!(gain(sidecar) >= 0.9 && gain(replica) >= 0.9, "{name}: {sidecar} {replica} of {last}");
    }
}
