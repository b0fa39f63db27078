//! The request header `x-foretell: off | plain | gamma=N`.
//!
//! It can only restrict what policy and gates allow; it is removed before the request is sent to
//! the backend.

pub const NAME: &str = "x-foretell";

/// The largest number of draft tokens in one round that any setting allows.
pub const GAMMA_MAX: u8 = foretell_core::session::GAMMA_MAX as u8;

/// The client's instruction to Foretell, the strictest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Control {
    /// Pass this request through unchanged.
    Off,
    /// Serve it by a session that never speculates.
    Plain,
    /// Maximum draft tokens of one round (`num_speculative_tokens`), 1..=32.
    Gamma(u8),
}

/// The header has none of the allowed values; holds the first 40 characters of its value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("x-foretell must be off, plain or gamma=N with N from 1 to {GAMMA_MAX}, got {0:?}")]
pub struct ControlError(pub String);

impl Control {
    /// Reads the value of the header, without the spaces around it.
    ///
    /// # Errors
    /// It is none of the three forms, or gamma is not 1 to 32.
    pub fn parse(value: &str) -> Result<Self, ControlError> {
        match value.trim() {
            "off" => Ok(Self::Off),
            "plain" => Ok(Self::Plain),
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
        assert_eq!(Control::parse(" plain "), Ok(Control::Plain));
        assert_eq!(Control::parse("gamma=1"), Ok(Control::Gamma(1)));
        assert_eq!(Control::parse("gamma=32"), Ok(Control::Gamma(32)));
    }

    #[test]
    fn any_other_value_is_an_error_that_names_the_allowed_ones() {
        for wrong in ["", "on", "OFF", "gamma", "gamma=", "gamma=0", "gamma=33", "gamma=+4", "gamma=4,plain"]
        {
            assert!(Control::parse(wrong).is_err(), "{wrong}");
        }
        let error = Control::parse("faster").unwrap_err();
        assert_eq!(
            error.to_string(),
            "x-foretell must be off, plain or gamma=N with N from 1 to 32, got \"faster\""
        );
    }
}
