//! Foretell: a sidecar proxy that adds speculative decoding and adaptive control to LLM servers.
//!
//! # The map of the house
//!
//! Every folder is a room, and a room uses only rooms below it; a test reads the `use` lines. From the top:
//!
//! | room | what it is for |
//! |---|---|
//! | [`cli`] | one file per command: what the arguments mean, what is printed, which exit code |
//! | [`lab`] | measuring and showing: the bench, the demonstration, a simulated fleet, a whole Foretell in one process |
//! | [`app`] | from a validated configuration to a running proxy; the one place where all parts meet |
//! | [`admin`] | the operator's API and status page, above all that they show |
//! | [`gateway`] | accepts a request, judges it, relays it or hands it over |
//! | [`drive`] | one session against the world: its calls, its stream, its drafters |
//! | [`observe`] | what is told of each request: metrics, log, the last sessions |
//! | [`onnx_server`] | `foretell target`: an ONNX model behind the OpenAI API |
//! | [`runtime`] | ONNX Runtime: library, caches, sampler, model drafters |
//! | [`fleet`] | the servers behind: backends, replicas, who answers there, health, load, probes |
//! | [`config`] | the process file and the policy files: text to validated values, with every error at once |
//! | [`policy`] | *pure:* which policy matches, and what may be done with a request: facts to a decision |
//! | [`dialect`] | *pure:* how each engine is spoken to |
//! | [`openai`] | *pure:* the wire of clients, and the table of every parameter |
//! | [`text`] | *pure:* tokenizer, incremental detokenizer, chat template |
//! | [`session`] | *pure:* the state machine of one request: ride or leap, token by token |
//! | [`control`] | *pure:* what has been learnt, and what pays |
//! | [`draft`] | *pure:* trees of proposed tokens, and the lookups that propose them |
//! | [`words`] | *pure:* the closed lists that all share: plans, verdicts, modes, reasons |
//! | [`http`] | the ground of servers and clients: listeners, bodies, headers, workers |
//! | [`clock`], [`units`] | the one reading of the clock; moments and ids |
//!
//! Pure rooms open no sockets, read no clock and draw no randomness: time, dice and answers are arguments. Everything
//! that touches the world is a thin shell around them.
//!
//! # The way of a request
//!
//! [`gateway::proxy`] reads it, and asks [`policy::decide()`] with what it knows so far. If that says relay, [`gateway::relay`]
//! passes it on unchanged. Otherwise [`drive`] asks once more with what is known of the server, sends the client's own
//! request as first ride, and feeds what comes back to a [`session::Session`]. The session drafts ([`draft`]), asks
//! [`control`] whether a leap pays, and has the draft verified by the engine's [`dialect`]. What is accepted becomes text
//! ([`text`]) and events for the client ([`openai`]).

pub mod admin;
pub mod app;
pub mod cli;
pub mod clock;
pub mod config;
pub mod control;
pub mod dialect;
pub mod draft;
pub mod drive;
pub mod fleet;
pub mod gateway;
pub mod http;
pub mod lab;
pub mod observe;
pub mod onnx_server;
pub mod openai;
pub mod policy;
pub mod runtime;
pub mod session;
pub mod text;
pub mod units;
pub mod words;
