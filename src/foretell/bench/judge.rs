//! Finds outputs that loop.
//!
//! By token ids if the server can tokenize, else by words. Its requests run between measurements
//! and do not change the measured times.

use std::collections::HashMap;

use serde::Deserialize;
use serde_json::json;

use super::client::{Access, Client, Url};
use foretell_core::units::TokenId;
use foretell_core::words::looping;

/// Checks the outputs of one server for loops.
pub struct Judge {
    server: Option<Client>,
    known: HashMap<String, Vec<TokenId>>,
}

#[derive(Deserialize)]
struct Tokenized {
    tokens: Vec<TokenId>,
}

impl Judge {
    /// For outputs of the server at `url`.
    pub fn new(url: Url, access: Access) -> Self {
        Self { server: Some(Client::with_access(url, access)), known: HashMap::new() }
    }

    /// True if it compares words, because the server gives no token ids.
    pub const fn by_words(&self) -> bool {
        self.server.is_none()
    }

    pub async fn loops(&mut self, prompt: &str, output: &str, model: &str) -> bool {
        match (self.tokens(prompt, model).await, self.tokens(output, model).await) {
            (Some(prompt), Some(output)) => looping::loops(&prompt, &output),
            _ => looping::loops(&looping::words(prompt), &looping::words(output)),
        }
    }

    async fn tokens(&mut self, text: &str, model: &str) -> Option<Vec<TokenId>> {
        if let Some(known) = self.known.get(text) {
            return Some(known.clone());
        }
        let body = json!({"model": model, "prompt": text, "add_special_tokens": false});
        let answer = self.server.as_mut()?.post("/tokenize", &body).await;
        let read = answer.ok().and_then(|bytes| serde_json::from_slice::<Tokenized>(&bytes).ok());
        let Some(Tokenized { tokens }) = read else {
            self.server = None;
            return None;
        };
        self.known.insert(text.to_owned(), tokens.clone());
        Some(tokens)
    }
}
