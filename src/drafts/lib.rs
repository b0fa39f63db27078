//! The drafts service: an engine's plug-in asks it for drafts at every step, over a Unix socket.
//!
//! The engine verifies the drafts inside its step, so everything that it does to a text (tools,
//! reasoning, grammars, log-probabilities) stays its business, and its rejection sampling keeps
//! the answers exact. Here are the rows of its batch, their lookups, and one allocation of draft
//! tokens over all rows ([`foretell_control::choose`]).
//!
//! [`frame`] is the protocol, [`batch`] what is drafted (both pure); [`joins`] knows the requests
//! that the proxy has sent to the engine, and [`service`] has the sockets and threads.

pub mod batch;
mod chain;
pub mod frame;
mod index;
pub mod joins;
mod row;
pub mod service;
pub mod totals;
