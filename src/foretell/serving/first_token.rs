//! A chat whose stream would tell no ids: its first token comes as one answer with ids, and the
//! rest is asked for by ids. Where that answer is not as expected, the client's own request is
//! sent, as if nothing had been asked before.

use std::sync::Arc;

use http::header::CONTENT_TYPE;
use http::{HeaderValue, StatusCode};

use super::calls::Calls;
use super::exchange::{Exchange, Served};
use super::run::{Brought, Run};
use crate::http::gather;
use foretell_core::control::Presence;
use foretell_core::words::PlainReason;
use foretell_engines::dialect::FirstToken;
use foretell_engines::openai::sse;
use foretell_engines::text::Tokenizer;

/// The `content-type` of a stream, as Starlette servers have it.
const STREAM_TYPE: &str = "text/event-stream; charset=utf-8";

impl Run {
    /// Asks for the first token, and serves the rest. Passes the request on unchanged where it may
    /// not be speculated on now, or where the first token tells no ids.
    pub(super) async fn begin_with_first_token(self, mut exchange: Exchange) -> Served {
        if let Some(reason) = self.plain_now(&exchange) {
            return self.pass(exchange, reason).await;
        }
        let calls = Calls::new(&self, &exchange);
        let prediction = self.prediction(&exchange.request);
        let call = calls.engine().first_token_request(&exchange.request);
        exchange.slot.record.called();
        let sent = (Presence::new(Arc::clone(&self.control)), self.clock.now());
        let (fleet, replica) = (Arc::clone(&exchange.shared.fleet), Arc::clone(&exchange.replica));
        let response = match calls.first(call, |error| fleet.over_again(&replica, error)).await {
            Ok((response, true)) => response,
            Ok((_, false)) => return self.pass(exchange, PlainReason::GateHealth).await,
            Err(error) => return self.unanswered(exchange, error),
        };
        let status = response.status();
        if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS {
            return Ok(self.pass_on(exchange, response));
        }
        // Another refusal may be one of the fields that were added.
        let (mut head, body) = response.into_parts();
        let body = gather::whole(body, sse::EVENT_BYTES).await.ok().filter(|_| status == StatusCode::OK);
        let Some(first) = body.as_deref().and_then(|body| self.read_first_token(body)) else {
            if body.is_some() {
                self.answer_traits.tells_no_first_token();
            }
            return self.pass(exchange, PlainReason::UntrustedIds).await;
        };
        if exchange.request.stream {
            head.headers.insert(CONTENT_TYPE, HeaderValue::from_static(STREAM_TYPE));
        } else {
            exchange.slot.record.gathers();
        }
        exchange.slot.record.answered(head.status, &head.headers);
        Box::pin(self.answer(exchange, calls, head, Brought::FirstToken(first), sent, prediction)).await
    }

    /// Reason for which the session could not speculate now; `None` if it could.
    fn plain_now(&self, exchange: &Exchange) -> Option<PlainReason> {
        let rules = &self.plan.rules;
        let forced = rules.gamma_fixed.is_some();
        let closed = || self.gates(exchange)().filter(|_| !forced);
        rules
            .permission
            .reason()
            .or(rules.methods.is_empty().then_some(PlainReason::NoVerifyMethod))
            .or((rules.holdback && !forced).then_some(PlainReason::Holdback))
            .or_else(closed)
    }

    fn read_first_token(&self, body: &[u8]) -> Option<FirstToken> {
        let identity = &self.plan.identity;
        let first = identity.engine.dialect.codec().first_token(&serde_json::from_slice(body).ok()?)?;
        is_its_text(&identity.tokenizer, &first).then_some(first)
    }
}

/// True if the server sent the token's own text: nothing was made of it. Half a character, and
/// spaces that depend on the prompt, show nothing.
fn is_its_text(tokenizer: &Tokenizer, first: &FirstToken) -> bool {
    let own = tokenizer.decode(&[first.token], true).unwrap_or_default();
    let text = &first.text;
    text.is_empty() || own.contains(char::REPLACEMENT_CHARACTER) || own.trim() == text.trim()
}
