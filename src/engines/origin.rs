//! Origin of an answer, as it names it: the model, the engine's fingerprint, the version of the
//! weights.
//!
//! All answers to one request have to come from the process that began it. If two of them name
//! different origins, another process, or another model in the same process, has answered.

use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

/// The origin of one answer, or of all answers to a request so far; parts that they do not name are
/// `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    /// `model`, on OpenAI's routes only: on other routes engines write another name for the same
    /// model.
    pub model: Option<String>,
    pub fingerprint: Option<String>,
    /// `weight_version`; of vLLM's token endpoint the last of `weight_versions`.
    pub weights: Option<String>,
}

impl Origin {
    /// The origin that an event of a stream names.
    pub fn of_event(event: &Value) -> Self {
        OriginMembers::deserialize(event).map(Self::from).unwrap_or_default()
    }

    /// The origin that an unstreamed answer names; for a list of answers, that of the first one.
    pub fn of_body(body: &[u8]) -> Self {
        let members = match body.trim_ascii_start().first() {
            Some(b'[') => {
                serde_json::from_slice::<Vec<OriginMembers>>(body).ok().and_then(|all| all.into_iter().next())
            }
            _ => serde_json::from_slice(body).ok(),
        };
        members.map(Self::from).unwrap_or_default()
    }

    /// Takes over the parts that `other` names and this does not. False if they contradict each
    /// other; then nothing is taken.
    pub fn join(&mut self, other: Self) -> bool {
        let same =
            |one: &Option<String>, other: &Option<String>| one.is_none() || other.is_none() || one == other;
        let agrees = same(&self.model, &other.model)
            && same(&self.fingerprint, &other.fingerprint)
            && same(&self.weights, &other.weights);
        if agrees {
            let Self { model, fingerprint, weights } = other;
            self.model = self.model.take().or(model);
            self.fingerprint = self.fingerprint.take().or(fingerprint);
            self.weights = self.weights.take().or(weights);
        }
        agrees
    }
}

/// The members of an answer that name its origin. A member of another type is ignored, and the
/// others are still read.
#[derive(Default, Deserialize)]
#[serde(default)]
struct OriginMembers {
    #[serde(deserialize_with = "lenient")]
    object: Option<String>,
    #[serde(deserialize_with = "lenient")]
    model: Option<String>,
    #[serde(deserialize_with = "lenient")]
    system_fingerprint: Option<String>,
    #[serde(deserialize_with = "lenient")]
    metadata: Option<Weights>,
    #[serde(deserialize_with = "lenient")]
    meta_info: Option<Weights>,
    #[serde(deserialize_with = "lenient")]
    choices: Option<Vec<Choice>>,
}

#[derive(Deserialize)]
struct Weights {
    weight_version: Option<String>,
}

#[derive(Deserialize)]
struct Choice {
    weight_versions: Option<Vec<Version>>,
}

#[derive(Deserialize)]
struct Version {
    version: Option<String>,
}

/// A member that is skipped where it cannot be read.
#[derive(Deserialize)]
#[serde(untagged)]
enum Lenient<T> {
    Known(T),
    Other(IgnoredAny),
}

fn lenient<'de, D: Deserializer<'de>, T: Deserialize<'de>>(reader: D) -> Result<Option<T>, D::Error> {
    Ok(match Lenient::deserialize(reader)? {
        Lenient::Known(value) => Some(value),
        Lenient::Other(IgnoredAny) => None,
    })
}

impl From<OriginMembers> for Origin {
    fn from(members: OriginMembers) -> Self {
        let listed = || {
            let choice = members.choices.into_iter().flatten().next()?;
            choice.weight_versions.into_iter().flatten().next_back()?.version
        };
        let one =
            [members.metadata, members.meta_info].into_iter().flatten().find_map(|at| at.weight_version);
        let weights = one.or_else(listed);
        let model = if members.object.is_some() { members.model } else { None };
        // Gateways write an empty text where they know none.
        let named = |name: Option<String>| name.filter(|name| !name.is_empty());
        Self { model: named(model), fingerprint: named(members.system_fingerprint), weights: named(weights) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn origin(names: [Option<&str>; 3]) -> Origin {
        let [model, fingerprint, weights] = names.map(|name| name.map(str::to_owned));
        Origin { model, fingerprint, weights }
    }

    #[test]
    fn answers_name_their_origin_where_each_engine_writes_it() {
        let completion = json!({"object": "text_completion", "model": "m", "system_fingerprint": "fp_1",
            "choices": [], "metadata": {"weight_version": "7"}});
        assert_eq!(Origin::of_event(&completion), origin([Some("m"), Some("fp_1"), Some("7")]));
        let own = json!({"model": "/models/m", "rows": [], "system_fingerprint": "fp_1"});
        assert_eq!(Origin::of_body(own.to_string().as_bytes()), origin([None, Some("fp_1"), None]));
        let sglang = br#" [{"text": "", "meta_info": {"weight_version": "7"}}, {"meta_info": {}}]"#;
        assert_eq!(Origin::of_body(sglang), origin([None, None, Some("7")]));
        let listed = br#"{"choices": [{"weight_versions": [{"version": "7"}, {"version": "8"}]}], "system_fingerprint": 1}"#;
        assert_eq!(Origin::of_body(listed), origin([None, None, Some("8")]));
        assert_eq!(Origin::of_body(b"<html>"), Origin::default());
        assert_eq!(Origin::of_body(br#"{"model": 4}"#), Origin::default());
        let empty = br#"{"object": "", "model": "", "system_fingerprint": ""}"#;
        assert_eq!(Origin::of_body(empty), Origin::default());
    }

    #[test]
    fn missing_parts_do_not_contradict_and_differing_parts_do() {
        let mut all = origin([Some("m"), None, None]);
        assert!(all.join(Origin::default()));
        assert!(all.join(origin([Some("m"), Some("a"), None])));
        assert!(!all.join(origin([None, Some("b"), Some("7")])));
        assert!(!all.join(origin([Some("n"), None, None])));
        assert_eq!(all, origin([Some("m"), Some("a"), None]), "nothing is taken from another origin");
    }
}
