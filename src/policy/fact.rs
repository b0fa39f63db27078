//! A fact that may be unknown.

/// A fact that a decision needs and that may be unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fact<T> {
    /// It is known.
    Known(T),
    /// It is not known; the text says why.
    Unknown(&'static str),
}

impl<T> Fact<T> {
    /// The value, if it is known.
    pub fn known(self) -> Option<T> {
        match self {
            Self::Known(value) => Some(value),
            Self::Unknown(_) => None,
        }
    }
}
