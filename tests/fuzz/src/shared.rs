//! Measurements of other sidecars, as the fleet store holds them.
//!
//! Input: JSON. Whatever it says can be lent to an engine, which measures on; its own measurements
//! are saved and shared as if nothing had been lent.

use foretell_core::control::{Control, SharedCosts, SharedModel};

use crate::snapshot::used;

/// Maximum size of an input, bytes.
const MAX_LEN: usize = 64 << 10;

/// Runs one input.
pub fn run(input: &[u8]) {
    if input.len() > MAX_LEN {
        return;
    }
    let Ok((model, costs)) = serde_json::from_slice::<(SharedModel, SharedCosts)>(input) else { return };
    let (mut models, mut sum, mut siblings) =
        (SharedModel::default(), SharedCosts::default(), SharedCosts::default());
    for _ in 0..2 {
        models.add(&model);
        sum.add(&costs);
    }
    siblings.add(&costs);
    sum.age(1e6);
    let (alone, control) = (Control::new(), Control::new());
    for control in [&alone, &control] {
        used(control);
    }
    control.lend(&models, &sum.or_probed(&siblings));
    assert_eq!(control.shared(), alone.shared(), "what is lent is not its own");
    used(&control);
    control.save().expect("own measurements can be saved");
    control.lend(&SharedModel::default(), &SharedCosts::default());
    used(&control);
    let (shared, _) = control.shared();
    let text = serde_json::to_vec(&shared).expect("what is shared is JSON");
    serde_json::from_slice::<SharedModel>(&text).expect("and is read again");
}
