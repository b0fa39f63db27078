//! The text of a request, which all lookups of the request search by one index.

use super::suffix::{Growing, SEPARATOR};
use super::{Feedback, LookupSpec, Origin, Shared};
use crate::units::TokenId;

/// The tokens of a request so far. Memory: 9 to 13 bytes per token if a lookup searches them.
#[derive(Debug, Default)]
pub struct Context {
    text: Growing,
    searched: bool,
}

impl Context {
    /// The context of a request with these lookups, which has no token yet. The client's
    /// prediction is searched as a text before it.
    pub fn new<'a>(lookups: impl IntoIterator<Item = &'a LookupSpec>, shared: &Shared) -> Self {
        let mut this = Self::default();
        let mut predicts = false;
        for spec in lookups {
            this.searched |= spec.searches();
            predicts |= spec.searches() && spec.reads_prediction();
        }
        if predicts && !shared.prediction.is_empty() {
            this.text.extend(&shared.prediction);
            this.text.extend(&[SEPARATOR]);
        }
        this
    }

    /// Adds tokens, and shows them to the lookups.
    pub fn read(&mut self, tokens: &[TokenId], origin: Origin, show: impl FnOnce(&Feedback<'_>)) {
        if self.searched {
            self.text.extend(tokens);
        }
        show(&Feedback { tokens, origin, text: &self.text });
    }

    /// The indexed text; empty if no lookup searches it.
    pub fn text(&self) -> &Growing {
        &self.text
    }

    /// Sorts what was added, if that is due; true if it was. A sort may take milliseconds: call it
    /// where nobody waits for a draft.
    pub fn tidy(&mut self) -> bool {
        self.text.tidy()
    }

    /// Bytes of the text and its index.
    pub fn bytes(&self) -> usize {
        self.text.bytes()
    }
}
