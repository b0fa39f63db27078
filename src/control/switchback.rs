//! Ride-only windows of a replica: the control group of everything that its engine computes.
//!
//! Requests that are held back by lot ride beside others that leap, so they show nothing of what leaping costs its
//! neighbours. In a window nobody leaps: the seconds per token of all sessions in it are compared with those of the
//! stretch before it. After each change a while is left out, in which what was under way still ends.

use std::time::Duration;

use super::groups::{Groups, LatencyGate};
use crate::units::{Dice, Tick};

/// What is left out after a change, at most a quarter of the window.
const WASHOUT: Duration = Duration::from_secs(5);
/// Fewest tokens of a stretch that are compared.
const LEAST: usize = 100;

/// Length of a window, and the mean time from the start of one to the start of the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Windows {
    /// Length of a window.
    pub window: Duration,
    /// From start to start.
    pub every: Duration,
}

/// Tokens of a stretch of time, and the seconds that their requests took for them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Stretch {
    tokens: usize,
    seconds: f64,
}

impl Stretch {
    fn per_token(self) -> Option<f64> {
        (self.tokens >= LEAST).then(|| self.seconds / self.tokens as f64)
    }
}

/// The windows of one replica, and what they have shown.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Switchback {
    windows: Option<Windows>,
    /// When the next window begins; `None` before the first request.
    next: Option<Tick>,
    /// When the present window ends.
    until: Option<Tick>,
    /// What is noted before this is left out.
    settled: Tick,
    leaping: Stretch,
    riding: Stretch,
    groups: Groups,
}

impl Switchback {
    /// Plans windows, or none.
    pub fn plan(&mut self, windows: Option<Windows>) {
        if windows != self.windows {
            (self.windows, self.next) = (windows, None);
        }
    }

    /// Whether nobody may leap now: in a window. Each begins at a random moment, so that it meets no rhythm of the load.
    pub fn rides(&mut self, now: Tick, dice: &mut Dice) -> bool {
        let Some(Windows { window, every }) = self.windows else { return false };
        if self.until.take_if(|until| *until <= now).is_some() {
            self.ended(window, every, now);
        }
        let next = *self.next.get_or_insert_with(|| now.after(every.mul_f64(0.5 + dice.unit())));
        if self.until.is_none() && next <= now {
            self.until = Some(now.after(window));
            self.next = Some(now.after(every.mul_f64(0.5 + dice.unit()).max(2 * window)));
            self.settled = now.after(WASHOUT.min(window / 4));
        }
        self.until.is_some()
    }

    /// Whether windows are planned.
    pub fn is_planned(&self) -> bool {
        self.windows.is_some()
    }

    /// Whether a window is open now.
    pub fn in_window(&self, now: Tick) -> bool {
        self.until.is_some_and(|until| now < until)
    }

    /// Windows so far that could be compared with the stretch before them.
    pub fn compared(&self) -> u64 {
        self.groups.requests().1
    }

    /// Whether leaping is closed now because all requests together were slower with it.
    pub fn is_closed(&mut self, now: Tick) -> bool {
        self.groups.is_closed(now)
    }

    /// Notes tokens of a session, `seconds` after the ones before.
    pub fn emitted(&mut self, tokens: usize, seconds: f64, now: Tick) {
        let over = self.until.is_some_and(|until| until <= now);
        if self.windows.is_none() || over || now < self.settled || !seconds.is_finite() {
            return;
        }
        let stretch = if self.until.is_some() { &mut self.riding } else { &mut self.leaping };
        stretch.tokens += tokens;
        stretch.seconds += seconds;
    }

    /// What the windows have shown: time per token outside of them ÷ inside.
    pub fn groups(&self) -> &Groups {
        &self.groups
    }

    fn ended(&mut self, window: Duration, every: Duration, now: Tick) {
        let stretches = self.leaping.per_token().zip(self.riding.per_token());
        if let Some((leaping, riding)) = stretches {
            let gate = LatencyGate { limit: 1.02, reprobe: every };
            self.groups.note(true, riding, gate, now);
            self.groups.note(false, leaping, gate, now);
        }
        (self.leaping, self.riding) = (Stretch::default(), Stretch::default());
        self.settled = now.after(WASHOUT.min(window / 4));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOWS: Windows = Windows { window: Duration::from_secs(20), every: Duration::from_mins(30) };

    /// Ten hours of a stream of 10 tokens a second that takes `leaping` times as long outside windows: the share of the
    /// time in windows, and the switchback.
    fn day(leaping: f64) -> (f64, Switchback, bool) {
        let (mut switchback, mut dice) = (Switchback::default(), Dice::new(8));
        switchback.plan(Some(WINDOWS));
        let (mut inside, mut closed) = (0, false);
        let ticks = 10 * 3_600;
        for second in 0..ticks {
            let now = Tick(second * 1_000_000);
            let rides = switchback.rides(now, &mut dice);
            inside += u64::from(rides);
            closed |= switchback.is_closed(now);
            let times = (if rides { 1.0 } else { leaping }) * (0.9 + 0.2 * dice.unit());
            switchback.emitted(10, times, now);
        }
        (inside as f64 / ticks as f64, switchback, closed)
    }

    #[test]
    fn windows_take_about_a_hundredth_of_the_time_and_show_a_gain() {
        let (share, switchback, closed) = day(0.6);
        assert!((0.006..0.016).contains(&share) && !closed, "{share}");
        let ratio = switchback.groups().ratio().expect("enough windows");
        assert!(ratio.high < 0.7 && ratio.low > 0.5, "{ratio:?}");
    }

    #[test]
    fn where_everybody_is_slower_with_leaping_it_is_closed_for_a_while() {
        assert!(day(1.4).2);
        assert!(!day(1.0).2);
    }

    #[test]
    fn without_a_plan_there_are_no_windows() {
        let (mut switchback, mut dice) = (Switchback::default(), Dice::new(8));
        assert!((0..10_000).all(|second| !switchback.rides(Tick(second * 1_000_000), &mut dice)));
    }
}
