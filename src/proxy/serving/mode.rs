//! The operator's switch between `off`, `observe` and `auto`, for the process and for single
//! backends.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::RwLock;

use foretell_core::words::Mode;

#[derive(Clone, Copy, Debug)]
struct Setting {
    base: Mode,
    /// A temporary mode and when it ends; it has precedence until then.
    temporary: Option<(Mode, Instant)>,
}

impl Setting {
    fn at(self, now: Instant) -> Mode {
        match self.temporary {
            Some((mode, until)) if now < until => mode,
            _ => self.base,
        }
    }

    fn active(self, now: Instant) -> ActiveMode {
        let ends_in = self.temporary.and_then(|(_, until)| until.checked_duration_since(now));
        ActiveMode { mode: self.at(now), base: self.base, ends_in: ends_in.filter(|rest| !rest.is_zero()) }
    }

    fn set(&mut self, mode: Mode, ttl: Option<Duration>, now: Instant) {
        match ttl.and_then(|ttl| now.checked_add(ttl)) {
            Some(until) => self.temporary = Some((mode, until)),
            None => *self = Self { base: mode, temporary: None },
        }
    }
}

/// The mode in force of the process or of a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ActiveMode {
    pub mode: Mode,
    /// The permanent mode, which is in force after a temporary one.
    pub base: Mode,
    /// Remaining time of a temporary mode; `None` without one.
    pub ends_in: Option<Duration>,
}

/// The switch, shared by the gateway, the session runner and the admin API.
#[derive(Debug)]
pub struct ModeSwitch {
    settings: RwLock<(Setting, HashMap<String, Setting>)>,
}

impl ModeSwitch {
    /// A switch with `mode` for the process, and none for single backends.
    #[must_use]
    pub fn new(mode: Mode) -> Self {
        Self { settings: RwLock::new((Setting { base: mode, temporary: None }, HashMap::new())) }
    }

    /// The mode of `backend` now: the stricter of the process's mode and the backend's.
    pub fn of(&self, backend: &str) -> Mode {
        let settings = self.settings.read();
        let process = settings.0;
        let backend = settings.1.get(backend).copied();
        drop(settings);
        if process.temporary.is_none() && backend.is_none() {
            return process.base;
        }
        let now = Instant::now();
        backend.map_or(process.at(now), |backend| backend.at(now).min(process.at(now)))
    }

    pub fn process(&self) -> Mode {
        self.settings.read().0.at(Instant::now())
    }

    /// The modes in force: of the process, and of each backend with a setting, ordered by name.
    pub fn active(&self) -> (ActiveMode, Vec<(String, ActiveMode)>) {
        let now = Instant::now();
        let settings = self.settings.read();
        let process = settings.0.active(now);
        let mut backends: Vec<(String, ActiveMode)> =
            settings.1.iter().map(|(name, setting)| (name.clone(), setting.active(now))).collect();
        drop(settings);
        backends.sort_by(|a, b| a.0.cmp(&b.0));
        (process, backends)
    }

    /// Sets the permanent mode of the process, as configured in its file. A temporary mode stays
    /// in force until it ends.
    pub fn set_base(&self, mode: Mode) {
        self.settings.write().0.base = mode;
    }

    /// Sets the mode of one backend (`None`: of the process), for `ttl` (`None`: permanently).
    pub fn set(&self, mode: Mode, backend: Option<&str>, ttl: Option<Duration>) {
        let now = Instant::now();
        let mut settings = self.settings.write();
        match backend {
            None => settings.0.set(mode, ttl, now),
            Some(name) => {
                let setting = settings.1.entry(name.to_owned());
                setting.or_insert(Setting { base: Mode::Auto, temporary: None }).set(mode, ttl, now);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stricter_of_process_and_backend_wins() {
        let switch = ModeSwitch::new(Mode::Auto);
        assert_eq!(switch.of("a"), Mode::Auto);
        switch.set(Mode::Observe, Some("a"), None);
        assert_eq!((switch.of("a"), switch.of("b")), (Mode::Observe, Mode::Auto));
        switch.set(Mode::Off, None, None);
        assert_eq!((switch.of("a"), switch.of("b")), (Mode::Off, Mode::Off));
    }

    #[test]
    fn the_file_does_not_end_a_mode_that_was_set_for_a_time() {
        let switch = ModeSwitch::new(Mode::Auto);
        switch.set(Mode::Off, None, Some(Duration::from_hours(1)));
        switch.set_base(Mode::Observe);
        assert_eq!(switch.process(), Mode::Off);
        switch.set(Mode::Auto, None, None);
        switch.set_base(Mode::Observe);
        assert_eq!(switch.process(), Mode::Observe, "the later one");
    }

    #[test]
    fn a_temporary_mode_falls_back_to_the_permanent_one() {
        let now = Instant::now();
        let mut setting = Setting { base: Mode::Auto, temporary: None };
        setting.set(Mode::Off, Some(Duration::from_secs(5)), now);
        assert_eq!(setting.at(now + Duration::from_secs(4)), Mode::Off);
        assert_eq!(setting.at(now + Duration::from_secs(5)), Mode::Auto);
    }

    #[test]
    fn a_held_mode_has_its_time_left_and_its_base() {
        let now = Instant::now();
        let mut setting = Setting { base: Mode::Auto, temporary: None };
        assert_eq!(setting.active(now), ActiveMode { mode: Mode::Auto, base: Mode::Auto, ends_in: None });
        setting.set(Mode::Off, Some(Duration::from_secs(5)), now);
        let later = now + Duration::from_secs(2);
        let ends_in = Some(Duration::from_secs(3));
        assert_eq!(setting.active(later), ActiveMode { mode: Mode::Off, base: Mode::Auto, ends_in });
        assert_eq!(setting.active(now + Duration::from_secs(5)).ends_in, None);
        let switch = ModeSwitch::new(Mode::Auto);
        switch.set(Mode::Observe, Some("b"), None);
        switch.set(Mode::Off, Some("a"), None);
        let names: Vec<String> = switch.active().1.into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["a", "b"]);
    }
}
