//! Who is behind a backend's address: which engine, which model, which vocabulary, since when.
//!
//! Everything learnt is keyed by this [`Epoch`]; a restarted engine or another tokenizer is a new one and
//! starts clean. Until the identity is known, requests are relayed.

use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt, Empty, Limited};
use hyper::{Request, StatusCode};
use serde::Deserialize;

use crate::dialect::Dialect;
use crate::fleet::Backend;
use crate::gateway::listen::{BoxError, Body};
use crate::text::Tokenizer;
use crate::units::TokenId;

/// A tokenizer file is a few MiB; more than this is not one.
const TOKENIZER_BYTES: usize = 64 << 20;
/// A question about itself that an engine does not answer in this time, it does not answer.
const WITHIN: Duration = Duration::from_secs(5);

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

/// Asks the backend who it is, by calls that cost it nothing.
///
/// # Errors
/// [`Unknown`]: it cannot be reached, or is no engine that can verify.
pub async fn ask(backend: &Backend, tokenizer: Option<&std::path::Path>) -> Result<Identity, Unknown> {
    let version: Version = json(backend, "/version").await?;
    if version.engine.as_deref() != Some("foretell-target") {
        return Err(Unknown::Foreign(format!("version {}", version.version)));
    }
    let models: Models = json(backend, "/v1/models").await?;
    let model = models.data.into_iter().next().ok_or_else(|| Unknown::Foreign("it serves no model".into()))?;
    let info: TokenizerInfo = json(backend, "/tokenizer_info").await?;
    let file = match tokenizer {
        Some(path) => tokio::fs::read(path).await.map_err(|e| Unknown::Foreign(format!("{}: {e}", path.display())))?,
        None => get(backend, "/tokenizer.json").await?,
    };
    let tokenizer = Tokenizer::from_bytes(&file).map_err(|error| Unknown::Foreign(error.to_string()))?;
    let epoch = Epoch {
        backend: backend.name().to_owned(),
        model: model.id,
        version: version.version,
        started: model.created,
        vocabulary: tokenizer.fingerprint().to_owned(),
    };
    let context = model.max_model_len.ok_or_else(|| Unknown::Foreign("it tells no context length".into()))?;
    Ok(Identity { epoch, dialect: Dialect::Onnx, tokenizer: Arc::new(tokenizer), eos: info.eos_token_ids, context })
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
