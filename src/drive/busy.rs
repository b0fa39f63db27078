//! How the engines stand, as the sessions take it: how busy they are, and whether leaping has lost what it may lose there.

use std::sync::Arc;

use super::Driver;
use crate::control::Control;
use crate::fleet::Replica;
use crate::fleet::identity::Standing;

impl Driver {
    /// How busy the engine of a replica is, 0 to 1, as curves over load take it; `None` before its first request.
    pub fn load(&self, replica: &Arc<Replica>) -> Option<f64> {
        let control = self.learnt(replica)?;
        let signal = replica.load().map(|load| load.signal());
        Some(control.with(|learnt| {
            if let Some(signal) = &signal {
                learnt.crowd_changes(|crowd| crowd.hear(signal));
            }
            learnt.crowd.load()
        }))
    }

    /// Whether no session may begin to leap on a replica, because leaping has lost there what it may lose, or because its
    /// ride-only windows were faster.
    pub fn has_lost(&self, replica: &Arc<Replica>) -> bool {
        let now = self.inner.clock.now();
        self.learnt(replica).is_some_and(|control| {
            control.with(|learnt| {
                let windows = learnt.switchback.groups().looks_closed(now);
                windows || !learnt.account.may_begin(learnt.crowd.leaping())
            })
        })
    }

    /// What is learnt of the engine of a replica; `None` before its first request.
    fn learnt(&self, replica: &Arc<Replica>) -> Option<Arc<Control>> {
        let standing = self.inner.setup.identities.standing(replica)?;
        let Standing::Known(identity) = &*standing else { return None };
        self.inner.controls.lock().look(&identity.epoch).map(Arc::clone)
    }
}
