//! Who is behind a backend's address: which engine, which model, which vocabulary, since when.
//!
//! Everything learnt is keyed by this [`Epoch`]; a restarted engine or another tokenizer is a new one and
//! starts clean. Until the identity is known, requests are relayed.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwapOption;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::{Request, StatusCode};
use serde::Deserialize;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::dialect::Dialect;
use crate::fleet::Backend;
use crate::gateway::listen::{Body, BoxError};
use crate::text::Tokenizer;
use crate::units::TokenId;

/// A tokenizer file is a few MiB; more than this is not one.
const TOKENIZER_BYTES: usize = 64 << 20;
/// A question about itself that an engine does not answer in this time, it does not answer.
const WITHIN: Duration = Duration::from_secs(5);
/// How soon an unknown backend is asked again.
const RETRY: Duration = Duration::from_millis(500);
/// How soon a known backend is asked whether it is still the same.
const RECHECK: Duration = Duration::from_secs(5);

/// What everything learnt is keyed by.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Epoch {
    /// The backend's name in the configuration.
    pub backend: String,
    /// The model id that it serves.
    pub model: String,
    /// The engine's own version.
    pub version: String,
    /// Unix seconds of its start, as it tells.
    pub started: u64,
    /// Hash of the vocabulary, hexadecimal.
    pub vocabulary: String,
}

/// A backend that is known well enough to leap with.
#[derive(Clone)]
pub struct Identity {
    /// The key of everything learnt.
    pub epoch: Epoch,
    /// How it is spoken to.
    pub dialect: Dialect,
    /// Its vocabulary.
    pub tokenizer: Arc<Tokenizer>,
    /// Tokens that end an output.
    pub eos: Vec<TokenId>,
    /// Most tokens of prompt and output together.
    pub context: usize,
}

/// Why a backend is not known.
#[derive(Debug, thiserror::Error)]
pub enum Unknown {
    /// It cannot be reached, or does not answer in time.
    #[error("not reachable: {0}")]
    Unreachable(String),
    /// It answers, but not as an engine that Foretell can ask to verify.
    #[error("not an engine that can verify: {0}")]
    Foreign(String),
}

#[derive(Deserialize)]
struct Version {
    version: String,
    #[serde(default)]
    engine: Option<String>,
}

#[derive(Deserialize)]
struct Models {
    data: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    id: String,
    #[serde(default)]
    created: u64,
    #[serde(default)]
    max_model_len: Option<usize>,
}

#[derive(Deserialize)]
struct TokenizerInfo {
    eos_token_ids: Vec<TokenId>,
}

/// Asks the backend who it is, by calls that cost it nothing. If it still is who it was `before`, the
/// vocabulary is not fetched again.
///
/// # Errors
/// [`Unknown`]: it cannot be reached, or is no engine that can verify.
pub async fn ask(
    backend: &Backend,
    tokenizer: Option<&Path>,
    before: Option<&Arc<Identity>>,
) -> Result<Arc<Identity>, Unknown> {
    let version: Version = json(backend, "/version").await?;
    if version.engine.as_deref() != Some("foretell") {
        return Err(Unknown::Foreign(format!("version {}", version.version)));
    }
    let models: Models = json(backend, "/v1/models").await?;
    let model =
        models.data.into_iter().next().ok_or_else(|| Unknown::Foreign("it serves no model".into()))?;
    let same = |epoch: &Epoch| {
        epoch.version == version.version && epoch.model == model.id && epoch.started == model.created
    };
    if let Some(before) = before.filter(|before| same(&before.epoch)) {
        return Ok(Arc::clone(before));
    }
    let info: TokenizerInfo = json(backend, "/tokenizer_info").await?;
    let file = match tokenizer {
        Some(path) => {
            tokio::fs::read(path).await.map_err(|e| Unknown::Foreign(format!("{}: {e}", path.display())))?
        }
        None => get(backend, "/tokenizer.json").await?,
    };
    let tokenizer = Tokenizer::from_bytes(&file).map_err(|error| Unknown::Foreign(error.to_string()))?;
    let epoch = Epoch {
        backend: backend.name().to_owned(),
        model: model.id,
        version: version.version,
        started: model.created,
        vocabulary: tokenizer.fingerprint().to_string(),
    };
    let context = model.max_model_len.ok_or_else(|| Unknown::Foreign("it tells no context length".into()))?;
    let (tokenizer, eos) = (Arc::new(tokenizer), info.eos_token_ids);
    Ok(Arc::new(Identity { epoch, dialect: Dialect::Onnx, tokenizer, eos, context }))
}

async fn json<T: for<'a> Deserialize<'a>>(backend: &Backend, path: &str) -> Result<T, Unknown> {
    let body = get(backend, path).await?;
    serde_json::from_slice(&body).map_err(|error| Unknown::Foreign(format!("{path}: {error}")))
}

async fn get(backend: &Backend, path: &str) -> Result<Vec<u8>, Unknown> {
    let asked = async {
        let empty: Body = Empty::new().map_err(|never| -> BoxError { match never {} }).boxed_unsync();
        let mut request = Request::new(empty);
        *request.uri_mut() = path.parse().map_err(|_| Unknown::Foreign(format!("{path}: no path")))?;
        let unreachable = |error: &dyn std::fmt::Display| Unknown::Unreachable(error.to_string());
        let response = backend.send(request).await.map_err(|error| unreachable(&error))?;
        if response.status() != StatusCode::OK {
            return Err(Unknown::Foreign(format!("{path} answers {}", response.status())));
        }
        let body = Limited::new(response.into_body(), TOKENIZER_BYTES).collect().await;
        body.map(|body| body.to_bytes().to_vec()).map_err(|error| unreachable(&error))
    };
    match tokio::time::timeout(WITHIN, asked).await {
        Ok(answer) => answer,
        Err(_) => Err(Unknown::Unreachable(format!("{path}: no answer within {} s", WITHIN.as_secs()))),
    }
}

/// One backend and what is known about it.
struct Known {
    backend: Arc<Backend>,
    tokenizer: Option<PathBuf>,
    identity: ArcSwapOption<Identity>,
}

/// Who is behind each backend, asked again and again.
pub struct Identities {
    known: Vec<Known>,
    changed: watch::Sender<u64>,
}

impl Identities {
    /// Nothing known yet about these backends; each with a tokenizer file, or the backend's own.
    pub fn new(backends: impl IntoIterator<Item = (Arc<Backend>, Option<PathBuf>)>) -> Self {
        let known = backends
            .into_iter()
            .map(|(backend, tokenizer)| Known { backend, tokenizer, identity: ArcSwapOption::empty() })
            .collect();
        Self { known, changed: watch::Sender::new(0) }
    }

    /// What is known about a backend.
    pub fn of(&self, backend: &Arc<Backend>) -> Option<Arc<Identity>> {
        let known = self.known.iter().find(|known| Arc::ptr_eq(&known.backend, backend))?;
        known.identity.load_full()
    }

    /// Everything that is known: name, address, identity.
    pub fn all(&self) -> impl Iterator<Item = (&Arc<Backend>, Option<Arc<Identity>>)> {
        self.known.iter().map(|known| (&known.backend, known.identity.load_full()))
    }

    /// Resolves once every backend has been asked at least once.
    pub async fn asked(&self) {
        // The sender lives in `self`, so the wait cannot fail.
        let _ = self.changed.subscribe().wait_for(|rounds| *rounds > 0).await;
    }

    /// Asks every backend for ever: often while it is unknown, seldom once it is known. A backend that stops
    /// answering keeps its identity (its requests fail by themselves); one that answers as another is another.
    pub async fn keep_asking(&self, stop: CancellationToken) {
        loop {
            let mut all_known = true;
            for known in &self.known {
                all_known &= known.refresh().await;
            }
            self.changed.send_modify(|rounds| *rounds += 1);
            let pause = if all_known { RECHECK } else { RETRY };
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
            }
        }
    }
}

impl Known {
    /// Asks once. Returns whether the backend is known now.
    async fn refresh(&self) -> bool {
        let before = self.identity.load_full();
        match ask(&self.backend, self.tokenizer.as_deref(), before.as_ref()).await {
            Ok(identity) => {
                if before.as_ref().is_none_or(|before| before.epoch != identity.epoch) {
                    tracing::info!(
                        backend = self.backend.name(),
                        model = identity.epoch.model,
                        "backend known"
                    );
                    self.backend.set_dialect(identity.dialect.name(), true);
                    self.identity.store(Some(identity));
                }
                true
            }
            Err(Unknown::Foreign(why)) => {
                if before.is_some() || self.backend.dialect().as_str() == "auto" {
                    tracing::info!(backend = self.backend.name(), why, "backend is relayed");
                }
                self.backend.set_dialect("relay", false);
                self.identity.store(None);
                true
            }
            Err(Unknown::Unreachable(why)) => {
                tracing::debug!(backend = self.backend.name(), why, "backend not reached");
                before.is_some()
            }
        }
    }
}
