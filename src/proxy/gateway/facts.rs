//! Facts of the gateway for the decision about a request: the same for a request that is served and
//! for one that is only explained.

use http::HeaderMap;

use super::Shared;
use crate::serving::mode::ModeSwitch;
use foretell_core::words::Mode;
use foretell_net::fleet::{self, Replica};
use foretell_net::http::headers::is_encoded;
use foretell_policy::{Backend, Head, Wish};
use foretell_wire::openai::{Api, Route};

/// The facts that are known once the head of a request has been read.
pub fn of_head<'a>(
    (route, api, headers): (Route, Api, &'a HeaderMap),
    tenant: Option<&'a str>,
    wish: Wish,
    shared: &Shared,
) -> Head<'a> {
    Head {
        route,
        api,
        headers,
        tenant,
        wish,
        mode: laxest(&shared.fleet, &shared.modes),
        speculates_anywhere: shared.fleet.speculates(),
        encoded: is_encoded(headers),
    }
}

/// The backend of a request, and the replica that it goes to.
pub fn backend<'a>(replica: &'a Replica, shared: &Shared) -> Backend<'a> {
    Backend {
        name: replica.backend(),
        mode: shared.modes.of(replica.backend()),
        speculates: replica.speculates(),
        injected: shared.joins.is_injected(replica.label()),
    }
}

/// The laxest mode of all backends; that of the process if there is none.
pub fn laxest(fleet: &fleet::Fleet, modes: &ModeSwitch) -> Mode {
    fleet.names().map(|name| modes.of(name)).max().unwrap_or_else(|| modes.process())
}
