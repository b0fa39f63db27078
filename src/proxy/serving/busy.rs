//! State of the engines as sessions see it: their load, and whether the regret budget allows
//! speculation.

use std::sync::Arc;

use super::SessionRunner;
use foretell_core::control::Control;
use foretell_core::words::Gate;
use foretell_net::fleet::Replica;

impl SessionRunner {
    /// Load of a replica's engine, 0 to 1, as used by tolerance curves over load; `None` before its
    /// first request.
    pub fn load(&self, replica: &Arc<Replica>) -> Option<f64> {
        let control = self.learnt(replica)?;
        let signal = replica.load().map(|load| load.signal());
        Some(control.with(|learnt| {
            if let Some(signal) = &signal {
                learnt.set_signal(signal);
            }
            learnt.concurrency.load()
        }))
    }

    /// Gates that the control state of a replica's engine closes: `regret` where its regret budget
    /// is too low to begin to speculate, `first_token` where a draft would delay first tokens by
    /// more than this ratio allows.
    pub fn closed(&self, replica: &Arc<Replica>, first_token: f64) -> impl Iterator<Item = Gate> + use<> {
        let closed = self.learnt(replica).map(|control| {
            control.with(|learnt| {
                let empty = !learnt.is_solvent(false);
                let late = learnt.nodes_allowed(first_token) == 0;
                [(empty, Gate::Regret), (late, Gate::FirstToken)]
            })
        });
        closed.into_iter().flatten().filter_map(|(closed, gate)| closed.then_some(gate))
    }

    /// Control state of a replica's engine; `None` before its first request.
    pub(super) fn learnt(&self, replica: &Arc<Replica>) -> Option<Arc<Control>> {
        self.setup.learnt.at(&self.setup.identities, replica)
    }
}
