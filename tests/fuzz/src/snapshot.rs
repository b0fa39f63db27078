//! Files that keep learnt state over a restart: costs and acceptance, and the corpus of earlier
//! texts.
//!
//! Input: the first byte selects the file; then its content, or changes to a written one. An
//! accepted file must be usable and is written again; the head and checksum of a corpus file are
//! added here, since no input would hit them.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use foretell_core::control::costs::Way;
use foretell_core::control::{Class, Control, Forecast, Prospective, TemperatureBucket, forecast};
use foretell_core::draft::Source;
use foretell_core::draft::corpus::Limits;
use foretell_core::draft::suffix::{Finder, Rules, Shape};
use foretell_core::units::Tick;
use foretell_core::words::VerifyMethod;
use foretell_net::http::memory::Memory;
use foretell_observe::Observer;
use foretell_proxy::learning::corpus::CorpusHandle;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::bytes::Bytes;

/// Maximum size of an input, bytes.
const MAX_LEN: usize = 64 << 10;
/// Maximum size of the corpus, bytes.
const HELD: usize = 1 << 20;

/// Runs one input.
pub fn run(input: &[u8]) {
    if input.len() > MAX_LEN {
        return;
    }
    let mut input = Bytes(input);
    match input.below(4) {
        0 => texts(&headed(input.0)),
        1 => texts(input.0),
        2 => serde_json::from_slice(input.0).ok().as_ref().map_or((), learnt),
        _ => learnt(&changed(input)),
    }
}

/// Learnt state of an engine.
fn learnt(saved: &Value) {
    for rest in [Duration::ZERO, Duration::from_secs(u64::MAX)] {
        let Ok(control) = Control::restored(saved.clone(), rest) else { continue };
        used(&control);
        let again = control.save().expect("what is read and used can be written");
        let read: Value = serde_json::from_str(&again.to_string()).expect("what is written is JSON");
        Control::restored(read, Duration::ZERO).expect("what is written is read again");
    }
}

/// A saved state of an engine, with some of its values replaced.
fn changed(mut input: Bytes<'_>) -> Value {
    let control = Control::new();
    (0..8).for_each(|_| used(&control));
    let mut saved = control.save().expect("it can be written");
    while !input.is_empty() {
        replace(&mut saved, &mut input);
    }
    saved
}

/// Replaces the value that is reached from here by one step for each level.
fn replace(at: &mut Value, input: &mut Bytes<'_>) {
    let step = usize::from(input.byte());
    let inner = match at {
        _ if step == 255 => None,
        Value::Object(members) => {
            let step = step % members.len().max(1);
            members.values_mut().nth(step)
        }
        Value::Array(items) => {
            let step = step % items.len().max(1);
            items.get_mut(step)
        }
        _ => None,
    };
    match inner {
        Some(inner) => replace(inner, input),
        None => *at = hostile(input),
    }
}

fn hostile(input: &mut Bytes<'_>) -> Value {
    match input.below(16) {
        0 => json!(0),
        1 => json!(-1),
        2 => json!(1e308),
        3 => json!(-1e308),
        4 => json!(u64::MAX),
        5 => json!(i64::MIN),
        6 => Value::Null,
        7 => json!([]),
        8 => json!({}),
        9 => json!("x"),
        10 => json!(true),
        11 => json!(5e-324),
        12 => json!(-0.0),
        13 => json!(u32::MAX),
        14 => json!(vec![0; input.below(256)]),
        _ => json!(input.byte()),
    }
}

/// Every read and update of the learnt state by a session.
pub(crate) fn used(control: &Control) {
    let _ = control.model("a model");
    let mut now = Tick(2_000_000);
    for temperature in [0.0, 1.0] {
        let class = Class::new(Source::PromptLookup.into(), TemperatureBucket::of(temperature), 0);
        for method in VerifyMethod::ALL {
            let way = Way { method, fallback: Some(VerifyMethod::FanOut), context: 1000 };
            now = now.after(Duration::from_millis(20));
            let asked = Prospective {
                classes: &[class],
                way,
                margin: 0.1,
                max_gap: f64::MAX,
                first_token: 1.1,
                min_acceptance: 0.1,
                gamma_max: 8,
                forced: false,
            };
            let foreseen: Forecast = control.with(|learnt| {
                learnt.note_plain(0.02, 1, now);
                learnt.costs.verified(way, 4, foretell_core::control::Shared::default(), 0.05);
                learnt.plain_resumed(0.03, 1, true, now);
                learnt.output_ended(100);
                let _ = learnt.expected_remainder(10);
                forecast(learnt, &asked)
            });
            let _ = foreseen;
        }
    }
}

/// The texts with the head of a corpus file.
fn headed(body: &[u8]) -> Vec<u8> {
    let digest = Sha256::digest(body).iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    });
    let mut file = format!("{{\"version\":1,\"saved\":4000000000,\"sha256\":\"{digest}\"}}\n").into_bytes();
    file.extend_from_slice(body);
    file
}

/// One corpus serves all inputs: its thread is started once.
fn corpus() -> &'static CorpusHandle {
    static MEMORIES: OnceLock<CorpusHandle> = OnceLock::new();
    MEMORIES.get_or_init(|| {
        let limits = Limits { bytes: HELD, ttl: Duration::from_hours(1) };
        let observer = Arc::new(Observer::new().expect("metrics"));
        CorpusHandle::start(limits, &Memory::new(1 << 30), observer, None).expect("a thread")
    })
}

fn texts(content: &[u8]) {
    let corpus = corpus();
    let file = scratch();
    std::fs::write(&file, content).expect("a file");
    let Ok(read) = corpus.load(&file) else { return };
    let holdings = corpus.holdings();
    assert!(holdings.iter().map(|(_, held)| held.texts).sum::<usize>() <= read.max(1));
    for (key, _) in &holdings {
        let view = corpus.view(key);
        let finder = Finder::new(view.iter().map(|segment| segment.source()), &[1, 2, 3]);
        let _ = finder.draft(&Rules::default(), Shape::Path);
    }
    let saved = corpus.save(&file).expect("a file");
    corpus.clear(None).expect("the corpus runs");
    assert_eq!(corpus.load(&file).ok(), Some(saved), "what is written is read again");
    corpus.clear(None).expect("the corpus runs");
    assert!(corpus.holdings().is_empty());
}

/// A file of this process.
pub fn scratch() -> PathBuf {
    std::env::temp_dir().join(format!("foretell-fuzz-{}", std::process::id()))
}
