//! The wire of clients: OpenAI requests and answers, without any I/O.
//!
//! | module | purpose |
//! |---|---|
//! | [`openai`] | requests, answers, server-sent events, and the table of every parameter |
//! | [`translation`] | what translations of other APIs into chats share |
//! | [`anthropic`], [`responses`] | the Messages API, and the Responses API, as translations of chats |

pub mod anthropic;
pub mod openai;
pub mod responses;
pub mod translation;
