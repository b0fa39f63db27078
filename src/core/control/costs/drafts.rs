//! Times of the drafts and shadow passes of each model drafter, in seconds.

use serde::{Deserialize, Serialize};

use crate::control::belief::Belief;
use crate::units::Tick;

/// Times of every model drafter, indexed by its number.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Drafts(Vec<Times>);

/// Measured times of one model drafter, seconds.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct Times {
    /// Seconds per drafted token.
    pub token: Belief,
    /// Seconds of a shadow pass, of either kind below.
    pub shadow: Belief,
    /// Seconds of a shadow pass of a drafter that had read the prompt before.
    pub chunk: Belief,
    /// Seconds of a shadow pass that read the prompt.
    pub reading: Belief,
}

impl Drafts {
    /// The times of a model; empty for one that never drafted.
    pub fn of(&self, model: u8) -> Times {
        self.0.get(usize::from(model)).copied().unwrap_or_default()
    }

    /// Notes a draft of `tokens` tokens that took `seconds`.
    pub fn drafted(&mut self, model: u8, tokens: usize, seconds: f64, now: Tick) {
        self.times(model, |times| times.token.observe(seconds / tokens.max(1) as f64, now));
    }

    /// Notes a shadow pass that took `seconds`. `read`: the prompt had been read before.
    pub fn shadowed(&mut self, model: u8, seconds: f64, read: bool, now: Tick) {
        self.times(model, |times| {
            times.shadow.observe(seconds, now);
            let kind = if read { &mut times.chunk } else { &mut times.reading };
            kind.observe(seconds, now);
        });
    }

    /// Makes `now` the origin of time.
    pub fn age(&mut self, now: Tick) {
        let all = self.0.iter_mut();
        let beliefs =
            all.flat_map(|times| [&mut times.token, &mut times.shadow, &mut times.chunk, &mut times.reading]);
        beliefs.for_each(|belief| belief.age(now));
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
        drafts.drafted(2, 4, 0.008, Tick(0));
        drafts.shadowed(0, 0.2, false, Tick(0));
        let known = |model| {
            let Times { token, shadow, chunk, reading } = drafts.of(model);
            [token, shadow, chunk, reading].map(|belief| belief.known())
        };
        assert_eq!(known(2), [Some(0.002), None, None, None]);
        assert_eq!(known(0), [None, Some(0.2), None, Some(0.2)]);
        assert_eq!((known(1), known(9)), ([None; 4], [None; 4]));
    }
}
