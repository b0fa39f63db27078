//! The text of a pace, as of `foretell target --pace`.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use super::curve::Steps;
use super::profile::Profile;
use super::{Costs, Pace};

/// Error for a text that is not a [`Pace`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoPace {
    /// A part that is not `key=value` with a known key.
    #[error(
        "no such key, allowed profile, slow, step, base, node, growth, prompt (KEY=VALUE with commas between), got {0:?}"
    )]
    Key(String),
    /// A duplicate key.
    #[error("{0}: given twice")]
    Twice(&'static str),
    /// A value that is malformed or out of range.
    #[error("{key}: allowed {allowed}, got {got:?}")]
    Value {
        key: &'static str,
        allowed: String,
        /// The value in the text.
        got: String,
    },
    /// Neither `profile` nor `step`.
    #[error(
        "step is missing: how long a plain step takes, such as step=60ms; or profile, such as profile=h100-8b"
    )]
    NoStep,
    /// A profile together with single costs.
    #[error("profile: goes with slow alone, got {0} too")]
    Both(&'static str),
}

impl FromStr for Pace {
    type Err = NoPace;

    fn from_str(text: &str) -> Result<Self, NoPace> {
        let (mut profile, mut slow, mut step, mut prompt) = (None, None, None, None);
        let (mut base, mut node, mut growth) = (None, None, None);
        for part in text.split(',') {
            let (key, value) = part.split_once('=').ok_or_else(|| NoPace::Key(part.to_owned()))?;
            match key {
                "profile" => once("profile", &mut profile, named(value)?)?,
                "slow" => once("slow", &mut slow, number("slow", value, 1.0..=1000.0)?)?,
                "step" => once("step", &mut step, seconds("step", value)?)?,
                "base" => once("base", &mut base, number("base", value, 1.0..=100.0)?)?,
                "node" => once("node", &mut node, number("node", value, 0.0..=100.0)?)?,
                "growth" => once("growth", &mut growth, number("growth", value, 0.0..=100.0)?)?,
                "prompt" => once("prompt", &mut prompt, seconds("prompt", value)?)?,
                _ => return Err(NoPace::Key(part.to_owned())),
            }
        }
        let slow = slow.unwrap_or(1.0);
        let given = [("step", step), ("base", base), ("node", node), ("growth", growth), ("prompt", prompt)];
        if let Some(profile) = profile {
            let other = given.into_iter().find(|(_, value)| value.is_some());
            return match other {
                Some((key, _)) => Err(NoPace::Both(key)),
                None => Ok(Self { costs: Costs::Profile(profile), slow }),
            };
        }
        let step = step.ok_or(NoPace::NoStep)?;
        if step == 0.0 {
            return Err(NoPace::Value {
                key: "step",
                allowed: "more than 0".to_owned(),
                got: "0".to_owned(),
            });
        }
        let costs = Steps {
            step,
            base: base.unwrap_or(1.0),
            node: node.unwrap_or(0.0),
            growth: growth.unwrap_or(0.0),
            prompt: prompt.unwrap_or(0.0),
        };
        Ok(Self { costs: Costs::Steps(costs), slow })
    }
}

fn once<T>(key: &'static str, field: &mut Option<T>, value: T) -> Result<(), NoPace> {
    if field.replace(value).is_some() { Err(NoPace::Twice(key)) } else { Ok(()) }
}

fn named(value: &str) -> Result<Profile, NoPace> {
    let refused = || NoPace::Value { key: "profile", allowed: Profile::names(), got: value.to_owned() };
    Profile::from_name(value).ok_or_else(refused)
}

/// A decimal number within a range. `parse` alone would take `inf`, `1e3` and `+1` too.
fn number(key: &'static str, text: &str, range: RangeInclusive<f64>) -> Result<f64, NoPace> {
    let plain = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    let value = text.parse().ok().filter(|value| plain && range.contains(value));
    let allowed = || format!("{} to {}", range.start(), range.end());
    value.ok_or_else(|| NoPace::Value { key, allowed: allowed(), got: text.to_owned() })
}

/// The seconds of a duration up to a minute, such as `60ms`, `2.5ms`, `80us`, `1s`; rounded to
/// microseconds.
fn seconds(key: &'static str, text: &str) -> Result<f64, NoPace> {
    let allowed = || "a number with us, ms or s, up to 60s".to_owned();
    let refused = || NoPace::Value { key, allowed: allowed(), got: text.to_owned() };
    let (count, micros) = match text {
        _ if text.ends_with("us") => (text.strip_suffix("us"), 1.0),
        _ if text.ends_with("ms") => (text.strip_suffix("ms"), 1e3),
        _ => (text.strip_suffix('s'), 1e6),
    };
    let count = number(key, count.ok_or_else(refused)?, 0.0..=60e6).map_err(|_| refused())?;
    let micros = (count * micros).round();
    if micros > 60e6 { Err(refused()) } else { Ok(micros / 1e6) }
}

impl fmt::Display for Pace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.costs {
            Costs::Profile(profile) => write!(f, "profile={}", profile.name())?,
            Costs::Steps(Steps { step, base, node, growth, prompt }) => {
                let ms = |seconds: f64| (seconds * 1e6).round() / 1e3;
                let (step, prompt) = (ms(step), ms(prompt));
                write!(f, "step={step}ms,base={base},node={node},growth={growth},prompt={prompt}ms")?;
            }
        }
        if self.slow > 1.0 { write!(f, ",slow={}", self.slow) } else { Ok(()) }
    }
}
