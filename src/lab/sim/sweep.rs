//! Gamma over temperature and load: a table replayed with every number of clients and texts of
//! every temperature.
//!
//! The first stream of ours gets the clients and the text; everything else stays as in the table.
//! The figures are of requests that began in the second half of the time, when the controller knew
//! the engine and the text.

use std::fmt::Write;

use super::pool;
use super::record::{Record, Served};
use super::source::Scripts;
use super::table::{Sweep, Table};
use super::traffic::{Arrivals, Owner, Ramp};
use super::world::{Broken, Setup, World};
use foretell_core::session::Summary;
use foretell_core::units::SplitMix64;

/// One number of clients with one text.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cell {
    pub clients: usize,
    /// Their number as a multiple of the sequences that the engine runs at a time.
    pub load: f64,
    /// The text's temperature.
    pub temperature: f64,
    /// Drafted tokens per round; `None` without a round. If few texts are speculated on, it is that
    /// of those texts only.
    pub gamma: Option<f64>,
    /// Drafted tokens per round or plain token: gamma, where plain decoding is gamma 0.
    pub drafted: f64,
    /// Share of the output that was decoded plainly.
    pub plain: f64,
    /// Accepted ÷ drafted tokens; `None` without a drafted token.
    pub accepted: Option<f64>,
    pub requests: usize,
}

/// The cells of a table, by clients and then by text; none if it has no sweep.
///
/// # Errors
/// See [`World::play`].
pub fn play(table: &Table, seed: u64) -> Result<Vec<Cell>, Broken> {
    let Sweep { clients, texts } = &table.sweep;
    let pairs: Vec<(usize, &Scripts)> =
        clients.iter().flat_map(|&clients| texts.iter().map(move |text| (clients, text))).collect();
    let seeds = table.seeds.max(1) as usize;
    let played = pool::each(pairs.len() * seeds, |number| {
        let &(clients, text) = pairs.get(number / seeds)?;
        let seed = SplitMix64::mix(seed ^ SplitMix64::mix((number % seeds) as u64));
        Some(World::play(setup(table, clients, text, seed)))
    });
    let records: Vec<Record> = played.into_iter().flatten().collect::<Result<_, _>>()?;
    let of =
        |(&(clients, text), records): (&(usize, &Scripts), &[Record])| cell(table, clients, text, records);
    Ok(pairs.iter().zip(records.chunks(seeds)).map(of).collect())
}

fn setup(table: &Table, clients: usize, text: &Scripts, seed: u64) -> Setup {
    let mut setup = Setup { seed, ..table.setup.clone() };
    if let Some(stream) = setup.streams.iter_mut().find(|stream| stream.whose == Owner::Ours) {
        let think = if let Arrivals::Closed { think, .. } = stream.arrivals { think } else { 0.0 };
        stream.arrivals = Arrivals::Closed { clients: Ramp::flat(clients as f64), think };
        stream.scripts = text.clone();
    }
    setup
}

fn cell(table: &Table, clients: usize, text: &Scripts, records: &[Record]) -> Cell {
    let knows = |served: &&Served| served.began >= super::at(table.seconds / 2.0);
    let served = records.iter().flat_map(|record| &record.served);
    let summaries: Vec<&Summary> =
        served.filter(knows).filter_map(|served| served.summary.as_ref()).collect();
    let sum =
        |of: &dyn Fn(&Summary) -> u32| summaries.iter().map(|summary| f64::from(of(summary))).sum::<f64>();
    let (rounds, drafted, accepted) =
        (sum(&|one| one.rounds), sum(&|one| one.drafted), sum(&|one| one.accepted));
    let tokens = sum(&|one| one.output_tokens);
    // A round yields the accepted tokens and one more.
    let plain = (tokens - accepted - rounds).max(0.0);
    let per = |value: f64, of: f64| if of > 0.0 { value / of } else { 0.0 };
    Cell {
        clients,
        load: clients as f64 / table.setup.engine.shape.sequences as f64,
        temperature: text.first().map_or(0.0, |script| script.temperature),
        gamma: (rounds > 0.0).then(|| drafted / rounds),
        drafted: per(drafted, rounds + plain),
        plain: per(plain, tokens),
        accepted: (drafted > 0.0).then(|| accepted / drafted),
        requests: summaries.len(),
    }
}

/// The distinct values of some cells, in order of appearance.
pub fn values<T: PartialEq>(cells: &[Cell], of: impl Fn(&Cell) -> T) -> Vec<T> {
    let mut found = Vec::new();
    for value in cells.iter().map(of) {
        if !found.contains(&value) {
            found.push(value);
        }
    }
    found
}

/// A line for each number of clients, with a column for each temperature; empty without cells.
pub fn rows(cells: &[Cell]) -> Vec<Vec<String>> {
    let temperatures = values(cells, |cell| cell.temperature);
    if temperatures.is_empty() {
        return Vec::new();
    }
    let first = ["clients".to_owned(), "load".to_owned()];
    let mut rows: Vec<Vec<String>> =
        vec![first.into_iter().chain(temperatures.iter().map(|t| format!("T={t}"))).collect()];
    for clients in values(cells, |cell| cell.clients) {
        let of: Vec<&Cell> = cells.iter().filter(|cell| cell.clients == clients).collect();
        let load = of.first().map_or(0.0, |cell| cell.load);
        let mut row = vec![clients.to_string(), format!("{load:.2}")];
        row.extend(of.iter().map(|cell| summarized(cell)));
        rows.push(row);
    }
    rows
}

fn summarized(cell: &Cell) -> String {
    let gamma = cell.gamma.map_or_else(|| "–".to_owned(), |gamma| format!("{gamma:.1}"));
    format!("{:.2}, {gamma}, {:.0} %", cell.drafted, cell.plain * 100.0)
}

pub fn text(cells: &[Cell]) -> String {
    let mut text = String::new();
    if !cells.is_empty() {
        text.push_str(
            "  gamma where plain decoding is gamma 0, gamma of rounds, share of the output that was decoded plainly\n",
        );
    }
    for row in rows(cells) {
        let widths = [7, 5].into_iter().chain(std::iter::repeat(19));
        let line: Vec<String> =
            row.iter().zip(widths).map(|(value, width)| format!("{value:>width$}")).collect();
        let _ = writeln!(text, "  {}", line.join(" "));
    }
    text
}
