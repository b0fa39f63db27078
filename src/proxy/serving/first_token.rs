//! A chat whose stream has no token ids: its first token is requested as one answer with ids, and
//! the rest is continued by ids. Where that answer is not as expected, the client's request is sent
//! unchanged.

use std::sync::Arc;

use http::header::CONTENT_TYPE;
use http::{HeaderValue, Response, StatusCode};

use super::calls::Calls;
use super::exchange::Exchange;
use super::run::{AnswerBody, Run, may_refuse_fields, unanswered};
use foretell_core::control::Presence;
use foretell_core::session::Decode;
use foretell_core::words::PlainReason;
use foretell_engines::Unreadable;
use foretell_engines::first_token::{self, FirstToken};
use foretell_net::http::body::Body;
use foretell_net::http::gather;
use foretell_parsers::text::Tokenizer;
use foretell_wire::openai::Request;
use foretell_wire::openai::sse;

/// The `content-type` of a stream, as Starlette servers have it.
const STREAM_TYPE: &str = "text/event-stream; charset=utf-8";

impl Run {
    /// Requests the first token, and serves the rest. Passes the request on unchanged where it is
    /// decoded plainly now, or where the first token has no ids.
    pub(super) async fn begin_with_first_token(mut self, mut exchange: Exchange) -> Response<Body> {
        if let Some(reason) = self.plain_now(&exchange) {
            return self.pass_instead(exchange, reason, None).await;
        }
        let calls = Calls::new(&self.plan, &self.answer_traits, &exchange);
        let prediction = self.prediction(&exchange.request);
        let call = first_token::request(&exchange.request);
        exchange.slot.record.called();
        let sent = (Presence::reading(Arc::clone(&self.control)), self.clock.now());
        let (fleet, replica) = (Arc::clone(&exchange.shared.fleet), Arc::clone(&exchange.replica));
        let response = match calls.first(call, |error| fleet.resends_to_same(&replica, error)).await {
            Ok((response, true)) => response,
            Ok((_, false)) => {
                return self.pass_instead(exchange, PlainReason::GateHealth, Some(sent.0)).await;
            }
            Err(error) => return unanswered(exchange, error).await,
        };
        match response.status() {
            StatusCode::OK => {}
            status if may_refuse_fields(status) => return self.refused(exchange, response).await,
            _ => return self.pass_on(exchange, response),
        }
        let (mut head, body) = response.into_parts();
        let longest = sse::longest_event(exchange.body.len());
        let body = gather::read_all(body, longest).await.unwrap_or_default();
        let first = match self.read_first_token(&body) {
            Ok(Some(first)) if self.fits(&exchange.request, first.prompt.len()) => first,
            Ok(Some(_)) => {
                return self.pass_instead(exchange, PlainReason::ContextTooLong, Some(sent.0)).await;
            }
            Ok(None) => return self.pass_instead(exchange, PlainReason::UpstreamError, Some(sent.0)).await,
            Err(unreadable) => {
                if let Some(call) = self.first_call.take() {
                    call.unreadable(&unreadable.to_string());
                }
                return self.pass_instead(exchange, PlainReason::UntrustedIds, Some(sent.0)).await;
            }
        };
        if let Some(call) = &mut self.first_call {
            call.read();
        }
        if exchange.request.stream {
            head.headers.insert(CONTENT_TYPE, HeaderValue::from_static(STREAM_TYPE));
        } else {
            exchange.slot.record.gathers();
        }
        exchange.slot.record.answered(head.status, &head.headers);
        Box::pin(self.answer(exchange, calls, head, AnswerBody::FirstToken(first), sent, prediction)).await
    }

    /// Passes the client's request on. It counts among those that the engine computes.
    async fn pass_instead(
        mut self,
        exchange: Exchange,
        reason: PlainReason,
        present: Option<Presence>,
    ) -> Response<Body> {
        let mut present = present.unwrap_or_else(|| Presence::new(Arc::clone(&self.control)));
        present.has_come(None);
        self.present = Some(present);
        self.pass(exchange, reason).await
    }

    /// Reason for which the session could not speculate now; `None` if it could.
    fn plain_now(&self, exchange: &Exchange) -> Option<PlainReason> {
        let rules = &self.plan.ruling.rules;
        let forced = rules.gamma_fixed.is_some();
        let closed = || self.gates(exchange)().filter(|reason| !forced || reason.applies_when_forced());
        let long = exchange.request.prompt_size().tokens >= rules.context_max;
        rules
            .permission
            .reason()
            .or(rules.methods.is_empty().then_some(PlainReason::NoVerifyMethod))
            .or((rules.control_group && !forced).then_some(PlainReason::ControlGroup))
            .or((long || !self.fits(&exchange.request, 0)).then_some(PlainReason::ContextTooLong))
            .or_else(closed)
    }

    /// True if the engine accepts a prompt of so many tokens with the client's `max_tokens`. It
    /// refuses longer ones, but would not with the limit of one token.
    fn fits(&self, request: &Request, prompt: usize) -> bool {
        let output = request.max_tokens.map_or(0, |tokens| tokens as usize);
        self.plan.identity.engine.context.is_none_or(|context| prompt.saturating_add(output) <= context)
    }

    fn read_first_token(&self, body: &[u8]) -> Result<Option<FirstToken>, Unreadable> {
        let identity = &self.plan.identity;
        let answer = serde_json::from_slice(body).map_err(|_| Unreadable("the answer is not JSON"))?;
        let first = first_token::read(&answer)?;
        if first.as_ref().is_none_or(|first| is_its_text(&identity.tokenizer, first)) {
            return Ok(first);
        }
        Err(Unreadable("the first token has another text"))
    }
}

/// True if the server sent the token's text unaltered. An incomplete character counts as such.
fn is_its_text(tokenizer: &Arc<Tokenizer>, first: &FirstToken) -> bool {
    let Some(text) = &first.text else { return true };
    let mut decoder = tokenizer.detokenizer(&first.prompt, true);
    let decoded = decoder.push(first.token);
    if decoder.is_inside_character() {
        text.trim_end_matches(char::REPLACEMENT_CHARACTER) == decoded
    } else {
        *text == decoded
    }
}
