//! `foretell bench --drafters`: measures drafters over recorded texts, without a server.

use std::fmt::Write as _;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use super::bench::{BenchArgs, Report, Unusable};
use crate::draft::Spelling;
use crate::lab::Exit;
use crate::lab::replay::{self, Contestant, Game, Row, Stream};
use crate::text::Tokenizer;
use crate::words::Shape;

/// Maximum draft tokens of a round.
const MAX_GAMMA: usize = 32;
/// Maximum time of a round besides drafting, milliseconds.
const MAX_VERIFY: f64 = 60e3;

/// Plays the streams with each drafter; the table goes to `out`, errors to standard error.
pub(super) fn run(args: &BenchArgs, out: &mut impl Write) -> Exit {
    match played(args) {
        Ok(rows) => finish(args, &rows, out),
        Err(unusable) => refuse(&unusable),
    }
}

fn played(args: &BenchArgs) -> Result<Vec<Row>, Unusable> {
    let (players, shape) = read(args)?;
    let streams = |path: &PathBuf| replay::read(path).map_err(Unusable::Streams);
    let earlier: Vec<Stream> =
        args.earlier.iter().map(streams).collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect();
    let verify = Duration::from_secs_f64(args.verify_ms / 1e3);
    let spelling = spelling(args.tokenizer.as_deref(), &players)?;
    let game = Game {
        gamma: args.gamma,
        shape,
        earlier: &earlier,
        context: args.context,
        spelling: spelling.as_ref(),
        verify,
    };
    let mut rows: Vec<Row> = Vec::new();
    for path in &args.streams {
        let streams = streams(path)?;
        let name = path.file_stem().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        rows.extend(players.iter().map(|player| replay::play(*player, &players, &name, &streams, game)));
    }
    Ok(rows)
}

/// The tokenizer of the streams; it is only opened for a drafter that needs it.
fn spelling(file: Option<&Path>, players: &[Contestant]) -> Result<Option<Arc<dyn Spelling>>, Unusable> {
    if !players.contains(&Contestant::Phrasebook) {
        return Ok(None);
    }
    let unusable = |got: String| {
        let allowed = "the tokenizer.json of the streams, for phrasebook";
        Unusable::Value { flag: "tokenizer", allowed, got }
    };
    let file = file.ok_or_else(|| unusable("nothing".to_owned()))?;
    let tokenizer = Tokenizer::from_file(file).map_err(|error| unusable(error.to_string()))?;
    Ok(Some(Arc::new(tokenizer)))
}

fn finish(args: &BenchArgs, rows: &[Row], out: &mut impl Write) -> Exit {
    // A closed pipe is not an error: the file is still written.
    let _ = out.write_all(table(rows).as_bytes());
    let told =
        json!({ "gamma": args.gamma, "context": args.context, "verify_ms": args.verify_ms, "rows": rows });
    let json = Report::open(args.json.as_deref());
    match json.and_then(|file| file.map_or(Ok(()), |file| file.write(&format!("{told:#}\n")))) {
        Ok(()) => Exit::Done,
        Err(unusable) => refuse(&unusable),
    }
}

fn refuse(unusable: &Unusable) -> Exit {
    super::complain(&format_args!("foretell bench: {unusable}"));
    Exit::Usage
}

fn read(args: &BenchArgs) -> Result<(Vec<Contestant>, Shape), Unusable> {
    let value = |flag, allowed, got: String| Unusable::Value { flag, allowed, got };
    let parse = |name: &String| {
        let allowed =
            "prompt_lookup, suffix, suffix_tenant, recycling, recycling_tenant, phrasebook, model, merged";
        Contestant::parse(name).ok_or_else(|| value("drafters", allowed, name.clone()))
    };
    let players = args.drafters.iter().map(parse).collect::<Result<Vec<_>, _>>()?;
    if !(1..=MAX_GAMMA).contains(&args.gamma) {
        return Err(value("gamma", "1..=32", args.gamma.to_string()));
    }
    if !(0.0..=MAX_VERIFY).contains(&args.verify_ms) {
        return Err(value("verify-ms", "0..=60000", args.verify_ms.to_string()));
    }
    if args.streams.is_empty() {
        return Err(value("streams", "at least one file", "nothing".to_owned()));
    }
    Ok((players, if args.chain { Shape::Chain } else { Shape::Tree }))
}

fn table(rows: &[Row]) -> String {
    let mut text = format!(
        "{:<14} {:<14} {:>7} {:>8} {:>8} {:>6} {:>9} {:>9} {:>9} {:>8} {:>9} {:>8}\n",
        "workload",
        "drafter",
        "rounds",
        "drafted",
        "accepted",
        "length",
        "us/token",
        "p50",
        "p99",
        "share %",
        "reading",
        "B/token"
    );
    for row in rows {
        let [mean, p50, p99] = row.micros;
        let bytes = row.bytes_per_token.map_or_else(|| "-".to_owned(), |bytes| format!("{bytes:.1}"));
        let _ = writeln!(
            text,
            "{:<14} {:<14} {:>7} {:>8} {:>8} {:>6.3} {mean:>9.2} {p50:>9.2} {p99:>9.2} {:>8.4} {:>9.3} {bytes:>8}",
            row.workload,
            row.drafter,
            row.rounds,
            row.drafted,
            row.accepted,
            row.mean_acceptance_length,
            100.0 * row.share,
            row.reading
        );
    }
    text
}
