//! Probing a replica: makes the calls that [`Prober`] asks for, and times them.
//!
//! Nothing is decided here. Calls go out one after the other, as a session's rounds do, and their results do not count
//! in the replica's health.

mod report;

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use http::header::{ACCEPT_ENCODING, CONTENT_TYPE};
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::BodyExt;
use tokio::time::Instant;

use super::replica::Fresh;
use super::{Answer, Replica};
use crate::clock::Clock;
use crate::dialect::probe::{Bounds, Findings, Heard, Prober, Step, TEXT};
use crate::dialect::{Call, Engine, RideKind};
use crate::http::body::full;
use crate::http::gather;
use crate::openai::sse;
use crate::text::Tokenizer;
use crate::units::TokenId;
use crate::words::Plan;

pub use report::{Report, Seen, noise};

/// The text that the probe's prompts are made of.
const PAGES: &str = include_str!("probe/pages.txt");

/// Most bytes of a refusal that are read.
const REFUSAL_BYTES: usize = 64 << 10;
/// Calls by which one engine shows that it is one.
const ONE_CALLS: u32 = 4;
/// Why an address is not leapt on whose answers do not find cached what was sent there before.
pub const MANY: &str = "a prompt that was sent is not found cached every time: several engines answer at this address, or \
     their prefix caches are off";

/// Bounds of a probe.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Most calls.
    pub calls: u32,
    /// Longest time for all calls.
    pub within: Duration,
    /// Most bytes of a round's requests, and of each answer.
    pub bytes_max: usize,
    /// Longest context of a verify call, tokens.
    pub context_max: usize,
    /// The plans that the operator allows.
    pub allow: Vec<Plan>,
}

/// A random number, by which a probe's text is new to the engine.
pub fn nonce() -> u64 {
    RandomState::new().hash_one(Instant::now())
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

/// Asks whether one engine answers at an address that does not tell when it was started: four calls, eight at most.
/// [`Findings::balanced`] is the answer, unless the plan that was asked by does not work ([`not_asked`]).
pub async fn is_one(
    replica: &Replica,
    engine: &Engine,
    tokenizer: &Tokenizer,
    limits: &Limits,
    nonce: u64,
) -> Findings {
    let clock = Clock::start();
    let ask = async |long: bool| {
        let text = text(tokenizer, nonce.wrapping_add(u64::from(long)));
        let prober = Prober::of_one(engine.clone(), text, bounds(&clock, limits), long);
        drive(replica, engine, prober, &clock, limits).await
    };
    let short = ask(false).await;
    if short.cache.told || short.calls < ONE_CALLS {
        return short;
    }
    let long = ask(true).await;
    Findings { calls: short.calls + long.calls, ..long }
}

/// Why [`is_one`] could not ask: the engine's only plan, and what is wrong with it.
pub fn not_asked(shown: &Findings) -> Option<&(Plan, String)> {
    let stopped = shown.calls < ONE_CALLS && shown.engine.plans.is_empty();
    shown.removed.first().filter(|_| stopped)
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

/// Token ids of real text, which begins with the nonce so that it is cached nowhere.
fn text(tokenizer: &Tokenizer, nonce: u64) -> Vec<TokenId> {
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
    let until = Instant::now() + limits.within;
    while let Some(step) = prober.next(clock.now()) {
        let heard = match step {
            Step::Round { calls, fresh } => {
                tokio::time::timeout_at(until, round(replica, &calls, fresh, limits.bytes_max)).await
            }
            Step::Ride { call, leave } => {
                tokio::time::timeout_at(until, ride(replica, engine, &call, leave)).await
            }
        };
        prober.take(heard.unwrap_or(Heard::Late));
    }
    prober.findings()
}

async fn round(replica: &Replica, calls: &[Call], fresh: bool, bytes_max: usize) -> Heard {
    let begun = Instant::now();
    let answers = calls.iter().map(|call| whole(replica, call, fresh, bytes_max));
    match futures_util::future::try_join_all(answers).await {
        Ok(bodies) => Heard::Round { bodies, seconds: begun.elapsed().as_secs_f64() },
        Err(heard) => heard,
    }
}

async fn whole(replica: &Replica, call: &Call, fresh: bool, most: usize) -> Result<Vec<u8>, Heard> {
    let response = send(replica, call, fresh).await?;
    gather::whole(response.into_body(), most).await.map_err(|_| Heard::Silence)
}

/// Reads a stream until so many events with tokens have come, and hangs up; or an answer that comes whole.
async fn ride(replica: &Replica, engine: &Engine, call: &Call, leave: usize) -> Heard {
    let begun = Instant::now();
    let response = match send(replica, call, false).await {
        Ok(response) => response,
        Err(heard) => return heard,
    };
    let kind = response.headers().get(CONTENT_TYPE);
    let whole = kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/json"));
    let mut body = response.into_body();
    if whole {
        let Ok(body) = gather::whole(body, sse::EVENT_BYTES).await else { return Heard::Silence };
        let value = serde_json::from_slice(&body);
        return value
            .map_or(Heard::Silence, |value| Heard::Ride(vec![(begun.elapsed().as_secs_f64(), value)]));
    }
    let mut decoder = sse::Decoder::new(sse::EVENT_BYTES);
    let (mut events, mut with_tokens) = (Vec::new(), 0);
    while let Some(frame) = body.frame().await {
        let Ok(frame) = frame else { return Heard::Silence };
        let Ok(data) = frame.into_data() else { continue };
        let Ok(messages) = decoder.push(&data) else { return Heard::Silence };
        for message in messages.iter().filter(|message| !message.is_done()) {
            let Ok(value) = serde_json::from_str(&message.data) else { continue };
            let chunk = engine.chunk(RideKind::Later, &value);
            with_tokens += usize::from(chunk.is_ok_and(|chunk| !chunk.tokens.is_empty()));
            events.push((begun.elapsed().as_secs_f64(), value));
        }
        if with_tokens >= leave {
            break;
        }
    }
    Heard::Ride(events)
}

async fn send(replica: &Replica, call: &Call, fresh: bool) -> Result<Response<Answer>, Heard> {
    let mut request = Request::new(full(call.body.clone()));
    *request.method_mut() = Method::POST;
    *request.uri_mut() = call.path.parse().map_err(|_| Heard::Silence)?;
    request.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    request.headers_mut().insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    if fresh {
        request.extensions_mut().insert(Fresh);
    }
    let response = replica.own(request).await.map_err(|_| Heard::Silence)?;
    match response.status() {
        StatusCode::OK => Ok(response),
        status => {
            let body = gather::whole(response.into_body(), REFUSAL_BYTES).await;
            Err(Heard::Refused(status.as_u16(), body.unwrap_or_default()))
        }
    }
}
