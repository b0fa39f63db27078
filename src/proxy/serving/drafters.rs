//! The model drafters that the policies name, loaded once and shared by all sessions.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, RwLock};

use foretell_config::process::DrafterModel;
use foretell_config::process::Process;
use foretell_config::trained::{self, Origin};
use foretell_net::fleet::identity::Identity;
use foretell_onnx::drafter::DrafterService;
use foretell_onnx::open::Options;
use foretell_parsers::text::Tokenizer;
use foretell_parsers::text::translate::{Ends, Pair};
use foretell_policy::PolicySet;
use foretell_policy::part::ModelState;
use foretell_policy::part::TranslationMode;

/// A model drafter that a policy names cannot be loaded.
#[derive(Debug, thiserror::Error)]
#[error("drafter `{name}`: {detail}")]
pub struct DrafterError {
    /// Its name in the config file.
    pub name: String,
    /// The cause, as text for the operator.
    pub detail: String,
}

/// Compares the vocabulary of a drafter with that of a target.
pub fn compared(name: &str, drafter: &Tokenizer, identity: &Identity) -> ModelState {
    let (fingerprint, target) = (drafter.fingerprint().to_string(), &identity.engine_start.vocabulary);
    if fingerprint == *target {
        return ModelState::Ready;
    }
    let short = |fingerprint: &str| fingerprint.get(..8).unwrap_or(fingerprint).to_owned();
    ModelState::OtherVocabulary(format!(
        "the vocabulary of `{name}` ({} tokens, {}) is not that of `{}` ({} tokens, {})",
        drafter.size(),
        short(&fingerprint),
        identity.engine_start.model,
        identity.tokenizer.size(),
        short(target),
    ))
}

/// A loaded model drafter and its vocabulary.
#[derive(Clone)]
pub struct LoadedDrafter {
    /// Handle to the thread that runs the model.
    pub service: DrafterService,
    pub tokenizer: Arc<Tokenizer>,
    /// Translations between it and the targets it has drafted for, by their fingerprints and
    /// end tokens.
    pairs: Arc<Mutex<Translations>>,
    /// The recorded requests that these weights were trained on; `None` for any other drafter.
    origin: Option<Origin>,
}

/// Translations by the fingerprint and the end tokens of the target.
type Translations = HashMap<(String, Vec<u32>), Arc<Translation>>;

/// The translation between a drafter and a target, built on first use.
pub struct Translation {
    target: Arc<Tokenizer>,
    drafter: Arc<Tokenizer>,
    ends: [Vec<u32>; 2],
    pair: OnceLock<Option<Arc<Pair>>>,
}

/// A model drafter as used by one target's sessions.
#[derive(Clone)]
pub struct SessionModel {
    /// Its name in the config file.
    pub name: String,
    /// Handle to the thread that runs the model.
    pub service: DrafterService,
    /// The translation of its drafts to the target's tokens; `None` with
    /// [`TranslationMode::Same`].
    pub translation: Option<Arc<Translation>>,
}

impl LoadedDrafter {
    /// A drafter that is running.
    pub fn new(service: DrafterService, tokenizer: Arc<Tokenizer>) -> Self {
        Self { service: service.bounded(tokenizer.end()), tokenizer, pairs: Arc::default(), origin: None }
    }

    fn is_of(&self, vocabulary: &str) -> bool {
        self.tokenizer.fingerprint().to_string() == vocabulary
    }

    fn translation(&self, identity: &Identity) -> Arc<Translation> {
        let mut pairs = self.pairs.lock();
        // Drops the translations that no session uses: each has a table of both vocabularies.
        if pairs.len() >= PAIRS {
            pairs.retain(|_, translation| Arc::strong_count(translation) > 1);
        }
        let made = pairs
            .entry((identity.engine_start.vocabulary.clone(), identity.engine.tokens.eos.clone()))
            .or_insert_with(|| {
                Arc::new(Translation {
                    target: Arc::clone(&identity.tokenizer),
                    drafter: Arc::clone(&self.tokenizer),
                    ends: [identity.engine.tokens.eos.clone(), self.service.config().eos.clone()],
                    pair: OnceLock::new(),
                })
            });
        Arc::clone(made)
    }
}

impl Translation {
    /// The pair of vocabularies; `None` if one of the tokenizers cannot be used. The first call
    /// takes tens of milliseconds for large vocabularies.
    pub fn pair(&self) -> Option<&Arc<Pair>> {
        let made = || {
            let [target, drafter] = &self.ends;
            let pair =
                Pair::new(Arc::clone(&self.target), Arc::clone(&self.drafter), Ends { target, drafter });
            pair.map(Arc::new)
                .inspect_err(|error| tracing::warn!(%error, "the vocabularies cannot be translated"))
                .ok()
        };
        self.pair.get_or_init(made).as_ref()
    }
}

/// Number of translations from which on a drafter drops unused ones.
const PAIRS: usize = 16;

/// The model drafters, by the names that policies use.
#[derive(Default)]
pub struct Drafters {
    loaded: RwLock<HashMap<String, LoadedDrafter>>,
}

impl Drafters {
    /// Adds a running drafter.
    #[must_use]
    pub fn with(self, name: impl Into<String>, drafter: LoadedDrafter) -> Self {
        self.loaded.write().insert(name.into(), drafter);
        self
    }

    /// Loads the drafters that `policies` name and that are not loaded yet, or were retrained
    /// since: the policies were judged by the origin on disk, so the weights must be of that
    /// origin.
    ///
    /// # Errors
    /// The first drafter that is not declared or cannot be loaded; nothing is changed then.
    pub fn extend(&self, process: &Process, policies: &PolicySet) -> Result<(), DrafterError> {
        let mut opened = HashMap::new();
        for name in policies.models() {
            let model = process.drafters.get(name);
            if opened.contains_key(name) || self.is_loaded(name, model) {
                continue;
            }
            let fault = |detail: String| DrafterError { name: name.to_owned(), detail };
            let model = model.ok_or_else(|| fault("is not declared".to_owned()))?;
            let drafter = open(model).map_err(fault)?;
            if drafter.origin != origin(model)
                || !trained::stay_apart(drafter.origin.as_ref(), name, policies)
            {
                let replaced = "was retrained since the policies were judged by the origin of its texts";
                return Err(fault(replaced.to_owned()));
            }
            opened.insert(name.to_owned(), drafter);
        }
        // All at once: a refusal before changes no weights of the policies in force.
        self.loaded.write().extend(opened);
        Ok(())
    }

    /// True if the drafter of that name is loaded, with weights of the origin on disk.
    fn is_loaded(&self, name: &str, model: Option<&DrafterModel>) -> bool {
        let loaded = self.loaded.read();
        loaded.get(name).is_some_and(|drafter| model.is_none_or(|model| drafter.origin == origin(model)))
    }

    /// Drops the drafters that `policies` do not name. A drafter in use ends with its last
    /// session.
    pub fn retain(&self, policies: &PolicySet) {
        let named: Vec<&str> = policies.models().collect();
        self.loaded.write().retain(|name, _| {
            let is_named = named.contains(&name.as_str());
            if !is_named {
                tracing::info!(drafter = name, "no policy names it any more: it ends with its last session");
            }
            is_named
        });
    }

    /// State of the drafter of that name for a target: not loaded, ready, or of another
    /// vocabulary.
    pub fn state(&self, name: &str, identity: &Identity) -> ModelState {
        match self.loaded.read().get(name) {
            None => ModelState::NotLoaded,
            Some(drafter) => compared(name, &drafter.tokenizer, identity),
        }
    }

    /// The drafter of that name for a target, if it is loaded.
    pub fn get(
        &self,
        name: &str,
        translation_mode: TranslationMode,
        identity: &Identity,
    ) -> Option<SessionModel> {
        let loaded = self.loaded.read();
        let drafter = loaded.get(name)?;
        let same = drafter.is_of(&identity.engine_start.vocabulary);
        let translation = match translation_mode {
            TranslationMode::Same if !same => return None,
            TranslationMode::Same => None,
            TranslationMode::Slem => Some(drafter.translation(identity)),
        };
        Some(SessionModel { name: name.to_owned(), service: drafter.service.clone(), translation })
    }

    /// Number of requests waiting for each drafter, by name.
    pub fn waiting(&self) -> Vec<(String, usize)> {
        let loaded = self.loaded.read();
        loaded.iter().map(|(name, drafter)| (name.clone(), drafter.service.waiting())).collect()
    }

    /// Time at which each drafter that was trained on recorded requests was trained, Unix seconds,
    /// by name.
    pub fn trained(&self) -> Vec<(String, u64)> {
        let loaded = self.loaded.read();
        loaded
            .iter()
            .filter_map(|(name, drafter)| Some((name.clone(), drafter.origin.as_ref()?.at)))
            .collect()
    }

    /// Names of the loaded drafters, sorted.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.loaded.read().keys().cloned().collect();
        names.sort();
        names
    }
}

/// The origin on disk; one that cannot be read was refused when the configuration was checked,
/// unless the policy shares the drafter.
fn origin(model: &DrafterModel) -> Option<Origin> {
    trained::read(&model.path).ok().flatten()
}

fn open(model: &DrafterModel) -> Result<LoadedDrafter, String> {
    // Before the weights: if they are replaced meanwhile, the next reload finds another origin.
    let origin = origin(model);
    let from = model.tokenizer.as_ref().unwrap_or(&model.path);
    let tokenizer = Tokenizer::from_file(from).map_err(|error| error.to_string())?;
    // A drafter is small: a second thread would only wait for the first.
    let options = Options {
        device: model.device,
        lanes: model.slots as usize,
        context: Some(model.context as usize),
        threads: 1,
        ..Options::default()
    };
    let service = DrafterService::start(&model.path, &options).map_err(|error| error.to_string())?;
    service.try_out().map_err(|fault| format!("it loads and does not run: {fault}"))?;
    Ok(LoadedDrafter { origin, ..LoadedDrafter::new(service, Arc::new(tokenizer)) })
}
