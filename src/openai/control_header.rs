//! The request header `x-foretell: off | ride | gamma=N`.
//!
//! It may only lower what policy and gates allow; it is stripped before the backend sees the request.

/// The name of the header.
pub const NAME: &str = "x-foretell";

/// The largest number of draft tokens in one round that any setting allows.
pub const GAMMA_MAX: u8 = 32;

/// What the client asks of Foretell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Control {
    /// Relay this request unchanged.
    Off,
    /// Serve it by a session that never leaps.
    Ride,
    /// At most this many draft tokens in one round, 1..=32.
    Gamma(u8),
}

/// The header has none of the allowed values.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("x-foretell must be off, ride or gamma=N with N from 1 to {GAMMA_MAX}, got {0:?}")]
pub struct ControlError(pub String);

impl Control {
    /// Reads the value of the header.
    pub fn parse(value: &str) -> Result<Self, ControlError> {
        match value.trim() {
            "off" => Ok(Self::Off),
            "ride" => Ok(Self::Ride),
            other => other
                .strip_prefix("gamma=")
                .filter(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()))
                .and_then(|digits| digits.parse::<u8>().ok())
                .filter(|gamma| (1..=GAMMA_MAX).contains(gamma))
                .map(Self::Gamma)
                .ok_or_else(|| ControlError(other.chars().take(40).collect())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_three_forms_are_read() {
        assert_eq!(Control::parse("off"), Ok(Control::Off));
        assert_eq!(Control::parse(" ride "), Ok(Control::Ride));
        assert_eq!(Control::parse("gamma=1"), Ok(Control::Gamma(1)));
        assert_eq!(Control::parse("gamma=32"), Ok(Control::Gamma(32)));
    }

    #[test]
    fn anything_else_is_an_error_that_names_what_is_allowed() {
        for wrong in ["", "on", "OFF", "gamma", "gamma=", "gamma=0", "gamma=33", "gamma=+4", "gamma=4,ride"] {
            assert!(Control::parse(wrong).is_err(), "{wrong}");
        }
        let error = Control::parse("faster").unwrap_err();
        assert_eq!(
            error.to_string(),
            "x-foretell must be off, ride or gamma=N with N from 1 to 32, got \"faster\""
        );
    }
}
