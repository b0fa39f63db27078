//! The calls that one session makes: first ride, later rides, verify calls.
//!
//! All of them carry the client's end-to-end headers and its trace context, so that the backend's own
//! authentication, logs and traces see the client, and an `x-request-id` with a round suffix.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};

use hyper::header::{self, HeaderMap, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};

use crate::dialect::{Asked, Beside, Call, Context, Engine, Refusal, Round};
use crate::draft::{Draft, Sampled};
use crate::drive::exchange::Exchange;
use crate::drive::manner::Manner;
use crate::drive::run::Run;
use crate::fleet::rounds_seen::RoundsSeen;
use crate::fleet::{Answer, Fresh, Repeatable, Replica, SendError};
use crate::http::body::{Body, BoxError};
use crate::http::gather;
use crate::http::headers;
use crate::observe::trace::Trace;
use crate::openai::{self, Sampling};
use crate::session::{Event, Fault};
use crate::words::{Past, Plan, Put, Verdict};

/// What the calls of one session have in common.
pub struct Common {
    /// The replica that all calls go to.
    pub replica: Arc<Replica>,
    /// Builds the calls and reads their answers.
    pub engine: Arc<Engine>,
    /// Verify calls under way and cached tokens are noted here.
    pub rounds_seen: Arc<RoundsSeen>,
    /// The client's end-to-end header fields.
    pub headers: HeaderMap,
    /// The request's `x-request-id`; calls after the first add `-` and the round's number.
    pub request_id: String,
    /// Its trace; `None` if it has no spans.
    pub trace: Option<Trace>,
    /// The model id as the client sent it.
    pub model: String,
    /// Sampling parameters; `seed` is the session's where the engine's noise can be reproduced.
    pub sampling: Sampling,
    /// A lossy accept rule wants to know the target's probabilities.
    pub weighs: bool,
    /// Size and time bounds.
    pub limits: CallLimits,
    /// How the server writes its answers.
    manner: Arc<Manner>,
}

/// Makes the calls of one session. Cheap to clone: the content is shared.
#[derive(Clone)]
pub struct Calls(Arc<Common>, Option<Enclosed>);

/// The sampled draft of a verify call, with the laws of its tokens. It is enclosed with the request and no part of its body,
/// so that only a replica in this process gets it.
pub type Enclosed = Arc<Sampled>;

/// Why a call has no usable answer.
enum Missed {
    /// It failed, or the backend asked for a pause.
    Fault(Fault),
    /// The engine answered that this plan cannot decide this draft, which is no fault.
    Nothing,
}

/// Bounds of the calls of one round.
#[derive(Clone, Copy, Debug)]
pub struct CallLimits {
    /// Most bytes of a round's requests together, and of each answer.
    pub bytes_max: usize,
    /// Timeout of a question that no action of the session waits for: the ids of a prompt, or of a text.
    pub question: Duration,
}

impl Calls {
    /// The calls of a request, with the client's end-to-end fields.
    pub fn new(run: &Run, exchange: &Exchange) -> Self {
        let mut headers = exchange.head.headers.clone();
        for name in
            [header::CONTENT_LENGTH, header::HOST, header::ACCEPT_ENCODING, header::TE, header::TRAILER]
        {
            headers.remove(name);
        }
        headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        Self(
            Arc::new(Common {
                replica: Arc::clone(&exchange.replica),
                engine: Arc::clone(&run.identity.engine),
                rounds_seen: Arc::clone(&run.identity.rounds_seen),
                headers,
                request_id: exchange.slot.record.so_far().id.clone(),
                trace: exchange.slot.record.so_far().trace.clone(),
                model: exchange.request.model.clone(),
                sampling: run.sampling.clone(),
                weighs: run.ruling.rules.accept.is_lossy() && run.sampling.temperature > 0.0,
                limits: run.limits,
                manner: Arc::clone(&run.manner),
            }),
            None,
        )
    }

    /// The engine of the replica.
    pub fn engine(&self) -> &Arc<Engine> {
        &self.0.engine
    }

    /// Timeout of a question that no action of the session waits for.
    pub fn patience(&self) -> Duration {
        self.0.limits.question
    }

    /// Sends the client's own request, which alone counts in the replica's health; once more over a fresh connection if `again`
    /// says so of the error.
    pub async fn first(
        &self,
        call: Call,
        again: impl FnOnce(&SendError) -> bool,
    ) -> Result<Response<Answer>, SendError> {
        let (path, body) = (call.path, Bytes::from(call.body));
        let mut request = self.request(path, body.clone(), None);
        request.extensions_mut().insert(Repeatable);
        match self.0.replica.send(request).await {
            Err(error) if again(&error) => {}
            sent => return sent,
        }
        let mut request = self.request(path, body, None);
        request.extensions_mut().insert(Fresh);
        self.0.replica.send(request).await
    }

    /// Starts a ride from the whole context. It continues an answer that the client is reading, so its head is
    /// awaited no longer than the replica's idle timeout. The error holds the cause in words for the operator.
    pub async fn ride(
        self,
        past: Past,
        max_tokens: u32,
        round: u32,
    ) -> Result<Response<Answer>, (Fault, String)> {
        let context = Context::of(&self.0.model, &past);
        let call = self.0.engine.ride(&context, &self.0.sampling, max_tokens);
        let sent = self.send(call, Some(round));
        let sent = match self.0.replica.idle() {
            Some(idle) => tokio::time::timeout(idle, sent).await.map_err(|_| {
                self.0.replica.fell_silent();
                (Fault::Silence, format!("the backend sent no answer within {idle:?}"))
            })?,
            None => sent.await,
        };
        let response = sent.map_err(|error| (Fault::Ride, error.to_string()))?;
        let cause = format!("the backend answered {}", response.status());
        match response.status() {
            StatusCode::OK => Ok(response),
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE
                if response.headers().contains_key(header::RETRY_AFTER) =>
            {
                Err((retry_after(response.headers()), cause))
            }
            _ => Err((Fault::Ride, cause)),
        }
    }

    /// Asks for the prompt's ids while the first ride streams. Any failure gives [`Event::Doubt`].
    pub async fn beside(self, request: Arc<openai::Request>, first: Call) -> Event {
        let mut call = first;
        loop {
            let asked = tokio::time::timeout(self.0.limits.question, self.answer(call, None, None)).await;
            let Ok(Ok(body)) = asked else { return Event::Doubt };
            match self.0.engine.read_beside(&request, &body) {
                Ok(Beside::Prompt(ids)) => return Event::Prompt(ids),
                Ok(Beside::Ask(next)) => call = next,
                Err(_) => return Event::Doubt,
            }
        }
    }

    /// Makes one verify round. The event is `Verdict` or `Fault`; the session cancels a round that takes too long.
    pub async fn verify(mut self, past: Past, draft: Draft, plan: Plan, round: u32) -> Event {
        self.1 = draft.sampled().cloned();
        let context = Context::of(&self.0.model, &past);
        let put = Round { context, draft: &draft, sampling: &self.0.sampling, plan, weighs: self.0.weighs };
        let asked = match self.0.engine.verify(&put, self.0.limits.bytes_max) {
            Ok(asked) => asked,
            Err(refusal) => {
                tracing::debug!(%refusal, "draft not sent");
                let too_long = matches!(refusal, Refusal::TooLong { .. } | Refusal::NoRoom(_));
                return Event::Fault(if too_long { Fault::TooLong } else { Fault::Verify });
            }
        };
        let warm =
            self.0.engine.warm(&put).filter(|call| round == 1 && call.body.len() <= self.0.limits.bytes_max);
        if let Some(call) = warm {
            // It only fills the engine's prefix cache: answer and error are ignored.
            let _ = self.answer(call, Some(round), None).await;
        }
        self.ask(&put, asked, round).await.unwrap_or_else(Event::Fault)
    }

    /// Makes the calls of a round; if they decide nothing, once more in the dialect's other form, if it has one.
    async fn ask(&self, put: &Round<'_>, mut asked: Asked, round: u32) -> Result<Event, Fault> {
        let _verifying = self.0.rounds_seen.verifying(put.plan.sequences(asked.nodes));
        let verdict = self.judged(put, &mut asked, round).await?;
        let again = verdict.rows.is_empty().then(|| self.0.engine.again(put, &asked)).flatten();
        Ok(Event::Verdict(match again {
            Some(mut again) => self.judged(put, &mut again, round).await?,
            None => verdict,
        }))
    }

    /// Makes all calls of `asked` concurrently (they are taken out of it) and reads the verdict.
    async fn judged(&self, put: &Round<'_>, asked: &mut Asked, round: u32) -> Result<Verdict, Fault> {
        let calls = std::mem::take(&mut asked.calls);
        let count = calls.len();
        let made = Put { plan: put.plan, nodes: asked.nodes };
        let answers = calls.into_iter().map(|call| self.answer(call, Some(round), Some(put.plan)));
        let bodies = match futures_util::future::try_join_all(answers).await {
            Ok(bodies) => bodies,
            Err(Missed::Fault(fault)) => return Err(fault),
            Err(Missed::Nothing) => return Ok(Verdict { put: Some(made), ..Verdict::default() }),
        };
        self.0.manner.reads(&bodies);
        let mut verdict = self.0.engine.verdict(put, asked, &bodies).map_err(|unreadable| {
            tracing::debug!(%unreadable, "verdict refused");
            Fault::Verify
        })?;
        let alone = self.0.replica.in_flight() <= count;
        if let Some(computed) = verdict.computed.filter(|_| alone) {
            let all = put.plan.prompt_tokens(put.context.len(), asked.nodes);
            let cached = all.saturating_sub(computed as usize);
            self.0.rounds_seen.cached(cached, put.context.len(), self.0.engine.block);
        }
        verdict.put = Some(made);
        Ok(verdict)
    }

    async fn answer(&self, call: Call, round: Option<u32>, plan: Option<Plan>) -> Result<Vec<u8>, Missed> {
        let fault = Missed::Fault(Fault::Verify);
        let Ok(response) = self.send(call, round).await else { return Err(fault) };
        let status = response.status();
        if matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
            return Err(Missed::Fault(retry_after(response.headers())));
        }
        let Ok(body) = gather::whole(response.into_body(), self.0.limits.bytes_max).await else {
            return Err(fault);
        };
        let codec = self.0.engine.dialect.codec();
        match (status, plan) {
            (StatusCode::OK, _) => Ok(body),
            (status, Some(plan)) if codec.tells_nothing(plan, status.as_u16(), &body) => Err(Missed::Nothing),
            _ => Err(fault),
        }
    }

    async fn send(&self, call: Call, round: Option<u32>) -> Result<Response<Answer>, SendError> {
        self.0.replica.ask(self.request(call.path, call.body.into(), round)).await
    }

    fn request(&self, path: &'static str, body: Bytes, round: Option<u32>) -> Request<Body> {
        let mut request = Request::new(full(body));
        *request.method_mut() = Method::POST;
        if let Ok(uri) = path.parse() {
            *request.uri_mut() = uri;
        }
        *request.headers_mut() = self.0.headers.clone();
        let id =
            round.map_or_else(|| self.0.request_id.clone(), |round| format!("{}-{round}", self.0.request_id));
        if let (Some(trace), Some(_)) = (&self.0.trace, round) {
            trace.inject(round, request.headers_mut());
        }
        if let Ok(id) = HeaderValue::from_str(&id) {
            request.headers_mut().insert(headers::REQUEST_ID, id);
        }
        if let Some(sampled) = &self.1 {
            request.extensions_mut().insert(Arc::clone(sampled));
        }
        request
    }
}

fn full(bytes: Bytes) -> Body {
    Full::new(bytes).map_err(|never| -> BoxError { match never {} }).boxed_unsync()
}

/// The pause of `Retry-After` in seconds; one second if it is missing or no number.
fn retry_after(headers: &HeaderMap) -> Fault {
    let seconds = headers
        .get(header::RETRY_AFTER)
        .and_then(|value| value.to_str().ok())
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(1);
    Fault::RetryAfter(Duration::from_secs(seconds))
}
