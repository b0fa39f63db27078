//! Knowledge about inference engines and the wire format, without any I/O.
//!
//! Requests and answers are values here; `foretell` sends and receives them. Only tokenizers and
//! chat templates may be opened by their path.
//!
//! | module | purpose |
//! |---|---|
//! | [`text`] | tokenizer, incremental detokenizer, chat template, translation between vocabularies |
//! | [`parse`] | the output parsers of servers: reasoning, content, tool calls |
//! | [`openai`] | the wire of clients, and the table of every parameter |
//! | [`translation`] | what translations of other APIs into chats share |
//! | [`anthropic`], [`responses`] | the Messages API, and the Responses API, as translations of chats |
//! | [`dialect`] | the API of each engine: its requests, its answers, its habits (`QUIRKS`) |
//! | [`policy`] | the policy that matches, and what may be done with a request |
//!
//! A module uses only those above it in this table.

pub mod anthropic;
pub mod dialect;
pub mod openai;
pub mod parse;
pub mod policy;
pub mod responses;
pub mod text;
pub mod translation;
