//! Foretell: a sidecar proxy that adds speculative decoding and adaptive control to LLM servers.
//!
//! # Module map
//!
//! Every folder is a layer, and a layer uses only the layers below it; a test reads the `use`
//! lines. From the top:
//!
//! | layer | purpose |
//! |---|---|
//! | [`cli`] | one file per command: the meaning of its arguments, its output, its exit code |
//! | [`lab`] | measuring and showing: the bench, the demonstration, a simulated fleet, a whole Foretell in one process |
//! | [`app`] | from a validated configuration to a running proxy; the one place where all parts meet |
//! | [`admin`] | the operator's API and status page, above all that they show |
//! | [`gateway`] | accepts a request, judges it, relays it or hands it over |
//! | [`serving`] | one session with its I/O: its requests, its stream, its drafters |
//! | [`observe`] | the record of each request: metrics, log, the last sessions |
//! | [`onnx_server`] | `foretell target`: an ONNX model behind the OpenAI API |
//! | [`runtime`] | ONNX Runtime: library, caches, sampler, model drafters |
//! | [`fleet`] | the servers behind: backends, replicas, the process that answers there, health, load, probes |
//! | [`config`] | the process file and the policy files: text to validated values, with every error at once |
//! | [`policy`] | *pure:* the policy that matches, and what may be done with a request: facts to a decision |
//! | [`dialect`] | *pure:* the API of each engine |
//! | [`openai`] | *pure:* the wire of clients, and the table of every parameter |
//! | [`text`] | *pure:* tokenizer, incremental detokenizer, chat template |
//! | [`session`] | *pure:* the state machine of one request: plain decoding or speculation, token by token |
//! | [`control`] | *pure:* measured costs and acceptance, and the decision which draft pays |
//! | [`draft`] | *pure:* trees of draft tokens, and the lookups that propose them |
//! | [`words`] | *pure:* the closed lists that all layers share: verification methods and results, modes, reasons |
//! | [`http`] | the base of servers and clients: listeners, bodies, headers, workers |
//! | [`clock`], [`units`] | the only reader of the clock; moments, token ids, random numbers |
//!
//! Pure layers open no sockets, read no clock and draw no random numbers of their own: time, random
//! numbers and answers are arguments. Everything with side effects is a thin shell around them.
//!
//! # The path of a request
//!
//! [`gateway::proxy`] reads it, and calls [`policy::decide()`] with the facts known so far. If the
//! decision is to relay, [`gateway::relay`] passes it on unchanged. Otherwise [`serving`] decides
//! once more with the facts about the server, sends the client's own request as the first plain
//! request, and feeds the answer to a [`session::Session`]. The session drafts ([`draft`]), asks
//! [`control`] whether a round pays, and has the draft verified by the engine's [`dialect`].
//! Accepted tokens become text ([`text`]) and events for the client ([`openai`]).

pub mod admin;
pub mod app;
pub mod cli;
pub mod clock;
pub mod config;
pub mod control;
pub mod dialect;
pub mod draft;
pub mod fleet;
pub mod gateway;
pub mod http;
pub mod lab;
pub mod observe;
pub mod onnx_server;
pub mod openai;
pub mod policy;
pub mod runtime;
pub mod serving;
pub mod session;
pub mod text;
pub mod units;
pub mod words;
