//! The texts of a table.

use std::path::Path;

use crate::sim::source::{self, Scripts};
use crate::sim::synthetic::{Agreement, Copied, Kind};
use foretell::config::kind::{number, whole};
use foretell::config::problem::Refusal;
use foretell::config::read::{Item, Section};
use foretell::config::yaml::Value;

/// Number of requests generated of a kind before they repeat.
const MADE: usize = 64;

pub(super) fn scripts(item: &Item<'_>, seed: u64, traces: &Path) -> Option<Scripts> {
    if let Value::Text(name) = &item.node.value {
        let read = source::read(&traces.join(format!("{name}.jsonl")));
        let refused = |error: source::Unreadable| {
            item.refuse_as(Refusal::new("not a recording", "one of traces/"), error.to_string());
        };
        return read.map_err(refused).ok();
    }
    Some(kind(item.section()).scripts(MADE, 1_000 + seed))
}

fn kind(mut section: Section<'_>) -> Kind {
    let kind = Kind {
        prompt: section.or("prompt", "", 300, &whole(1..=1_000_000)),
        output: section.or("output", "", 128, &whole(1..=1_000_000)),
        vary: section.or("vary", "", 0.5, &number(0.0..=1.0)),
        copied: section.item("copied", "").and_then(|item| copied(&item)).unwrap_or(Copied::Fresh),
        agreement: section
            .item("agreement", "")
            .and_then(|item| agreement(&item))
            .unwrap_or(Agreement::Never),
    };
    section.close();
    kind
}

fn copied(item: &Item<'_>) -> Option<Copied> {
    const ALLOWED: &str = "fresh|{ rewrite: EDITS }|{ until: TOKENS }|{ plateau: { after, period } }";
    if matches!(&item.node.value, Value::Text(text) if text == "fresh") {
        return Some(Copied::Fresh);
    }
    let mut section = map(item, ALLOWED)?;
    let rewrite =
        section.item("rewrite", "").and_then(|item| item.read(&number(0.0..=1.0))).map(Copied::Rewrite);
    let until =
        section.item("until", "").and_then(|item| item.read(&whole(0..=1_000_000))).map(Copied::Until);
    let plateau = section.item("plateau", "").map(|item| {
        let mut section = item.section();
        let after = section.or("after", "", 0, &whole(0..=1_000_000));
        let period = section.or("period", "", 1, &whole(1..=1_000_000));
        section.close();
        Copied::Plateau { after, period }
    });
    section.close();
    one(item, ALLOWED, [rewrite, until, plateau])
}

fn agreement(item: &Item<'_>) -> Option<Agreement> {
    const ALLOWED: &str = "none|{ even: P }|{ fading: [P, …] }|{ turning: { first, then, at } }|{ mixed: { easy, hard, stretch } }";
    if matches!(&item.node.value, Value::Text(text) if text == "none") {
        return Some(Agreement::Never);
    }
    let share = || number(0.0..=1.0);
    let mut section = map(item, ALLOWED)?;
    let even = section.item("even", "").and_then(|item| item.read(&share())).map(Agreement::Even);
    let fading = section.item("fading", "").map(|item| Agreement::Fading(item.list(&share())));
    let turning = section.item("turning", "").map(|item| {
        let mut section = item.section();
        let (first, then) = (section.or("first", "", 0.9, &share()), section.or("then", "", 0.1, &share()));
        let at = section.or("at", "", 64, &whole(0..=1_000_000));
        section.close();
        Agreement::Turning { first, then, at }
    });
    let mixed = section.item("mixed", "").map(|item| {
        let mut section = item.section();
        let (easy, hard) = (section.or("easy", "", 0.9, &share()), section.or("hard", "", 0.4, &share()));
        let stretch = section.or("stretch", "", 12.0, &number(1.0..=1e6));
        section.close();
        Agreement::Mixed { easy, hard, stretch }
    });
    section.close();
    one(item, ALLOWED, [even, fading, turning, mixed])
}

fn map<'n>(item: &Item<'n>, allowed: &str) -> Option<Section<'n>> {
    let is_map = matches!(item.node.value, Value::Map(_));
    if !is_map {
        item.refuse(Refusal::new("unknown value", allowed));
    }
    is_map.then(|| item.section())
}

fn one<T, const N: usize>(item: &Item<'_>, allowed: &str, found: [Option<T>; N]) -> Option<T> {
    let mut found: Vec<T> = found.into_iter().flatten().collect();
    if found.len() != 1 {
        item.refuse(Refusal::new("not one of these", allowed));
    }
    found.pop()
}
