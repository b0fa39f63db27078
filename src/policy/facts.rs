//! What a decision is made of. Whoever asks fills in what is known, and says of the rest why it is not.

use http::{HeaderMap, HeaderValue};

use super::part::ModelState;
use super::{PolicySet, Subject};
use crate::dialect::Engine;
use crate::openai::{Control, Judgement, Request, Route};
use crate::words::{BypassReason, Mode, Plan};

/// Something that a decision needs and that may not be known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fact<T> {
    /// It is known.
    Known(T),
    /// It is not, for this reason.
    Unknown(&'static str),
}

impl<T> Fact<T> {
    /// The value, if it is known.
    pub fn known(self) -> Option<T> {
        match self {
            Self::Known(value) => Some(value),
            Self::Unknown(_) => None,
        }
    }
}

/// Everything that a decision is made of, in the order in which a request brings it to light.
#[derive(Clone)]
pub struct Facts<'a> {
    /// The route.
    pub route: Route,
    /// The client's headers.
    pub headers: &'a HeaderMap,
    /// The tenant, if the request has one.
    pub tenant: Option<&'a str>,
    /// What the client asks of Foretell.
    pub wish: Wish,
    /// The laxest mode of all backends. Where that is `off`, no body has to be read.
    pub mode: Mode,
    /// Whether some replica may verify drafts or take predictions. If not, no body has to be read.
    pub leaps: bool,
    /// The body is compressed.
    pub encoded: bool,
    /// The body, once it has been read.
    pub body: Fact<Body<'a>>,
    /// The backend that the request goes to; `None` if there is none.
    pub backend: Fact<Option<Backend<'a>>>,
    /// Whether there is a place for one more session.
    pub session: Fact<bool>,
    /// Who answers at the replica's address.
    pub server: Fact<ServerState<'a>>,
    /// The policies in force.
    pub policies: Fact<&'a PolicySet>,
    /// What is known of the drafter models that policies name.
    pub models: &'a (dyn Fn(&str) -> ModelState + Sync),
}

impl Facts<'_> {
    /// What the policies look at.
    pub fn subject<'s>(
        &'s self,
        request: &'s Request,
        backend: &'s str,
        temperature: Fact<f64>,
    ) -> Subject<'s> {
        Subject {
            model: &request.model,
            backend,
            tenant: self.tenant,
            route: self.route,
            headers: self.headers,
            temperature,
            prompt_tokens: request.prompt_size().tokens,
        }
    }
}

/// What the client asks of Foretell by `x-foretell`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// Nothing, or this.
    Said(Option<Control>),
    /// Something that cannot be read: taken for the strictest wish.
    Unreadable,
}

impl Wish {
    /// Reads the value of the header, if there is one and the process lets clients use it.
    pub fn read(value: Option<&HeaderValue>) -> Self {
        let Some(value) = value else { return Self::Said(None) };
        let control = value.to_str().ok().and_then(|text| Control::parse(text).ok());
        control.map_or(Self::Unreadable, |control| Self::Said(Some(control)))
    }

    /// What can be read of it.
    pub fn control(self) -> Option<Control> {
        match self {
            Self::Said(control) => control,
            Self::Unreadable => None,
        }
    }
}

/// The body of a request.
#[derive(Clone, Copy, Debug)]
pub enum Body<'a> {
    /// It is larger than what is read.
    TooLarge,
    /// It may be speculated, as far as the body tells.
    Eligible(&'a Request),
    /// It may not.
    Refused {
        /// Why.
        reason: BypassReason,
        /// The parameter that is to blame, where one is.
        parameter: Option<&'a str>,
        /// What could be read of it, where somebody asks further.
        request: Option<&'a Request>,
    },
}

impl<'a> From<&'a Judgement> for Body<'a> {
    fn from(judgement: &'a Judgement) -> Self {
        match judgement {
            Judgement::Eligible(request) => Self::Eligible(request),
            Judgement::Bypass { reason, parameter } => {
                Self::Refused { reason: *reason, parameter: parameter.as_deref(), request: None }
            }
        }
    }
}

impl<'a> Body<'a> {
    /// What could be read of it.
    pub fn request(self) -> Option<&'a Request> {
        match self {
            Self::TooLarge => None,
            Self::Eligible(request) => Some(request),
            Self::Refused { request, .. } => request,
        }
    }
}

/// The backend that a request goes to, and its replica.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Backend<'a> {
    /// The name of the backend.
    pub name: &'a str,
    /// The stricter of the process's mode and the backend's.
    pub mode: Mode,
    /// A likely answer may be sent along for this model.
    pub predicts: bool,
    /// It bills per token.
    pub billed: bool,
    /// The replica's server is one that can verify, or the driver knows why it cannot.
    pub speculates: bool,
}

/// Who answers at a replica's address.
#[derive(Clone, Copy)]
pub enum ServerState<'a> {
    /// A server that is relayed to, for this reason.
    Relayed(BypassReason, &'a str),
    /// Nobody answers there now, for this reason. The driver does not look at this, since a server may be back at any
    /// time: it tries.
    Down(&'a str),
    /// A server that can verify.
    Known(Server<'a>),
}

impl<'a> ServerState<'a> {
    /// The server, if it can verify.
    pub fn server(self) -> Option<Server<'a>> {
        match self {
            Self::Known(server) => Some(server),
            Self::Relayed(..) | Self::Down(_) => None,
        }
    }
}

/// A server that can verify, and what the operator allows there.
#[derive(Clone, Copy)]
pub struct Server<'a> {
    /// The server, as it was found.
    pub engine: &'a Engine,
    /// Whether it is one engine that answers at the address.
    pub single: Fact<bool>,
    /// Whether a probe found that nothing pays there; `None` if there was no probe.
    pub nothing_pays: Option<bool>,
    /// What the operator allows.
    pub terms: &'a Terms,
}

/// What the operator allows on a backend.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// How drafts may be verified.
    pub allow: Vec<Plan>,
    /// Longest context of a verify call, tokens.
    pub context_max: usize,
    /// Most bytes of a round's request, and of its answer.
    pub bytes_max: usize,
}
