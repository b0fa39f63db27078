//! The controller before simulated fleets: every table beside this file is as it says.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, missing_docs)]

use std::path::{Path, PathBuf};

use foretell::lab::sim::figures::Figure;
use foretell::lab::sim::play;
use foretell::lab::sim::report::Report;
use foretell::lab::sim::table::Table;
use foretell::lab::sim::world::Mode;

/// Tables that are not yet as they say, and why. One that is belongs here no more, and the test says so.
const PENDING: &[(&str, &str)] = &[];

fn tables() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/control");
    let files = std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    let mut tables: Vec<PathBuf> =
        files.filter(|path| path.extension().is_some_and(|kind| kind == "yaml")).collect();
    tables.sort();
    tables
}

fn name(path: &Path) -> &str {
    path.file_stem().and_then(|name| name.to_str()).expect("a name")
}

fn played(path: &Path, mode: Mode) -> Report {
    let table = Table::read(path).unwrap_or_else(|error| panic!("{error}"));
    let outcome = play::play_as(&table, 1, mode).unwrap_or_else(|broken| panic!("{}: {broken}", name(path)));
    Report { table, outcome }
}

#[test]
fn every_table_is_as_it_says() {
    let (mut wrong, mut waiting) = (Vec::new(), Vec::new());
    for path in tables() {
        let report = played(&path, Mode::Auto);
        let short = !report.shortfalls().is_empty();
        match (short, PENDING.iter().find(|pending| pending.0 == name(&path))) {
            (false, None) => {}
            (true, Some((name, reason))) => {
                waiting.push(format!("pending: {name}: {reason}\n{}", report.text()))
            }
            (true, None) => wrong.push(report.text()),
            (false, Some((name, _))) => {
                wrong.push(format!("{name} is as it says: it is pending no more\n{}", report.text()))
            }
        }
    }
    println!("{}", waiting.join("\n"));
    assert!(wrong.is_empty(), "{} tables:\n{}", wrong.len(), wrong.join("\n"));
}

/// What is asked of leaping must not be lost by the dice: whoever never leaps is as fast as direct.
#[test]
fn riding_is_as_a_hostile_table_says() {
    let hostile = tables().into_iter().filter(|path| name(path).starts_with("hostile-"));
    let wrong: Vec<String> = hostile
        .map(|path| played(&path, Mode::Ride))
        .filter(|report| !report.shortfalls().is_empty())
        .map(|report| report.text())
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn there_is_a_table_for_each_thing_that_can_go_wrong() {
    let tables: Vec<Table> = tables().iter().map(|path| Table::read(path).expect("a table")).collect();
    assert!(tables.len() >= 16, "{}", tables.len());
    for (table, path) in tables.iter().zip(self::tables()) {
        assert_eq!(table.name, name(&path), "a table has the name of its file");
    }
    let some = |which: &dyn Fn(&Table) -> bool| tables.iter().filter(|table| which(table)).count();
    assert!(some(&|table| table.held_out) >= 3);
    assert!(some(&|table| table.setup.signal.every.is_none()) >= 1, "no load signal");
    assert!(some(&|table| table.setup.signal.until.is_some()) >= 1, "a stale one");
    assert!(some(&|table| !table.setup.engine.prefix_cache) >= 1, "no prefix cache");
    assert!(some(&|table| table.setup.engine.cancel >= 1.0) >= 1, "slow cancels");
    assert!(some(&|table| table.setup.sidecars >= 4) >= 1, "several sidecars");
    assert!(some(&|table| table.overload.is_some()) >= 2, "overload");
    for pending in PENDING {
        assert!(tables.iter().any(|table| table.name == pending.0), "{} is no table", pending.0);
    }
    // What the hostile ones promise is what the design promises.
    for table in tables.iter().filter(|table| table.name.starts_with("hostile-")) {
        let most = |figure| {
            table.expected.iter().find(|expected| expected.figure == figure).and_then(|expected| expected.max)
        };
        assert_eq!((most(Figure::P50), most(Figure::P95)), (Some(1.01), Some(1.02)), "{}", table.name);
    }
    for table in tables.iter().filter(|table| table.name.starts_with("friendly-")) {
        let best = table.expected.iter().find(|expected| expected.figure == Figure::OfBest);
        let least = best.and_then(|expected| expected.min);
        assert!(least.is_none_or(|least| least >= 0.95), "{}", table.name);
    }
}

#[test]
fn the_same_seed_gives_the_same_figures_and_another_others() {
    let path = tables().into_iter().find(|path| name(path) == "hostile-far-away").expect("it is there");
    let table = Table::read(&path).expect("a table");
    let json = |seed| {
        let outcome = play::play(&table, seed).expect("exact");
        Report { table: table.clone(), outcome }.json().to_string()
    };
    assert_eq!(json(1), json(1));
    assert_ne!(json(1), json(2));
}
