//! Origin of an answer, as it names it: the model, the engine's fingerprint, the version of the
//! weights.
//!
//! All answers to one request have to come from the process that began it. If two of them name
//! different origins, another process, or another model in the same process, has answered.

use serde::Deserialize;
use serde_json::value::RawValue;

use foretell_wire::openai::Event;

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
    pub fn of_event(event: &Event) -> Self {
        let top = event.top();
        // Gateways write an empty text where they know none.
        let named = |name: &str| top.read::<String>(name).filter(|text| !text.is_empty());
        let one =
            ["metadata", "meta_info"].into_iter().find_map(|name| top.read::<Weights>(name)?.weight_version);
        let listed = || event.choice()?.read::<Vec<Version>>("weight_versions")?.pop()?.version;
        Self {
            model: top.read::<String>("object").and_then(|_| named("model")),
            fingerprint: named("system_fingerprint"),
            weights: one.or_else(listed).filter(|version| !version.is_empty()),
        }
    }

    /// The origin that an unstreamed answer names; for a list of answers, that of the first one.
    pub fn of_body(body: &[u8]) -> Self {
        let text = std::str::from_utf8(body).unwrap_or_default().trim_start();
        let first = match serde_json::from_str::<Vec<&RawValue>>(text) {
            Ok(answers) => answers.first().map_or("", |answer| answer.get()),
            Err(_) => text,
        };
        Event::of(first.to_owned()).map(|event| Self::of_event(&event)).unwrap_or_default()
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

#[derive(Deserialize)]
struct Weights {
    weight_version: Option<String>,
}

#[derive(Deserialize)]
struct Version {
    version: Option<String>,
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
        assert_eq!(
            Origin::of_event(&Event::of(completion.to_string()).unwrap()),
            origin([Some("m"), Some("fp_1"), Some("7")])
        );
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
