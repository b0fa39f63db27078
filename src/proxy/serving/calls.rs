//! The calls of one session: the first call, later plain calls, verify requests.
//!
//! All of them carry the client's end-to-end headers and its trace context, so that the backend's
//! authentication, logs and traces see the client, and an `x-request-id` with a round suffix.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use hyper::header::{self, HeaderMap, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::learning::answer_traits::AnswerTraits;
use crate::serving::exchange::Exchange;
use crate::serving::grammar::Grammar;
use crate::serving::plan::{CallLimits, SessionPlan};
use foretell_core::draft::Tree;
use foretell_core::session::{Event, Fault};
use foretell_core::units::TokenId;
use foretell_core::words::{Put, TokenContext, VerifyMethod, VerifyResult};
use foretell_engines::{
    Call, Context, Engine, Origin, PromptStep, Refusal, Round, VerifyRequest, is_rendering,
};
use foretell_net::fleet::identity::Identity;
use foretell_net::fleet::rounds_seen::RoundsSeen;
use foretell_net::fleet::tie::{Tie, Tied};
use foretell_net::fleet::{Answer, Fresh, Repeatable, Replica, SendError};
use foretell_net::http::body::{Body, full};
use foretell_net::http::gather::{self, Unread};
use foretell_net::http::headers;
use foretell_net::random::fresh_seed;
use foretell_observe::trace::Trace;
use foretell_parsers::parse::ParsedMessage;
use foretell_parsers::text::Tokenizer;
use foretell_parsers::text::evidence::may_spell;
use foretell_wire::openai::{self, Route, Sampling, parts};

/// State shared by the calls of one session.
pub struct Common {
    pub replica: Arc<Replica>,
    /// The server that renders its requests, if it is another.
    renderer: Option<Arc<Replica>>,
    /// Builds the calls and reads their answers.
    pub engine: Arc<Engine>,
    /// Tokenizer of its model, to compare texts with ids.
    pub tokenizer: Arc<Tokenizer>,
    /// Counts of verify requests in flight and of cached tokens.
    pub rounds_seen: Arc<RoundsSeen>,
    /// The client's end-to-end header fields.
    pub headers: HeaderMap,
    /// The request's `x-request-id`; rounds add `-` and their number.
    pub request_id: String,
    /// The `x-request-id` of the first call. If calls can be aborted by id it has to be unique;
    /// clients may reuse theirs.
    first_id: String,
    /// The query of the client's URI, which goes with every call, as its headers do: a gateway
    /// in front of the backend may go by it.
    query: Option<String>,
    /// The trace of the request; `None` if it has no spans.
    pub trace: Option<Trace>,
    /// The model id as the client sent it.
    pub model: String,
    /// Sampling parameters; `seed` is the session's where the engine's noise can be reproduced.
    pub sampling: Sampling,
    /// A lossy accept rule needs the target's probabilities.
    pub weighs: bool,
    /// Size and time bounds.
    pub limits: CallLimits,
    /// The process that all calls must reach.
    pub process: Process,
    answer_traits: Arc<AnswerTraits>,
}

/// The process that a session began on.
pub struct Process {
    /// Proof that a new connection leads to this process; see [`Identity::tie`].
    tie: Option<Arc<Tie>>,
    /// Triggers a new identification of the server.
    reidentify: Arc<Notify>,
    /// See [`Identity::replaced`].
    replaced: Arc<AtomicBool>,
    /// Fingerprint, weights and model that its answers have named so far.
    origin: Mutex<Origin>,
}

impl Process {
    /// The process that was recognised.
    fn of(identity: &Identity) -> Self {
        let marks = &identity.engine.process;
        let origin =
            Origin { fingerprint: marks.fingerprint.clone(), weights: marks.weights.clone(), model: None };
        Self {
            tie: identity.tie.clone(),
            reidentify: Arc::clone(&identity.reidentify),
            replaced: Arc::clone(&identity.replaced),
            origin: Mutex::new(origin),
        }
    }
}

/// Makes the calls of one session. Cheap to clone: the content is shared.
#[derive(Clone)]
pub struct Calls(Arc<Common>);

/// Pause before the next call if a new connection does not show which process it leads to.
const UNTIED_PAUSE: Duration = Duration::from_secs(1);

/// Reason that a call has no usable answer.
enum NoAnswer {
    /// It failed, or the backend answered with `Retry-After`.
    Fault(Fault),
    /// The engine answered that this verification method cannot decide this draft, which is no
    /// fault.
    Undecided,
}

impl Calls {
    /// The calls of a request, with the client's end-to-end fields.
    pub fn new(plan: &SessionPlan, answer_traits: &Arc<AnswerTraits>, exchange: &Exchange) -> Self {
        let mut headers = exchange.head.headers.clone();
        for name in
            [header::CONTENT_LENGTH, header::HOST, header::ACCEPT_ENCODING, header::TE, header::TRAILER]
        {
            headers.remove(name);
        }
        headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        let request_id = exchange.slot.record.so_far().id.clone();
        let mut sampling = plan.sampling.clone();
        if !plan.identity.engine.continues_grammar {
            // It would restart with every request.
            sampling.grammar = None;
        }
        let aborts = plan.identity.engine.pages.aborts && answer_traits.may_end_with_news(true);
        let first_id =
            if aborts { format!("{request_id}-{:016x}", fresh_seed()) } else { request_id.clone() };
        Self(Arc::new(Common {
            replica: Arc::clone(&exchange.replica),
            renderer: plan.identity.renderer.clone(),
            engine: plan.engine(),
            tokenizer: Arc::clone(&plan.identity.tokenizer),
            rounds_seen: Arc::clone(&plan.identity.rounds_seen),
            headers,
            request_id,
            first_id,
            query: exchange.head.uri.query().map(ToOwned::to_owned),
            trace: exchange.slot.record.so_far().trace.clone(),
            model: exchange.request.model.clone(),
            sampling,
            weighs: plan.ruling.rules.accept.is_lossy() && plan.sampling.temperature > 0.0,
            limits: plan.limits,
            process: Process::of(&plan.identity),
            answer_traits: Arc::clone(answer_traits),
        }))
    }

    pub fn engine(&self) -> &Arc<Engine> {
        &self.0.engine
    }

    /// Sends the client's request, the only call that counts in the replica's health; resends it
    /// over a fresh connection if `resends` returns true for the error. If a new connection does
    /// not show which process it leads to, the request is sent anyway and the second value is
    /// false: the session must not speculate.
    pub async fn first(
        &self,
        call: Call,
        resends: impl FnOnce(&SendError) -> bool,
    ) -> Result<(Response<Answer>, bool), SendError> {
        let (path, body) = (call.path, Bytes::from(call.body));
        let request = || self.request(path, body.clone(), None);
        let mut begun = match self.begin(request, Repeatable).await {
            Err(error) if resends(&error) => self.begin(request, Fresh).await,
            begun => begun,
        };
        if let Ok((response, _)) = &mut begun
            && self.0.first_id != self.0.request_id
            && response.headers().get(headers::REQUEST_ID).is_some_and(|id| id == self.0.first_id.as_str())
        {
            // The unique id is not echoed to the client, which gets the id that it sent.
            response.headers_mut().remove(headers::REQUEST_ID);
        }
        begun
    }

    /// As [`Self::first`], once; `mark` selects the connection.
    async fn begin<M: Clone + Send + Sync + 'static>(
        &self,
        request: impl Fn() -> Request<Body>,
        mark: M,
    ) -> Result<(Response<Answer>, bool), SendError> {
        let marked = || {
            let mut request = request();
            request.extensions_mut().insert(mark.clone());
            request
        };
        match self.noticed(self.0.replica.send(self.tied(marked(), false)).await) {
            Err(SendError::Untied { detail, .. }) => {
                tracing::debug!(detail, "a new connection does not show which process it leads to");
                Ok((self.0.replica.send(marked()).await?, false))
            }
            sent => Ok((sent?, true)),
        }
    }

    /// Records the process that an event of a stream names; false if it is another than the
    /// session's.
    pub fn join_origin(&self, event: &openai::Event) -> bool {
        let origin = Origin::of_event(event);
        !self.is_unnamed(&origin) && self.is_from_there(origin)
    }

    fn is_from_there(&self, origin: Origin) -> bool {
        self.0.process.origin.lock().join(origin)
    }

    /// The body of an answer, unless it shows that another process than the session's sent it.
    fn of_this_process(&self, body: Vec<u8>) -> Result<Vec<u8>, NoAnswer> {
        let origin = Origin::of_body(&body);
        // A process that always names itself sends no answer without its name.
        if self.is_unnamed(&origin) {
            return Err(NoAnswer::Fault(Fault::Verify));
        }
        if self.is_from_there(origin) { Ok(body) } else { Err(NoAnswer::Fault(Fault::Changed)) }
    }

    /// True if an answer lacks the name that this process puts into all of its answers.
    fn is_unnamed(&self, origin: &Origin) -> bool {
        self.0.engine.process.fingerprint.is_some() && origin.fingerprint.is_none()
    }

    /// Another process, or another model, has answered: triggers a new identification at once.
    pub fn changed(&self) {
        tracing::debug!(replica = self.0.replica.label(), "another engine has answered");
        self.0.process.reidentify.notify_one();
    }

    /// The fault of a call that got no answer; `usual` if the session may go on.
    fn fault_of(&self, error: &SendError, usual: Fault) -> Fault {
        match error {
            SendError::Changed { .. } => Fault::Changed,
            // The process behind a new connection cannot be determined now; it may be after a
            // pause.
            SendError::Untied { .. } => Fault::RetryAfter(UNTIED_PAUSE),
            SendError::Connect { .. } | SendError::ConnectTimeout { .. } | SendError::Closed { .. } => {
                self.lost(usual)
            }
            _ => usual,
        }
    }

    /// The fault of a lost connection; `usual` if a new one is known to lead to the same process.
    fn lost(&self, usual: Fault) -> Fault {
        if self.0.engine.shows_itself() { usual } else { Fault::Lost }
    }

    /// Starts a plain call from the complete context. It continues an answer that the client is
    /// reading, so its head is awaited no longer than the replica's idle timeout. The error
    /// includes the cause as text for the operator.
    pub async fn plain_request(
        self,
        token_context: TokenContext,
        max_tokens: u32,
        round: u32,
    ) -> Result<Response<Answer>, (Fault, String)> {
        let context = Context::of(&self.0.model, &token_context);
        let call = self.0.engine.plain_request(&context, &self.0.sampling, max_tokens);
        let sent = self.send(call, Some(round));
        let sent = match self.0.replica.idle() {
            Some(idle) => tokio::time::timeout(idle, sent).await.map_err(|_| {
                self.0.replica.fell_silent();
                (Fault::Silence, format!("the backend sent no answer within {idle:?}"))
            })?,
            None => sent.await,
        };
        let response = sent.map_err(|error| (self.fault_of(&error, Fault::Plain), error.to_string()))?;
        let cause = format!("the backend answered {}", response.status());
        match response.status() {
            StatusCode::OK => Ok(response),
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE
                if response.headers().contains_key(header::RETRY_AFTER) =>
            {
                Err((retry_after(response.headers()), cause))
            }
            _ => Err((Fault::Plain, cause)),
        }
    }

    /// Aborts the first call. `Some(false)`: the server has no endpoint for that; `None`: it failed
    /// this time.
    pub async fn abort(&self, route: Route) -> Option<bool> {
        let call = self.0.engine.abort(route, &self.0.first_id)?;
        let response = self.send(call, None).await.ok()?;
        let status = response.status();
        let _ = gather::read_all(response.into_body(), self.0.limits.bytes_max).await;
        match status {
            StatusCode::OK => Some(true),
            StatusCode::FORBIDDEN | StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED => Some(false),
            _ => None,
        }
    }

    /// The `x-request-id` of the first call and that of the client's request, if they differ.
    pub fn renamed(&self) -> Option<(String, String)> {
        let (first, clients) = (&self.0.first_id, &self.0.request_id);
        (first != clients).then(|| (first.clone(), clients.clone()))
    }

    /// Requests the prompt's ids while the first call streams, and stores whether a grammar
    /// constrains the output. Any failure gives [`Event::Doubt`].
    pub async fn prompt_and_grammar(
        self,
        grammar: Grammar,
        request: Arc<openai::Request>,
        call: Call,
    ) -> Event {
        let event = self.prompt_ids(&request, call).await;
        if let (Grammar::Requested(Some(key)), Event::Rendered { constrained, .. }) = (grammar, &event) {
            self.0.answer_traits.grammars.note(key, *constrained);
        }
        event
    }

    async fn prompt_ids(&self, request: &openai::Request, first: Call) -> Event {
        let mut call = first;
        loop {
            let answer = tokio::time::timeout(self.0.limits.question, self.answer(call, None, None)).await;
            let Ok(Ok(body)) = answer else { return Event::Doubt };
            match self.0.engine.prompt_step(request, Some(&body)) {
                Ok(PromptStep::Prompt(ids)) => return Event::Prompt(ids),
                Ok(PromptStep::Rendered { prompt, has_grammar }) => {
                    return Event::Rendered { prompt, constrained: has_grammar };
                }
                Ok(PromptStep::Call(next)) => call = next,
                Ok(PromptStep::Nothing) | Err(_) => return Event::Doubt,
            }
        }
    }

    /// The parts of a complete output, given without the token that ended it, as the server's
    /// parser has them for an answer that is not streamed; `None` if it gives none.
    pub async fn parts(
        &self,
        request: &openai::Request,
        prompt: &[TokenId],
        output: &[TokenId],
    ) -> Option<ParsedMessage> {
        // The server accepts no empty output.
        if output.is_empty() {
            return None;
        }
        let call = self.0.engine.parts_call(request, prompt, output)?;
        let answer = tokio::time::timeout(self.0.limits.question, self.answer(call, None, None)).await;
        let mut parts = parts::read_message(&answer.ok()?.ok()?)?;
        if request.single_call {
            // vLLM's page gives all of them (0.32).
            parts.calls.truncate(1);
        }
        Some(parts)
    }

    /// Makes the verify requests of one round. The event is `VerifyResult` or `Fault`; the session
    /// cancels a round that takes too long.
    pub async fn verify(
        self,
        token_context: TokenContext,
        draft: Tree,
        method: VerifyMethod,
        round: u32,
    ) -> Event {
        let context = Context::of(&self.0.model, &token_context);
        let put = Round { context, draft: &draft, sampling: &self.0.sampling, method, weighs: self.0.weighs };
        let verify_request = match self.0.engine.verify(&put, self.0.limits.bytes_max) {
            Ok(verify_request) => verify_request,
            Err(refusal) => {
                tracing::debug!(%refusal, "draft not sent");
                let too_long = matches!(refusal, Refusal::TooLong { .. } | Refusal::NoRoom(_));
                return Event::Fault(if too_long { Fault::TooLong } else { Fault::Verify });
            }
        };
        if round == 1
            && let Some(call) = self.0.engine.warm(&put)
            && call.body.len() <= self.0.limits.bytes_max
        {
            // It only fills the engine's prefix cache, so its answer and most errors are ignored.
            if let Err(NoAnswer::Fault(fault @ (Fault::Lost | Fault::Changed))) =
                self.answer(call, Some(round), None).await
            {
                return Event::Fault(fault);
            }
        }
        self.verify_round(&put, verify_request, round).await.unwrap_or_else(Event::Fault)
    }

    /// Makes the calls of a round; if they decide nothing, repeats it in the dialect's other form,
    /// if it has one.
    async fn verify_round(
        &self,
        put: &Round<'_>,
        mut request: VerifyRequest,
        round: u32,
    ) -> Result<Event, Fault> {
        let _verifying = self.0.rounds_seen.verifying(put.method.sequences(request.nodes));
        let mut result = self.verify_result(put, &mut request, round).await?;
        if result.rows.is_empty()
            && let Some(mut other) = self.0.engine.retry(put, &request)
        {
            result = self.verify_result(put, &mut other, round).await?;
        }
        Ok(Event::VerifyResult(result))
    }

    /// Makes all calls of `request` concurrently (they are taken out of it) and reads the
    /// verification result.
    async fn verify_result(
        &self,
        put: &Round<'_>,
        request: &mut VerifyRequest,
        round: u32,
    ) -> Result<VerifyResult, Fault> {
        let calls = std::mem::take(&mut request.calls);
        let count = calls.len();
        let made = Put { method: put.method, nodes: request.nodes };
        let answers = calls.into_iter().map(|call| self.answer(call, Some(round), Some(put.method)));
        let bodies = match futures_util::future::try_join_all(answers).await {
            Ok(bodies) => bodies,
            Err(NoAnswer::Fault(fault)) => return Err(fault),
            Err(NoAnswer::Undecided) => {
                return Ok(VerifyResult { put: Some(made), ..VerifyResult::default() });
            }
        };
        self.0.answer_traits.reads(&bodies);
        let mut result = self.0.engine.result(put, request, &bodies).map_err(|unreadable| {
            tracing::debug!(%unreadable, "verification result not usable");
            Fault::Verify
        })?;
        if !self.spells(put, &result) {
            tracing::debug!("the text of an answer is not that of its ids");
            return Err(Fault::Verify);
        }
        let alone = self.0.replica.in_flight() <= count;
        if alone && let Some(computed) = result.computed {
            let all = put.method.prompt_tokens(put.context.len(), request.nodes);
            let cached = all.saturating_sub(computed as usize);
            self.0.rounds_seen.cached(cached, put.context.len(), self.0.engine.cache.block);
        }
        result.put = Some(made);
        Ok(result)
    }

    /// True if the text that came with each sample is that of its id.
    fn spells(&self, put: &Round<'_>, result: &VerifyResult) -> bool {
        let tidies = self.0.engine.quirks().answers.tidies_text;
        result.rows.iter().enumerate().all(|(position, row)| {
            let Some((sample, text)) = row.sample.zip(row.text.as_ref()) else { return true };
            let path = position.checked_sub(1).map(|node| put.draft.path(node)).unwrap_or_default();
            let before = put.context.prompt.iter().chain(put.context.output).chain(&path).copied();
            may_spell(&self.0.tokenizer, before, sample, text, tidies)
        })
    }

    async fn answer(
        &self,
        call: Call,
        round: Option<u32>,
        method: Option<VerifyMethod>,
    ) -> Result<Vec<u8>, NoAnswer> {
        let sent = self.send(call, round).await;
        let response = sent.map_err(|error| NoAnswer::Fault(self.fault_of(&error, Fault::Verify)))?;
        let status = response.status();
        if matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
            return Err(NoAnswer::Fault(retry_after(response.headers())));
        }
        let body = gather::read_all(response.into_body(), self.0.limits.bytes_max).await;
        let body = body.map_err(|unread| {
            NoAnswer::Fault(match unread {
                Unread::Broken(_) => self.lost(Fault::Verify),
                Unread::TooLong(_) => Fault::Verify,
            })
        })?;
        match (status, method) {
            (StatusCode::OK, Some(_)) => self.of_this_process(body),
            (StatusCode::OK, _) => Ok(body),
            (status, Some(method)) if self.0.engine.is_undecided(method, status.as_u16(), &body) => {
                Err(NoAnswer::Undecided)
            }
            _ => Err(NoAnswer::Fault(Fault::Verify)),
        }
    }

    async fn send(&self, call: Call, round: Option<u32>) -> Result<Response<Answer>, SendError> {
        if let Some(renderer) = &self.0.renderer
            && is_rendering(call.path)
        {
            return renderer.send_additional(self.request(call.path, call.body.into(), round)).await;
        }
        // With a tie or a fingerprint every connection or answer shows its process, so that the
        // polled state is not needed: the previous process may still finish its answers.
        let identified = self.0.process.tie.is_some() || self.0.engine.process.fingerprint.is_some();
        if !identified && self.0.process.replaced.load(Ordering::Relaxed) {
            return Err(SendError::Changed { backend: self.0.replica.backend().to_owned() });
        }
        let request = self.tied(self.request(call.path, call.body.into(), round), true);
        self.noticed(self.0.replica.send_additional(request).await)
    }

    /// The request, restricted to the session's process.
    fn tied(&self, mut request: Request<Body>, patient: bool) -> Request<Body> {
        if let Some(tie) = &self.0.process.tie {
            request.extensions_mut().insert(Tied { to: Arc::clone(tie), patient });
        }
        request
    }

    /// Passes the result on; reports a change if another process answered.
    fn noticed(&self, sent: Result<Response<Answer>, SendError>) -> Result<Response<Answer>, SendError> {
        if matches!(sent, Err(SendError::Changed { .. })) {
            self.changed();
        }
        sent
    }

    fn request(&self, path: &'static str, body: Bytes, round: Option<u32>) -> Request<Body> {
        let mut request = Request::new(full(body));
        *request.method_mut() = Method::POST;
        let uri = match &self.0.query {
            Some(query) => format!("{path}?{query}").parse(),
            None => path.parse(),
        };
        if let Ok(uri) = uri {
            *request.uri_mut() = uri;
        }
        *request.headers_mut() = self.0.headers.clone();
        let id =
            round.map_or_else(|| self.0.first_id.clone(), |round| format!("{}-{round}", self.0.request_id));
        if let (Some(trace), Some(_)) = (&self.0.trace, round) {
            trace.inject(round, request.headers_mut());
        }
        if let Ok(id) = HeaderValue::from_str(&id) {
            request.headers_mut().insert(headers::REQUEST_ID, id);
        }
        request
    }
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
