//! Measuring Foretell: against a server asked directly, against another proxy, in virtual time.

pub mod relay;
