//! Knowledge about a grammar that the server may make of a request, so that no later request can
//! continue its output.

use std::sync::Arc;

use super::calls::Calls;
use crate::clock::Clock;
use crate::fleet::identity::Identity;
use crate::learning::answer_traits::AnswerTraits;
use foretell_core::session::Event;
use foretell_core::units::Tick;
use foretell_engines::dialect::Call;
use foretell_engines::openai::{GrammarKey, Request};

/// Knowledge about a request's grammar before its first call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Grammar {
    /// Nothing in the request makes the server bring one in.
    None,
    /// The server has rendered an earlier request that shares everything with this one but its
    /// messages: true if a grammar bound it.
    Told(bool),
    /// The server is asked concurrently with the first call. Its answer is kept under this key;
    /// `None` where it could be another server's later on.
    Asked(Option<GrammarKey>),
}

impl Grammar {
    /// The knowledge about a request to this server.
    pub fn of(identity: &Identity, request: &Request, traits: &AnswerTraits, now: Tick) -> Self {
        // With a first token of its own there are no tools and no parser to bring one in.
        if request.rendered.is_empty() || identity.engine.reports_first_token(request) {
            return Self::None;
        }
        // An answer holds until the server restarts, which has to be seen; the restart of another
        // server that renders for it is not.
        if identity.renderer.is_some() || !identity.engine.shows_itself() {
            return Self::Asked(None);
        }
        let key = GrammarKey::of(request);
        traits.grammars.applies(&key, now).map_or(Self::Asked(Some(key)), Self::Told)
    }

    /// True if a grammar binds the output, or may.
    pub fn may_bind(&self) -> bool {
        !matches!(self, Self::None | Self::Told(false))
    }

    /// True if the server need not be asked.
    pub fn is_told(&self) -> bool {
        matches!(self, Self::Told(_))
    }

    /// Asks for the prompt's ids by this call, and keeps what the server says of a grammar.
    pub(super) async fn ask(
        self,
        calls: Calls,
        request: Arc<Request>,
        call: Call,
        traits: Arc<AnswerTraits>,
        clock: Clock,
    ) -> Event {
        let event = calls.prompt_ids_call(&request, call).await;
        if let (Self::Asked(Some(key)), Event::Rendered { constrained: bound, .. }) = (self, &event) {
            traits.grammars.note(&key, *bound, clock.now());
        }
        event
    }
}
