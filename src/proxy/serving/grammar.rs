//! Knowledge about a grammar that the server may derive from a request: no later request can
//! continue an output that it constrains.

use crate::learning::answer_traits::AnswerTraits;
use foretell_net::fleet::identity::Identity;
use foretell_wire::openai::{GrammarKey, Request};

/// Knowledge about a request's grammar before its first call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Grammar {
    /// Nothing in the request makes the server add one.
    None,
    /// The server has rendered an earlier request that shares everything with this one but its
    /// messages: true if a grammar constrained it.
    Known(bool),
    /// It is requested from the server concurrently with the first call, and stored under this
    /// key; `None` where the answer may be another server's later on.
    Requested(Option<GrammarKey>),
}

impl Grammar {
    /// The knowledge about a request to this server.
    pub fn of(identity: &Identity, request: &Request, traits: &AnswerTraits) -> Self {
        // A request for a separate first token has neither tools nor a parser that add one.
        if request.rendered.is_empty() || identity.engine.reports_first_token(request) {
            return Self::None;
        }
        // An answer is valid until the server restarts. The restart of a separate renderer is not
        // noticed.
        if identity.renderer.is_some() || !identity.engine.shows_itself() {
            return Self::Requested(None);
        }
        let key = GrammarKey::of(request);
        traits.grammars.applies(&key).map_or(Self::Requested(Some(key)), Self::Known)
    }

    /// True if a grammar constrains the output, or may.
    pub fn may_bind(&self) -> bool {
        !matches!(self, Self::None | Self::Known(false))
    }

    /// True if the server has rendered such a request before.
    pub fn is_known(&self) -> bool {
        matches!(self, Self::Known(_))
    }
}
