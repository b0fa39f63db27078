//! The workloads: five of the bundled models, recorded or made from a seed, and those of a real
//! model that were recorded.

use std::path::{Path, PathBuf};

use super::source::{self, Scripts, Unreadable};
use super::synthetic::{Agreement, Copied, TextKind};

/// Those of the bundled models.
pub const NAMES: [&str; 5] = ["rewrite", "completion", "prose", "chat", "hostile"];
/// Those of SmolLM2-135M, without a model drafter (`tests/control/record.py --real`).
pub const REAL: [&str; 5] = ["real-edit", "real-chat", "real-completion", "real-talk", "real-tools"];
/// Number of requests of a generated workload.
const REQUESTS: usize = 30;

/// Requests of one kind.
#[derive(Clone, Debug)]
pub struct Workload {
    pub name: String,
    pub scripts: Scripts,
}

/// The recorded workloads of a folder, `NAME.jsonl` each; a missing one of the bundled models is
/// made from a seed, a missing one of the real model omitted.
///
/// # Errors
/// A recording that cannot be read.
pub fn all(folder: &Path) -> Result<Vec<Workload>, Unreadable> {
    let real = REAL.into_iter().filter(|name| recording(folder, name).exists());
    NAMES.into_iter().chain(real).map(|name| one(folder, name)).collect()
}

fn recording(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("{name}.jsonl"))
}

fn one(folder: &Path, name: &str) -> Result<Workload, Unreadable> {
    let path = recording(folder, name);
    if path.exists() {
        return Ok(Workload { name: name.to_owned(), scripts: source::read(&path)? });
    }
    Ok(Workload { name: format!("{name}*"), scripts: made(name).scripts(REQUESTS, 7) })
}

/// Text with about the acceptance that was measured for the bundled models on the workload.
pub fn made(name: &str) -> TextKind {
    let mixed = |easy, hard| Agreement::Mixed { easy, hard, stretch: 12.0 };
    let kind = |copied, agreement| TextKind { prompt: 300, output: 128, vary: 0.0, copied, agreement };
    match name {
        "rewrite" => kind(Copied::Rewrite(0.05), mixed(0.85, 0.4)),
        "completion" => kind(Copied::Rewrite(0.45), mixed(0.9, 0.4)),
        "prose" => kind(Copied::Rewrite(0.6), mixed(0.9, 0.45)),
        "chat" => kind(Copied::Fresh, mixed(0.95, 0.5)),
        "hostile" => kind(Copied::Fresh, Agreement::Even(0.1)),
        _ => unreachable!("{name} is none of NAMES"),
    }
}
