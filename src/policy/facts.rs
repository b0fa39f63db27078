//! The facts that a decision is made from. The caller fills in the known ones and gives a reason
//! for each unknown one.

use std::sync::Arc;

use http::{HeaderMap, HeaderValue};

use super::part::ModelState;
use super::{Fact, Policy, PolicySet, Subject};
use foretell_core::session::Permission;
use foretell_core::words::{Mode, PassthroughReason, VerifyMethod};
use foretell_engines::Engine;
use foretell_wire::openai::{Api, Control, Finding, Request, Route, refusal};

/// Facts that are known once the head of a request has been read.
#[derive(Clone)]
pub struct Head<'a> {
    /// API route of the request.
    pub route: Route,
    /// API that the client asks by: that of the route, unless the request was translated.
    pub api: Api,
    /// Headers sent by the client.
    pub headers: &'a HeaderMap,
    /// Tenant of the request; `None` if it has none.
    pub tenant: Option<&'a str>,
    /// The client's request in `x-foretell`.
    pub wish: Wish,
    /// Least strict mode of all backends. If it is `off`, the body need not be read.
    pub mode: Mode,
    /// True if any replica may verify drafts. If not, the body need not be read.
    pub speculates_anywhere: bool,
    /// True if the body is compressed.
    pub encoded: bool,
}

impl<'a> Head<'a> {
    /// The parts that policies match on.
    pub fn subjects(&self) -> Subjects<'a> {
        Subjects { api: self.api, headers: self.headers, tenant: self.tenant }
    }
}

/// The parts of a head that policies match on.
#[derive(Clone, Copy)]
pub struct Subjects<'a> {
    /// API that the client asks by.
    pub api: Api,
    /// Headers sent by the client.
    pub headers: &'a HeaderMap,
    /// Tenant of the request; `None` if it has none.
    pub tenant: Option<&'a str>,
}

impl Subjects<'_> {
    /// Everything that policies match on.
    pub fn of<'s>(&'s self, request: &'s Request, backend: &'s str, temperature: Fact<f64>) -> Subject<'s> {
        Subject {
            model: &request.model,
            backend,
            tenant: self.tenant,
            api: self.api,
            headers: self.headers,
            temperature,
            prompt_tokens: request.prompt_size().tokens,
        }
    }
}

/// State of a drafter model, by its name in the config file.
pub type Models<'a> = &'a (dyn Fn(&str) -> ModelState + Sync);

/// All inputs of a decision that is explained, in the order in which they become known.
#[derive(Clone)]
pub struct Facts<'a> {
    /// The head of the request.
    pub head: Head<'a>,
    /// The body, once it has been read.
    pub body: Fact<Body<'a>>,
    /// The backend that the request goes to; `None` if there is none.
    pub backend: Fact<Option<Backend<'a>>>,
    /// True if a session slot is free.
    pub session: Fact<bool>,
    /// The server at the replica's address.
    pub server: Fact<ServerState<'a>>,
    /// The policies in force.
    pub policies: Fact<&'a PolicySet>,
    /// State of the drafter models.
    pub models: Models<'a>,
    /// The group of the request, once its policy is known.
    pub group: Groups<'a>,
}

/// The group of a request in the comparison of its policy with plain decoding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Group {
    /// It is in the control group.
    pub in_control: bool,
    /// Speculation by this policy has been slower than the control group.
    pub is_slower: bool,
}

/// Draws, or looks up, the group of a request that a policy applies to.
pub type Groups<'a> = &'a dyn Fn(&Arc<Policy>) -> Group;

/// The client's request in `x-foretell`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// The header's value; `None` without a header.
    Said(Option<Control>),
    /// The header's value is malformed: treated as `off`, the strictest value.
    Unreadable,
}

impl Wish {
    /// Reads the header's values: there are several if a proxy in front of this one adds another,
    /// and the strictest counts. Pass none if clients may not use the header.
    pub fn read<'a>(values: impl IntoIterator<Item = &'a HeaderValue>) -> Self {
        let mut strictest = None;
        for value in values {
            let control = value.to_str().ok().and_then(|text| Control::parse(text).ok());
            let Some(control) = control else { return Self::Unreadable };
            strictest = Some(strictest.map_or(control, |known: Control| known.min(control)));
        }
        Self::Said(strictest)
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
    /// It is eligible, by its body.
    Eligible(&'a Request),
    /// It must be passed through.
    Refused {
        /// The reason.
        reason: PassthroughReason,
        /// The parameter that causes it, if a single one does.
        parameter: Option<&'a str>,
        /// The request in the parts that could be parsed, for explanations.
        request: Option<&'a Request>,
    },
}

/// A body that was read, with the judgement of its parameters; `None` if it is no JSON object.
pub type Understood = Option<(Request, Vec<Finding>)>;

impl<'a> From<&'a Understood> for Body<'a> {
    fn from(understood: &'a Understood) -> Self {
        let Some((request, findings)) = understood else {
            return Self::Refused { reason: PassthroughReason::Body, parameter: None, request: None };
        };
        match refusal(findings) {
            Some((reason, parameter)) => {
                Self::Refused { reason, parameter: Some(parameter), request: Some(request) }
            }
            None => Self::Eligible(request),
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
    /// The replica's server may be able to verify drafts, or the session runner knows why it
    /// cannot.
    pub speculates: bool,
    /// The replica's engine asks Foretell for drafts inside its steps.
    pub injected: bool,
}

/// The server at a replica's address.
#[derive(Clone, Copy)]
pub enum ServerState<'a> {
    /// A server to which everything is passed through; reason and explanation.
    Passthrough(PassthroughReason, &'a str),
    /// No server answers now; the text says why. Only explanations set this. The proxy tries to
    /// connect, since the server may be back at any time.
    Down(&'a str),
    /// A server that can verify drafts.
    Known(Server<'a>),
}

impl<'a> ServerState<'a> {
    /// The server, if it can verify drafts.
    pub fn server(self) -> Option<Server<'a>> {
        match self {
            Self::Known(server) => Some(server),
            Self::Passthrough(..) | Self::Down(_) => None,
        }
    }
}

/// A server that can verify drafts, and the operator's limits for it.
#[derive(Clone, Copy)]
pub struct Server<'a> {
    /// The engine as identified.
    pub engine: &'a Engine,
    /// True if all requests to the address reach a single engine.
    pub single: Fact<bool>,
    /// True if the probe found that speculation gains nothing there; `None` without a probe.
    pub nothing_pays: Option<bool>,
    /// The permission to which the format of its answers to this request narrows that of every
    /// policy; `None` if it does not.
    pub by_format: Option<Permission>,
    /// The operator's limits.
    pub terms: &'a Terms,
}

impl Server<'_> {
    /// Maximum tokens of context and draft in a verify request.
    pub fn context_max(&self) -> usize {
        self.engine.context.unwrap_or(usize::MAX).min(self.terms.context_max)
    }
}

/// The operator's limits for verify requests of a backend.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// Allowed verification methods.
    pub allow: Vec<VerifyMethod>,
    /// Maximum context tokens of a verify request.
    pub context_max: usize,
    /// Maximum bytes of a round's request, and maximum bytes of its answer.
    pub bytes_max: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_strictest_of_several_wishes_counts() {
        let read = |values: &[&'static str]| {
            let values: Vec<_> = values.iter().map(|value| HeaderValue::from_static(value)).collect();
            Wish::read(&values)
        };
        assert!(matches!(read(&[]), Wish::Said(None)));
        assert!(matches!(read(&["gamma=4", "gamma=2"]), Wish::Said(Some(Control::Gamma(2)))));
        assert!(matches!(read(&["gamma=4", "off", "plain"]), Wish::Said(Some(Control::Off))));
        assert!(matches!(read(&["plain", "on"]), Wish::Unreadable));
    }
}
