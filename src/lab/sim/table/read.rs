//! A table's keys.

use std::path::Path;
use std::time::Duration;

use super::{Expected, Table, Unusable, engine, text};
use crate::sim::figures::Figure;
use crate::sim::permit::{self, Permit, Refused};
use crate::sim::sidecar::SignalSpec;
use crate::sim::sweep::Sweep;
use crate::sim::traffic::{Arrivals, Owner, Ramp, Stream};
use crate::sim::world::{Mode, Net, Setup};
use foretell::config::kind::{Kind, boolean, number, ratio, text as words, whole, word};
use foretell::config::problem::{Problems, Refusal};
use foretell::config::read::{Item, Section};
use foretell::config::yaml::{self, Value};
use foretell_core::control::{Imposed, Windows};
use foretell_core::words::VerifyMethod;
use serde_json::Value as Json;

/// Maximum simulated time, seconds.
const DAY: f64 = 86_400.0;

pub(super) fn table(file: &str, source: &str, traces: &Path) -> Result<Table, Unusable> {
    let root = yaml::parse(file, source).map_err(Unusable::Settings)?;
    let problems = Problems::new(file);
    let read = read(file, &Item::root(&root, &problems), traces);
    let found = problems.into_vec();
    match read {
        Some(table) if found.is_empty() => Ok(table?),
        _ => Err(Unusable::Settings(found)),
    }
}

fn read(file: &str, root: &Item<'_>, traces: &Path) -> Option<Result<Table, Refused>> {
    let mut top = root.section();
    top.must("version", "", "1", &whole::<i64>(1..=1));
    let name = top.must("name", "", "a text", &words());
    let about = top.must("about", "", "a text", &words());
    let held_out = top.or("held_out", "", false, &boolean());
    let seconds = top.must("for", "", "a duration", &within(1.0, DAY));
    let seeds = top.or("seeds", "", 1, &whole(1..=64));
    let interval = top.or("interval", "", 1.0, &within(0.01, DAY));
    let engine = engine::engine(top.section("engine", ""));
    let net = net(top.section("network", ""));
    let signal = top.item("signal", "").map_or(SignalSpec::USUAL, |item| signal(&item));
    let drafter = top.item("drafter", "").and_then(|item| engine::drafter(&item));
    let methods = top.list("verify", "", vec![VerifyMethod::Tree], &word(METHODS));
    let sidecars = top.or("sidecars", "", 1, &whole(1..=64));
    let permit = permit(file, &mut top, &methods);
    let imposed = budget(top.section("budget", ""));
    let streams = streams(top.item("traffic", ""), traces);
    if streams.is_empty() {
        top.refuse("traffic", Refusal::new("no traffic", "at least one stream"), "none");
    }
    let overload = top.item("overload", "").and_then(|item| overload(item.section()));
    let sweep = top.item("sweep", "").map(|item| sweep(item.section(), traces)).unwrap_or_default();
    let expected = top.item("expect", "").map(|item| expected(&item)).unwrap_or_default();
    if expected.is_empty() {
        top.refuse("expect", Refusal::new("no expectation", Figure::names()), "none");
    }
    top.close();
    let (engine, seconds) = (engine?, seconds?);
    let permit = match permit {
        Ok(permit) => Permit { imposed: imposed.unwrap_or(permit.imposed), ..permit },
        Err(refused) => return Some(Err(refused)),
    };
    let setup = Setup {
        drafter,
        net,
        sidecars,
        signal,
        mode: Mode::Auto,
        until: Some(seconds),
        interval,
        ..Setup::plain(engine, permit, streams)
    };
    Some(Ok(Table { name: name?, about: about?, held_out, setup, seeds, seconds, overload, sweep, expected }))
}

const METHODS: &[(&str, VerifyMethod)] = &[
    ("tree", VerifyMethod::Tree),
    ("score", VerifyMethod::Score),
    ("fan_out", VerifyMethod::FanOut),
    ("native", VerifyMethod::Native),
];
const DRAFTERS: &[(&str, (bool, bool))] =
    &[("lookup", (true, false)), ("model", (false, true)), ("both", (true, true))];

/// The policy's permit. Without a policy: one with the named drafters.
fn permit(file: &str, top: &mut Section<'_>, methods: &[VerifyMethod]) -> Result<Permit, Refused> {
    let (lookup, model) = top.or("drafters", "", (true, true), &word(DRAFTERS));
    let own = top.maybe("policy", "", None, &words());
    let text = own.unwrap_or_else(|| permit::policy(lookup, model));
    permit::of(&format!("{file} policy"), &text, methods, 1 << 20)
}

/// The backend's budget; `None` where the table sets none.
fn budget(mut section: Section<'_>) -> Option<Imposed> {
    let extra_tokens = section.maybe("extra_tokens", "", None, &ratio());
    let windows = section.item("switchback", "").map(|item| {
        let mut section = item.section();
        let time = |seconds: f64| Duration::from_secs_f64(seconds);
        let windows = Windows {
            window: time(section.or("window", "", 20.0, &within(0.1, DAY))),
            every: time(section.or("every", "", 1800.0, &within(1.0, DAY))),
        };
        section.close();
        windows
    });
    section.close();
    let set = extra_tokens.is_some() || windows.is_some();
    set.then(|| Imposed { extra_tokens: extra_tokens.unwrap_or(0.25), windows })
}

fn net(mut section: Section<'_>) -> Net {
    let net = Net {
        rtt: section.or("rtt", "", 0.5e-3, &within(0.0, 10.0)),
        call: section.or("call", "", 0.3e-3, &within(0.0, 10.0)),
    };
    section.close();
    net
}

fn signal(item: &Item<'_>) -> SignalSpec {
    if matches!(&item.node.value, Value::Text(text) if text == "none") {
        return SignalSpec::ABSENT;
    }
    let mut section = item.section();
    let signal = SignalSpec {
        every: Some(section.or("every", "", 0.5, &within(0.001, DAY))),
        age: section.or("age", "", 0.0, &within(0.0, DAY)),
        until: section.maybe("until", "", None, &within(0.0, DAY)),
    };
    section.close();
    signal
}

fn streams(item: Option<Item<'_>>, traces: &Path) -> Vec<Stream> {
    let items = item.map(|item| item.items()).unwrap_or_default();
    items.iter().enumerate().filter_map(|(number, item)| stream(item, number, traces)).collect()
}

fn stream(item: &Item<'_>, number: usize, traces: &Path) -> Option<Stream> {
    let mut section = item.section();
    let whose =
        section.must("whose", "", "ours|others", &word(&[("ours", Owner::Ours), ("others", Owner::Others)]));
    let clients = section.item("clients", "").and_then(|item| ramp(&item));
    let think = section.or("think", "", 0.0, &within(0.0, DAY));
    let rate = section.item("rate", "").and_then(|item| ramp(&item));
    let text = section.item("text", "");
    if text.is_none() {
        section.refuse("text", Refusal::new("missing", "a recording's name, or a map"), "nothing");
    }
    let scripts = text.and_then(|item| text::scripts(&item, number as u64, traces));
    let arrivals = match (clients, rate) {
        (Some(clients), None) => Some(Arrivals::Closed { clients, think }),
        (None, Some(rate)) => Some(Arrivals::Poisson(rate)),
        _ => {
            section.refuse("rate", Refusal::new("not one of two", "either clients or rate"), "both or none");
            None
        }
    };
    section.close();
    Some(Stream { whose: whose?, arrivals: arrivals?, scripts: scripts?, requests: None })
}

/// A number, or numbers by the second from which they hold.
fn ramp(item: &Item<'_>) -> Option<Ramp> {
    let value = number(0.0..=100_000.0);
    if !matches!(item.node.value, Value::Map(_)) {
        return item.read(&value).map(Ramp::flat);
    }
    let mut steps = Vec::new();
    for (key, member) in item.members() {
        let Some(from) = seconds(key) else {
            member.refuse_as(Refusal::new("not a duration", DURATION), key.to_owned());
            continue;
        };
        steps.extend(member.read(&value).map(|value| (from, value)));
    }
    steps.sort_by(|a, b| a.0.total_cmp(&b.0));
    Some(Ramp(steps))
}

fn overload(mut section: Section<'_>) -> Option<(f64, f64)> {
    let from = section.must("from", "", "a duration", &within(0.0, DAY));
    let until = section.must("until", "", "a duration", &within(0.0, DAY));
    if let (Some(from), Some(until)) = (from, until)
        && from >= until
    {
        section.refuse("until", Refusal::new("not after from", "a later moment"), &until.to_string());
    }
    section.close();
    from.zip(until)
}

fn sweep(mut section: Section<'_>, traces: &Path) -> Sweep {
    let clients = section.list("clients", "", Vec::new(), &whole(1..=4096));
    let texts = section.item("texts", "").map(|item| item.items()).unwrap_or_default();
    let texts: Vec<_> = texts.iter().map(|item| text::scripts(item, 0, traces)).collect();
    for (key, empty) in [("clients", clients.is_empty()), ("texts", texts.is_empty())] {
        if empty {
            section.refuse(key, Refusal::new("nothing to play", "at least one"), "none");
        }
    }
    section.close();
    Sweep { clients, texts: texts.into_iter().flatten().collect() }
}

fn expected(item: &Item<'_>) -> Vec<Expected> {
    let read = |(name, item): (&str, Item<'_>)| {
        let Some(figure) = Figure::named(name) else {
            let names: Vec<&str> = Figure::ALL.iter().map(|figure| figure.name()).collect();
            item.refuse_as(
                Refusal::new("unknown figure", Figure::names()).near(name, &names),
                name.to_owned(),
            );
            return None;
        };
        let mut section = item.section();
        let (min, max) = (
            section.maybe("min", "", None, &number(-1e9..=1e9)),
            section.maybe("max", "", None, &number(-1e9..=1e9)),
        );
        if min.is_none() && max.is_none() {
            item.refuse(Refusal::new("no bound", "min, max or both"));
        }
        section.close();
        Some(Expected { figure, min, max })
    };
    item.members().into_iter().filter_map(read).collect()
}

const DURATION: &str = r"\d+(.\d+)?(us|ms|s|m|h)";

/// A duration with these bounds, in seconds.
pub(super) fn within(least: f64, most: f64) -> Kind<f64> {
    Kind::new(Json::Null, move |node| {
        let Value::Text(text) = &node.value else { return Err(Refusal::new("not a duration", DURATION)) };
        let seconds = seconds(text).ok_or_else(|| Refusal::new("not a duration", DURATION))?;
        let good = (least..=most).contains(&seconds);
        if good { Ok(seconds) } else { Err(Refusal::new("out of range", format!("{least}s..={most}s"))) }
    })
}

/// The seconds of a duration; fractions are allowed.
fn seconds(text: &str) -> Option<f64> {
    let unit = text.find(|letter: char| !(letter.is_ascii_digit() || letter == '.'))?;
    let (count, unit) = text.split_at(unit);
    let factor = match unit {
        "us" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return None,
    };
    Some(count.parse::<f64>().ok()? * factor)
}
