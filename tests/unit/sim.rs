//! The simulated fleet: known truths of speculative decoding, and the grid of known costs.

use foretell::lab::sim::grid::{self, Cell, Drafters, GAMMAS, Size, Workload};
use foretell::lab::sim::profile::Paced;
use foretell::lab::sim::workloads;
use foretell::lab::sim::world::Mode;

fn workload(name: &str) -> Workload {
    Workload { name: name.to_owned(), scripts: workloads::made(name).scripts(6, 7) }
}

#[test]
fn the_grid_knows_what_pays_and_plays_the_same_twice() {
    let workloads = [workload("rewrite"), workload("hostile")];
    let servers = [(1.1, 0.005), (4.0, 0.4)].map(|(base, node)| Paced {
        step: 0.02,
        base,
        node,
        growth: 0.0,
        prefill: 0.0001,
    });
    let cells = grid::cells(&servers, &workloads);
    let size = Size { first: 2, rest: 4 };
    let outcomes = grid::play(&cells, size).expect("exact");
    assert_eq!(outcomes.len(), 2 * 2 * Drafters::ALL.len());
    for outcome in &outcomes {
        let (gamma, best) = outcome.best();
        let Cell { paced, workload, drafters } = outcome.cell;
        match (workload.name.as_str(), drafters, paced.base < 2.0) {
            ("rewrite", Drafters::Lookup, true) => assert!(gamma >= 8 && best > 3.0, "{gamma}: {best}"),
            ("rewrite", Drafters::Model, true) => assert!(gamma >= 4 && best > 1.3, "{gamma}: {best}"),
            ("hostile", _, _) => assert_eq!(gamma, 0, "nothing pays"),
            (_, Drafters::Model, false) => assert_eq!(gamma, 0, "too dear"),
            _ => {}
        }
        assert_eq!(outcome.fixed.len(), GAMMAS.len());
        assert!(outcome.auto.rest > 0.5);
    }
    let again = grid::play(&cells, size).expect("exact");
    assert_eq!(grid::table(&outcomes), grid::table(&again));
}

#[test]
fn riding_through_foretell_costs_its_calls_and_nothing_else() {
    let rewrite = workload("rewrite");
    let paced = Paced { step: 0.02, base: 1.1, node: 0.005, growth: 0.0, prefill: 0.0001 };
    let cell = Cell { paced, workload: &rewrite, drafters: Drafters::Both };
    let size = Size { first: 0, rest: 6 };
    let (direct, ride) = (cell.play(Mode::Direct, size), cell.play(Mode::Ride, size));
    let more = ride.expect("exact").1 - direct.expect("exact").1;
    assert!((more - 6.0 * 0.3e-3).abs() < 1e-9, "{more}");
}
