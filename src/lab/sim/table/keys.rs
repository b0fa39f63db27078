//! A table's keys, as its file has them.

use std::num::{NonZeroU64, NonZeroUsize};

use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};
use serde_saphyr::Spanned;

use crate::sim::drafter::DrafterSpec;
use crate::sim::engine::Front;
use crate::sim::grid::Drafters;
use crate::sim::profile::Jitter;
use crate::sim::sidecar::SignalSpec;
use crate::sim::synthetic::TextKind;
use crate::sim::traffic::{Owner, Ramp};
use crate::sim::values::{DAY, WordOr, number, seconds};
use crate::sim::world::Net;
use foretell_onnx::pace::curve::Steps;
use foretell_onnx::pace::profile::Profile;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Keys {
    pub version: Spanned<u64>,
    pub name: String,
    pub about: String,
    #[serde(default)]
    pub untuned: bool,
    #[serde(rename = "for", deserialize_with = "seconds::<_, 1_000_000, DAY>")]
    pub seconds: f64,
    pub seeds: Option<NonZeroU64>,
    #[serde(default = "second", deserialize_with = "seconds::<_, 10_000, DAY>")]
    pub interval: f64,
    pub engine: Spanned<Engine>,
    #[serde(default = "Net::usual")]
    pub network: Net,
    pub signal: Option<WordOr<Nothing, SignalSpec>>,
    pub drafter: Option<WordOr<Nothing, DrafterSpec>>,
    pub verify: Option<Spanned<Vec<String>>>,
    pub sidecars: Option<NonZeroUsize>,
    #[serde(default)]
    pub drafters: Drafters,
    pub policy: Option<String>,
    #[serde(default)]
    pub budget: Budget,
    pub traffic: Spanned<Vec<Spanned<Traffic>>>,
    pub overload: Option<Spanned<Overload>>,
    pub sweep: Option<Spanned<Sweep>>,
    pub expect: Spanned<Map<String, Value>>,
}

const fn second() -> f64 {
    1.0
}

/// The word `none`.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Nothing {
    None,
}

/// Either a profile or a paced server, and what differs from it.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Engine {
    #[serde(deserialize_with = "profile")]
    pub profile: Option<Profile>,
    pub paced: Option<Paced>,
    pub sequences: Option<NonZeroUsize>,
    pub kv: Option<NonZeroUsize>,
    pub chunk: Option<NonZeroUsize>,
    pub block: Option<NonZeroUsize>,
    pub prefix_cache: Option<bool>,
    #[serde(deserialize_with = "seconds::<_, 0, 60>")]
    pub cancel: f64,
    pub front: Front,
    pub jitter: Option<WordOr<JitterWord, Jitter>>,
}

fn profile<'de, D: Deserializer<'de>>(source: D) -> Result<Option<Profile>, D::Error> {
    let name = String::deserialize(source)?;
    let refused = || D::Error::custom(format!("allowed {}, got {name}", Profile::names()));
    Profile::from_name(&name).ok_or_else(refused).map(Some)
}

/// As of `foretell target --pace`.
#[derive(Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Paced {
    #[serde(deserialize_with = "seconds::<_, 1, 60>")]
    step: f64,
    #[serde(default = "one")]
    base: f64,
    #[serde(default)]
    node: f64,
    #[serde(default)]
    growth: f64,
    #[serde(default, deserialize_with = "seconds::<_, 0, 60>")]
    prompt: f64,
}

const fn one() -> f64 {
    1.0
}

impl Paced {
    pub(super) const fn steps(self) -> Steps {
        Steps { step: self.step, base: self.base, node: self.node, growth: self.growth, prompt: self.prompt }
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum JitterWord {
    None,
    Usual,
}

/// The backend's budget.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Budget {
    pub slots: Option<Share>,
}

#[derive(Deserialize)]
pub(super) struct Share(#[serde(deserialize_with = "number::<_, 0, 1>")] pub f64);

/// A stream: either clients, with their time to think, or a rate.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Traffic {
    pub whose: Owner,
    pub clients: Option<Ramp>,
    #[serde(default, deserialize_with = "seconds::<_, 0, DAY>")]
    pub think: f64,
    pub rate: Option<Ramp>,
    pub text: Spanned<Text>,
}

/// The name of a recording, or a kind of text.
pub(super) type Text = WordOr<String, TextKind>;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Overload {
    #[serde(deserialize_with = "seconds::<_, 0, DAY>")]
    pub from: f64,
    #[serde(deserialize_with = "seconds::<_, 0, DAY>")]
    pub until: f64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Sweep {
    pub clients: Vec<NonZeroUsize>,
    pub texts: Vec<Spanned<Text>>,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Bounds {
    pub min: Option<f64>,
    pub max: Option<f64>,
}
