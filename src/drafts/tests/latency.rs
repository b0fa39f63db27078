//! How long an engine waits for its drafts: a step of ROWS rows of TOKENS tokens with both lookups,
//! over the socket, while nothing else runs.
//!
//!     cargo run --profile dist -p foretell-drafts --example latency -- [ROWS] [TOKENS] [STEPS]
#![allow(clippy::expect_used, clippy::indexing_slicing, reason = "tests")]

mod client;

use std::sync::Arc;
use std::time::{Duration, Instant};

use client::{Client, Row};
use foretell_core::units::SplitMix64;
use foretell_drafts::service::{Service, Unknown};
use foretell_net::http::memory::Memory;

/// As in the program.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Text of which every other run of 30 tokens repeats an earlier one.
fn text(tokens: usize, seed: u64) -> Vec<u32> {
    let mut rng = SplitMix64::new(seed);
    let mut text: Vec<u32> = Vec::with_capacity(tokens + 60);
    while text.len() < tokens {
        let from = rng.below(text.len() as u64 + 1) as usize;
        let again: Vec<u32> = text.iter().skip(from).take(30).copied().collect();
        text.extend(again);
        text.extend((0..30).map(|_| rng.below(8_192) as u32));
    }
    text.truncate(tokens);
    text
}

fn main() {
    let mut arguments = std::env::args().skip(1).map(|value| value.parse::<usize>().expect("a number"));
    let mut next = |usual| arguments.next().unwrap_or(usual);
    let (rows, tokens, steps) = (next(16), next(8_192), next(5_000));
    let folder = std::env::temp_dir().join(format!("foretell-latency-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder for the socket");
    let path = folder.join("drafts.sock");
    let service = Service::listen(&path, 0o600, || Unknown::Lookups, Arc::default(), Memory::new(4 << 30))
        .expect("a socket");
    let mut client = Client::connect(&path, 16, 49_152);
    let texts: Vec<Vec<u32>> = (0..rows).map(|row| text(tokens + 4 * steps, row as u64)).collect();
    for (row, text) in texts.iter().enumerate() {
        client.begin(row as u32, tokens as u32, 0.0, "a-b-c");
        client.text(row as u32, 0, &text[..tokens]);
    }
    std::thread::sleep(Duration::from_secs(2));
    let (mut waits, mut drafted) = (Vec::with_capacity(steps), 0);
    for step in 0..steps {
        // Each row emits one to four tokens.
        let at = |row: usize, step: usize| tokens + (step * 5).div_ceil(2) + row % 2;
        let of = |row: usize| {
            let from = if step == 0 { tokens } else { at(row, step - 1) };
            (from, at(row, step))
        };
        let asked: Vec<Row<'_>> = (0..rows)
            .map(|row| {
                let (from, to) = of(row);
                let new = &texts[row][from..to];
                Row {
                    row: row as u32,
                    scheduled: 0,
                    sampled: new.len() as u16,
                    room: 16,
                    length: to as u32,
                    tokens: new,
                }
            })
            .collect();
        let begun = Instant::now();
        drafted += client.step(20_000, false, &asked).1.iter().map(|(_, tokens)| tokens.len()).sum::<usize>();
        waits.push(begun.elapsed());
        // The engine computes.
        std::thread::sleep(Duration::from_millis(2));
    }
    waits.sort_unstable();
    let at = |share: f64| waits[((waits.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e6;
    println!(
        "{rows} rows of {tokens} tokens, {steps} steps, {drafted} draft tokens: p50 {:.0} us, p90 {:.0} us, p99 {:.0} us, most {:.0} us",
        at(0.5),
        at(0.9),
        at(0.99),
        at(1.0)
    );
    client.gone(&(0..rows as u32).collect::<Vec<u32>>());
    service.stop();
    let _ = std::fs::remove_dir_all(folder);
}
