//! Text and tokens, without any I/O: a vocabulary and text go in, nothing else.
//!
//! | module | purpose |
//! |---|---|
//! | [`text`] | tokenizer, incremental detokenizer, chat template, translation between vocabularies |
//! | [`parse`] | the output parsers of servers: reasoning, content, tool calls |
//!
//! Only tokenizers and chat templates may be opened by their path.

pub mod parse;
pub mod text;
