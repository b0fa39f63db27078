//! Probing a replica: makes the calls that a [`Prober`] requests, and times them.
//!
//! Nothing is decided here. Calls are sent one after the other, like a session's rounds, and their
//! results do not count in the replica's health. They give way to clients: a prompt of a thousand
//! tokens that is read for nobody is seconds on a slow engine.

mod report;

use std::time::Duration;

use http::header::{ACCEPT_ENCODING, CONTENT_TYPE};
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::BodyExt;
use tokio::time::Instant;

use super::replica::Fresh;
use super::{Answer, Replica, rounds_seen};
use crate::clock::Clock;
use crate::http::body::full;
use crate::http::gather;
use crate::http::headers::is_json;
use foretell_core::units::TokenId;
use foretell_core::words::VerifyMethod;
use foretell_engines::confirm::CallAnswer;
use foretell_engines::probe::{Bounds, Findings, ProbeAnswer, ProbeStep, Prober, TEXT};
use foretell_engines::{Call, Engine, RequestKind};
use foretell_parsers::text::Tokenizer;
use foretell_wire::openai::{Event, sse};

pub use report::{ProbeReport, Seen, noise};

/// The text that the probe's prompts are made of.
const PAGES: &str = include_str!("probe/pages.txt");

/// Maximum time that all calls of one probe wait for moments without requests of clients; after
/// that it competes with them.
const MAX_DEFERRAL: Duration = Duration::from_mins(1);
/// Interval of checking for requests in flight.
const LOOK: Duration = Duration::from_millis(20);
/// Maximum length of a refusal that is read, bytes.
const REFUSAL_BYTES: usize = 64 << 10;
/// Calls that show that a single engine answers.
const ONE_CALLS: u32 = 4;
/// Reason that requests to an address are not speculated on: prompts sent there before are not
/// found cached.
pub const MANY: &str = "a prompt that was sent is not found cached every time: several engines answer at this address, or \
     their prefix caches are off";

#[derive(Clone, Debug)]
pub struct Limits {
    /// Maximum number of calls.
    pub calls: u32,
    /// Maximum time for all calls.
    pub within: Duration,
    /// Maximum size of a round's requests, and of each answer, bytes.
    pub bytes_max: usize,
    /// Maximum context of a verify request, tokens.
    pub context_max: usize,
    /// The verification methods that the operator allows.
    pub allow: Vec<VerifyMethod>,
}

/// Measures an engine. `nonce` makes a text that it has not seen.
pub async fn measure(
    replica: &Replica,
    engine: &Engine,
    tokenizer: &Tokenizer,
    limits: &Limits,
    nonce: u64,
) -> Findings {
    let clock = Clock::start();
    let prober = Prober::new(engine.clone(), text(tokenizer, nonce), bounds(&clock, limits));
    drive(replica, engine, prober, &clock, limits).await
}

/// Checks that a single engine answers at an address that does not report its start time: four
/// calls, eight at most. [`Findings::several_engines`] is the result, unless the verification
/// method in use does not work ([`failed_method`]), or the check was not finished ([`unchecked`]).
pub async fn is_one(
    replica: &Replica,
    engine: &Engine,
    tokenizer: &Tokenizer,
    limits: &Limits,
    nonce: u64,
) -> Findings {
    let clock = Clock::start();
    let check = async |long: bool| {
        let text = text(tokenizer, nonce.wrapping_add(u64::from(long)));
        let prober = Prober::of_one(engine.clone(), text, bounds(&clock, limits), long);
        drive(replica, engine, prober, &clock, limits).await
    };
    let short = check(false).await;
    if short.cache.reported || short.calls < ONE_CALLS {
        return short;
    }
    let long = check(true).await;
    Findings { calls: short.calls + long.calls, ..long }
}

/// Reason that [`is_one`] could not check: the engine's only verification method, and its failure.
pub fn failed_method(findings: &Findings) -> Option<&(VerifyMethod, String)> {
    let stopped = findings.calls < ONE_CALLS && findings.engine.methods.is_empty();
    if stopped { findings.removed.first() } else { None }
}

/// Reason that [`is_one`] has no result, for the operator.
pub fn unchecked(findings: &Findings) -> Option<String> {
    let why = findings.unchecked.as_ref()?;
    Some(format!(
        "it is not known yet if a single engine answers at this address: the check {why}; it is repeated"
    ))
}

fn bounds(clock: &Clock, limits: &Limits) -> Bounds {
    Bounds {
        calls: limits.calls,
        until: clock.now().after(limits.within),
        bytes_max: limits.bytes_max,
        context_max: limits.context_max,
        allow: limits.allow.clone(),
    }
}

/// Time to wait for a server to become idle.
const IDLE_WITHIN: Duration = Duration::from_secs(5);
/// Interval between two checks of its load.
const LOOK_AT_LOAD: Duration = Duration::from_millis(500);

/// Waits for some seconds until no request runs or waits there; true if so. A server that
/// reports no load counts as idle. `calls` is increased by the calls that this takes.
pub async fn is_idle(replica: &Replica, engine: &Engine, calls: &mut u32) -> bool {
    let Some(path) = engine.pages.load else { return true };
    let until = Instant::now() + IDLE_WITHIN;
    loop {
        *calls += 1;
        match rounds_seen::look(replica, engine.dialect, path).await {
            Some(load) if load.running + load.waiting > 0 => {}
            _ => return true,
        }
        if Instant::now() >= until {
            return false;
        }
        tokio::time::sleep(LOOK_AT_LOAD).await;
    }
}

/// The status and the body of the answer to a call; `None`: there was none.
pub async fn answer(replica: &Replica, call: &Call) -> CallAnswer {
    match answer_body(replica, call, false, sse::EVENT_BYTES).await {
        Ok(body) => Some((StatusCode::OK.as_u16(), body)),
        Err(ProbeAnswer::Refused(status, body)) => Some((status, body)),
        Err(_) => None,
    }
}

/// Token ids of real text, which begins with the nonce so that it is cached nowhere.
pub fn text(tokenizer: &Tokenizer, nonce: u64) -> Vec<TokenId> {
    let mut ids = tokenizer.encode(&format!("Leaf {nonce:016x}. "), false).unwrap_or_default();
    let mut page = 1;
    while ids.len() < TEXT {
        let more = tokenizer.encode(&format!("{PAGES}\nEnd of part {page}.\n"), false).unwrap_or_default();
        if more.is_empty() {
            break;
        }
        ids.extend(more);
        page += 1;
    }
    ids.truncate(TEXT);
    ids
}

async fn drive(
    replica: &Replica,
    engine: &Engine,
    mut prober: Prober,
    clock: &Clock,
    limits: &Limits,
) -> Findings {
    let (mut until, mut patience) = (Instant::now() + limits.within, MAX_DEFERRAL);
    loop {
        let waited = give_way(replica, patience).await;
        until += waited;
        patience = patience.saturating_sub(waited);
        prober.postpone(waited);
        let Some(step) = prober.next(clock.now()) else { break };
        let answer = match step {
            ProbeStep::Round { calls, fresh } => {
                tokio::time::timeout_at(until, round(replica, &calls, fresh, limits.bytes_max)).await
            }
            ProbeStep::Plain { call, leave } => {
                tokio::time::timeout_at(until, plain(replica, engine, &call, leave)).await
            }
        };
        prober.take(answer.unwrap_or(ProbeAnswer::Late));
    }
    prober.findings()
}

/// Waits until no request of a client is in flight, for at most `patience`; returns the time that
/// took.
async fn give_way(replica: &Replica, patience: Duration) -> Duration {
    let mut waited = Duration::ZERO;
    while replica.in_flight() > 0 && waited + LOOK <= patience {
        tokio::time::sleep(LOOK).await;
        waited += LOOK;
    }
    waited
}

async fn round(replica: &Replica, calls: &[Call], fresh: bool, bytes_max: usize) -> ProbeAnswer {
    let begun = Instant::now();
    let answers = calls.iter().map(|call| answer_body(replica, call, fresh, bytes_max));
    match futures_util::future::try_join_all(answers).await {
        Ok(bodies) => ProbeAnswer::Round { bodies, seconds: begun.elapsed().as_secs_f64() },
        Err(answer) => answer,
    }
}

async fn answer_body(
    replica: &Replica,
    call: &Call,
    fresh: bool,
    bytes_max: usize,
) -> Result<Vec<u8>, ProbeAnswer> {
    let response = send(replica, call, fresh).await?;
    gather::read_all(response.into_body(), bytes_max).await.map_err(|_| ProbeAnswer::Silence)
}

/// Reads a stream until `leave` events with tokens have come, and closes it; or a buffered answer.
async fn plain(replica: &Replica, engine: &Engine, call: &Call, leave: usize) -> ProbeAnswer {
    let begun = Instant::now();
    let response = match send(replica, call, false).await {
        Ok(response) => response,
        Err(answer) => return answer,
    };
    let buffered = is_json(response.headers());
    let mut body = response.into_body();
    if buffered {
        let Ok(body) = gather::read_all(body, sse::EVENT_BYTES).await else { return ProbeAnswer::Silence };
        let event = String::from_utf8(body).ok().and_then(Event::of);
        return event.map_or(ProbeAnswer::Silence, |event| {
            ProbeAnswer::Plain(vec![(begun.elapsed().as_secs_f64(), event)])
        });
    }
    let mut decoder = sse::Decoder::new(sse::EVENT_BYTES);
    let (mut events, mut with_tokens) = (Vec::new(), 0);
    while let Some(frame) = body.frame().await {
        let Ok(frame) = frame else { return ProbeAnswer::Silence };
        let Ok(data) = frame.into_data() else { continue };
        let Ok(messages) = decoder.push(&data) else { return ProbeAnswer::Silence };
        for event in messages.into_iter().filter_map(|message| Event::of(message.data)) {
            let chunk = engine.chunk(RequestKind::Later, &event);
            with_tokens += usize::from(chunk.is_ok_and(|chunk| !chunk.tokens.is_empty()));
            events.push((begun.elapsed().as_secs_f64(), event));
        }
        if with_tokens >= leave {
            break;
        }
    }
    ProbeAnswer::Plain(events)
}

async fn send(replica: &Replica, call: &Call, fresh: bool) -> Result<Response<Answer>, ProbeAnswer> {
    let mut request = Request::new(full(call.body.clone()));
    *request.method_mut() = Method::POST;
    *request.uri_mut() = call.path.parse().map_err(|_| ProbeAnswer::Silence)?;
    request.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    request.headers_mut().insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    if fresh {
        request.extensions_mut().insert(Fresh);
    }
    let response = replica.send_internal(request).await.map_err(|_| ProbeAnswer::Silence)?;
    match response.status() {
        StatusCode::OK => Ok(response),
        status => {
            let body = gather::read_all(response.into_body(), REFUSAL_BYTES).await;
            Err(ProbeAnswer::Refused(status.as_u16(), body.unwrap_or_default()))
        }
    }
}
