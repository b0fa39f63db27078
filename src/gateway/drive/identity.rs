//! Who is behind a backend's address: which engine, which model, which vocabulary, since when.
//!
//! Everything learnt is keyed by this [`Epoch`]; a restarted engine or another tokenizer is a new one and
//! starts clean. Until the identity is known, requests are relayed.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::{Method, Request, StatusCode, header};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::dialect::recognise::{self, Told};
use crate::dialect::{Answers, Dialect, Engine, Question};
use crate::fleet::Backend;
use crate::gateway::listen::{Body, BoxError};
use crate::openai::BypassReason;
use crate::text::Tokenizer;

/// A tokenizer file is a few MiB; more than this is not one.
const TOKENIZER_BYTES: usize = 64 << 20;
/// A question about itself that an engine does not answer in this time, it does not answer.
const WITHIN: Duration = Duration::from_secs(5);
/// How soon an unknown backend is asked again.
const RETRY: Duration = Duration::from_millis(500);
/// How soon a known backend is asked whether it is still the same.
const RECHECK: Duration = Duration::from_secs(5);
/// Turns of questions after which a server is given up.
const TURNS: usize = 8;
/// Where our own target hands out its tokenizer.
const TOKENIZER: &str = "/tokenizer.json";
/// A text on which tokenizers that differ are likely to differ.
const SAMPLE: &str =
    "The naïve façade — 1,234.56 \u{4f60}\u{597d} \u{1f600}\n\tdef f(x):  return x**2  # ok?\r\n";

/// What everything learnt is keyed by.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Epoch {
    /// The backend's name in the configuration.
    pub backend: String,
    /// The model id that it serves.
    pub model: String,
    /// The engine's own version.
    pub version: String,
    /// Unix seconds of its start, as it tells; of one that does not tell, how often it has been away.
    pub started: u64,
    /// Hash of the vocabulary, hexadecimal.
    pub vocabulary: String,
}

/// A backend that is known well enough to leap with.
#[derive(Clone)]
pub struct Identity {
    /// The key of everything learnt.
    pub epoch: Epoch,
    /// How it is spoken to, and what it can do.
    pub engine: Arc<Engine>,
    /// Its vocabulary.
    pub tokenizer: Arc<Tokenizer>,
}

/// What is known about a backend.
#[derive(Clone)]
pub enum Standing {
    /// Who it is.
    Known(Arc<Identity>),
    /// It is relayed, for this reason.
    Relayed(BypassReason),
}

/// How a backend is to be asked, as configured.
#[derive(Clone, Debug, Default)]
pub struct Asking {
    /// Its dialect; `None` finds out.
    pub dialect: Option<Dialect>,
    /// The tokenizer of its model; `None` asks the backend for it.
    pub tokenizer: Option<PathBuf>,
}

/// Why a backend is not known.
#[derive(Debug, thiserror::Error)]
pub enum Unknown {
    /// It cannot be reached, or does not answer in time.
    #[error("not reachable: {0}")]
    Unreachable(String),
    /// It answers, but not as an engine that Foretell can ask to verify.
    #[error("not an engine that can verify: {1}")]
    Foreign(BypassReason, String),
    /// It is known, and can only be relayed.
    #[error("{} is only relayed", .0.name())]
    Relayed(Dialect),
}

impl Unknown {
    fn foreign(why: impl Into<String>) -> Self {
        Self::Foreign(BypassReason::NoPlan, why.into())
    }

    fn tokenizer(why: impl Into<String>) -> Self {
        Self::Foreign(BypassReason::Tokenizer, why.into())
    }
}

/// Asks the backend who it is, by calls that cost it nothing or one token. If it still is who it was `before`,
/// the vocabulary is not fetched again. `away`: how often it has been away.
///
/// # Errors
/// [`Unknown`]: it cannot be reached, or is no engine that can verify.
pub async fn ask(
    backend: &Backend,
    asking: &Asking,
    before: Option<&Arc<Identity>>,
    away: u64,
) -> Result<Arc<Identity>, Unknown> {
    let mut engine = recognise(backend, asking.dialect).await?;
    if engine.plans.is_empty() {
        return Err(Unknown::Relayed(engine.dialect));
    }
    let started = engine.started.unwrap_or(away);
    let same = |epoch: &Epoch| {
        epoch.version == engine.version && epoch.model == engine.model && epoch.started == started
    };
    if let Some(before) = before.filter(|before| same(&before.epoch)) {
        return Ok(Arc::clone(before));
    }
    let tokenizer = tokenizer(backend, asking.tokenizer.as_deref(), &engine).await?;
    if !engine.dialect.codec().names() && !writes_plainly(asking.tokenizer.as_deref(), &tokenizer).await {
        return Err(Unknown::tokenizer(
            "it sends text without ids, and no tokenizer_config.json beside the configured tokenizer says that              it writes tokens as they are (clean_up_tokenization_spaces: false)",
        ));
    }
    engine.special = (0..tokenizer.end()).filter(|&id| tokenizer.is_special(id)).collect();
    let epoch = Epoch {
        backend: backend.name().to_owned(),
        model: engine.model.clone(),
        version: engine.version.clone(),
        started,
        vocabulary: tokenizer.fingerprint().to_string(),
    };
    Ok(Arc::new(Identity { epoch, engine: Arc::new(engine), tokenizer: Arc::new(tokenizer) }))
}

/// Which engine it is, and what it can do.
///
/// # Errors
/// [`Unknown`].
pub async fn recognise(backend: &Backend, dialect: Option<Dialect>) -> Result<Engine, Unknown> {
    let mut answers = Answers::default();
    for question in recognise::introduction_to(dialect) {
        answers.add(&question.path, put(backend, &question).await?);
    }
    let dialect = dialect.or_else(|| recognise::dialect_of(&answers));
    let dialect = dialect.ok_or_else(|| Unknown::foreign("none of the engines that are told apart"))?;
    for _ in 0..TURNS {
        let questions = dialect.codec().questions(&answers);
        if questions.is_empty() {
            break;
        }
        for question in questions {
            answers.add(&question.path, put(backend, &question).await?);
        }
    }
    dialect.codec().engine(&answers).map_err(|foreign| Unknown::foreign(foreign.to_string()))
}

/// The tokenizer of the backend's model: from the file, or from the backend itself; and whether the backend
/// agrees with it.
async fn tokenizer(backend: &Backend, file: Option<&Path>, engine: &Engine) -> Result<Tokenizer, Unknown> {
    let bytes = match file {
        Some(path) => {
            let read = tokio::fs::read(path).await;
            read.map_err(|error| Unknown::tokenizer(format!("{}: {error}", path.display())))?
        }
        None => match put(backend, &Question::get(TOKENIZER)).await? {
            Told { status: 200, body, .. } => body,
            _ => return Err(Unknown::tokenizer("its tokenizer is not configured, and it hands none out")),
        },
    };
    let tokenizer = Tokenizer::from_bytes(&bytes).map_err(|error| Unknown::tokenizer(error.to_string()))?;
    if let Some(question) = engine.dialect.codec().tokenize(engine, SAMPLE) {
        let told = put(backend, &question).await?;
        let theirs = engine.dialect.codec().tokens(&told.body);
        let own = tokenizer.encode(SAMPLE, false).ok();
        if told.status == 200 && theirs.is_some() && theirs != own {
            return Err(Unknown::tokenizer(
                "the tokenizer is not the backend's: they cut a text differently",
            ));
        }
    }
    Ok(tokenizer)
}

/// Whether a backend that makes text with Hugging Face's own code makes it of the tokens' bytes and nothing else.
/// That code tidies spaces before punctuation away unless the model's own configuration forbids it, which shows
/// in a text only when it comes to such a place: too late.
async fn writes_plainly(file: Option<&Path>, tokenizer: &Tokenizer) -> bool {
    let Some(file) = file.filter(|_| tokenizer.is_byte_level()) else { return false };
    let Ok(config) = tokio::fs::read(file.with_file_name("tokenizer_config.json")).await else {
        return false;
    };
    let config: Option<serde_json::Value> = serde_json::from_slice(&config).ok();
    config.and_then(|config| config.get("clean_up_tokenization_spaces")?.as_bool()) == Some(false)
}

/// Puts a question to the backend.
async fn put(backend: &Backend, question: &Question) -> Result<Told, Unknown> {
    let asked = async {
        let body = question.body.as_ref().map(|body| Bytes::from(body.to_string()));
        let method = if body.is_some() { Method::POST } else { Method::GET };
        let full: Body = Full::new(body.unwrap_or_default())
            .map_err(|never| -> BoxError { match never {} })
            .boxed_unsync();
        let mut request = Request::new(full);
        *request.uri_mut() =
            question.path.parse().map_err(|_| Unknown::foreign(format!("{}: no path", question.path)))?;
        if method == Method::POST {
            let json = header::HeaderValue::from_static("application/json");
            request.headers_mut().insert(header::CONTENT_TYPE, json);
        }
        *request.method_mut() = method;
        let unreachable = |error: &dyn std::fmt::Display| Unknown::Unreachable(error.to_string());
        let response = backend.send(request).await.map_err(|error| unreachable(&error))?;
        let status = response.status();
        let server = response.headers().get(header::SERVER).and_then(|server| server.to_str().ok());
        let server = server.map(ToOwned::to_owned);
        // An engine that loads its model says so with 503.
        if status == StatusCode::SERVICE_UNAVAILABLE {
            return Err(Unknown::Unreachable(format!("{} answers {status}", question.path)));
        }
        let body = Limited::new(response.into_body(), TOKENIZER_BYTES).collect().await;
        let body = body.map_err(|error| unreachable(&error))?.to_bytes().to_vec();
        Ok(Told { status: status.as_u16(), server, body })
    };
    match tokio::time::timeout(WITHIN, asked).await {
        Ok(answer) => answer,
        Err(_) => {
            Err(Unknown::Unreachable(format!("{}: no answer within {} s", question.path, WITHIN.as_secs())))
        }
    }
}

/// One backend and what is known about it.
struct Known {
    backend: Arc<Backend>,
    asking: Asking,
    standing: ArcSwap<Standing>,
    away: AtomicU64,
}

/// Who is behind each backend, asked again and again.
pub struct Identities {
    known: Vec<Known>,
    changed: watch::Sender<u64>,
}

impl Identities {
    /// Nothing known yet about these backends.
    pub fn new(backends: impl IntoIterator<Item = (Arc<Backend>, Asking)>) -> Self {
        let unknown = Standing::Relayed(BypassReason::NoPlan);
        let known = backends
            .into_iter()
            .map(|(backend, asking)| Known {
                backend,
                asking,
                standing: ArcSwap::from_pointee(unknown.clone()),
                away: AtomicU64::new(0),
            })
            .collect();
        Self { known, changed: watch::Sender::new(0) }
    }

    /// Who a backend is.
    ///
    /// # Errors
    /// Why its requests are relayed.
    pub fn of(&self, backend: &Arc<Backend>) -> Result<Arc<Identity>, BypassReason> {
        let known = self.known.iter().find(|known| Arc::ptr_eq(&known.backend, backend));
        match &**known.ok_or(BypassReason::NoPlan)?.standing.load() {
            Standing::Known(identity) => Ok(Arc::clone(identity)),
            Standing::Relayed(reason) => Err(*reason),
        }
    }

    /// Everything that is known: name, address, identity.
    pub fn all(&self) -> impl Iterator<Item = (&Arc<Backend>, Option<Arc<Identity>>)> {
        self.known.iter().map(|known| (&known.backend, known.identity()))
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
    fn relayed(&self, dialect: &str, reason: BypassReason, why: &str, was_known: bool) {
        if was_known || self.backend.dialect().as_str() == "auto" {
            tracing::info!(backend = self.backend.name(), why, "backend is relayed");
        }
        self.backend.set_dialect(dialect, false);
        self.standing.store(Arc::new(Standing::Relayed(reason)));
    }

    fn identity(&self) -> Option<Arc<Identity>> {
        match &**self.standing.load() {
            Standing::Known(identity) => Some(Arc::clone(identity)),
            Standing::Relayed(_) => None,
        }
    }

    /// Asks once. Returns whether it is settled what the backend is.
    async fn refresh(&self) -> bool {
        let before = self.identity();
        let away = self.away.load(Ordering::Relaxed);
        match ask(&self.backend, &self.asking, before.as_ref(), away).await {
            Ok(identity) => {
                if before.as_ref().is_none_or(|before| before.epoch != identity.epoch) {
                    tracing::info!(
                        backend = self.backend.name(),
                        dialect = identity.engine.dialect.name(),
                        version = identity.engine.version,
                        model = identity.epoch.model,
                        "backend known"
                    );
                    self.backend.set_dialect(identity.engine.dialect.name(), true);
                    self.standing.store(Arc::new(Standing::Known(identity)));
                }
                true
            }
            Err(Unknown::Foreign(reason, why)) => {
                self.relayed("relay", reason, &why, before.is_some());
                true
            }
            Err(unknown @ Unknown::Relayed(dialect)) => {
                self.relayed(dialect.name(), BypassReason::NoPlan, &unknown.to_string(), before.is_some());
                true
            }
            Err(Unknown::Unreachable(why)) => {
                tracing::debug!(backend = self.backend.name(), why, "backend not reached");
                if before.is_some() {
                    self.away.fetch_add(1, Ordering::Relaxed);
                }
                before.is_some()
            }
        }
    }
}
