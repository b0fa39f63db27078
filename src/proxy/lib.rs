//! The path of a request: accepted, judged, passed through or served, and what is learnt from it.
//!
//! | module | purpose |
//! |---|---|
//! | [`gateway`] | accepts a request, judges it, passes it through or hands it over |
//! | [`serving`] | one session with its I/O: its requests, its stream, its drafters |
//! | [`store`] | measurements shared with other sidecars over Redis or Valkey |
//! | [`learning`] | what outlives a session: control groups, the corpus, traits of answers |

pub mod gateway;
pub mod learning;
pub mod serving;
pub mod store;
