//! Decides if a replica answers anything at all.
//!
//! The kernel accepts connections for a process that is stopped or hangs, so only received bytes
//! prove that one runs: the head or a part of any answer, to a client's request or to a liveness
//! question. A replica that was quiet for [`QUIET`] gets a question that its engine answers
//! without its model; after [`UNANSWERED`] of them in a row in which nothing was received it is
//! silent. A long prefill is not: it delays tokens, not every byte.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use foretell_core::units::Tick;

/// Time without a received byte after which a question is sent.
const QUIET: Duration = Duration::from_secs(3);
/// Time limit of a question.
pub(super) const QUESTION_WITHIN: Duration = Duration::from_secs(3);
/// Number of unanswered questions in a row after which a replica is silent.
const UNANSWERED: u32 = 2;

/// Result of a look at a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    Nothing,
    /// A question is due. `repeated`: the one before was not answered.
    QuestionDue {
        repeated: bool,
    },
    /// It was silent, and has answered.
    Returned,
}

/// The signs of life of one replica.
#[derive(Debug, Default)]
pub(super) struct Liveness {
    /// A byte was received since the last look; so a busy connection writes it four times a second
    /// at most.
    received: AtomicBool,
    silent: AtomicBool,
    quiet: Mutex<Quiet>,
}

#[derive(Debug, Default)]
struct Quiet {
    /// Time of the last look that found a received byte.
    since: Tick,
    unanswered: u32,
    /// True while a question is under way.
    under_way: bool,
    /// True if something was received since that question began: its end proves nothing.
    void: bool,
}

impl Liveness {
    /// Records that a byte was received.
    pub(super) fn byte_received(&self) {
        if !self.received.load(Ordering::Relaxed) {
            self.received.store(true, Ordering::Relaxed);
        }
    }

    /// True if it answers nothing.
    pub(super) fn is_silent(&self) -> bool {
        self.silent.load(Ordering::Relaxed)
    }

    /// Looks at what was received since the last look.
    pub(super) fn look(&self, now: Tick) -> Look {
        let mut quiet = self.quiet.lock();
        if self.received.swap(false, Ordering::Relaxed) {
            *quiet = Quiet { since: now, unanswered: 0, under_way: quiet.under_way, void: quiet.under_way };
            return if self.silent.swap(false, Ordering::Relaxed) { Look::Returned } else { Look::Nothing };
        }
        let due = quiet.unanswered > 0 || now - quiet.since >= QUIET;
        if quiet.under_way || !due {
            return Look::Nothing;
        }
        quiet.under_way = true;
        Look::QuestionDue { repeated: quiet.unanswered > 0 }
    }

    /// Records the end of a question. True if the replica is silent from now on.
    pub(super) fn question_ended(&self, unanswered: bool) -> bool {
        let mut quiet = self.quiet.lock();
        quiet.under_way = false;
        let void = std::mem::take(&mut quiet.void);
        if !unanswered || void || self.received.load(Ordering::Relaxed) {
            return false;
        }
        quiet.unanswered = quiet.unanswered.saturating_add(1);
        quiet.unanswered >= UNANSWERED && !self.silent.swap(true, Ordering::Relaxed)
    }

    /// Resets the state: the replica cannot be reached, which other checks show. True if it was
    /// silent.
    pub(super) fn reset(&self, now: Tick) -> bool {
        let mut quiet = self.quiet.lock();
        *quiet = Quiet { since: now, unanswered: 0, under_way: quiet.under_way, void: quiet.under_way };
        self.silent.swap(false, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> Tick {
        Tick(millis * 1000)
    }

    /// Looks every 250 ms, and ends questions in time; returns the time at which it became silent,
    /// ms. `heard`: the times at which a byte was received.
    fn silent_at(liveness: &Liveness, until: u64, heard: impl Fn(u64) -> bool) -> Option<u64> {
        let within = QUESTION_WITHIN.as_millis() as u64;
        let mut asked = None;
        for now in (0..=until).step_by(250) {
            if heard(now) {
                liveness.byte_received();
            }
            if asked.is_some_and(|since| now - since >= within) {
                asked = None;
                if liveness.question_ended(true) {
                    return Some(now);
                }
            }
            if let Look::QuestionDue { .. } = liveness.look(at(now)) {
                asked = Some(now);
            }
        }
        None
    }

    #[test]
    fn a_replica_that_answers_nothing_is_silent_within_ten_seconds_and_not_after_eight() {
        let silent = silent_at(&Liveness::default(), 60_000, |now| now == 0).unwrap();
        assert!((8_001..=9_750).contains(&silent), "{silent} ms");
    }

    #[test]
    fn any_byte_now_and_then_keeps_it_alive() {
        // The tokens of a slow stream, or the questions that a server answers during a long
        // prefill.
        assert_eq!(silent_at(&Liveness::default(), 600_000, |now| now % 8_000 == 0), None);
        // A late answer to the first question.
        assert_eq!(silent_at(&Liveness::default(), 600_000, |now| now % 6_000 == 5_750), None);
    }

    #[test]
    fn it_returns_with_the_first_byte_and_is_asked_all_the_time_until_then() {
        let liveness = Liveness::default();
        let silent = silent_at(&liveness, 60_000, |now| now == 0).unwrap();
        assert!(liveness.is_silent());
        assert_eq!(liveness.look(at(silent)), Look::QuestionDue { repeated: true });
        assert_eq!(liveness.look(at(silent + 250)), Look::Nothing, "one question at a time");
        assert!(!liveness.question_ended(true), "it is reported once");
        assert_eq!(liveness.look(at(silent + 3_000)), Look::QuestionDue { repeated: true });
        liveness.byte_received();
        assert_eq!(liveness.look(at(silent + 3_250)), Look::Returned);
        assert!(!liveness.is_silent());
        assert_eq!(liveness.look(at(silent + 3_500)), Look::Nothing);
    }

    #[test]
    fn an_answer_to_a_client_proves_as_much_as_one_to_the_question() {
        let liveness = Liveness::default();
        assert_eq!(liveness.look(at(3_000)), Look::QuestionDue { repeated: false });
        liveness.byte_received();
        assert!(!liveness.question_ended(true));
        assert_eq!(liveness.look(at(6_000)), Look::Nothing);
        assert_eq!(liveness.look(at(9_000)), Look::QuestionDue { repeated: false }, "the count began anew");
    }
}
