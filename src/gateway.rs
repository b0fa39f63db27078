//! The proxy itself: accept, judge, relay or drive a session, answer.

pub mod listen;
