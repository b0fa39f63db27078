//! Operating mode: the operator's limit on what Foretell does, for the process and for single
//! backends.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Operating mode, ordered from the strictest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Pass everything through.
    Off,
    /// Pass requests through and draft in the shadow, never speculate.
    Observe,
    /// Speculate where it pays.
    #[default]
    Auto,
}

impl Mode {
    /// Every mode, from the strictest.
    pub const ALL: [Self; 3] = [Self::Off, Self::Observe, Self::Auto];

    /// The name in configuration, metrics and answers.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Observe => "observe",
            Self::Auto => "auto",
        }
    }

    /// The mode with this name; `None` if there is none.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|mode| mode.name() == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_read_back() {
        for mode in [Mode::Off, Mode::Observe, Mode::Auto] {
            assert_eq!(Mode::parse(mode.name()), Some(mode));
        }
        assert_eq!(Mode::parse("on"), None);
    }
}
