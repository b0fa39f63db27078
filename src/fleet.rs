//! Connections to the backends.
