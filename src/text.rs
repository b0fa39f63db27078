//! Tokens to text and back: tokenizer, incremental detokenizer, chat template.
