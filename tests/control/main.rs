//! The controller on simulated fleets: every table in this folder must meet its expectations.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod engine;
mod fleet;
mod shared;

use std::path::{Path, PathBuf};

use foretell::cli::Exit;
use foretell_lab::commands::sim::{self as command, SimArgs};
use foretell_lab::sim::figures::Figure;
use foretell_lab::sim::play;
use foretell_lab::sim::report::TableReport;
use foretell_lab::sim::sweep::{self, Cell};
use foretell_lab::sim::table::Table;
use foretell_lab::sim::world::Mode;

/// Tables that do not meet their expectations yet, with the reason. The test fails for one that
/// does meet them.
const PENDING: &[(&str, &str)] = &[
    (
        "friendly-32-on-70b",
        "first tokens are 2.0 times as late as allowed at p95 (p50 is kept): 1.5 times as many prompts a second wait for \
         each other",
    ),
    (
        "friendly-half-others",
        "others' time per token is 1.06 at p50 and 1.05 at p95, where ours are 2.0 times as fast: ours end sooner and come \
         again, and only what is rejected is bounded",
    ),
    (
        "hostile-slow-cancel",
        "p95 1.04 to 1.13, ratio 1.00 (1.12 and 1.02 if cancels take no time): easy and hard text alternate, the best fixed \
         length makes 0.87, and what a few requests win the others wait for; the regret budget bounds the mean only",
    ),
];

fn tables() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/control");
    let files = std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    let mut tables: Vec<PathBuf> =
        files.filter(|path| path.extension().is_some_and(|kind| kind == "yaml")).collect();
    tables.sort();
    tables
}

fn name(path: &Path) -> &str {
    path.file_stem().and_then(|name| name.to_str()).expect("a name")
}

fn played(path: &Path, mode: Mode) -> TableReport {
    let table = Table::read(path).unwrap_or_else(|error| panic!("{error}"));
    let outcome = play::play(&table, 1, mode, play::gammas(&table))
        .unwrap_or_else(|broken| panic!("{}: {broken}", name(path)));
    TableReport { table, outcome, swept: Vec::new() }
}

#[test]
fn every_table_meets_its_expectations() {
    let (mut wrong, mut waiting) = (Vec::new(), Vec::new());
    for path in tables() {
        let report = played(&path, Mode::Auto);
        let short = !report.shortfalls().is_empty();
        match (short, PENDING.iter().find(|pending| pending.0 == name(&path))) {
            (false, None) => {}
            (true, Some((name, reason))) => {
                waiting.push(format!("pending: {name}: {reason}\n{}", report.text()));
            }
            (true, None) => wrong.push(report.text()),
            (false, Some((name, _))) => {
                wrong.push(format!(
                    "{name} meets its expectations: remove it from PENDING\n{}",
                    report.text()
                ));
            }
        }
    }
    println!("{}", waiting.join("\n"));
    assert!(wrong.is_empty(), "{} tables:\n{}", wrong.len(), wrong.join("\n"));
}

/// The hostile tables' expectations must not fail by chance alone: they hold for sessions that
/// never speculate.
#[test]
fn hostile_tables_hold_for_plain_decoding() {
    let hostile = tables().into_iter().filter(|path| name(path).starts_with("hostile-"));
    let wrong: Vec<String> = hostile
        .map(|path| played(&path, Mode::Plain))
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
    assert!(some(&|table| table.untuned) >= 3);
    assert!(some(&|table| table.setup.signal.every.is_none()) >= 1, "no load signal");
    assert!(some(&|table| table.setup.signal.until.is_some()) >= 1, "a stale load signal");
    assert!(some(&|table| !table.setup.engine.prefix_cache) >= 1, "no prefix cache");
    assert!(some(&|table| table.setup.engine.cancel >= 1.0) >= 1, "slow cancels");
    assert!(some(&|table| table.setup.sidecars >= 4) >= 1, "several sidecars");
    assert!(some(&|table| table.overload.is_some()) >= 2, "overload");
    for pending in PENDING {
        assert!(tables.iter().any(|table| table.name == pending.0), "{} is no table", pending.0);
    }
    // The hostile tables' limits are those of the design.
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

/// The sweep of `friendly-sampled`, for numbers of clients that the engine has room for. The
/// compared gamma counts plain decoding as 0: where few texts are speculated on, their rounds do
/// not represent the rest.
#[test]
fn gamma_falls_with_temperature_and_with_load() {
    const CLIENTS: [usize; 3] = [1, 4, 8];
    const TEMPERATURES: [f64; 4] = [0.0, 0.4, 0.7, 1.0];
    let path = tables().into_iter().find(|path| name(path) == "friendly-sampled").expect("it is there");
    let mut table = Table::read(&path).expect("a table");
    let all = std::mem::take(&mut table.sweep.clients);
    table.seeds = 1;
    // Of a minute the beginning is a large part.
    (table.seconds, table.setup.until) = (240.0, Some(240.0));
    let cells = |clients: &[usize]| {
        let mut table = table.clone();
        table.sweep.clients = clients.to_vec();
        sweep::play(&table, 1).expect("exact")
    };
    let within = cells(&CLIENTS);
    println!("{}", sweep::text(&within));
    let cell = |clients: usize, temperature: f64| -> &Cell {
        let same = |cell: &&Cell| {
            cell.clients == clients && (cell.temperature - temperature).abs() < 1e-9 && cell.requests > 0
        };
        within.iter().find(same).unwrap_or_else(|| panic!("{clients} clients at {temperature}"))
    };
    for clients in CLIENTS {
        let drafted = TEMPERATURES.map(|temperature| cell(clients, temperature).drafted);
        assert!(drafted.windows(2).all(|pair| pair[1] < 1.15 * pair[0]), "{clients} clients: {drafted:?}");
        assert!(drafted[3] < 0.2 * drafted[0], "{clients} clients: {drafted:?}");
        let (cold, hot) = (cell(clients, 0.0), cell(clients, 1.0));
        assert!(cold.drafted > hot.drafted && cold.plain < hot.plain, "{cold:?} {hot:?}");
    }
    for temperature in &TEMPERATURES[..3] {
        let drafted = CLIENTS.map(|clients| cell(clients, *temperature).drafted);
        // Four may fall below eight: the delay of first tokens, which bounds the draft tokens in
        // flight, is more certain there.
        assert!(drafted[1] < drafted[0], "T={temperature}: {drafted:?}");
        // The best fixed length here is 16 for one client and for eight (`best fixed gamma` of a
        // run of this table at T=0.4), so a large fall would be a loss.
        assert!(drafted[2] < drafted[0], "T={temperature}: {drafted:?}");
    }
    // At temperature 1 most of the output is decoded plainly, at any load: a fixed length loses.
    assert!(CLIENTS.iter().all(|&clients| cell(clients, 1.0).plain > 0.7));
    let most = all.into_iter().max().expect("clients");
    let overloaded = cells(&[most]);
    assert!(overloaded.iter().all(|cell| cell.load > 1.0 && cell.plain > 0.8), "{overloaded:?}");
    assert_eq!(cells(&[most]), overloaded, "the same seed gives the same");
}

fn args(workload: &[&Path], folder: &Path) -> SimArgs {
    SimArgs {
        workload: workload.iter().map(|path| path.to_path_buf()).collect(),
        json: Some(folder.join("out.json")),
        html: Some(folder.join("out.html")),
        seed: 1,
        fixed: false,
        grid: false,
        traces: PathBuf::new(),
        only: Vec::new(),
    }
}

#[test]
fn the_command_reports_shortfalls_and_its_exit_code() {
    let folder = tempfile::tempdir().expect("a folder");
    let written = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).expect("written");
        path
    };
    let good = "version: 1\nname: t\nabout: a test\nfor: 5s\nengine: { paced: { step: 20ms } }\n\
                traffic: [{ whose: ours, clients: 1, text: { output: 20 } }]\nexpect: { ratio: { min: 0.9 } }\n";
    let (good, short, wrong) = (
        written("good.yaml", good),
        written("short.yaml", &good.replace("min: 0.9", "min: 9")),
        written("wrong.yaml", &good.replace("for: 5s", "for: 5")),
    );
    let run = |workload: &[&Path]| {
        let mut out = Vec::new();
        let exit = command::run(&args(workload, folder.path()), &mut out);
        (exit, String::from_utf8(out).expect("text"))
    };
    let (exit, out) = run(&[&good]);
    assert_eq!(exit, Exit::Done);
    assert!(out.starts_with("t: a test\n  ratio ") && !out.contains("NOT MET"), "{out}");
    let json = std::fs::read_to_string(folder.path().join("out.json")).expect("JSON");
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert!(json["tables"][0]["figures"]["ratio"].as_f64().is_some_and(|ratio| ratio > 0.9), "{json}");
    assert_eq!(json["tables"][0]["expected"][0]["met"], true);
    let page = std::fs::read_to_string(folder.path().join("out.html")).expect("a page");
    assert_eq!(page.matches("<svg").count(), 4);
    assert!(!page.contains("http://") && !page.contains("<script"));
    let (exit, out) = run(&[&good, &short]);
    assert_eq!(exit, Exit::RequirementNotMet);
    assert!(
        out.contains("NOT MET") && out.ends_with("1 of 2 tables have a figure that was not met\n"),
        "{out}"
    );
    assert_eq!(
        run(&[&good, &wrong]),
        (Exit::Usage, String::new()),
        "an error is found before anything is played"
    );
    assert_eq!(run(&[&folder.path().join("none.yaml")]).0, Exit::Usage);
}

#[test]
fn a_set_of_tables_is_compared_with_every_fixed_gamma_on_request() {
    let folder = tempfile::tempdir().expect("a folder");
    let table = folder.path().join("short.yaml");
    let text = "version: 1\nname: short\nabout: one client\nfor: 5s\nengine: { paced: { step: 20ms, base: 1.1, node: 0.005 } }\n\
                traffic:\n  - { whose: ours, clients: 1, text: { output: 64, copied: { rewrite: 0.05 } } }\nexpect: { ratio: { min: 0.1 } }\n";
    std::fs::write(&table, text).expect("written");
    let mut out = Vec::new();
    let done = command::run(&SimArgs { fixed: true, ..args(&[&table], folder.path()) }, &mut out);
    let said = String::from_utf8(out).expect("text");
    assert_eq!(done == Exit::RequirementNotMet, said.contains("BEATEN"), "{said}");
    let last = said.lines().last().expect("a line");
    assert!(last.starts_with("1 tables, our tokens per second") && last.contains("fixed 31 "), "{said}");
}

#[test]
fn the_same_seed_gives_the_same_figures_and_another_others() {
    let path = tables().into_iter().find(|path| name(path) == "hostile-far-away").expect("it is there");
    let table = Table::read(&path).expect("a table");
    let json = |seed| {
        let outcome = play::play(&table, seed, Mode::Auto, play::gammas(&table)).expect("exact");
        TableReport { table: table.clone(), outcome, swept: Vec::new() }.json().to_string()
    };
    assert_eq!(json(1), json(1));
    assert_ne!(json(1), json(2));
}
