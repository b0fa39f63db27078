//! `foretell-lab drafters`: measures drafters over recorded texts, without a server.

use std::fmt::Write as _;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use super::complain;
use crate::replay::{self, ReplayDrafter, ReplaySettings, Row, Stream};
use foretell::cli::Exit;
use foretell_core::draft::Spelling;
use foretell_core::words::Shape;
use foretell_parsers::text::Tokenizer;

/// Maximum draft tokens of a round.
const MAX_GAMMA: usize = 32;
/// Maximum time of a round besides drafting, milliseconds.
const MAX_VERIFY: f64 = 60e3;

/// Play recorded texts with each of some drafters, and compare them.
#[derive(Clone, Debug, clap::Args)]
pub struct DraftersArgs {
    /// The drafters, of prompt_lookup|suffix|suffix_tenant|phrasebook|model|merged.
    #[arg(value_name = "LIST", value_delimiter = ',', required = true)]
    pub drafters: Vec<String>,
    /// The recorded texts, one {"prompt", "output", "choices"} of token ids per line.
    #[arg(long, value_name = "F", num_args = 1.., value_delimiter = ',', required = true)]
    pub streams: Vec<PathBuf>,
    /// The tokenizer.json of the recorded texts, which phrasebook needs.
    #[arg(long, value_name = "F")]
    pub tokenizer: Option<PathBuf>,
    /// Maximum nodes of a draft, 1 to 32.
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub gamma: usize,
    /// Drafts are chains, as for verification methods without trees.
    #[arg(long)]
    pub chain: bool,
    /// Recorded texts that are in the corpus before the first one is played.
    #[arg(long, value_name = "F", num_args = 1.., value_delimiter = ',')]
    pub earlier: Vec<PathBuf>,
    /// Minimum tokens of context, filled up with other texts.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub context: usize,
    /// Assumed time of a round besides drafting, milliseconds: "share %" is the share of drafting
    /// and learning in the total.
    #[arg(long, value_name = "MS", default_value_t = 10.0)]
    pub verify_ms: f64,
    /// Write the figures as JSON.
    #[arg(long, value_name = "F")]
    pub json: Option<PathBuf>,
}

/// Reason that nothing was measured.
#[derive(Debug, thiserror::Error)]
enum Unusable {
    #[error("{0}")]
    Streams(#[from] replay::Error),
    #[error("--{flag}: allowed {allowed}, got {got}")]
    Value { flag: &'static str, allowed: &'static str, got: String },
    #[error("{path}: {source}")]
    File { path: PathBuf, source: std::io::Error },
}

/// Plays the streams with each drafter; the table goes to `out`, errors to standard error.
pub fn run(args: &DraftersArgs, out: &mut impl Write) -> Exit {
    match played(args) {
        Ok(rows) => finish(args, &rows, out),
        Err(unusable) => refuse(&unusable),
    }
}

fn played(args: &DraftersArgs) -> Result<Vec<Row>, Unusable> {
    let (drafters, shape) = read(args)?;
    let streams = |path: &PathBuf| replay::read(path).map_err(Unusable::Streams);
    let earlier: Vec<Stream> =
        args.earlier.iter().map(streams).collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect();
    let verify = Duration::from_secs_f64(args.verify_ms / 1e3);
    let spelling = spelling(args.tokenizer.as_deref(), &drafters)?;
    let settings = ReplaySettings {
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
        rows.extend(
            drafters.iter().map(|drafter| replay::play(*drafter, &drafters, &name, &streams, settings)),
        );
    }
    Ok(rows)
}

/// The tokenizer of the streams; it is only opened for a drafter that needs it.
fn spelling(file: Option<&Path>, drafters: &[ReplayDrafter]) -> Result<Option<Arc<dyn Spelling>>, Unusable> {
    if !drafters.contains(&ReplayDrafter::Phrasebook) {
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

fn finish(args: &DraftersArgs, rows: &[Row], out: &mut impl Write) -> Exit {
    // A closed pipe is not an error: the file is still written.
    let _ = out.write_all(table(rows).as_bytes());
    let figures =
        json!({ "gamma": args.gamma, "context": args.context, "verify_ms": args.verify_ms, "rows": rows });
    let Some(path) = &args.json else { return Exit::Done };
    match std::fs::write(path, format!("{figures:#}\n")) {
        Ok(()) => Exit::Done,
        Err(source) => refuse(&Unusable::File { path: path.clone(), source }),
    }
}

fn refuse(unusable: &Unusable) -> Exit {
    complain(&format_args!("foretell-lab drafters: {unusable}"));
    Exit::Usage
}

fn read(args: &DraftersArgs) -> Result<(Vec<ReplayDrafter>, Shape), Unusable> {
    let value = |flag, allowed, got: String| Unusable::Value { flag, allowed, got };
    let parse = |name: &String| {
        let allowed = "prompt_lookup, suffix, suffix_tenant, phrasebook, model, merged";
        ReplayDrafter::parse(name).ok_or_else(|| value("drafters", allowed, name.clone()))
    };
    let drafters = args.drafters.iter().map(parse).collect::<Result<Vec<_>, _>>()?;
    if !(1..=MAX_GAMMA).contains(&args.gamma) {
        return Err(value("gamma", "1..=32", args.gamma.to_string()));
    }
    if !(0.0..=MAX_VERIFY).contains(&args.verify_ms) {
        return Err(value("verify-ms", "0..=60000", args.verify_ms.to_string()));
    }
    Ok((drafters, if args.chain { Shape::Chain } else { Shape::Tree }))
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
