//! Facts of the gateway for the decision about a request: the same for a request that is served and
//! for one that is only explained.

use http::HeaderMap;

use super::Shared;
use crate::fleet::{self, Replica};
use crate::openai::Route;
use crate::policy::part::ModelState;
use crate::policy::{Backend, Fact, Facts, Wish};
use crate::serving::mode::ModeSwitch;
use crate::words::Mode;

/// The parts of a request's head that a decision uses.
#[derive(Clone, Copy)]
pub struct Head<'a> {
    /// The route.
    pub route: Route,
    /// The client's headers.
    pub headers: &'a HeaderMap,
    /// The tenant; `None` if not known.
    pub tenant: Option<&'a str>,
    /// The client's `x-foretell`.
    pub wish: Wish,
    /// The body is compressed.
    pub encoded: bool,
}

/// The facts that are known once the head of a request has been read.
pub fn of_head<'a>(head: &Head<'a>, shared: &Shared) -> Facts<'a> {
    Facts {
        route: head.route,
        headers: head.headers,
        tenant: head.tenant,
        wish: head.wish,
        mode: laxest(&shared.fleet, &shared.modes),
        speculates_anywhere: shared.fleet.speculates() || shared.fleet.predicts(),
        encoded: head.encoded,
        body: Fact::Unknown("the body has not been read"),
        backend: Fact::Unknown("the body has not been read"),
        session: Fact::Unknown("it was not checked"),
        server: Fact::Unknown("it was not asked"),
        policies: Fact::Unknown("they were not read"),
        models: &|_| ModelState::Unknown("it was not checked"),
    }
}

/// The backend of a request for `model`, and the replica that it goes to.
pub fn backend<'a>(replica: &'a Replica, model: &str, modes: &ModeSwitch) -> Backend<'a> {
    Backend {
        name: replica.name(),
        mode: modes.of(replica.name()),
        predicts: replica.predicts_for(model),
        billed: replica.is_billed(),
        speculates: replica.speculates(),
    }
}

/// The laxest mode of all backends; that of the process if there is none.
pub fn laxest(fleet: &fleet::Fleet, modes: &ModeSwitch) -> Mode {
    fleet.names().map(|name| modes.of(name)).max().unwrap_or_else(|| modes.process())
}
