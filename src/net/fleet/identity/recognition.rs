//! Recognition of a server's engine by requests that cost it nothing or one token.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{Method, Request, StatusCode, header};

use crate::fleet::identity::confirm;
use crate::fleet::identity::unknown::Unknown;
use crate::fleet::identity::{EngineStart, Identity, RecognitionSettings, Renderer};
use crate::fleet::rounds_seen::RoundsSeen;
use crate::fleet::tie::Tie;
use crate::fleet::{Fresh, Replica, SendError};
use crate::http::body::{Body, BoxError};
use crate::http::gather;
use crate::http::headers;
use foretell_core::words::PassthroughReason;
use foretell_core::words::VerifyMethod;
use foretell_engines::recognise::{self, Reply};
use foretell_engines::{Answers, Dialect, Engine, Question, is_rendering, rendering_question, shared};
use foretell_parsers::parse::Parsers;
use foretell_parsers::text::Tokenizer;

/// Largest answer that is read, bytes; a tokenizer file is a few MiB.
const TOKENIZER_BYTES: usize = 64 << 20;
/// Timeout of one request.
const WITHIN: Duration = Duration::from_secs(5);
/// Maximum number of rounds of requests to one server.
const TURNS: usize = 8;
/// Statuses of an engine, or of a proxy in front of it, that is not ready yet.
const NOT_YET: [StatusCode; 3] =
    [StatusCode::BAD_GATEWAY, StatusCode::SERVICE_UNAVAILABLE, StatusCode::GATEWAY_TIMEOUT];
/// Connections that must all show the same start time.
const CONNECTIONS: u32 = 4;
/// The path at which `foretell target` serves its tokenizer.
const TOKENIZER: &str = "/tokenizer.json";
/// A text for which different tokenizers are likely to give different tokens.
const SAMPLE: &str =
    "The naïve façade — 1,234.56 \u{4f60}\u{597d} \u{1f600}\n\tdef f(x):  return x**2  # ok?\r\n";

/// A recognised engine, and further results from its answers.
#[derive(Clone, Debug, PartialEq)]
pub struct Recognised {
    pub engine: Engine,
    /// Verification methods that it lacks, with the reason.
    pub missing: Vec<(VerifyMethod, String)>,
    /// The page on which it reports its start time; `None` if it does not.
    pub start_page: Option<String>,
    /// Number of fresh connections that reported the same start time; 0 if it reports none.
    pub starts: u32,
    /// Number of requests that were sent to it.
    pub questions: u32,
    answers: Answers,
}

/// The times that a replica became unreachable, instead of a start time where its engine reports
/// none.
#[derive(Clone, Copy, Debug, Default)]
pub struct Away {
    /// Their number.
    pub times: u64,
    /// True if it was one since it was recognised: another process may answer now.
    pub since: bool,
}

/// Recognises the backend. If it still is the engine `before`, the vocabulary is not refetched.
///
/// # Errors
/// [`Unknown`]: it cannot be reached, or is not an engine that can verify, or is several.
pub async fn identify(
    replica: &Replica,
    settings: &RecognitionSettings,
    before: Option<&Arc<Identity>>,
    away: Away,
    rounds_seen: &Arc<RoundsSeen>,
) -> Result<Arc<Identity>, Unknown> {
    if let Some(before) = before
        && !(away.since && before.engine.process.started.is_none())
        && still(replica, before).await?
        && !renders_now(settings, &before.engine).await
    {
        return Ok(Arc::clone(before));
    }
    let mut recognised = recognise(replica, &settings.renderer, settings.dialect, &settings.named).await?;
    let mut engine = recognised.engine.clone();
    if engine.methods.is_empty() {
        return Err(Unknown::PassedThrough(engine.dialect, engine.pages.load));
    }
    let started = engine.process.started.or(engine.process.drawn).unwrap_or(away.times);
    let same = |engine_start: &EngineStart| {
        engine_start.version == engine.version
            && engine_start.model == engine.model
            && engine_start.started == started
            && engine_start.weights == engine.process.weights
    };
    if let Some(before) = before
        && same(&before.engine_start)
        && before.engine.pages.renders == engine.pages.renders
    {
        return Ok(Arc::clone(before));
    }
    recognised.starts = one_start(replica, &recognised).await?;
    let tokenizer = tokenizer(replica, settings.tokenizer.as_deref(), &engine).await?;
    if settings.parsers != Parsers::default() {
        engine.parsing.parsers = settings.parsers;
    }
    (engine.tokens.special, engine.tokens.may_end) = (tokenizer.special(), tokenizer.may_end());
    if let Some(config) = &settings.generation_config {
        confirm::confirm(replica, &mut engine, &tokenizer, config).await?;
    }
    let engine_start = EngineStart {
        replica: replica.label().to_owned(),
        model: engine.model.clone(),
        version: engine.version.clone(),
        started,
        weights: engine.process.weights.clone(),
        vocabulary: tokenizer.fingerprint().to_string(),
    };
    recognised.engine = engine.clone();
    let tie = tie(&recognised);
    let (engine, tokenizer, recognised) = (Arc::new(engine), Arc::new(tokenizer), Arc::new(recognised));
    Ok(Arc::new(Identity {
        engine_start,
        engine,
        tokenizer,
        rounds_seen: Arc::clone(rounds_seen),
        probe: None,
        tie,
        renderer: settings.renderer.other().cloned(),
        reidentify: Arc::default(),
        replaced: Arc::default(),
        recognised,
    }))
}

/// The test that a new connection leads to the recognised process, by the page with its start time.
/// Not needed for an engine that identifies its process in each answer.
fn tie(recognised: &Recognised) -> Option<Arc<Tie>> {
    let Recognised { engine, answers, start_page, .. } = recognised;
    if engine.process.fingerprint.is_some() {
        return None;
    }
    let page = start_page.clone()?;
    let uri = page.parse().ok()?;
    let (engine, answers) = (engine.clone(), answers.clone());
    let names = move |body: Vec<u8>| {
        let mut now = answers.clone();
        now.add(&page, Reply { status: 200, server: None, body });
        engine.dialect.codec().engine(&now).is_ok_and(|now| is_same(&now, &engine))
    };
    Some(Arc::new(Tie::new(uri, names)))
}

/// The same engine, with newly confirmed defaults.
///
/// # Errors
/// [`Unknown`]: the named file of its model cannot be read.
pub async fn reconfirmed(
    replica: &Replica,
    settings: &RecognitionSettings,
    known: &Arc<Identity>,
) -> Result<Arc<Identity>, Unknown> {
    let Some(config) = &settings.generation_config else { return Ok(Arc::clone(known)) };
    let mut engine = known.recognised.engine.clone();
    confirm::confirm(replica, &mut engine, &known.tokenizer, config).await?;
    let recognised = Recognised { engine: engine.clone(), ..(*known.recognised).clone() };
    // The engine in use also has the findings of a probe.
    let measured = Engine { defaults: engine.defaults, limits: engine.limits, ..(*known.engine).clone() };
    Ok(Arc::new(Identity {
        engine: Arc::new(measured),
        recognised: Arc::new(recognised),
        ..(**known).clone()
    }))
}

/// True if two answers are those of one process.
fn is_same(now: &Engine, before: &Engine) -> bool {
    let of = |engine: &Engine| {
        (
            engine.process.started,
            engine.process.fingerprint.clone(),
            engine.process.weights.clone(),
            engine.context,
        )
    };
    now.version == before.version && now.model == before.model && of(now) == of(before)
}

/// True if it still is the same engine, by the pages alone that it answered then: a known engine
/// gets no requests that it refused before, nor any that makes it render or compute. The first
/// request uses a new connection: an open one leads to the process that it always led to.
async fn still(replica: &Replica, before: &Identity) -> Result<bool, Unknown> {
    let Recognised { engine, answers, start_page, .. } = &*before.recognised;
    let mut now = answers.clone();
    let pages = recognise::check_of(engine.dialect, answers, start_page.as_deref());
    for (index, page) in pages.into_iter().enumerate() {
        now.add(&page.path, put(replica, &page, index == 0).await?);
    }
    Ok(engine.dialect.codec().engine(&now).is_ok_and(|now| is_same(&now, engine)))
}

/// True if the server that renders this engine's requests was not there when the engine was
/// recognised, and is now.
async fn renders_now(settings: &RecognitionSettings, engine: &Engine) -> bool {
    if engine.pages.renders {
        return false;
    }
    let Some(renderer) = settings.renderer.other() else { return false };
    let reply = put(renderer, &rendering_question(), false).await;
    reply.is_ok_and(|reply| matches!(reply.status, 400 | 422))
}

/// The engine and its capabilities. `renderer`: the server that renders its requests. `named`:
/// verification methods that are used even where their first call may crash it.
///
/// # Errors
/// [`Unknown`]: it cannot be reached, requires an API key, or is not an engine that can verify.
pub async fn recognise(
    replica: &Replica,
    renderer: &Renderer,
    dialect: Option<Dialect>,
    named: &[VerifyMethod],
) -> Result<Recognised, Unknown> {
    let mut answers = Answers::default();
    let mut questions = 0;
    for question in recognise::introduction_to(dialect) {
        questions += 1;
        answers.add(&question.path, put(replica, &question, false).await?);
    }
    let dialect = dialect.or_else(|| recognise::dialect_of(&answers));
    if let Some(status) = locked(&answers, [recognise::MODELS]) {
        return Err(Unknown::Locked(status));
    }
    let dialect = dialect.ok_or_else(|| stranger(&answers))?;
    for _ in 0..TURNS {
        let next = dialect.codec().questions(&answers);
        if next.is_empty() {
            break;
        }
        for question in next {
            questions += 1;
            let reply = match renderer {
                // Without it the engine is as good as one that renders nothing.
                Renderer::Other(server) if is_rendering(&question.path) => {
                    put(server, &question, false).await.unwrap_or_default()
                }
                _ => put(replica, &question, false).await?,
            };
            answers.add(&question.path, reply);
        }
    }
    let mut engine = dialect.codec().engine(&answers).map_err(|foreign| {
        let locked = locked(&answers, answers.paths()).filter(|status| *status == StatusCode::UNAUTHORIZED);
        locked.map_or_else(|| Unknown::foreign(foreign.to_string()), Unknown::Locked)
    })?;
    engine.enable_named(named);
    if matches!(renderer, Renderer::Never) {
        (engine.pages.renders, engine.pages.derenders) = (false, false);
    }
    let missing =
        VerifyMethod::ALL.into_iter().filter(|verify_method| !engine.methods.contains(verify_method));
    let missing = missing
        .map(|verify_method| (verify_method, dialect.codec().missing(&answers, verify_method)))
        .collect();
    let start_page = recognise::start_page(dialect, &answers).map(ToOwned::to_owned);
    Ok(Recognised { engine, missing, start_page, starts: 0, questions, answers })
}

/// Reason that a server with these answers is not recognised.
fn stranger(answers: &Answers) -> Unknown {
    let failed: BTreeSet<u16> =
        answers.paths().filter_map(|path| answers.status(path)).filter(|status| *status != 404).collect();
    match failed.first() {
        Some(status) if *status >= 500 => {
            Unknown::Unreachable(format!("it answers {status} to every question about its engine"))
        }
        _ => Unknown::Stranger("none of the engines that Foretell recognises".to_owned()),
    }
}

/// The status with which one of these pages was refused because of a missing or wrong key; `None`
/// if none was.
fn locked<'a>(answers: &Answers, pages: impl IntoIterator<Item = &'a str>) -> Option<StatusCode> {
    pages.into_iter().find_map(|page| refused_status(answers.status(page)?))
}

/// The status, if it means that a key is missing or wrong.
fn refused_status(status: u16) -> Option<StatusCode> {
    let status = StatusCode::from_u16(status).ok()?;
    matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN).then_some(status)
}

/// Checks that fresh connections report the same start time; returns the number that did, 0 if it
/// reports none.
///
/// # Errors
/// [`Unknown`]: it cannot be reached, or several engines answer.
pub async fn one_start(replica: &Replica, recognised: &Recognised) -> Result<u32, Unknown> {
    let Some(page) = &recognised.start_page else { return Ok(0) };
    let engine = &recognised.engine;
    for _ in 0..CONNECTIONS {
        let mut answers = recognised.answers.clone();
        let question = Question { path: page.clone().into(), body: None };
        answers.add(page, put(replica, &question, true).await?);
        let other = engine.dialect.codec().engine(&answers);
        let other = other.map_err(|foreign| Unknown::foreign(foreign.to_string()))?;
        if other.process.started != engine.process.started {
            let why = "several engines answer at this address: their start times differ";
            return Err(Unknown::Foreign(PassthroughReason::SeveralEngines, why.to_owned()));
        }
    }
    Ok(CONNECTIONS)
}

/// Requests the list of models, and returns their ids: the only request to a server that bills per
/// token.
///
/// # Errors
/// [`Unknown`]: it cannot be reached.
pub async fn models(replica: &Replica) -> Result<Vec<String>, Unknown> {
    let reply = put(replica, &Question::get(recognise::MODELS), false).await?;
    if let Some(status) = refused_status(reply.status) {
        return Err(Unknown::Locked(status));
    }
    let listed: Option<serde_json::Value> = serde_json::from_slice(&reply.body).ok();
    let models = listed.as_ref().and_then(|listed| listed.get("data")?.as_array());
    let id = |model: &serde_json::Value| Some(model.get("id")?.as_str()?.to_owned());
    Ok(models.into_iter().flatten().filter_map(id).collect())
}

/// The tokenizer of the backend's model, from the file or from the backend itself; checks that the
/// backend tokenizes alike.
///
/// # Errors
/// [`Unknown`]: there is none, or it is not the backend's.
pub async fn tokenizer(
    replica: &Replica,
    file: Option<&Path>,
    engine: &Engine,
) -> Result<Tokenizer, Unknown> {
    let bytes = match file {
        Some(path) => {
            let read = tokio::fs::read(path).await;
            read.map_err(|error| Unknown::tokenizer(format!("{}: {error}", path.display())))?
        }
        None => match put(replica, &Question::get(TOKENIZER), false).await? {
            Reply { status: 200, body, .. } => body,
            _ => {
                return Err(Unknown::tokenizer(
                    "it serves no tokenizer: configure that of the model (models[].tokenizer, or --tokenizer)",
                ));
            }
        },
    };
    let tokenizer = Tokenizer::from_bytes(&bytes).map_err(|error| Unknown::tokenizer(error.to_string()))?;
    if let Some(form) = engine.quirks().tokenize {
        let question = form.question(&engine.model, SAMPLE);
        let reply = put(replica, &question, false).await?;
        let theirs = shared::tokens(&reply.body);
        let ours = tokenizer.encode(SAMPLE, false).ok();
        if reply.status == 200 && theirs.is_some() && theirs != ours {
            return Err(Unknown::tokenizer(
                "the tokenizer is not the backend's: they tokenize a text differently",
            ));
        }
    }
    if file.is_some() && engine.dialect == Dialect::Onnx {
        let reply = put(replica, &Question::get(TOKENIZER), false).await?;
        if reply.status == 200
            && let Ok(theirs) = Tokenizer::from_bytes(&reply.body)
            && theirs.fingerprint() != tokenizer.fingerprint()
        {
            return Err(Unknown::tokenizer("the tokenizer is not the backend's: it serves another one"));
        }
    }
    Ok(tokenizer)
}

/// Sends a request to the backend. `fresh`: on a new connection.
async fn put(replica: &Replica, question: &Question, fresh: bool) -> Result<Reply, Unknown> {
    let exchange = async {
        let body = question.body.as_ref().map(|body| Bytes::from(body.to_string()));
        let method = if body.is_some() { Method::POST } else { Method::GET };
        let full: Body = Full::new(body.unwrap_or_default())
            .map_err(|never| -> BoxError { match never {} })
            .boxed_unsync();
        let mut request = Request::new(full);
        if fresh {
            request.extensions_mut().insert(Fresh);
        }
        *request.uri_mut() =
            question.path.parse().map_err(|_| Unknown::foreign(format!("{}: no path", question.path)))?;
        if method == Method::POST {
            let json = header::HeaderValue::from_static("application/json");
            request.headers_mut().insert(header::CONTENT_TYPE, json);
        }
        *request.method_mut() = method;
        let unreachable = |error: &dyn std::fmt::Display| Unknown::Unreachable(error.to_string());
        let response = replica.inquire(request).await.map_err(|error| match error {
            SendError::FirstByteTimeout { .. } => Unknown::Late(error.to_string()),
            _ => unreachable(&error),
        })?;
        let status = response.status();
        let server = response.headers().get(header::SERVER).and_then(|server| server.to_str().ok());
        let server = server.map(ToOwned::to_owned);
        if response.headers().contains_key(headers::PATH) {
            return Err(Unknown::foreign("it is a Foretell: name the server behind it"));
        }
        // An engine that is loading its model answers 503, and a proxy in front of it 502 or 504.
        if NOT_YET.contains(&status) {
            return Err(Unknown::Unreachable(format!("{} answers {status}", question.path)));
        }
        let body = gather::read_all(response.into_body(), TOKENIZER_BYTES).await;
        let body = body.map_err(|error| unreachable(&error))?;
        Ok(Reply { status: status.as_u16(), server, body })
    };
    match tokio::time::timeout(WITHIN, exchange).await {
        Ok(answer) => answer,
        Err(_) => Err(Unknown::Late(format!("{}: no answer within {} s", question.path, WITHIN.as_secs()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_fails_at_every_question_is_told_by_its_status() {
        let answers = |statuses: &[u16]| {
            let mut answers = Answers::default();
            for (place, &status) in statuses.iter().enumerate() {
                answers.add(&format!("/{place}"), Reply { status, ..Reply::default() });
            }
            stranger(&answers)
        };
        for failing in [&[500, 500, 501][..], &[404, 500]] {
            let Unknown::Unreachable(why) = answers(failing) else { panic!("{failing:?}") };
            assert_eq!(why, "it answers 500 to every question about its engine");
        }
        for other in [&[404, 404][..], &[200, 500], &[]] {
            assert!(matches!(answers(other), Unknown::Stranger(_)), "{other:?}");
        }
    }
}
