//! Plays a table: without Foretell, with the controller's decisions, and with fixed gammas if it is
//! compared with them.

use super::figures::{Figure, Outcome, Played};
use super::pool;
use super::record::Record;
use super::table::Table;
use super::world::{Broken, Mode, Setup, World};
use foretell_core::units::SplitMix64;

/// The fixed gammas that the controller is compared with.
pub const GAMMAS: [usize; 5] = [2, 4, 8, 16, 31];

/// The fixed gammas that a table must be played with: all if it has an expectation on `of_best`,
/// else none.
pub fn gammas(table: &Table) -> &'static [usize] {
    let compares = table.expected.iter().any(|expected| expected.figure == Figure::OfBest);
    if compares { &GAMMAS } else { &[] }
}

/// Plays a table with its seeds, on all processors: without Foretell, with it in this mode, and
/// with fixed gammas.
///
/// # Errors
/// See [`World::play`].
pub fn play(table: &Table, seed: u64, through: Mode, gammas: &[usize]) -> Result<Outcome, Broken> {
    let fixed = gammas.iter().copied().map(Mode::Fixed);
    let modes: Vec<Mode> = [Mode::Direct, through].into_iter().chain(fixed).collect();
    let seeds = table.seeds.max(1) as usize;
    let one = |number: usize| {
        let mode = modes.get(number / seeds).copied().unwrap_or(Mode::Direct);
        let seed = SplitMix64::mix(seed ^ SplitMix64::mix((number % seeds) as u64));
        World::play(Setup { mode, seed, ..table.setup.clone() })
    };
    let records = pool::each(modes.len() * seeds, one);
    let mut records = records.into_iter().collect::<Result<Vec<Record>, Broken>>()?.into_iter();
    let mut of_seeds = || Played(records.by_ref().take(seeds).collect());
    let (direct, auto) = (of_seeds(), of_seeds());
    Ok(Outcome {
        streams: table.setup.streams.iter().map(|stream| stream.whose).collect(),
        seconds: table.seconds,
        overload: table.overload,
        direct,
        auto,
        fixed: gammas.iter().map(|&gamma| (gamma, of_seeds())).collect(),
    })
}
