//! Values of the `model` label. Clients choose model names freely, so the values are limited: a
//! model of the configuration always is one, any other becomes one by its first successful answer,
//! up to a maximum number.

use std::collections::HashSet;
use std::sync::Arc;

use parking_lot::RwLock;

/// Maximum number of values for models that the configuration does not name.
const MAX: usize = 100;
/// Value for all other models.
pub(super) const OTHER: &str = "other";

#[derive(Debug, Default)]
pub(super) struct ModelLabels {
    configured: RwLock<HashSet<Arc<str>>>,
    answered: RwLock<HashSet<Arc<str>>>,
}

impl ModelLabels {
    pub(super) fn configured<'a>(&self, names: impl IntoIterator<Item = &'a str>) {
        self.configured.write().extend(names.into_iter().map(Arc::from));
    }

    /// The label value for `model`. `good`: a backend has just answered successfully for it.
    pub(super) fn label(&self, model: &str, good: bool) -> Arc<str> {
        for known in [&self.configured, &self.answered] {
            if let Some(label) = known.read().get(model) {
                return Arc::clone(label);
            }
        }
        if model.is_empty() {
            return Arc::from("");
        }
        if !good {
            return Arc::from(OTHER);
        }
        let mut answered = self.answered.write();
        if answered.len() >= MAX {
            return Arc::from(OTHER);
        }
        let label: Arc<str> = Arc::from(model);
        answered.insert(Arc::clone(&label));
        label
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_no_backend_knows_gets_no_label() {
        let labels = ModelLabels::default();
        for n in 0..2 * MAX {
            assert_eq!(&*labels.label(&format!("invented-{n}"), false), OTHER);
        }
        assert_eq!(&*labels.label("real", true), "real");
        assert_eq!(&*labels.label("real", false), "real", "its failures are its own");
        assert_eq!(&*labels.label("", false), "");
    }

    #[test]
    fn labels_are_capped_but_for_those_that_are_configured() {
        let labels = ModelLabels::default();
        labels.configured(["named"]);
        let values: HashSet<Arc<str>> = (0..2 * MAX).map(|n| labels.label(&format!("m{n}"), true)).collect();
        assert_eq!(values.len(), MAX + 1);
        assert_eq!(&*labels.label("late", true), OTHER);
        assert_eq!(&*labels.label("named", false), "named");
    }
}
