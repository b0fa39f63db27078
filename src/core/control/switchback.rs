//! Plain windows of a replica (switchback): time-sliced A/B windows, the control group for all
//! requests of its engine.
//!
//! Requests that are held back at random are decoded concurrently with others that are speculated
//! on, so they do not show the cost of speculation for its neighbours. In a window no request is
//! speculated on: the seconds per token of all sessions in it are compared with those of the
//! stretch before it. After each change a washout time is left out, in which the requests in flight
//! end.

use std::time::Duration;

use super::groups::{ControlGate, Groups};
use crate::units::{SplitMix64, Tick};

/// Washout time after a change, at most a quarter of the window.
const WASHOUT: Duration = Duration::from_secs(5);
/// Minimum tokens of a stretch that is compared.
const MIN: usize = 100;

/// Length of a window, and the mean time from the start of one to the start of the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Windows {
    /// Length of a window.
    pub window: Duration,
    /// Mean time from start to start; each is drawn from half to one and a half of it, and is at
    /// least two windows.
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
        (self.tokens >= MIN).then(|| self.seconds / self.tokens as f64)
    }
}

/// The windows of one replica, and their results.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Switchback {
    windows: Option<Windows>,
    /// Start of the next window; `None` before the first request.
    next: Option<Tick>,
    /// Other sidecars of the replica have that window at the same time.
    agreed: bool,
    /// End of the present window.
    until: Option<Tick>,
    /// Tokens before this are left out.
    settled: Tick,
    speculating: Stretch,
    plain: Stretch,
    groups: Groups,
}

impl Switchback {
    /// Schedules windows; `None` for none.
    pub fn set_windows(&mut self, windows: Option<Windows>) {
        if windows != self.windows {
            (self.windows, self.next, self.agreed) = (windows, None, false);
        }
    }

    /// Start of the next window; `None` before the first request.
    pub fn next(&self) -> Option<Tick> {
        self.next
    }

    /// The schedule of windows; `None` if there is none.
    pub fn windows(&self) -> Option<Windows> {
        self.windows
    }

    /// Schedules the next window for `start`, when other sidecars of the replica have one too. If
    /// the first request after `start` comes later, the window ends no later for it.
    pub fn agree(&mut self, start: Tick) {
        if self.windows.is_some() {
            (self.next, self.agreed) = (Some(start), true);
        }
    }

    /// True in a window, in which no request may be speculated on. Each begins at a random moment,
    /// so that it does not follow a rhythm of the load.
    pub fn starts_plain(&mut self, now: Tick, rng: &mut SplitMix64) -> bool {
        let Some(Windows { window, every }) = self.windows else { return false };
        if self.until.take_if(|until| *until <= now).is_some() {
            self.ended(window, every, now);
        }
        let next = *self.next.get_or_insert_with(|| now.after(every.mul_f64(0.5 + rng.unit())));
        if self.until.is_none() && next <= now {
            let end = if std::mem::take(&mut self.agreed) { next } else { now }.after(window);
            self.next = Some(now.after(every.mul_f64(0.5 + rng.unit()).max(2 * window)));
            if end > now {
                self.until = Some(end);
                self.settled = now.after(WASHOUT.min(window / 4));
            }
        }
        self.until.is_some()
    }

    /// True if windows are scheduled.
    pub fn is_planned(&self) -> bool {
        self.windows.is_some()
    }

    /// True if a window is open now.
    pub fn in_window(&self, now: Tick) -> bool {
        self.until.is_some_and(|until| now < until)
    }

    /// Number of windows so far that could be compared with the stretch before them.
    pub fn compared(&self) -> u64 {
        self.groups.requests().1
    }

    /// True if speculation is closed now because all requests together were certainly more than 2 %
    /// slower with it.
    pub fn is_closed(&mut self, now: Tick) -> bool {
        self.groups.is_closed(now)
    }

    /// Notes tokens of a session, `seconds` after the ones before. During the washout time they do
    /// not count.
    pub fn emitted(&mut self, tokens: usize, seconds: f64, now: Tick) {
        let over = self.until.is_some_and(|until| until <= now);
        if self.windows.is_none() || over || now < self.settled || !seconds.is_finite() {
            return;
        }
        let stretch = if self.until.is_some() { &mut self.plain } else { &mut self.speculating };
        stretch.tokens += tokens;
        stretch.seconds += seconds;
    }

    /// Result of the windows: time per token outside of them ÷ inside.
    pub fn groups(&self) -> &Groups {
        &self.groups
    }

    fn ended(&mut self, window: Duration, every: Duration, now: Tick) {
        let stretches = self.speculating.per_token().zip(self.plain.per_token());
        if let Some((speculating, plain)) = stretches {
            let gate = ControlGate { limit: 1.02, reprobe: every };
            self.groups.note(true, plain, gate, now);
            self.groups.note(false, speculating, gate, now);
        }
        (self.speculating, self.plain) = (Stretch::default(), Stretch::default());
        self.settled = now.after(WASHOUT.min(window / 4));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOWS: Windows = Windows { window: Duration::from_secs(20), every: Duration::from_mins(30) };

    /// Ten hours of a stream of 10 tokens a second that takes `speculating` times as long outside
    /// windows: the share of the time in windows, the switchback, and `true` if it ever closed.
    fn day(speculating: f64) -> (f64, Switchback, bool) {
        let (mut switchback, mut rng) = (Switchback::default(), SplitMix64::new(8));
        switchback.set_windows(Some(WINDOWS));
        let (mut inside, mut closed) = (0, false);
        let ticks = 10 * 3_600;
        for second in 0..ticks {
            let now = Tick(second * 1_000_000);
            let starts_plain = switchback.starts_plain(now, &mut rng);
            inside += u64::from(starts_plain);
            closed |= switchback.is_closed(now);
            let times = (if starts_plain { 1.0 } else { speculating }) * (0.9 + 0.2 * rng.unit());
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
    fn where_speculation_slows_all_requests_it_is_closed_for_a_while() {
        assert!(day(1.4).2);
        assert!(!day(1.0).2);
    }

    #[test]
    fn an_agreed_window_begins_and_ends_for_all_at_the_same_time() {
        let (mut one, mut other, mut rng) =
            (Switchback::default(), Switchback::default(), SplitMix64::new(8));
        let at = |second: u64| Tick(second * 1_000_000);
        for switchback in [&mut one, &mut other] {
            assert_eq!(switchback.next(), None);
            switchback.set_windows(Some(WINDOWS));
            assert!(!switchback.starts_plain(at(0), &mut rng));
        }
        let (start, length) = (one.next().expect("a window is scheduled"), WINDOWS.window);
        assert_ne!(other.next(), Some(start), "each draws its own");
        other.agree(start);
        let late = start.after(length / 2);
        assert!(one.starts_plain(start, &mut rng) && other.starts_plain(late, &mut rng));
        let end = start.after(length);
        assert!(
            [one, other].iter().all(|switchback| switchback.in_window(late) && !switchback.in_window(end))
        );
        assert!(!one.starts_plain(end, &mut rng) && !other.starts_plain(end, &mut rng));
        one.agree(at(9_000));
        assert!(!one.starts_plain(at(9_900), &mut rng), "it is over for all");
        assert!(one.next().is_some_and(|next| next > at(9_900)), "and another one is drawn");
    }

    #[test]
    fn without_a_schedule_there_are_no_windows() {
        let (mut switchback, mut rng) = (Switchback::default(), SplitMix64::new(8));
        assert!((0..10_000).all(|second| !switchback.starts_plain(Tick(second * 1_000_000), &mut rng)));
    }
}
