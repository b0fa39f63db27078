//! The budget: how much time speculation may lose while it is learnt that it does not pay.
//!
//! In seconds. What a step won against its plain cost is booked, what it lost too. When the losses
//! reach the limit, nothing is drafted until plain decoding has refilled the budget: by 1 % of its
//! time.

/// Seconds that may be lost, in plain steps.
const STEPS: f64 = 10.0;
/// Seconds that may be saved up by steps that paid, as a multiple of that.
const SAVED: f64 = 3.0;
/// Share of the time of plain steps that refills it.
const REFILL: f64 = 0.01;

/// Seconds that speculation has lost and not won back.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Budget {
    lost: f64,
    spent: bool,
}

impl Budget {
    /// Books a step that won so many seconds against its plain cost of `plain` seconds; a loss is
    /// negative.
    pub fn book(&mut self, won: f64, plain: f64) {
        let limit = STEPS * plain;
        if won.is_finite() && limit > 0.0 {
            // One step counts as the budget at most: a hiccup is not the draft's fault.
            self.lost = (self.lost - won.max(-limit)).max(-SAVED * limit);
            self.spent |= self.lost >= limit;
        }
    }

    /// Refills it by a plain step of `plain` seconds.
    pub fn passed(&mut self, plain: f64) {
        if self.lost > 0.0 {
            self.lost = (self.lost - REFILL * plain).max(0.0);
        }
        // Half must be refilled before the next loss, so that a trial is more than one step.
        self.spent &= self.lost > STEPS * plain / 2.0;
    }

    /// True if speculation may lose more.
    pub fn is_open(&self) -> bool {
        !self.spent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lost_is_bounded_by_a_hundredth_of_the_time() {
        let mut budget = Budget::default();
        let (mut lost, mut steps) = (0.0, 0);
        for _ in 0..100_000 {
            steps += 1;
            if budget.is_open() {
                budget.book(-0.5, 1.0);
                lost += 0.5;
            } else {
                budget.passed(1.0);
            }
        }
        assert!(lost <= STEPS + REFILL * f64::from(steps) + 1.0, "{lost} of {steps}");
        assert!(lost > REFILL * f64::from(steps) / 2.0, "there are trials");
    }

    #[test]
    fn what_was_won_may_be_lost_again_to_a_limit() {
        let mut budget = Budget::default();
        (0..1_000).for_each(|_| budget.book(1.0, 1.0));
        let trials = std::iter::repeat_with(|| {
            budget.book(-1.0, 1.0);
            budget.is_open()
        });
        assert_eq!(trials.take_while(|open| *open).count(), 39);
    }
}
