//! The model drafters that the policies name, loaded once and shared by all sessions.

use crate::config::process::Process;
use crate::policy::PolicySet;

#[cfg(feature = "onnx")]
pub use with_runtime::{Drafters, LoadedDrafter};
#[cfg(not(feature = "onnx"))]
pub use without_runtime::{Drafters, LoadedDrafter};

/// A model drafter that a policy names cannot be loaded.
#[derive(Debug, thiserror::Error)]
#[error("drafter `{name}`: {detail}")]
pub struct DrafterError {
    /// Its name in the process file.
    pub name: String,
    /// The cause, in words for the operator.
    pub detail: String,
}

#[cfg(feature = "onnx")]
mod with_runtime {
    use std::collections::HashMap;

    use parking_lot::RwLock;

    use super::{DrafterError, PolicySet, Process};
    use crate::config::process::DrafterModel;
    use crate::fleet::identity::Identity;
    use crate::policy::part::ModelState;
    use crate::runtime::drafter::DrafterService;
    use crate::runtime::model::Options;
    use crate::text::Tokenizer;

    /// A loaded model drafter and its vocabulary.
    #[derive(Clone)]
    pub struct LoadedDrafter {
        /// Handle to the thread that runs the model.
        pub service: DrafterService,
        /// Fingerprint of its vocabulary; it drafts only for targets with the same one.
        pub vocabulary: String,
    }

    /// The model drafters, by the names that policies use.
    #[derive(Default)]
    pub struct Drafters {
        loaded: RwLock<HashMap<String, LoadedDrafter>>,
    }

    impl Drafters {
        /// Adds a drafter that is running already.
        #[must_use]
        pub fn with(self, name: impl Into<String>, drafter: LoadedDrafter) -> Self {
            self.loaded.write().insert(name.into(), drafter);
            self
        }

        /// Loads the drafters that `policies` name and that are not loaded yet.
        ///
        /// # Errors
        /// The first drafter that is not declared or cannot be loaded; those loaded before it stay.
        pub fn extend(&self, process: &Process, policies: &PolicySet) -> Result<(), DrafterError> {
            for name in policies.models() {
                if self.loaded.read().contains_key(name) {
                    continue;
                }
                let fault = |detail: String| DrafterError { name: name.to_owned(), detail };
                let model = process.drafters.get(name).ok_or_else(|| fault("is not declared".to_owned()))?;
                let drafter = open(model).map_err(fault)?;
                self.loaded.write().insert(name.to_owned(), drafter);
            }
            Ok(())
        }

        /// Drops the drafters that `policies` do not name. One that drafts for a session ends with the last of those.
        pub fn retain(&self, policies: &PolicySet) {
            let named: Vec<&str> = policies.models().collect();
            self.loaded.write().retain(|name, _| {
                let kept = named.contains(&name.as_str());
                if !kept {
                    tracing::info!(
                        drafter = name,
                        "no policy names it any more: it ends with its last session"
                    );
                }
                kept
            });
        }

        /// Whether the drafter of that name can draft for a target of this vocabulary.
        pub fn state(&self, name: &str, vocabulary: &str) -> ModelState {
            match self.loaded.read().get(name) {
                None => ModelState::NotLoaded,
                Some(drafter) if drafter.vocabulary == vocabulary => ModelState::Ready,
                Some(_) => ModelState::OtherVocabulary,
            }
        }

        /// The drafter of that name, if it is loaded and speaks the target's vocabulary.
        pub fn get(&self, name: &str, identity: &Identity) -> Option<DrafterService> {
            let loaded = self.loaded.read();
            let drafter = loaded.get(name)?;
            (drafter.vocabulary == identity.epoch.vocabulary).then(|| drafter.service.clone())
        }

        /// The names of those that are loaded.
        pub fn names(&self) -> Vec<String> {
            let mut names: Vec<String> = self.loaded.read().keys().cloned().collect();
            names.sort();
            names
        }
    }

    fn open(model: &DrafterModel) -> Result<LoadedDrafter, String> {
        let file = match &model.tokenizer {
            Some(file) => file.clone(),
            None => model.path.join("tokenizer.json"),
        };
        let tokenizer = Tokenizer::from_file(&file).map_err(|error| error.to_string())?;
        // A drafter is small: a second thread would only wait for the first.
        let options = Options {
            device: model.device.into(),
            lanes: model.slots as usize,
            context: Some(model.context as usize),
            threads: 1,
            spinning: false,
        };
        let service = DrafterService::start(&model.path, &options).map_err(|error| error.to_string())?;
        service.try_out().map_err(|fault| format!("it loads and does not run: {fault}"))?;
        Ok(LoadedDrafter { service, vocabulary: tokenizer.fingerprint().to_string() })
    }
}

#[cfg(not(feature = "onnx"))]
mod without_runtime {
    use super::{DrafterError, PolicySet, Process};
    use crate::policy::part::ModelState;

    /// Never constructed: this build has no ONNX runtime.
    pub enum LoadedDrafter {}

    /// No model drafters: this build has no runtime.
    #[derive(Default)]
    pub struct Drafters {}

    impl Drafters {
        /// Loads nothing.
        ///
        /// # Errors
        /// A policy names a model, which this build cannot run.
        pub fn extend(&self, _: &Process, policies: &PolicySet) -> Result<(), DrafterError> {
            policies.models().next().map_or(Ok(()), |name| {
                let detail = "this build has no ONNX runtime (feature `onnx`)".to_owned();
                Err(DrafterError { name: name.to_owned(), detail })
            })
        }

        /// There is nothing to drop.
        pub fn retain(&self, _: &PolicySet) {}

        /// Always [`ModelState::NotLoaded`].
        pub fn state(&self, _: &str, _: &str) -> ModelState {
            ModelState::NotLoaded
        }

        /// Always empty.
        pub fn names(&self) -> Vec<String> {
            Vec::new()
        }
    }
}
