//! The setting that a table's keys describe.

use std::num::{NonZeroU64, NonZeroUsize};
use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value};
use serde_saphyr::Spanned;

use super::keys::{Bounds, Engine, JitterWord, Keys, Overload, Text, Traffic};
use super::{Expected, Sweep, Table, Unusable};
use crate::sim::engine::EngineSpec;
use crate::sim::figures::Figure;
use crate::sim::permit::{self, Permit};
use crate::sim::profile::{Jitter, Shape};
use crate::sim::sidecar::SignalSpec;
use crate::sim::source::{self, Scripts};
use crate::sim::traffic::{Arrivals, Stream};
use crate::sim::values::WordOr;
use crate::sim::world::{Mode, Setup};
use foretell_core::words::VerifyMethod;
use foretell_onnx::pace::curve::Steps;

/// Number of requests generated of a kind before they repeat.
const GENERATED: usize = 64;

pub(super) fn table(file: &str, source: &str, traces: &Path) -> Result<Table, Unusable> {
    let reader = Reader { file, traces };
    let options = serde_saphyr::options! { strict_booleans: true, with_snippet: false };
    let keys = serde_saphyr::from_str_with_options(source, options);
    reader.table(keys.map_err(|error: serde_saphyr::Error| {
        let line = error.location().map_or(1, |location| location.line());
        let message = error.to_string();
        reader.refused(line, message.split(" at line ").next().unwrap_or_default())
    })?)
}

struct Reader<'a> {
    file: &'a str,
    traces: &'a Path,
}

impl Reader<'_> {
    fn refused(&self, line: u64, message: impl Into<String>) -> Unusable {
        Unusable::Settings { file: self.file.to_owned(), line, message: message.into() }
    }

    fn refuse<T>(&self, at: &Spanned<impl Sized>, message: &str) -> Result<T, Unusable> {
        Err(self.refused(at.referenced.line(), message))
    }

    fn table(&self, keys: Keys) -> Result<Table, Unusable> {
        if keys.version.value != 1 {
            return self.refuse(&keys.version, "version: allowed 1");
        }
        let permit = self.permit(&keys)?;
        let drafter = keys.drafter.and_then(|drafter| match drafter {
            WordOr::Word(_) => None,
            WordOr::Map(spec) => Some(spec),
        });
        let signal = keys.signal.map_or(SignalSpec::USUAL, |signal| match signal {
            WordOr::Word(_) => SignalSpec::ABSENT,
            WordOr::Map(spec) => spec,
        });
        let setup = Setup {
            drafter,
            net: keys.network,
            sidecars: keys.sidecars.map_or(1, NonZeroUsize::get),
            signal,
            mode: Mode::Auto,
            until: Some(keys.seconds),
            interval: keys.interval,
            ..Setup::plain(self.engine(keys.engine)?, permit, self.streams(keys.traffic)?)
        };
        Ok(Table {
            name: keys.name,
            about: keys.about,
            untuned: keys.untuned,
            setup,
            seeds: keys.seeds.map_or(1, NonZeroU64::get),
            seconds: keys.seconds,
            overload: keys.overload.map(|overload| self.overload(&overload)).transpose()?,
            sweep: keys.sweep.map(|sweep| self.sweep(&sweep)).transpose()?.unwrap_or_default(),
            expected: self.expected(&keys.expect)?,
        })
    }

    /// The policy's permit. Without a policy: one with the named drafters.
    fn permit(&self, keys: &Keys) -> Result<Permit, Unusable> {
        let text = keys.policy.clone().unwrap_or_else(|| permit::policy(keys.drafters.kinds()));
        let methods = self.methods(keys)?;
        let permit = permit::of(&format!("{} policy", self.file), &text, &methods, 1 << 20)?;
        Ok(Permit { slots: keys.budget.slots.as_ref().map_or(permit.slots, |share| share.0), ..permit })
    }

    fn methods(&self, keys: &Keys) -> Result<Vec<VerifyMethod>, Unusable> {
        let Some(names) = &keys.verify else { return Ok(vec![VerifyMethod::Tree]) };
        let named = |name: &String| VerifyMethod::ALL.into_iter().find(|method| method.name() == name);
        let methods = names.value.iter().map(named).collect::<Option<Vec<_>>>();
        let allowed = VerifyMethod::ALL.map(VerifyMethod::name).join("|");
        methods.map_or_else(|| self.refuse(names, &format!("verify: allowed {allowed}")), Ok)
    }

    fn engine(&self, keys: Spanned<Engine>) -> Result<EngineSpec, Unusable> {
        let base = match (keys.value.profile, keys.value.paced) {
            (Some(profile), None) => EngineSpec {
                shape: Shape::of(profile),
                jitter: Jitter::USUAL,
                ..EngineSpec::paced(Steps::default())
            },
            (None, Some(paced)) => EngineSpec::paced(paced.steps()),
            _ => return self.refuse(&keys, "engine: allowed either profile or paced, got both or none"),
        };
        let (keys, shape) = (keys.value, base.shape);
        let size = |size: Option<NonZeroUsize>, usual| size.map_or(usual, NonZeroUsize::get);
        Ok(EngineSpec {
            shape: Shape {
                sequences: size(keys.sequences, shape.sequences),
                kv: size(keys.kv, shape.kv),
                chunk: size(keys.chunk, shape.chunk),
                block: size(keys.block, shape.block),
                pace: shape.pace,
            },
            changes: base.changes,
            prefix_cache: keys.prefix_cache.unwrap_or(base.prefix_cache),
            cancel: keys.cancel,
            front: keys.front,
            jitter: keys.jitter.map_or(base.jitter, |jitter| match jitter {
                WordOr::Word(JitterWord::None) => Jitter::NONE,
                WordOr::Word(JitterWord::Usual) => Jitter::USUAL,
                WordOr::Map(jitter) => jitter,
            }),
        })
    }

    fn streams(&self, traffic: Spanned<Vec<Spanned<Traffic>>>) -> Result<Vec<Stream>, Unusable> {
        if traffic.value.is_empty() {
            return self.refuse(&traffic, "traffic: allowed at least one stream, got none");
        }
        let streams = traffic.value.into_iter().zip(0..);
        streams.map(|(stream, number)| self.stream(stream, number)).collect()
    }

    fn stream(&self, mut stream: Spanned<Traffic>, number: u64) -> Result<Stream, Unusable> {
        let arrivals = match (stream.value.clients.take(), stream.value.rate.take()) {
            (Some(clients), None) => Arrivals::Closed { clients, think: stream.value.think },
            (None, Some(rate)) => Arrivals::Poisson(rate),
            _ => return self.refuse(&stream, "traffic: allowed either clients or rate, got both or none"),
        };
        let scripts = self.scripts(&stream.value.text, number)?;
        Ok(Stream { whose: stream.value.whose, arrivals, scripts, requests: None })
    }

    fn scripts(&self, text: &Spanned<Text>, seed: u64) -> Result<Scripts, Unusable> {
        match &text.value {
            WordOr::Word(name) => source::read(&self.traces.join(format!("{name}.jsonl")))
                .or_else(|error| self.refuse(text, &format!("text: allowed one of traces/, got {error}"))),
            WordOr::Map(kind) => Ok(kind.scripts(GENERATED, 1_000 + seed)),
        }
    }

    fn overload(&self, overload: &Spanned<Overload>) -> Result<(f64, f64), Unusable> {
        let Overload { from, until } = overload.value;
        if from < until {
            Ok((from, until))
        } else {
            self.refuse(overload, "overload: until is not after from")
        }
    }

    fn sweep(&self, sweep: &Spanned<super::keys::Sweep>) -> Result<Sweep, Unusable> {
        let clients: Vec<usize> = sweep.value.clients.iter().map(|clients| clients.get()).collect();
        let texts = sweep.value.texts.iter().map(|text| self.scripts(text, 0));
        let texts = texts.collect::<Result<Vec<_>, _>>()?;
        if clients.is_empty() || texts.is_empty() {
            return self.refuse(sweep, "sweep: allowed at least one of clients and of texts, got none");
        }
        Ok(Sweep { clients, texts })
    }

    fn expected(&self, expect: &Spanned<Map<String, Value>>) -> Result<Vec<Expected>, Unusable> {
        if expect.value.is_empty() {
            return self.refuse(expect, "expect: allowed at least one figure, got none");
        }
        let one = |(name, bounds): (&String, &Value)| {
            let Some(figure) = Figure::named(name) else {
                return self.refuse(expect, &format!("expect: allowed {}, got {name}", Figure::names()));
            };
            match Bounds::deserialize(bounds) {
                Ok(Bounds { min: None, max: None }) => {
                    self.refuse(expect, &format!("expect.{name}: allowed min, max or both, got none"))
                }
                Ok(Bounds { min, max }) => Ok(Expected { figure, min, max }),
                Err(error) => self.refuse(expect, &format!("expect.{name}: {error}")),
            }
        };
        expect.value.iter().map(one).collect()
    }
}
