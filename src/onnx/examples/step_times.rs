//! Prints the duration of a run of a model, by number of lanes and tokens; with `--compare`, how
//! far the logits of the device are from those of the CPU.
//!
//! `cargo run --release --example step_times -- MODEL_DIR [--device cpu|cuda] [--threads N]
//! [--spin] [--context TOKENS] [--lanes 1,2,4] [--tokens 1,5,9] [--mixed 1,1,1,17] [--rounds N]
//! [--profile PREFIX] [--compare]`; `--mixed`: one run whose lanes get these numbers of tokens

use std::error::Error;
use std::path::PathBuf;
use std::time::Instant;

use foretell_onnx::forward::{Feed, Forward, Lane, Rows};
use foretell_onnx::open::{DeviceChoice, Options, open_target};

/// Longest prompt of one feed of the comparison, tokens.
const COMPARED: usize = 96;

struct Arguments {
    folder: PathBuf,
    options: Options,
    context: usize,
    lanes: Vec<usize>,
    tokens: Vec<usize>,
    mixed: Option<Vec<usize>>,
    rounds: usize,
    compare: bool,
}

fn arguments() -> Result<Arguments, Box<dyn Error>> {
    let mut given = std::env::args().skip(1);
    let folder = given.next().ok_or("usage: step_times MODEL_DIR [FLAGS]")?.into();
    let options = Options { device: DeviceChoice::Cpu, ..Options::default() };
    let mut read = Arguments {
        folder,
        options,
        context: 300,
        lanes: vec![1, 2, 4],
        tokens: vec![1, 2, 3, 5, 9, 17, 33],
        mixed: None,
        rounds: 80,
        compare: false,
    };
    let list = |text: String| text.split(',').map(str::parse).collect::<Result<Vec<usize>, _>>();
    while let Some(flag) = given.next() {
        match flag.as_str() {
            "--spin" => read.options.spinning = true,
            "--compare" => read.compare = true,
            _ => {
                let value = given.next().ok_or_else(|| format!("{flag} needs a value"))?;
                match flag.as_str() {
                    "--device" => {
                        let known = DeviceChoice::NAMES.iter().find(|(name, _)| *name == value);
                        read.options.device = known.ok_or("unknown device")?.1;
                    }
                    "--threads" => read.options.threads = value.parse()?,
                    "--context" => read.context = value.parse()?,
                    "--lanes" => read.lanes = list(value)?,
                    "--tokens" => read.tokens = list(value)?,
                    "--mixed" => read.mixed = Some(list(value)?),
                    "--rounds" => read.rounds = value.parse()?,
                    "--profile" => read.options.profile = Some(value.into()),
                    _ => return Err(format!("unknown flag {flag}").into()),
                }
            }
        }
    }
    let mixed = read.mixed.as_ref().map_or(1, Vec::len);
    read.options.lanes = read.lanes.iter().copied().max().unwrap_or(1).max(mixed);
    Ok(read)
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments = arguments()?;
    let started = Instant::now();
    let opened = open_target(&arguments.folder, &arguments.options)?;
    println!("{}; loaded in {:.1} s", opened.device, started.elapsed().as_secs_f64());
    let mut model = opened.model;
    if arguments.compare {
        let options = Options { device: DeviceChoice::Cpu, ..arguments.options.clone() };
        let mut reference = open_target(&arguments.folder, &options)?.model;
        return compare(reference.as_mut(), model.as_mut());
    }
    times(model.as_mut(), &arguments)
}

/// Tokens that mean nothing.
fn text(model: &dyn Forward, count: usize, salt: usize) -> Vec<u32> {
    (0..count).map(|index| ((index * 7 + salt * 31) % model.config().vocabulary) as u32).collect()
}

fn times(model: &mut dyn Forward, arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let prompt = text(model, arguments.context, 0);
    let lanes: Vec<Lane> = (0..arguments.options.lanes).filter_map(|_| model.reserve()).collect();
    let started = Instant::now();
    for &lane in &lanes {
        model.run(&[Feed { lane, tokens: &prompt, parents: None, rows: Rows::Last, draft: None }])?;
    }
    let each = started.elapsed().as_secs_f64() * 1e3 / lanes.len().max(1) as f64;
    println!("prefill of {}: {each:.2} ms", arguments.context);
    if let Some(mixed) = &arguments.mixed {
        let (median, least) = time(model, arguments, lanes.iter().copied().zip(mixed.iter().copied()))?;
        println!("{mixed:?} tokens: {median:.3}, {least:.3} (median, minimum [ms])");
        return Ok(());
    }
    println!("lanes x tokens: median, minimum [ms]");
    for &count in &arguments.lanes {
        for &tokens in &arguments.tokens {
            let (median, least) =
                time(model, arguments, lanes.iter().map(|&lane| (lane, tokens)).take(count))?;
            println!("{count} x {tokens}: {median:.3}, {least:.3}");
        }
    }
    Ok(())
}

/// Median and minimum of the milliseconds of a run that feeds these lanes so many tokens.
fn time(
    model: &mut dyn Forward,
    arguments: &Arguments,
    fed: impl Iterator<Item = (Lane, usize)>,
) -> Result<(f64, f64), Box<dyn Error>> {
    let fed: Vec<(Lane, Vec<u32>)> = fed.map(|(lane, tokens)| (lane, text(model, tokens, 1))).collect();
    let mut times = Vec::new();
    for _ in 0..arguments.rounds {
        let feeds: Vec<Feed<'_>> = fed
            .iter()
            .map(|(lane, tokens)| Feed {
                lane: *lane,
                tokens,
                parents: None,
                rows: Rows::From(0),
                draft: None,
            })
            .collect();
        let started = Instant::now();
        model.run(&feeds)?;
        times.push(started.elapsed().as_secs_f64() * 1e3);
        for &(lane, _) in &fed {
            model.rewind(lane, arguments.context);
        }
    }
    times.sort_by(f64::total_cmp);
    let of = |index: usize| times.get(index).copied().unwrap_or(0.0);
    Ok((of(times.len() / 2), of(0)))
}

/// The same chain, tree and committed branch on both models.
fn compare(reference: &mut dyn Forward, model: &mut dyn Forward) -> Result<(), Box<dyn Error>> {
    let prompt = text(model, COMPARED, 0);
    let parents = [None, Some(0), None, Some(2), Some(2)];
    let (mut far, mut largest, mut same, mut rows) = (0.0_f32, 0.0_f32, 0, 0);
    let mut both = |what: &str, feed: Feed<'_>, reference: &mut dyn Forward, model: &mut dyn Forward| {
        let (wanted, got) = (reference.run(&[feed])?, model.run(&[feed])?);
        for row in 0..feed.wanted() {
            let (Some(wanted), Some(got)) = (wanted.row(0, row), got.row(0, row)) else { continue };
            let best = |row: &[f32]| {
                let best = row.iter().enumerate().max_by(|(_, a), (_, b)| a.total_cmp(b));
                best.map(|(token, _)| token)
            };
            rows += 1;
            same += usize::from(best(wanted) == best(got));
            for (a, b) in wanted.iter().zip(got) {
                largest = largest.max(a.abs());
                far = if b.is_finite() { far.max((a - b).abs()) } else { f32::INFINITY };
            }
        }
        println!(
            "{what}: {same} of {rows} rows choose the same, at most {far:.2e} apart (logits to {largest:.1})"
        );
        Ok::<(), Box<dyn Error>>(())
    };
    let (Some(lane), Some(_)) = (reference.reserve(), model.reserve()) else { return Err("no lane".into()) };
    let chain = Feed { lane, tokens: &prompt, parents: None, rows: Rows::From(0), draft: None };
    both("chain", chain, reference, model)?;
    let nodes = text(model, parents.len(), 2);
    let tree = Feed { tokens: &nodes, parents: Some(&parents), ..chain };
    both("tree", tree, reference, model)?;
    reference.commit(lane, COMPARED, &[2, 4])?;
    model.commit(lane, COMPARED, &[2, 4])?;
    let after = text(model, 3, 3);
    both("after a committed branch", Feed { tokens: &after, parents: None, ..chain }, reference, model)?;
    Ok(())
}
