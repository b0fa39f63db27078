//! Times of the drafts and shadow passes of each model drafter, in seconds.

use serde::{Deserialize, Serialize};

use crate::control::mean::Mean;

/// Times of every model drafter, indexed by its number.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Drafts(Vec<Times>);

/// Measured times of one model drafter, seconds.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct Times {
    /// Seconds per drafted token.
    pub token: Mean<8>,
    /// Seconds of a shadow pass, of either kind below.
    pub shadow: Mean<8>,
    /// Seconds of a shadow pass of a drafter that had read the prompt before.
    pub chunk: Mean<8>,
    /// Seconds of a shadow pass that read the prompt.
    pub reading: Mean<8>,
}

impl Drafts {
    /// The times of a model; empty for one that never drafted.
    pub fn of(&self, model: u8) -> Times {
        self.0.get(usize::from(model)).copied().unwrap_or_default()
    }

    /// Notes a draft of `tokens` tokens that took `seconds`.
    pub fn drafted(&mut self, model: u8, tokens: usize, seconds: f64) {
        self.times(model, |times| times.token.note_time(seconds / tokens.max(1) as f64));
    }

    /// Notes a shadow pass that took `seconds`. `read`: the prompt had been read before.
    pub fn shadowed(&mut self, model: u8, seconds: f64, read: bool) {
        self.times(model, |times| {
            times.shadow.note_time(seconds);
            let kind = if read { &mut times.chunk } else { &mut times.reading };
            kind.note_time(seconds);
        });
    }

    fn times(&mut self, model: u8, note: impl FnOnce(&mut Times)) {
        let position = usize::from(model);
        if self.0.len() <= position {
            self.0.resize_with(position + 1, Times::default);
        }
        self.0.get_mut(position).map(note);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_model_has_its_own_times() {
        let mut drafts = Drafts::default();
        drafts.drafted(2, 4, 0.008);
        drafts.shadowed(0, 0.2, false);
        let known = |model| {
            let Times { token, shadow, chunk, reading } = drafts.of(model);
            [token, shadow, chunk, reading].map(Mean::known)
        };
        assert_eq!(known(2), [Some(0.002), None, None, None]);
        assert_eq!(known(0), [None, Some(0.2), None, Some(0.2)]);
        assert_eq!((known(1), known(9)), ([None; 4], [None; 4]));
    }
}
