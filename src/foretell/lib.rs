//! Foretell: a sidecar proxy that adds speculative decoding and adaptive control to LLM servers.
//!
//! This crate is the thin shell with all side effects around `foretell-core` (drafts, sessions,
//! control), `foretell-engines` (engines, wire, policies) and `foretell-onnx` (local models). From
//! the top; a module uses only those below it:
//!
//! | module | purpose |
//! |---|---|
//! | [`cli`] | one file per command: the meaning of its arguments, its output, its exit code |
//! | [`mod@bench`] | a server measured directly and through Foretell, and the demonstration |
//! | [`app`] | from a validated configuration to a running proxy |
//! | [`admin`] | the operator's API and status page, above all that they show |
//! | [`gateway`] | accepts a request, judges it, passes it through or hands it over |
//! | [`serving`] | one session with its I/O: its requests, its stream, its drafters |
//! | [`store`] | measurements shared with other sidecars over Redis or Valkey |
//! | [`learning`] | state that outlives a session: control groups, the corpus, traits of answers |
//! | [`observe`] | the record of each request: metrics, log, the last sessions |
//! | [`fleet`] | the upstream servers: backends, replicas, engines, health, load, probes |
//! | [`config`] | the config file and policy files: text to validated values, every error at once |
//! | [`http`] | the base of servers and clients: listeners, bodies, headers, workers |
//! | [`clock`], [`random`] | the moments and the random seeds that the pure crates receive |
//!
//! # The path of a request
//!
//! [`gateway::proxy`] reads it and takes the steps of a [`foretell_engines::policy::Admission`]. If
//! one of them says so, [`gateway::passthrough`] passes the request on unchanged. Otherwise
//! [`serving`] makes a [`serving::plan::SessionPlan`] with the facts about the server
//! ([`foretell_engines::policy::plan`]), sends the client's request as the first plain request, and
//! feeds the answer to a [`foretell_core::session::Session`]. The session drafts
//! ([`foretell_core::draft`]), lets [`foretell_core::control`] decide if a round pays, and has the
//! draft verified by the engine's [`foretell_engines::dialect`]. Accepted tokens become text
//! ([`foretell_engines::text`]) and events for the client ([`foretell_engines::openai`]).

pub mod admin;
pub mod app;
pub mod bench;
pub mod cli;
pub mod clock;
pub mod config;
pub mod fleet;
pub mod gateway;
pub mod http;
pub mod learning;
pub mod observe;
pub mod random;
pub mod serving;
pub mod store;
