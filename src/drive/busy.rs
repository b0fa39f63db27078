//! How busy the engines are, as the sessions take it.

use std::sync::Arc;

use super::Driver;
use crate::fleet::Replica;
use crate::fleet::identity::Standing;

impl Driver {
    /// How busy the engine of a replica is, 0 to 1, as curves over load take it; `None` before its first request.
    pub fn load(&self, replica: &Arc<Replica>) -> Option<f64> {
        let standing = self.inner.setup.identities.standing(replica)?;
        let Standing::Known(identity) = &*standing else { return None };
        let control = self.inner.controls.lock().look(&identity.epoch).map(Arc::clone)?;
        let signal = replica.load().map(|load| load.signal());
        Some(control.with(|learnt| {
            if let Some(signal) = &signal {
                learnt.crowd_changes(|crowd| crowd.hear(signal));
            }
            learnt.crowd.load()
        }))
    }
}
