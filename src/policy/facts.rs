//! The facts that a decision is made from. The caller fills in what is known and gives a reason for what is not.

use http::{HeaderMap, HeaderValue};

use super::part::ModelState;
use super::{PolicySet, Subject};
use crate::dialect::Engine;
use crate::openai::{Control, Judgement, Request, Route};
use crate::words::{BypassReason, Mode, Plan};

/// A fact that a decision needs and that may be unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fact<T> {
    /// It is known.
    Known(T),
    /// It is not known; the text says why.
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

/// Everything that a decision is made from, in the order in which it becomes known.
#[derive(Clone)]
pub struct Facts<'a> {
    /// API route of the request.
    pub route: Route,
    /// Headers sent by the client.
    pub headers: &'a HeaderMap,
    /// Tenant of the request; `None` if it has none.
    pub tenant: Option<&'a str>,
    /// What the client asks for with `x-foretell`.
    pub wish: Wish,
    /// Least strict mode of all backends. If it is `off`, the body need not be read.
    pub mode: Mode,
    /// Whether any replica may verify drafts or take predictions. If not, the body need not be read.
    pub leaps: bool,
    /// Whether the body is compressed.
    pub encoded: bool,
    /// The body, once it has been read.
    pub body: Fact<Body<'a>>,
    /// The backend that the request goes to; `None` if there is none.
    pub backend: Fact<Option<Backend<'a>>>,
    /// Whether a session slot is free.
    pub session: Fact<bool>,
    /// What answers at the replica's address.
    pub server: Fact<ServerState<'a>>,
    /// The policies in force.
    pub policies: Fact<&'a PolicySet>,
    /// State of a drafter model, by its name in the process file.
    pub models: &'a (dyn Fn(&str) -> ModelState + Sync),
}

impl Facts<'_> {
    /// The part of the facts that policies match on.
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

/// What the client asks for with `x-foretell`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// This, or nothing.
    Said(Option<Control>),
    /// The header's value is malformed: treated as `off`, the strictest value.
    Unreadable,
}

impl Wish {
    /// Reads the header's value; pass `None` if the header is missing or clients may not use it.
    pub fn read(value: Option<&HeaderValue>) -> Self {
        let Some(value) = value else { return Self::Said(None) };
        let control = value.to_str().ok().and_then(|text| Control::parse(text).ok());
        control.map_or(Self::Unreadable, |control| Self::Said(Some(control)))
    }

    /// The value, if it is well-formed and present.
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
    /// It is larger than the limit for bodies that are read.
    TooLarge,
    /// It may be speculated, as far as the body decides that.
    Eligible(&'a Request),
    /// It must be relayed.
    Refused {
        /// Reason of the bypass.
        reason: BypassReason,
        /// The parameter that causes it, if a single one does.
        parameter: Option<&'a str>,
        /// The request as far as it can be parsed, for explanations.
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
    /// The parsed request, if there is one.
    pub fn request(self) -> Option<&'a Request> {
        match self {
            Self::TooLarge => None,
            Self::Eligible(request) => Some(request),
            Self::Refused { request, .. } => request,
        }
    }
}

/// The chosen backend and facts about its replica.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Backend<'a> {
    /// The name of the backend.
    pub name: &'a str,
    /// The stricter of the process's mode and the backend's.
    pub mode: Mode,
    /// OpenAI's `prediction` may be sent along for this model.
    pub predicts: bool,
    /// The operator pays per token.
    pub billed: bool,
    /// The replica's server may be able to verify drafts, or the driver knows why it cannot.
    pub speculates: bool,
}

/// What answers at a replica's address.
#[derive(Clone, Copy)]
pub enum ServerState<'a> {
    /// A server to which everything is relayed; reason and explanation.
    Relayed(BypassReason, &'a str),
    /// No server answers now; the text says why. The proxy itself never sets this: it tries to connect, since the
    /// server may be back at any time. Only explanations do.
    Down(&'a str),
    /// A server that can verify drafts.
    Known(Server<'a>),
}

impl<'a> ServerState<'a> {
    /// The server, if it can verify drafts.
    pub fn server(self) -> Option<Server<'a>> {
        match self {
            Self::Known(server) => Some(server),
            Self::Relayed(..) | Self::Down(_) => None,
        }
    }
}

/// A server that can verify drafts, and the operator's limits for it.
#[derive(Clone, Copy)]
pub struct Server<'a> {
    /// The engine as identified.
    pub engine: &'a Engine,
    /// Whether all requests to the address reach a single engine.
    pub single: Fact<bool>,
    /// Whether the probe found that leaping gains nothing there; `None` if there was no probe.
    pub nothing_pays: Option<bool>,
    /// The operator's limits.
    pub terms: &'a Terms,
}

/// The operator's limits for verify calls of a backend.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// Allowed plans.
    pub allow: Vec<Plan>,
    /// Most context tokens of a verify call.
    pub context_max: usize,
    /// Most bytes of a round's request, and most bytes of its answer.
    pub bytes_max: usize,
}
