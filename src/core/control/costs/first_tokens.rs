//! Delay of first tokens by draft tokens in flight, measured at every first token of ours.
//!
//! A client's request waits for the running step and then for its prompt's, and draft tokens make
//! both longer. So the time to its first token is a line in the draft tokens that were in flight
//! when it was sent, and in the prompts that the engine read until then: in a burst, requests wait
//! for each other and not for drafts.

use foretell_control::line::Line;
use serde::{Deserialize, Serialize};

use super::concurrency::ConcurrencyBucket;
use super::lines::{Key, Lines};

/// Delay of a first token that is always allowed, seconds.
pub const DELAY_ALLOWED: f64 = 0.020;
/// Share of the allowed delay that the mean may have: the 95th percentile is longer.
const MEAN: f64 = 0.5;
/// First tokens after which one weighs half.
const HALF_LIFE: f64 = 350.0;
/// Weight of a prompt in the mean of its tokens.
const USUAL: f64 = 0.05;
/// First tokens from which on a delay is known.
const KNOWN: f64 = 16.0;
/// How far off the assumptions may be, in plain tokens: the time without drafts, the delay by a
/// draft token, the time of a thousand tokens of prompts.
const SCALE: [f64; 3] = [8.0, 0.02, 8.0];

/// The state of a replica when a client's request was sent.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sent {
    concurrency: ConcurrencyBucket,
    /// Tokens of our verify requests in flight. `None` between the rounds of those that are
    /// speculated on: the engine may be idle, as it never is while they are decoded plainly.
    drafted: Option<usize>,
    /// Tokens of all prompts of ours that had been read.
    read: usize,
}

impl Key for ConcurrencyBucket {
    fn distance(self, other: Self) -> Option<usize> {
        Some(Self::distance(self, other))
    }
}

/// Times to the first token, by concurrency.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct FirstTokens {
    lines: Lines<ConcurrencyBucket>,
    /// Tokens of all prompts of ours that were read so far.
    #[serde(skip)]
    read: usize,
    /// Mean tokens of a prompt.
    #[serde(skip)]
    prompt: f64,
}

impl FirstTokens {
    /// The state when a request is sent, while `drafted` tokens of verify requests are in flight.
    pub fn sent(&self, concurrency: ConcurrencyBucket, drafted: Option<usize>) -> Sent {
        Sent { concurrency, drafted, read: self.read }
    }

    /// Notes the first token of a request with `prompt` tokens, `seconds` after it was sent, where
    /// a plain token takes `token` seconds.
    pub fn note(&mut self, sent: Sent, prompt: usize, seconds: f64, token: f64) {
        self.read = self.read.wrapping_add(prompt);
        self.prompt += (prompt as f64 - self.prompt) * if self.prompt > 0.0 { USUAL } else { 1.0 };
        let Some(drafted) = sent.drafted else { return };
        let read = self.read.wrapping_sub(sent.read) as f64 / 1_000.0;
        let begin =
            || Line::new([2.0 * token, 0.0, 0.0], SCALE.map(|tokens| tokens * token), token, HALF_LIFE);
        self.lines.of(sent.concurrency, |_| begin()).note([1.0, drafted as f64, read], seconds, 1.0);
    }

    /// Expected seconds of reading a prompt at the nearest concurrency; 0 before that is known.
    pub fn prompt(&self, concurrency: ConcurrencyBucket) -> f64 {
        let line = self.lines.nearest(concurrency, |line| line.weight() >= KNOWN);
        let [.., thousand] = line.map_or([0.0; 3], |(_, line)| line.coefficients::<3>());
        thousand.max(0.0) * self.prompt / 1_000.0
    }

    /// Tokens of verify requests that may be in flight, ours alone, where all of them together may
    /// delay first tokens by the share `ratio - 1` of their time without them, and ours by the
    /// share `ours` of that. `node`: seconds by which one lengthens another verify request, which
    /// is measured more often: the least delay. Infinite where no delay was measured.
    pub fn room(&self, concurrency: ConcurrencyBucket, ratio: f64, ours: f64, node: f64) -> f64 {
        let line = self.lines.get(concurrency).filter(|line| line.weight() >= KNOWN);
        let Some([base, delay, _]) = line.map(Line::coefficients::<3>) else { return f64::INFINITY };
        let delay = delay.max(0.5 * node);
        let allowed = ((ratio - 1.0) * base).max(DELAY_ALLOWED);
        if delay > 0.0 { MEAN * ours * allowed / delay } else { f64::INFINITY }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_not_taken_for_a_delay_by_drafts_and_a_delay_leaves_less_room() {
        let (size, mut first) = (ConcurrencyBucket::of(64), FirstTokens::default());
        // Sixty requests at once, each behind the prompts before it.
        let sent = first.sent(size, Some(0));
        (0..60_u32).for_each(|before| first.note(sent, 300, 0.02 * f64::from(before + 1), 0.02));
        assert!(first.room(size, 1.1, 1.0, 0.0).is_infinite());
        for drafted in (0..600).map(|request| request % 5 * 100) {
            let sent = first.sent(size, Some(drafted));
            first.note(sent, 300, 0.04 + 1e-4 * drafted as f64, 0.02);
        }
        // 0.1 ms for each token: half of 20 ms is 100 tokens.
        let room = first.room(size, 1.01, 1.0, 0.0);
        assert!((80.0..140.0).contains(&room), "{room}");
        assert!((first.room(size, 1.01, 0.5, 0.0) - room / 2.0).abs() < 1e-9);
        assert!(first.room(size, 9.0, 1.0, 0.0) > 2.0 * room);
        let slow = first.room(size, 1.01, 1.0, 2e-3);
        assert!((slow - 10.0).abs() < 1e-9, "other verify requests are delayed by more: {slow}");
        assert!(first.room(ConcurrencyBucket::of(1), 1.1, 1.0, 0.0).is_infinite());
    }
}
