//! Makes the calls that confirm a server's defaults ([`Confirmer`]), when it is recognised.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use crate::fleet::identity::unknown::Unknown;
use crate::fleet::{Replica, probe};
use crate::random::fresh_seed;
use foretell_engines::confirm::Confirmer;
use foretell_engines::{Engine, ModelDefaults};
use foretell_parsers::text::Tokenizer;
use foretell_wire::openai::GenerationConfig;

/// Maximum time for all calls: about 30, each of a few tokens; seconds, unless the machine is
/// overloaded.
const WITHIN: Duration = Duration::from_mins(3);

/// The `generation_config.json` of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelConfig {
    /// The operator has named this file.
    Named(PathBuf),
    /// Its usual path, in the folder of the model's tokenizer; not every model has one.
    Usual(PathBuf),
}

impl ModelConfig {
    pub fn for_tokenizer(tokenizer: &Path) -> Self {
        Self::Usual(tokenizer.with_file_name("generation_config.json"))
    }

    /// The file's content; `None` if it does not exist, or is unreadable at its usual path.
    async fn read(&self) -> Result<Option<GenerationConfig>, Unknown> {
        let (Self::Named(path) | Self::Usual(path)) = self;
        let unread =
            |error: &dyn std::fmt::Display| Unknown::tokenizer(format!("{}: {error}", path.display()));
        let json = match tokio::fs::read(path).await {
            Err(_) if matches!(self, Self::Usual(_)) => return Ok(None),
            read => read.map_err(|error| unread(&error))?,
        };
        match GenerationConfig::read(&json) {
            Err(error) if matches!(self, Self::Usual(_)) => {
                tracing::warn!(file = %path.display(), %error, "the model's generation config is not used: correct the file");
                Ok(None)
            }
            read => Ok(Some(read.map_err(|error| unread(&error))?)),
        }
    }
}

/// Takes the model's defaults for an engine that does not report defaults, and tests them by its
/// answers where it can be tested.
///
/// # Errors
/// [`Unknown`]: the file that the operator has named cannot be read.
pub async fn confirm(
    replica: &Replica,
    engine: &mut Engine,
    tokenizer: &Tokenizer,
    config: &ModelConfig,
) -> Result<(), Unknown> {
    let config = config.read().await?;
    if takes_model_defaults(engine) {
        // A copied tokenizer alone does not show that the model has no such file.
        engine.defaults.chats = config.clone().map(|config| config.without_output_penalties().defaults);
    }
    let config = config.unwrap_or(GenerationConfig::NONE);
    let seed = fresh_seed();
    let text = probe::text(tokenizer, seed);
    let Some(mut confirmer) = Confirmer::of(engine, &config, &text, seed) else { return Ok(()) };
    let until = Instant::now() + WITHIN;
    while Instant::now() < until
        && let Some(next) = confirmer.next_call()
    {
        let answer = async {
            if next.idle && !probe::is_idle(replica, engine, &mut 0).await {
                return None;
            }
            probe::answer(replica, &next.call).await
        };
        confirmer.take(timeout_at(until, answer).await.ok().flatten());
    }
    confirmer.end(engine);
    Ok(())
}

/// True if the defaults of its chats are those of its model, and nobody else's.
fn takes_model_defaults(engine: &Engine) -> bool {
    engine.quirks().model_defaults == ModelDefaults::Named
        && engine.defaults.sampling.is_none()
        && !engine.defaults.preferred
}
