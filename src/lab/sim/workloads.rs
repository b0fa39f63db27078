//! The five workloads: recorded if there is a recording, otherwise made from a seed.

use std::path::Path;

use super::grid::Workload;
use super::source::{self, Unreadable};
use super::synthetic::{Agreement, Copied, Kind};

/// Their names.
pub const NAMES: [&str; 5] = ["rewrite", "completion", "prose", "chat", "hostile"];
/// Number of requests of a generated workload.
const REQUESTS: usize = 30;

/// The recorded workloads of a folder, `NAME.jsonl` each; a missing one is made from a seed.
///
/// # Errors
/// A recording that cannot be read.
pub fn all(folder: &Path) -> Result<Vec<Workload>, Unreadable> {
    NAMES.into_iter().map(|name| one(folder, name)).collect()
}

fn one(folder: &Path, name: &str) -> Result<Workload, Unreadable> {
    let path = folder.join(format!("{name}.jsonl"));
    if path.exists() {
        return Ok(Workload { name: name.to_owned(), scripts: source::read(&path)? });
    }
    Ok(Workload { name: format!("{name}*"), scripts: made(name).scripts(REQUESTS, 7) })
}

/// Text with about the acceptance that was measured for the bundled models on the workload.
pub fn made(name: &str) -> Kind {
    let mixed = |easy, hard| Agreement::Mixed { easy, hard, stretch: 12.0 };
    let kind = |copied, agreement| Kind { prompt: 300, output: 128, vary: 0.0, copied, agreement };
    match name {
        "rewrite" => kind(Copied::Rewrite(0.05), mixed(0.85, 0.4)),
        "completion" => kind(Copied::Rewrite(0.45), mixed(0.9, 0.4)),
        "prose" => kind(Copied::Rewrite(0.6), mixed(0.9, 0.45)),
        "chat" => kind(Copied::Fresh, mixed(0.95, 0.5)),
        _ => kind(Copied::Fresh, Agreement::Even(0.1)),
    }
}
