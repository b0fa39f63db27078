//! The engine and the drafter of a table.

use super::read::within;
use crate::sim::drafter::DrafterSpec;
use crate::sim::engine::EngineSpec;
use crate::sim::profile::{Jitter, Paced, Profile, Shape};
use foretell::config::kind::{Kind, boolean, number, text, whole};
use foretell::config::problem::Refusal;
use foretell::config::read::{Item, Section};
use foretell::config::yaml::Value;
use serde_json::Value as Json;

pub(super) fn engine(mut section: Section<'_>) -> Option<EngineSpec> {
    let profile = section.maybe("profile", "", None, &profile());
    let paced = section.item("paced", "").and_then(|item| paced(item.section()));
    let spec = match (profile, paced) {
        (Some(profile), None) => Some(EngineSpec {
            shape: profile.shape(),
            jitter: Jitter::USUAL,
            prefix_cache: true,
            changes: Vec::new(),
            cancel: 0.0,
        }),
        (None, Some(paced)) => Some(EngineSpec::paced(paced)),
        _ => {
            section.refuse(
                "profile",
                Refusal::new("not one of two", "either profile or paced"),
                "both or none",
            );
            None
        }
    };
    // Read with a default even after an error, so that every error is found.
    let base = spec.clone().unwrap_or_else(|| EngineSpec::paced(Paced::default()));
    let shape = base.shape;
    let engine = EngineSpec {
        shape: Shape {
            sequences: section.or("sequences", "", shape.sequences, &whole(1..=100_000)),
            kv: section.or("kv", "", shape.kv, &whole(1..=1_000_000_000)),
            chunk: section.or("chunk", "", shape.chunk, &whole(1..=10_000_000)),
            block: section.or("block", "", shape.block, &whole(1..=4096)),
            pace: shape.pace,
        },
        changes: base.changes,
        prefix_cache: section.or("prefix_cache", "", base.prefix_cache, &boolean()),
        cancel: section.or("cancel", "", base.cancel, &within(0.0, 60.0)),
        jitter: section.item("jitter", "").and_then(|item| jitter(&item)).unwrap_or(base.jitter),
    };
    section.close();
    spec.map(|_| engine)
}

fn profile() -> Kind<Profile> {
    Kind::new(Json::Null, |node| {
        let name = text().read(node)?;
        name.parse().map_err(|_| {
            let names: Vec<&str> = Profile::ALL.iter().map(|profile| profile.name()).collect();
            Refusal::new("unknown profile", names.join("|")).near(&name, &names)
        })
    })
}

fn paced(mut section: Section<'_>) -> Option<Paced> {
    let step = section.must("step", "", "a duration", &within(1e-6, 60.0));
    let (base, node) =
        (section.or("base", "", 1.0, &number(0.0..=1e3)), section.or("node", "", 0.0, &number(0.0..=1e3)));
    let growth = section.or("growth", "", 0.0, &number(0.0..=1e3));
    let prompt = section.or("prompt", "", 0.0, &within(0.0, 60.0));
    section.close();
    Some(Paced { step: step?, base, node, growth, prompt })
}

fn jitter(item: &Item<'_>) -> Option<Jitter> {
    match &item.node.value {
        Value::Text(name) if name == "none" => return Some(Jitter::NONE),
        Value::Text(name) if name == "usual" => return Some(Jitter::USUAL),
        Value::Text(_) => {
            item.refuse(Refusal::new("unknown value", "none|usual|{ spread, rare, tail }"));
            return None;
        }
        _ => {}
    }
    let mut section = item.section();
    let jitter = Jitter {
        spread: section.or("spread", "", 0.0, &number(0.0..=0.9)),
        rare: section.or("rare", "", 0.0, &number(0.0..=1.0)),
        tail: section.or("tail", "", 1.0, &number(1.0..=20.0)),
    };
    section.close();
    Some(jitter)
}

/// The drafter; `None` for `none`.
pub(super) fn drafter(item: &Item<'_>) -> Option<DrafterSpec> {
    if matches!(&item.node.value, Value::Text(text) if text == "none") {
        return None;
    }
    let mut section = item.section();
    let usual = DrafterSpec::BUNDLED;
    let spec = DrafterSpec {
        token: section.or("token", "", usual.token, &within(0.0, 60.0)),
        read: section.or("read", "", usual.read, &within(0.0, 60.0)),
        growth: section.or("growth", "", usual.growth, &number(0.0..=1e3)),
        slots: section.or("slots", "", usual.slots, &whole(1..=100_000)),
        shared: section.or("shared", "", usual.shared, &boolean()),
    };
    section.close();
    Some(spec)
}
