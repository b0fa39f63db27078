//! Foretell: a sidecar proxy that adds speculative decoding and adaptive control to LLM servers.
//!
//! The folders read as the life of a request: `gateway` accepts it, `openai` judges it, `session` decides
//! token by token whether to ride or to leap, `draft` proposes, `dialect` puts the question to the engine,
//! `control` learns what pays, `text` turns tokens back into text.
//!
//! `openai`, `session`, `draft`, `control` and `dialect` are pure: no sockets, no clock, no randomness but
//! what is handed to them. Everything that touches the world is a thin shell around them.

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
